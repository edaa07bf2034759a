"""Random shapes, spaces and plans for hypothesis: awkward on purpose, every part optional, sizes mostly different."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan, Width
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape
from megatron_elastic.space import AXES, AxisChoices, build_space, layers_of_axis, parent_plan, width_at

quick = settings(deadline=None, max_examples=60)
"""A loaded machine must not fail a test; these properties show themselves in few examples."""

SIZES = st.integers(1, 9)
HYBRID, GPT = "M*-E", "TX"


@st.composite
def shapes(draw: st.DrawFn, letters: str | None = None) -> ModelShape:
    """A model of one to seven layers of the given kinds (of one of the two families when None), with all it may have or lack."""
    pattern = draw(st.text(letters or draw(st.sampled_from([HYBRID, GPT])), min_size=1, max_size=7))
    gpt, routed, vocab = pattern[0] in GPT, bool(set(pattern) & set("EX")), draw(st.integers(5, 40))
    return ModelShape(
        layer_pattern=pattern,
        hidden_size=draw(st.integers(2, 30)),
        vocab_size=vocab,
        padded_vocab_size=draw(st.sampled_from([None, vocab, vocab + 3])),
        tied_embeddings=draw(st.booleans()),
        normalization="RMSNorm" if "M" in pattern else draw(st.sampled_from(["RMSNorm", "LayerNorm"])),
        activation=draw(st.sampled_from(["squared_relu", "silu", "gelu"])),
        gated=draw(st.booleans()),
        linear_bias=draw(st.booleans()) and not routed,
        attention=draw(_attention(gpt)) if set(pattern) & set("*TX") else None,
        mlp=MlpShape(ffn=draw(_neurons())) if set(pattern) & set("-T") else None,
        moe=draw(_moe()) if routed else None,
        mamba=draw(_mamba()) if "M" in pattern else None,
    )


def _neurons() -> st.SearchStrategy[int]:
    """Half of them multiples of 4, so that spaces have something to group."""
    return st.one_of(st.integers(1, 40), st.integers(1, 10).map(lambda n: 4 * n))


@st.composite
def _attention(draw: st.DrawFn, gpt: bool) -> AttentionShape:
    kv, head_dim = draw(SIZES), draw(SIZES)
    rotates = gpt and head_dim % 2 == 0
    return AttentionShape(
        heads=kv * draw(SIZES),
        kv_groups=kv,
        head_dim=head_dim,
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        rope_base=draw(st.sampled_from([None, 1e4])) if rotates else None,
    )


@st.composite
def _moe(draw: st.DrawFn) -> MoeShape:
    groups = draw(st.sampled_from([None, None, 1, 2, 3]))
    chosen = draw(st.integers(1, groups)) if groups else None
    each = draw(st.integers(1, 6))
    score: Any = draw(st.sampled_from(["sigmoid", "softmax"]))
    return MoeShape(
        experts=each * (groups or 1),
        topk=draw(st.integers(1, each)) * (chosen or 1),
        ffn=draw(_neurons()),
        shared_ffn=draw(st.one_of(st.none(), _neurons())),
        score=score,
        pre_softmax=score == "softmax" and draw(st.booleans()),
        expert_bias=score == "sigmoid" and draw(st.booleans()),
        routing_groups=groups,
        groups_per_token=chosen,
    )


@st.composite
def _mamba(draw: st.DrawFn) -> MambaShape:
    groups = draw(st.integers(1, 4))
    return MambaShape(heads=groups * draw(SIZES), head_dim=draw(SIZES), groups=groups, state=draw(SIZES), conv=draw(st.integers(2, 5)))


def _fewest_experts(shape: ModelShape, topk: int) -> int:
    """The fewest experts with which every token still finds `topk`."""
    assert shape.moe is not None
    return -(-topk // (shape.moe.groups_per_token or 1)) * (shape.moe.routing_groups or 1)


@st.composite
def spaces(draw: st.DrawFn, letters: str | None = None) -> tuple[ModelShape, ElasticSpace]:
    """A parent and a space of it: any axes it has, one to four choices each, homogeneous or per layer, any drop order."""
    shape = draw(shapes(letters))
    return shape, draw(spaces_of(shape))


@st.composite
def spaces_of(draw: st.DrawFn, shape: Any, shard_groups: int | None = None, expert_unit: int = 1) -> ElasticSpace:
    """A space of a parent. shard_groups: drawn when None; expert_unit: every choice of `experts` is a multiple of it where the parent's is."""
    neurons = [part for part in (shape.mlp and shape.mlp.ffn, shape.moe and shape.moe.ffn, shape.moe and shape.moe.shared_ffn) if part]
    if shard_groups is None:
        shard_groups = draw(st.sampled_from([n for n in (1, 2, 4, 5) if math.gcd(*neurons) % n == 0]))
    axes: dict[ElasticAxis, AxisChoices] = {}
    for axis, parent in [*parent_plan(shape).widths, (ElasticAxis.LAYERS, shape.num_layers)]:
        assert isinstance(parent, int)
        if axis is ElasticAxis.TOPK and shape.moe.routing_groups or draw(st.integers(0, 3)) == 0:
            continue
        unit, least = AXES[axis].groups(shape, shard_groups), 1
        if axis is ElasticAxis.TOPK and shape.moe.score == "softmax" and not shape.moe.pre_softmax:
            least = 2  # a softmax over one chosen expert is refused
            if parent < least:
                continue
        if axis is ElasticAxis.EXPERTS:
            both = math.lcm(shape.moe.routing_groups or 1, expert_unit)
            unit = shape.moe.routing_groups or 1 if parent % both else both
            least = -(-_fewest_experts(shape, shape.moe.topk) // unit)
        narrower = draw(st.sets(st.integers(least, parent // unit), max_size=3)) - {parent // unit}
        choices = (parent, *(unit * n for n in sorted(narrower, reverse=True)))
        axes[axis] = AxisChoices(choices=choices, per_layer=bool(layers_of_axis(shape, axis)) and draw(st.booleans()))
    drop_order = draw(st.permutations(range(shape.num_layers)))
    return build_space(shape, axes, shard_groups=shard_groups, drop_order=tuple(drop_order))


def plans(source: ElasticSpace | ModelShape) -> st.SearchStrategy[SubmodelPlan]:
    """Any plan of a space; of a shape, any plan at all: every width from its unit up, on all layers or on each, any layers dropped."""
    return _plans_of_space(source) if isinstance(source, ElasticSpace) else _plans_of_shape(source)


@st.composite
def _plans_of_space(draw: st.DrawFn, space: ElasticSpace) -> SubmodelPlan:
    widths: dict[ElasticAxis, Width] = {}
    for spec in space.axes:
        by_place = [draw(st.sampled_from(spec.choices)) for _ in range(spec.places)]
        widths[spec.axis] = tuple(by_place) if spec.per_layer else by_place[0]
    return space.plan(widths)


@st.composite
def _plans_of_shape(draw: st.DrawFn, shape: Any) -> SubmodelPlan:
    units = {
        ElasticAxis.HEADS: shape.attention.kv_groups if shape.attention else 1,
        ElasticAxis.MAMBA_HEADS: shape.mamba.groups if shape.mamba else 1,
        ElasticAxis.EXPERTS: (shape.moe.routing_groups or 1) if shape.moe else 1,
        ElasticAxis.TOPK: (shape.moe.groups_per_token or 1) if shape.moe else 1,
    }
    widths: dict[ElasticAxis, Width] = {}
    # topk first: it bounds the experts of its layer.
    for axis, parent in sorted(parent_plan(shape).widths, key=lambda item: item[0] is not ElasticAxis.TOPK):
        assert isinstance(parent, int)
        unit, layers = units.get(axis, 1), layers_of_axis(shape, axis)
        topk = widths.get(ElasticAxis.TOPK, 1)
        most = max(topk) if isinstance(topk, tuple) else topk
        least = _fewest_experts(shape, most) // unit if axis is ElasticAxis.EXPERTS else 1
        count = len(layers) if layers and draw(st.booleans()) else 1
        by_place = [unit * draw(st.integers(least, parent // unit)) for _ in range(count)]
        widths[axis] = tuple(by_place) if len(by_place) > 1 else by_place[0]
    return SubmodelPlan.of(widths, tuple(draw(st.sets(st.integers(0, shape.num_layers - 1)))))


def layer_widths(shape: ModelShape, plan: SubmodelPlan, layer: int) -> dict[ElasticAxis, int]:
    """The width of every axis that global layer `layer` has in `plan`, and of those of the whole model."""
    return {
        axis: width_at(shape, axis, width, layer)
        for axis, width in plan.widths
        if layer in (layers_of_axis(shape, axis) or range(shape.num_layers))
    }
