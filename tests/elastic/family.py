"""Small families that are awkward on purpose: every axis elastic, all sizes different, groups that do not divide each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan, Width
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.elastic.decision import Decision
from megatron_elastic.models.build import build_model
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import canonical_name
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import AXES, AxisChoices, build_space, parent_plan
from megatron_elastic.testing.tiny import randomize_, tiny_dense, tiny_moe, tiny_shape

PARENTS: Mapping[str, Callable[..., ModelShape]] = {"hybrid": tiny_shape, "dense": tiny_dense, "moe": tiny_moe}
SHARD_GROUPS = 4


def tiny_choices(shape: ModelShape, axis: ElasticAxis, parent: int) -> tuple[int, ...]:
    """Three widths of an axis (or as many as there are): all, three quarters and two fifths of each group."""
    unit, least = AXES[axis].groups(shape, SHARD_GROUPS), 1
    if shape.moe is not None and axis is ElasticAxis.EXPERTS:
        topk, used = shape.moe.topk, shape.moe.groups_per_token or 1
        assert isinstance(topk, int)
        unit = shape.moe.routing_groups or 2
        least = max(-(-topk // (used if shape.moe.routing_groups else unit)), 1)
    if shape.moe is not None and axis is ElasticAxis.TOPK and shape.moe.score == "softmax" and not shape.moe.pre_softmax:
        least = 2  # a softmax over one chosen expert is refused
    whole = parent // unit
    return tuple(unit * n for n in sorted({whole, max(whole * 3 // 4, least), max(whole * 2 // 5, least)}, reverse=True))


def tiny_space(shape: ModelShape, per_layer: Collection[ElasticAxis] = ()) -> ElasticSpace:
    """Every axis of `shape` elastic, those of `per_layer` with a width for each layer; three layers can be dropped."""
    axes = {}
    for axis, parent in [*parent_plan(shape).widths, (ElasticAxis.LAYERS, shape.num_layers)]:
        assert isinstance(parent, int)
        if axis is ElasticAxis.TOPK and shape.moe is not None and shape.moe.routing_groups:
            continue  # refused: the groups of a group-limited router score by topk
        axes[axis] = AxisChoices(choices=tiny_choices(shape, axis, parent), per_layer=axis in per_layer)
    last = shape.num_layers - 1
    return build_space(shape, axes, shard_groups=SHARD_GROUPS, drop_order=tuple(dict.fromkeys((last // 2 + 1, last - 1, 1, *range(last)))))


def layer_axes(shape: ModelShape) -> frozenset[ElasticAxis]:
    """The axes that may differ from layer to layer."""
    return frozenset(axis for axis, _ in parent_plan(shape).widths if AXES[axis].part)


def narrowed(space: ElasticSpace, axis: ElasticAxis | None, choice: int = -1) -> SubmodelPlan:
    """The plan with choice number `choice` of one axis, or of all of them (None); the last where there are fewer."""
    chosen = [spec for spec in space.axes if axis is None or spec.axis is axis]
    return space.plan({spec.axis: spec.choices[min(choice, len(spec.choices) - 1)] for spec in chosen})


def staggered(space: ElasticSpace, axis: ElasticAxis | None, start: int = 0) -> SubmodelPlan:
    """A plan whose per-layer axes (one, or all for None) go round their choices from layer to layer."""
    widths: dict[ElasticAxis, Width] = {}
    for spec in space.axes:
        if axis is None or spec.axis is axis:
            by_place = tuple(spec.choices[(start + place) % len(spec.choices)] for place in range(spec.places))
            widths[spec.axis] = by_place if spec.per_layer else spec.choices[min(1, len(spec.choices) - 1)]
    return space.plan(widths)


def build_family(
    parallel: ParallelContext, parent: str = "hybrid", per_layer: bool = False, **changes: Any
) -> tuple[Any, ElasticSpace, ElasticHandle, ModelShape]:
    """A randomised model, made elastic: (model, space, handle, shape). per_layer: every axis that can be is per layer."""
    shape = PARENTS[parent](**changes)
    model = build_model(shape, parallel)
    randomize_(model, seed=5)
    space = tiny_space(shape, layer_axes(shape) if per_layer else ())
    return model, space, elasticize(model, space, parallel, shape), shape


def text(batch: int = 2, length: int = 23, vocab: int = 131) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions [batch, length]."""
    tokens = torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(11))
    return tokens, torch.arange(length)[None].expand(batch, -1)


def forward_backward(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [batch, length, vocabulary] and the gradient of every parameter that got one, for a fixed text and a fixed loss."""
    model.zero_grad()
    tokens, positions = text()
    logits = model(tokens, positions, None)
    weight = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(3))
    (logits.tanh() * weight).sum().backward()
    return logits.detach(), {canonical_name(name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run(model: Any, handle: ElasticHandle, plan: SubmodelPlan | Decision | None, mode: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`forward_backward` under a plan."""
    with handle.use(plan, mode):
        return forward_backward(model)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of `b`."""
    return float((a - b).norm() / b.norm().clamp(min=1e-12))
