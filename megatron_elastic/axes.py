"""The vocabulary: axes, their choices and groups, plans.

An axis of G groups keeps *the first n/G components of each group* (a grouped prefix). G belongs to the axis and is fixed
for the life of a checkpoint; it never depends on the parallel layout, so one plan names the same components on every layout
and gives every rank the same share of work.

An axis is homogeneous (one width for the whole model) or per layer (a width for each layer that has it). A *place* is where a
width is chosen: a homogeneous axis has one, a per-layer axis one for each of its layers, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from megatron_elastic.errors import ConfigError, PlanError, raise_all
from megatron_elastic.formats import PLAN

Width = int | tuple[int, ...]
"""The width of an axis: one for the whole model, or one for each layer that has the axis, in the order of the layers."""


class ElasticAxis(StrEnum):
    """One dimension of the architecture that can shrink."""

    HIDDEN = "hidden"
    """Channels of the residual stream, shared by every layer."""
    FFN = "ffn"
    """Neurons of a dense MLP."""
    MOE_FFN = "moe_ffn"
    """Neurons of each routed expert."""
    SHARED_FFN = "shared_ffn"
    """Neurons of the shared expert."""
    HEADS = "heads"
    """Query heads; the same number leaves every KV group, keys and values stay."""
    MAMBA_HEADS = "mamba_heads"
    """Mamba-2 heads; the same number leaves every SSM group."""
    MAMBA_HEAD_DIM = "mamba_head_dim"
    """Channels of each Mamba-2 head."""
    MAMBA_STATE = "mamba_state"
    """State channels of each SSM group."""
    EXPERTS = "experts"
    """Routed experts."""
    TOPK = "topk"
    """Experts chosen for each token."""
    LAYERS = "layers"
    """Depth; `ElasticSpace.drop_order` says which layer goes first."""


@dataclass(frozen=True, slots=True)
class AxisSpec:
    """The choices of one elastic axis.

    choices: allowed widths in components, widest first; the first is the parent's.
    groups: number of equal groups a width is dealt over; divides every choice.
    layers: global numbers (from 0) of the layers that have the axis; empty for one that belongs to the model as a whole.
    per_layer: whether every one of `layers` has a width of its own.
    sharded: the ranks its groups are dealt over; "" when every rank holds the axis whole.
    """

    axis: ElasticAxis
    choices: tuple[int, ...]
    groups: int
    layers: tuple[int, ...] = ()
    per_layer: bool = False
    sharded: Literal["tensor", "expert", ""] = "tensor"

    @property
    def parent(self) -> int:
        """The parent's width."""
        return self.choices[0]

    @property
    def group_size(self) -> int:
        """Components of one group at the parent's width."""
        return self.parent // self.groups

    @property
    def places(self) -> int:
        """How many widths are chosen: one, or one a layer."""
        return len(self.layers) if self.per_layer else 1

    def place_of(self, layer: int | None) -> int:
        """The place whose width global layer `layer` has."""
        return self.layers.index(layer) if self.per_layer and layer is not None else 0

    def problems(self) -> list[str]:
        """Everything wrong with this axis, one line each."""
        key = f"elastic.axes.{self.axis.value}"
        found = []
        if list(self.choices) != sorted(set(self.choices), reverse=True):
            found.append(f"{key}: choices {list(self.choices)} must be distinct and run from wide to narrow")
        if self.per_layer and not self.layers:
            found.append(f"{key}: per_layer is true, but the axis belongs to the whole model; remove per_layer")
        for choice in self.choices:
            if choice <= 0:
                found.append(f"{key}: choice {choice} must be positive")
            elif choice % self.groups:
                below = choice // self.groups * self.groups
                near = [str(n) for n in (below, below + self.groups) if 0 < n <= self.parent]
                found.append(f"{key}: choice {choice} is not a multiple of its {self.groups} groups; use {' or '.join(near)}")
        return found

    def width_problems(self, width: Width) -> list[str]:
        """Why `width` is not one of this axis, one line each."""
        name, widths = self.axis.value, widths_by_place(width, self.places)
        if widths is None:
            count = len(width) if isinstance(width, tuple) else 1
            what = f"it has {self.places} layers" if self.per_layer else "it is not per layer (set per_layer: true)"
            return [f"{name} names {count} widths, but {what}"]
        wrong = sorted(set(widths) - set(self.choices), reverse=True)
        return [f"{name} {n} is not one of its choices {list(self.choices)}" for n in wrong]


def widths_by_place(width: Width, places: int) -> tuple[int, ...] | None:
    """`width` as one integer a place; None when it names another number of places."""
    if isinstance(width, int):
        return (width,) * places
    if len(width) == places:
        return width
    return (width[0],) if places == 1 and len(set(width)) == 1 else None


def _canonical(width: Width) -> Width:
    """Equal widths on all layers are one integer, so that equal plans compare equal."""
    if isinstance(width, int):
        return width
    widths = tuple(int(n) for n in width)
    return widths[0] if len(set(widths)) == 1 else widths


@dataclass(frozen=True, slots=True)
class SubmodelPlan:
    """One hard choice per axis (and layer): integers only, hashable, serialisable.

    widths: (axis, width) for every axis the model has except `layers`, in the order of `ElasticAxis`; a tuple has one width for each layer
    of the parent that has the axis, dropped layers included.
    dropped_layers: global numbers (from 0) of the layers that are skipped, ascending.
    """

    widths: tuple[tuple[ElasticAxis, Width], ...]
    dropped_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, widths: Mapping[ElasticAxis, Width], dropped_layers: tuple[int, ...] = ()) -> SubmodelPlan:
        """Build a plan from a mapping; order does not matter."""
        return cls(
            tuple((axis, _canonical(widths[axis])) for axis in ElasticAxis if axis in widths and axis is not ElasticAxis.LAYERS),
            tuple(sorted(dropped_layers)),
        )

    def width(self, axis: ElasticAxis) -> Width:
        """Width of `axis`. Raises PlanError when the plan does not name it."""
        for name, width in self.widths:
            if name is axis:
                return width
        raise PlanError(f"the plan has no width for axis {axis.value!r}")

    @property
    def homogeneous(self) -> bool:
        """Whether every axis has one width on all layers."""
        return all(isinstance(width, int) for _, width in self.widths)

    def keeps_layer(self, layer: int) -> bool:
        """Whether global layer `layer` (from 0) is computed."""
        return layer not in self.dropped_layers

    def contains(self, other: SubmodelPlan) -> bool:
        """Whether `other` is nested in this plan: never wider, never deeper."""
        mine = dict(self.widths)
        return all(axis in mine and _at_most(width, mine[axis]) for axis, width in other.widths) and set(self.dropped_layers) <= set(
            other.dropped_layers
        )

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON or YAML."""
        return {
            **PLAN.stamp,
            "widths": {axis.value: width if isinstance(width, int) else list(width) for axis, width in self.widths},
            "dropped_layers": list(self.dropped_layers),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> SubmodelPlan:
        """The inverse of `to_dict`. Raises PlanError for another format or an unknown axis."""
        PLAN.check(data, "plan")
        widths, dropped = data.get("widths"), data.get("dropped_layers")
        if not isinstance(widths, Mapping) or not isinstance(dropped, list):
            raise PlanError("a plan needs 'widths' (a mapping) and 'dropped_layers' (a list)")
        unknown = [str(name) for name in widths if name not in list(ElasticAxis)]
        raise_all(PlanError, [f"unknown axis {name!r}; axes are {', '.join(ElasticAxis)}" for name in unknown], "plan")
        return cls.of(
            {ElasticAxis(name): tuple(width) if isinstance(width, list) else int(width) for name, width in widths.items()},
            tuple(int(n) for n in dropped),
        )


def _at_most(width: Width, limit: Width) -> bool:
    if isinstance(width, int) and isinstance(limit, int):
        return width <= limit
    places = len(width) if isinstance(width, tuple) else len(limit) if isinstance(limit, tuple) else 1
    mine, other = widths_by_place(width, places), widths_by_place(limit, places)
    return mine is not None and other is not None and all(a <= b for a, b in zip(mine, other, strict=True))


@dataclass(frozen=True, slots=True)
class ElasticSpace:
    """All elastic axes of one parent.

    axes: the elastic axes with their choices, in the order of `ElasticAxis`.
    parent: the plan of the parent (every width, no layer dropped).
    drop_order: global layer numbers in the order they are dropped; needed when `layers` is elastic.
    shard_groups: the largest tensor parallelism the family can be trained or served with.
    """

    axes: tuple[AxisSpec, ...]
    parent: SubmodelPlan
    drop_order: tuple[int, ...] = ()
    shard_groups: int = 8

    def spec(self, axis: ElasticAxis) -> AxisSpec | None:
        """The choices of `axis`, or None when it is not elastic."""
        return next((spec for spec in self.axes if spec.axis is axis), None)

    def plan(self, choices: Mapping[ElasticAxis, Width]) -> SubmodelPlan:
        """The plan with these widths, the parent's elsewhere; an integer for a per-layer axis goes to all its layers.

        Raises PlanError listing every width that is no choice.
        """
        problems, widths, dropped = [], dict(self.parent.widths), ()
        for axis, width in choices.items():
            spec = self.spec(axis)
            if spec is None:
                if axis is ElasticAxis.LAYERS or width != dict(self.parent.widths).get(axis):
                    problems.append(f"axis {axis.value!r} is not elastic here; elastic axes: {', '.join(s.axis.value for s in self.axes)}")
            elif wrong := spec.width_problems(width):
                problems += wrong
            elif axis is ElasticAxis.LAYERS:
                assert isinstance(width, int)
                dropped = self.drop_order[: spec.parent - width]
            else:
                widths[axis] = width
        raise_all(PlanError, problems, "plan")
        return SubmodelPlan.of(widths, dropped)

    def completed(self, plan: SubmodelPlan) -> SubmodelPlan:
        """`plan` with the parent's widths on axes it does not name: a release that did not know an axis kept it whole."""
        return SubmodelPlan.of(dict(self.parent.widths) | dict(plan.widths), plan.dropped_layers)

    def choices_of(self, plan: SubmodelPlan, axis: ElasticAxis) -> tuple[int, ...]:
        """The choices of `axis` in `plan`, one a place (for `layers`, how many are kept)."""
        spec = self.spec(axis)
        if axis is ElasticAxis.LAYERS:
            return ((spec.parent if spec else 0) - len(plan.dropped_layers),)
        width = plan.width(axis)
        widths = widths_by_place(width, spec.places if spec else 1)
        if widths is None:
            raise PlanError(f"axis {axis.value!r} of the plan has widths {width}, not one for each of {spec.places if spec else 1} places")
        return widths

    def check(self, plan: SubmodelPlan) -> None:
        """Raise PlanError listing everything in `plan` that does not fit this space."""
        problems = []
        if [axis for axis, _ in plan.widths] != [axis for axis, _ in self.parent.widths]:
            problems.append(f"its axes {[a.value for a, _ in plan.widths]} are not the model's {[a.value for a, _ in self.parent.widths]}")
        for axis, width in plan.widths:
            spec, whole = self.spec(axis), dict(self.parent.widths).get(axis)
            if spec is not None:
                problems += spec.width_problems(width)
            elif whole is not None and width != whole:
                problems.append(f"{axis.value} {width} is not one of its choices [{whole}]")
        layers = self.spec(ElasticAxis.LAYERS)
        allowed_drops = {tuple(sorted(self.drop_order[: layers.parent - n])) for n in layers.choices} if layers else {()}
        if plan.dropped_layers not in allowed_drops:
            problems.append(
                f"dropped layers {list(plan.dropped_layers)} are not a prefix of the drop order {list(self.drop_order)} that a choice names"
            )
        raise_all(PlanError, problems, "the plan does not fit the space")

    def check_shards(self, tensor_parallel: int, expert_parallel: int, expert_tensor_parallel: int = 1) -> list[str]:
        """Problems of running this space on a layout: a shard must hold whole groups."""
        problems = [
            f"parallel.{key} {ranks} does not divide elastic.shard_groups {self.shard_groups}; choose a divisor or raise shard_groups"
            for key, ranks in (("tensor", tensor_parallel), ("expert_tensor", expert_tensor_parallel))
            if self.shard_groups % ranks and (key == "tensor" or ranks != tensor_parallel)
        ]
        for spec in self.axes:
            shards = {"tensor": tensor_parallel, "expert": expert_parallel, "": 1}[spec.sharded]
            if spec.groups % shards:
                problems.append(
                    f"parallel.{spec.sharded} {shards} does not divide the {spec.groups} groups of axis {spec.axis.value!r}; choose a divisor"
                )
        return problems


def validate_space(space: ElasticSpace, num_layers: int) -> None:
    """Raise ConfigError listing every problem of `space` at once."""
    problems = [line for spec in space.axes if spec.axis is not ElasticAxis.LAYERS for line in spec.problems()]
    layers = space.spec(ElasticAxis.LAYERS)
    if layers:
        deepest = layers.parent - min(layers.choices)
        if len(space.drop_order) < deepest:
            problems.append(
                f"elastic.drop_order names {len(space.drop_order)} layers, but axis 'layers' drops up to {deepest}; list them, first dropped first"
            )
        if len(set(space.drop_order)) != len(space.drop_order) or any(not 0 <= n < num_layers for n in space.drop_order):
            problems.append(f"elastic.drop_order {list(space.drop_order)} must be distinct layer numbers from 0 to {num_layers - 1}")
        problems += layers.problems()
    raise_all(ConfigError, problems, "elastic space")
