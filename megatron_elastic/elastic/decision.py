"""A decision for one microbatch, as the modules see it.

mask mode multiplies by weights in full width: a decision holds one small vector per axis. slice mode computes in the kept width
only: a decision is its plan. Both come from a hard plan; a router's probabilities (soft) exist in mask mode alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.decisions import prefix_weights, survival_weights
from megatron_elastic.layout import Dim, Runs, kept_widths


class Mode(StrEnum):
    """How a plan is run."""

    MASK = "mask"
    """Full width, multiplied by weights."""
    SLICE = "slice"
    """Only what is kept is computed."""


@dataclass(frozen=True)
class Decision:
    """What every elastic module needs to know for one microbatch.

    mode: mask or slice; weights: in mask mode, axis -> weights [group size] of the components of one group, for the axes that
    are not whole; survival: in mask mode, weights [layers] or None when no layer is gated; plan and kept: in slice mode, the
    plan and axis -> (kept, parent's width) for the axes that are narrower.
    The caches keep derived vectors for the life of the microbatch: they are built once, not in every layer.
    """

    mode: Mode
    weights: Mapping[ElasticAxis, torch.Tensor] = field(default_factory=dict)
    survival: torch.Tensor | None = None
    plan: SubmodelPlan | None = None
    kept: Mapping[ElasticAxis, tuple[int, int]] = field(default_factory=dict)
    _vectors: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    _runs: dict[tuple[Dim, int], Runs | None] = field(default_factory=dict, repr=False, compare=False)

    def vector(self, axis: ElasticAxis, unit: int, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        """Weights [groups x group size x unit] of a dim made of `axis`, in the dtype and on the device of `like`; None when whole.

        unit: entries per component; groups: groups of the dim on this rank.
        """
        if axis not in self.weights:
            return None
        key = (axis, unit, groups, like.dtype, like.device)
        if key not in self._vectors:
            weight = self.weights[axis].to(device=like.device, dtype=like.dtype)
            self._vectors[key] = weight.repeat_interleave(unit).repeat(groups)
        return self._vectors[key]

    def alive_share(self, axis: ElasticAxis, like: torch.Tensor) -> torch.Tensor | None:
        """d/D of an RMS norm over components of `axis`: the mean of the squared weights (0-d); None when whole."""
        if axis not in self.weights:
            return None
        key = ("share", axis, like.device)
        if key not in self._vectors:
            self._vectors[key] = self.weights[axis].to(like.device).square().mean()
        return self._vectors[key]

    def runs(self, dim: Dim, shards: int) -> Runs | None:
        """Runs that slice mode keeps of `dim` on one of `shards` ranks; None when everything is kept."""
        if not self.kept:
            return None
        key = (dim, shards)
        if key not in self._runs:
            runs = dim.runs(self.kept, shards)
            self._runs[key] = None if runs == ((0, dim.size // shards),) else runs
        return self._runs[key]

    def hidden_kept(self) -> int | None:
        """Channels of the residual stream in slice mode; None when whole."""
        return self.kept[ElasticAxis.HIDDEN][0] if ElasticAxis.HIDDEN in self.kept else None

    def skips(self, layer: int) -> bool:
        """Whether slice mode leaves out global layer `layer`."""
        return self.plan is not None and not self.plan.keeps_layer(layer)


def hard_decision(space: ElasticSpace, plan: SubmodelPlan, mode: Mode, num_layers: int) -> Decision | None:
    """The decision of a plan; None for the parent's plan, which runs as the parent does. Raises PlanError when it does not fit."""
    space.check(plan)
    if plan == space.parent:
        return None
    kept = kept_widths(space, plan)
    if mode is Mode.SLICE:
        return Decision(mode, plan=plan, kept=kept)
    weights = {}
    for axis, (width, parent) in kept.items():
        spec = space.spec(axis)
        assert spec is not None
        weights[axis] = (torch.arange(parent // spec.groups) < width // spec.groups).float()
    survival = torch.tensor([float(plan.keeps_layer(n)) for n in range(num_layers)]) if plan.dropped_layers else None
    return Decision(mode, weights, survival)


def soft_decision(space: ElasticSpace, probabilities: Mapping[ElasticAxis, torch.Tensor], num_layers: int) -> Decision:
    """The decision of a router: axis -> probabilities [choices] over the choices of the space, detached leaves or plain tensors.

    Gradients reach the given tensors. Every elastic axis of the space must be there.
    """
    weights, survival = {}, None
    for spec in space.axes:
        pi = probabilities[spec.axis]
        if spec.axis is ElasticAxis.LAYERS:
            survival = survival_weights(spec.choices, space.drop_order, pi, num_layers)
        else:
            weights[spec.axis] = prefix_weights(spec.choices, spec.groups, pi)
    return Decision(Mode.MASK, weights, survival)


@dataclass
class Slot:
    """Where the modules of one model find the decision of the microbatch that is being computed (None: the parent)."""

    decision: Decision | None = None
