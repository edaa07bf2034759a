"""A decision for one microbatch, as the modules see it.

A decision says two things of every axis in every layer: how much of it is computed at all (a prefix of each group), and by what the
computed components are multiplied. A plan in slice mode only cuts. A plan in mask mode only multiplies, by zeros and ones, in full width. A
router's probabilities (soft) multiply by their weights and, with a threshold, also cut what is hardly ever wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.decisions import prefix_weights, survival_weights
from megatron_elastic.layout import Dim, Runs, Segment
from megatron_elastic.runs import select


class Mode(StrEnum):
    """How a plan is run."""

    MASK = "mask"
    """Full width, multiplied by weights."""
    SLICE = "slice"
    """Only what is kept is computed."""


@dataclass(frozen=True)
class Decision:
    """What every elastic module needs to know for one microbatch.

    kept: axis -> computed width at each place, for the axes that are cut. weights: axis -> weights [places, group size] of the components
    of one group, for the axes that are multiplied. survival: weights [layers] of the sublayers' outputs, None when no layer is gated.
    skipped: global layers that are not computed.
    The caches keep derived vectors for the life of the microbatch: they are built once, not in every layer.
    """

    space: ElasticSpace
    kept: Mapping[ElasticAxis, tuple[int, ...]] = field(default_factory=dict)
    weights: Mapping[ElasticAxis, torch.Tensor] = field(default_factory=dict)
    survival: torch.Tensor | None = None
    skipped: frozenset[int] = frozenset()
    _specs: dict[ElasticAxis, AxisSpec] = field(init=False, repr=False, compare=False)
    _vectors: dict[tuple[object, ...], torch.Tensor | None] = field(default_factory=dict, repr=False, compare=False)
    _runs: dict[tuple[object, ...], Runs | None] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_specs", {spec.axis: spec for spec in self.space.axes})

    def snapshot(self) -> Decision:
        """The same decision, with the vectors that have been derived so far and nothing of what is derived later."""
        return replace(self, _vectors=dict(self._vectors))

    def width(self, axis: ElasticAxis, layer: int | None) -> tuple[int, int]:
        """(computed width, parent's width) of `axis` in global layer `layer`; (1, 1) when it is not cut."""
        if axis not in self.kept:
            return 1, 1
        spec = self._specs[axis]
        return self.kept[axis][spec.place_of(layer)], spec.parent

    def runs(self, dim: Dim, layer: int | None, shards: int) -> Runs | None:
        """Runs of `dim` that are computed on one of `shards` ranks in `layer`; None when everything is."""
        if not any(axis in self.kept for axis in dim.axes):
            return None
        key = (dim, self._place(dim, layer), shards)
        if key not in self._runs:
            runs = dim.runs({axis: self.width(axis, layer) for axis in dim.axes if axis in self.kept}, shards)
            self._runs[key] = None if runs == ((0, dim.size // shards),) else runs
        return self._runs[key]

    def vector(self, dim: Dim, layer: int | None, shards: int, like: torch.Tensor) -> torch.Tensor | None:
        """What the computed entries of `dim` are multiplied by, in the dtype and on the device of `like`; None for ones.

        The shape is that of one of `shards` equal shards: [computed entries].
        """
        if not any(axis in self.weights for axis in dim.axes):
            return None
        key = ("vector", dim, self._place(dim, layer), shards, like.device)
        if key not in self._vectors:
            self._vectors[key] = select(self._whole(dim, layer, shards), 0, self.runs(dim, layer, shards)).to(like.device)
        vector = self._vectors[key]
        return vector.to(like.dtype)  # here, so that the gradients of all layers meet in fp32

    def alive_share(self, dim: Dim, layer: int | None, shards: int, like: torch.Tensor) -> torch.Tensor | None:
        """d/D of a norm over the computed entries of `dim`: the mean of their squared weights (0-d, fp32 or fp64); None for 1."""
        if not any(axis in self.weights for axis in dim.axes):
            return None
        key = ("share", dim, self._place(dim, layer), like.device)
        if key not in self._vectors:
            vector = self.vector(dim, layer, shards, self._wide(like))
            assert vector is not None
            self._vectors[key] = vector.square().mean()
        return self._vectors[key]

    def numbered(self, dim: Dim, layer: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """Weights of all entries of `dim` in fp32, zero for those that are cut: for modules that keep the parent's numbering. None for ones."""
        if not any(axis in self.weights or axis in self.kept for axis in dim.axes):
            return None
        key = ("numbered", dim, self._place(dim, layer), like.device)
        if key not in self._vectors:
            whole, runs = self._whole(dim, layer, 1).to(like.device), self.runs(dim, layer, 1)
            if runs is not None:
                alive = torch.zeros_like(whole)
                for start, length in runs:
                    alive[start : start + length] = 1.0
                whole = whole * alive
            self._vectors[key] = whole
        return self._vectors[key]

    def component_weights(self, axis: ElasticAxis, layer: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """Weights [group size] of the components of one group of `axis` in fp32, zero for those that are cut; None for ones."""
        if axis not in self.weights and axis not in self.kept:
            return None
        spec = self._specs[axis]
        whole = self._row(axis, layer)
        if whole is None:
            whole = torch.ones(spec.group_size)
        width, parent = self.width(axis, layer)
        alive = torch.arange(spec.group_size, device=whole.device) < spec.group_size * width // parent
        return (whole * alive).to(like.device)

    def gate(self, layer: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """What the writes of `layer` to the residual stream are multiplied by (0-d); None for 1."""
        if self.survival is None or layer is None:
            return None
        return self.survival[layer].to(device=like.device, dtype=like.dtype)

    def _row(self, axis: ElasticAxis | None, layer: int | None) -> torch.Tensor | None:
        if axis is None or axis not in self.weights:
            return None
        return self.weights[axis][self._specs[axis].place_of(layer)]

    def _whole(self, dim: Dim, layer: int | None, shards: int) -> torch.Tensor:
        """Weights of all entries of one shard of `dim`, what is cut included."""
        parts, device = [], next((weights.device for weights in self.weights.values()), None)
        for segment, size, groups in dim.blocks(shards):
            weights, units = self._row(segment.axis, layer), self._row(segment.unit_axis, layer)
            if weights is None and units is None:
                parts.append(torch.ones(size, device=device))
            else:
                parts.append(_segment_weights(segment, size, groups, weights, units))
        return torch.cat(parts)

    def _place(self, dim: Dim, layer: int | None) -> int | None:
        """What of the layer a vector of `dim` depends on: nothing while all its axes are homogeneous."""
        return layer if any(axis in self._specs and self._specs[axis].per_layer for axis in dim.axes) else None

    def _wide(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _segment_weights(segment: Segment, size: int, groups: int, weights: torch.Tensor | None, units: torch.Tensor | None) -> torch.Tensor:
    """Weights [size] of a segment of `groups` groups from those of one group's components and of one component's entries; one may be None."""
    if weights is None:
        groups = 1  # those of an axis that is not elastic: a shard need not hold whole ones
    block = size // groups
    result = None if weights is None else weights.repeat_interleave(block // weights.numel())
    if units is not None:
        inner = units.repeat(block // segment.unit)
        result = inner if result is None else result * inner
    assert result is not None
    return result.repeat(groups)


def hard_decision(space: ElasticSpace, plan: SubmodelPlan, mode: Mode, num_layers: int) -> Decision | None:
    """The decision of a plan; None for the parent's plan, which runs as the parent does. Raises PlanError when it does not fit."""
    space.check(plan)
    if plan == space.parent:
        return None
    kept = {}
    for spec in space.axes:
        if spec.axis is not ElasticAxis.LAYERS:
            widths = space.choices_of(plan, spec.axis)
            if set(widths) != {spec.parent}:
                kept[spec.axis] = widths
    if mode is Mode.SLICE:
        return Decision(space, kept, skipped=frozenset(plan.dropped_layers))
    weights = {}
    for axis, widths in kept.items():
        spec = space.spec(axis)
        assert spec is not None
        component = torch.arange(spec.group_size)
        weights[axis] = torch.stack([(component < width // spec.groups).float() for width in widths])
    survival = torch.tensor([float(plan.keeps_layer(n)) for n in range(num_layers)]) if plan.dropped_layers else None
    return Decision(space, {}, weights, survival)


def soft_decision(
    space: ElasticSpace, probabilities: Mapping[ElasticAxis, torch.Tensor], num_layers: int, threshold: float = 0.0
) -> Decision:
    """The decision of a router: axis -> probabilities [places, choices] over the choices of the space, detached leaves or plain tensors.

    Gradients reach the given tensors. Every elastic axis of the space must be there. threshold: every place is computed only up to its
    widest choice whose probability is above it (0: in full width); a positive one reads the probabilities back from their device once.
    """
    weights, kept, survival, skipped = {}, {}, None, frozenset()
    for spec in space.axes:
        pi = probabilities[spec.axis]
        widths = _wanted_widths(spec, pi, threshold)
        if spec.axis is ElasticAxis.LAYERS:
            survival = survival_weights(spec.choices, space.drop_order, pi[0], num_layers)
            skipped = frozenset(space.drop_order[: spec.parent - widths[0]])
            continue
        weights[spec.axis] = prefix_weights(spec.choices, spec.groups, pi)
        if set(widths) != {spec.parent}:
            kept[spec.axis] = widths
    return Decision(space, kept, weights, survival, skipped)


def _wanted_widths(spec: AxisSpec, pi: torch.Tensor, threshold: float) -> tuple[int, ...]:
    """For each place the widest choice whose probability is above `threshold`."""
    if threshold <= 0:
        return (spec.parent,) * spec.places
    rows: list[list[float]] = pi.detach().tolist()
    return tuple(next((n for n, chance in zip(spec.choices, row, strict=True) if chance > threshold), spec.parent) for row in rows)


@dataclass
class Slot:
    """Where the modules of one model find the decision of the microbatch that is being computed (None: the parent)."""

    decision: Decision | None = None

    @contextmanager
    def holding(self, decision: Decision | None) -> Iterator[None]:
        """The modules find this decision, and afterwards the one that was there."""
        before, self.decision = self.decision, decision
        try:
            yield
        finally:
            self.decision = before

    @contextmanager
    def replaying(self, decision: Decision | None) -> Iterator[None]:
        """The modules find this decision as it is now, however often: what they derive from it is forgotten.

        decision: a snapshot from before a forward. torch's checkpoint wants the second run to save the tensors of the first in the same order,
        so a vector that was derived in the first is derived in the second.
        """
        with self.holding(None if decision is None else decision.snapshot()):
            yield
