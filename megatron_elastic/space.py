"""What can shrink in a model: where each axis lives in a ModelShape, the space of a recipe, and the shape of a plan. Plain Python, no torch.

One table, `AXES`, says for every axis where its parent width stands in the shape and how many groups it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan, Width, validate_space, widths_by_place
from megatron_elastic.errors import ConfigError, PlanError, raise_all
from megatron_elastic.shape import ModelShape


@dataclass(frozen=True, slots=True)
class AxisRule:
    """Where an axis lives in a ModelShape.

    part: the sub-shape it belongs to, which is also the sublayer it needs ("" for the model itself); field: the attribute.
    groups: (shape, shard_groups) -> number of groups.
    sharded: the ranks its groups are dealt over ("" when every rank holds the axis whole).
    """

    part: str
    field: str
    groups: Callable[[ModelShape, int], int]
    sharded: Literal["tensor", "expert", ""]


def _heads_groups(shape: ModelShape, shard_groups: int) -> int:
    assert shape.attention is not None and isinstance(shape.attention.heads, int)
    both = math.lcm(shape.attention.kv_groups, shard_groups)
    return both if shape.attention.heads % both == 0 else shape.attention.kv_groups


def _mamba_groups(shape: ModelShape, shard_groups: int) -> int:
    assert shape.mamba is not None
    return shape.mamba.groups


def _shard_groups(shape: ModelShape, shard_groups: int) -> int:
    return shard_groups


def _one_group(shape: ModelShape, shard_groups: int) -> int:
    return 1


AXES: Mapping[ElasticAxis, AxisRule] = {
    ElasticAxis.HIDDEN: AxisRule("", "hidden_size", _one_group, ""),
    ElasticAxis.FFN: AxisRule("mlp", "ffn", _shard_groups, "tensor"),
    ElasticAxis.MOE_FFN: AxisRule("moe", "ffn", _shard_groups, "tensor"),
    ElasticAxis.SHARED_FFN: AxisRule("moe", "shared_ffn", _shard_groups, "tensor"),
    ElasticAxis.HEADS: AxisRule("attention", "heads", _heads_groups, "tensor"),
    ElasticAxis.MAMBA_HEADS: AxisRule("mamba", "heads", _mamba_groups, "tensor"),
    ElasticAxis.MAMBA_HEAD_DIM: AxisRule("mamba", "head_dim", _one_group, ""),  # a prefix of every head
    ElasticAxis.MAMBA_STATE: AxisRule("mamba", "state", _one_group, ""),  # a prefix of every SSM group's block
    ElasticAxis.EXPERTS: AxisRule("moe", "experts", _one_group, "expert"),  # its groups depend on the choices: build_space
    ElasticAxis.TOPK: AxisRule("moe", "topk", _one_group, ""),
    ElasticAxis.LAYERS: AxisRule("", "num_layers", _one_group, ""),
}


def parent_width(shape: ModelShape, axis: ElasticAxis) -> Width | None:
    """The width of `axis` in `shape`, or None when the model has no such axis."""
    rule = AXES[axis]
    holder = getattr(shape, rule.part) if rule.part else shape
    return getattr(holder, rule.field) if holder is not None and (not rule.part or shape.has(rule.part)) else None


def layers_of_axis(shape: ModelShape, axis: ElasticAxis) -> tuple[int, ...]:
    """Global numbers (from 0) of the layers that have `axis`; empty for one that belongs to the model as a whole."""
    rule = AXES[axis]
    return shape.layers_with(rule.part) if rule.part else ()


def parent_plan(shape: ModelShape) -> SubmodelPlan:
    """The plan that keeps everything."""
    widths = {axis: width for axis in ElasticAxis if (width := parent_width(shape, axis)) is not None}
    return SubmodelPlan.of(widths)


def width_at(shape: ModelShape, axis: ElasticAxis, width: Width, layer: int | None) -> int:
    """The width that global layer `layer` has in `width`, a width of `axis` for the layers of `shape`."""
    return width if isinstance(width, int) else width[layers_of_axis(shape, axis).index(layer)] if layer is not None else max(width)


def expert_groups(choices: tuple[int, ...], routing_groups: int | None = None) -> int:
    """The largest of 8, 4, 2, 1 that divides every choice of the experts axis; with group-limited routing a multiple of its groups."""
    base = routing_groups or 1
    return base * next(g for g in (8, 4, 2, 1) if g == 1 or all(choice % (base * g) == 0 for choice in choices))


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisChoices:
    """The choices of an axis in a recipe, when there is more to say than a list of them."""

    choices: tuple[int | float, ...]
    """Widths from wide to narrow, the parent's first; a fraction counts from the parent's."""
    per_layer: bool = False
    """Whether every layer that has the axis gets a width of its own."""


def build_space(
    shape: ModelShape,
    axes: Mapping[ElasticAxis, tuple[int | float, ...] | AxisChoices],
    *,
    shard_groups: int = 8,
    num_expert_groups: int | None = None,
    drop_order: tuple[int, ...] = (),
) -> ElasticSpace:
    """The space of a parent from a recipe's `elastic.axes` (axis -> widths; a float is a fraction of the parent's).

    Raises ConfigError that lists every problem: an axis the model lacks, a fraction that lands on no width, a choice that is
    no multiple of its groups, a first choice that is not the parent's width, fewer experts than topk, a parent whose sizes differ
    from layer to layer.
    """
    if not shape.homogeneous:
        raise ConfigError("model: sizes that differ from layer to layer make no elastic parent; start from the model this one was cut from")
    problems, specs = [], []
    for axis in ElasticAxis:
        if axis not in axes:
            continue
        key, parent = f"elastic.axes.{axis.value}", parent_width(shape, axis)
        if parent is None:
            problems.append(f"{key}: the model has no such axis (layer_pattern {shape.layer_pattern!r}); remove it")
            continue
        assert isinstance(parent, int)
        given = axes[axis]
        wanted = given if isinstance(given, AxisChoices) else AxisChoices(choices=tuple(given))
        choices = tuple(_resolve(key, value, parent, problems) for value in wanted.choices)
        if not choices or choices[0] != parent:
            problems.append(f"{key}: the first choice must be the parent's width {parent}, not {choices[0] if choices else 'nothing'}")
            continue
        rule = AXES[axis]
        if axis is ElasticAxis.EXPERTS:
            assert shape.moe is not None
            groups = num_expert_groups or expert_groups(choices, shape.moe.routing_groups)
        else:
            groups = rule.groups(shape, shard_groups)
        specs.append(AxisSpec(axis, choices, groups, layers_of_axis(shape, axis), wanted.per_layer, rule.sharded))
    problems += _expert_problems(shape, {spec.axis: spec for spec in specs})
    space = ElasticSpace(tuple(specs), parent_plan(shape), drop_order, shard_groups)
    try:
        validate_space(space, shape.num_layers)
    except ConfigError as error:
        problems += error.problems
    raise_all(ConfigError, problems, "elastic space")
    return space


def _expert_problems(shape: ModelShape, specs: Mapping[ElasticAxis, AxisSpec]) -> list[str]:
    """What the router asks of the axes experts and topk (design: groups stay whole, every token finds its experts)."""
    if shape.moe is None:
        return []
    moe: Any = shape.moe
    experts, problems = specs.get(ElasticAxis.EXPERTS), []
    topk = specs.get(ElasticAxis.TOPK)
    if topk is not None and topk.choices[-1] == 1 and moe.score == "softmax" and not moe.pre_softmax:
        problems.append("elastic.axes.topk: choice 1 with a softmax over the chosen experts makes every gate 1; keep at least 2")
    if moe.routing_groups and ElasticAxis.TOPK in specs:
        problems.append(
            "elastic.axes.topk: not with group-limited routing (model.moe.routing_groups), whose groups score by topk; remove it"
        )
    if experts is None:
        return problems
    routing = moe.routing_groups or 1
    if experts.groups % routing:
        problems.append(
            f"elastic.expert_groups {experts.groups} is not a multiple of model.moe.routing_groups {routing}; use a multiple, or leave it out"
        )
    for choice in experts.choices:
        reachable = choice // routing * (moe.groups_per_token or 1)
        if 0 < choice < moe.topk:
            problems.append(f"elastic.axes.experts: {choice} experts are fewer than model.moe.topk {moe.topk}; keep at least {moe.topk}")
        elif choice > 0 and reachable < moe.topk:
            problems.append(
                f"elastic.axes.experts: {choice} experts leave {reachable} in the {moe.groups_per_token} groups of a token, fewer than "
                f"model.moe.topk {moe.topk}; keep more"
            )
        elif choice > 0 and choice // routing < moe.topk // (moe.groups_per_token or 1):
            problems.append(f"elastic.axes.experts: {choice} experts leave a routing group fewer than it is scored by; keep more")
    return problems


def _resolve(key: str, value: int | float, parent: int, problems: list[str]) -> int:
    if isinstance(value, int):
        return value
    width = value * parent
    if not 0 < value <= 1 or abs(width - round(width)) > 1e-9:
        problems.append(f"{key}: fraction {value} of {parent} is {width:g}, not a whole width; write the width itself")
    return round(width)


def resize(shape: ModelShape, plan: SubmodelPlan) -> ModelShape:
    """The shape of the sub-model of `plan`; sizes that differ from layer to layer become tuples.

    Raises PlanError when a width is wider than the parent's or names another number of layers.
    """
    problems = [line for axis, width in plan.widths for line in _misfits(shape, axis, width)]
    problems += [f"dropped layer {n} is not one of {shape.num_layers}" for n in plan.dropped_layers if not 0 <= n < shape.num_layers]
    raise_all(PlanError, problems, "the plan does not fit the model")
    parts: dict[str, dict[str, Any]] = {}
    for axis, width in plan.widths:
        parts.setdefault(AXES[axis].part, {})[AXES[axis].field] = _of_kept_layers(shape, plan, axis, width)
    pattern = "".join(letter for n, letter in enumerate(shape.layer_pattern) if plan.keeps_layer(n))
    changed = {name: replace(getattr(shape, name), **fields) for name, fields in parts.items() if name}
    return replace(shape, layer_pattern=pattern, **parts.get("", {}), **changed)


def _misfits(shape: ModelShape, axis: ElasticAxis, width: Width) -> list[str]:
    layers = layers_of_axis(shape, axis)
    parent = parent_width(shape, axis)
    if parent is None:
        return [f"{axis.value} {width}: the model has no such axis (layer_pattern {shape.layer_pattern!r})"]
    widths = widths_by_place(width, max(len(layers), 1))
    limits = widths_by_place(parent, max(len(layers), 1))
    if widths is None or limits is None:
        return [f"{axis.value} {width} does not name one width for each of the {len(layers)} layers that have it"]
    wrong = dict.fromkeys((n, limit) for n, limit in zip(widths, limits, strict=True) if not 0 < n <= limit)
    return [f"{axis.value} {n} does not fit the parent's {limit}" for n, limit in wrong]


def _of_kept_layers(shape: ModelShape, plan: SubmodelPlan, axis: ElasticAxis, width: Width) -> Width:
    if isinstance(width, int):
        return width
    kept = tuple(n for n, layer in zip(width, layers_of_axis(shape, axis), strict=True) if plan.keeps_layer(layer))
    return (kept[0] if len(set(kept)) == 1 else kept) if kept else max(width)
