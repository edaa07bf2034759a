"""Shapes: every bad number has its message, groups follow the table, and resizing gives the sub-model's own shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.errors import ConfigError, PlanError
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape
from megatron_elastic.space import AxisChoices, build_space, expert_groups, parent_plan, parent_width, resize
from tests.shape_strategies import layer_widths, plans, quick, shapes

A = ElasticAxis
SHAPE = ModelShape(
    layer_pattern="ME*-ME",
    hidden_size=56,
    vocab_size=99,
    attention=AttentionShape(heads=24, kv_groups=4, head_dim=10),
    mlp=MlpShape(ffn=48),
    moe=MoeShape(experts=12, topk=3, ffn=40, shared_ffn=72),
    mamba=MambaShape(heads=18, head_dim=14, groups=6, state=22),
)


def test_a_good_shape_has_no_problems():
    assert SHAPE.problems() == []
    assert (SHAPE.num_layers, SHAPE.layers_with("mamba"), SHAPE.layers_with("mlp"), SHAPE.vocab_rows) == (6, (0, 4), (3,), 99)
    assert replace(SHAPE, padded_vocab_size=104).vocab_rows == 104


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_pattern": ""},
            "model.layer_pattern '': unknown nothing; use M (mamba), * (attention), - (mlp), E (moe), T (attention + mlp), X",
        ),
        ({"layer_pattern": "MQ"}, "model.layer_pattern 'MQ': unknown ['Q']; use M (mamba)"),
        ({"layer_pattern": "MX"}, "model.layer_pattern 'MX' mixes the letters of GPT models (T, X) and of hybrid models (M, *, -, E)"),
        (
            {"layer_pattern": "M+G"},
            "model.layer_pattern 'M+G': multi-latent attention (MLA) layers ('+'), GatedDeltaNet layers ('G') cannot",
        ),
        ({"mlp": MlpShape(ffn=(48, 40))}, "model.mlp.ffn names 2 sizes, but 1 layers have it; write one for each, or one number"),
        ({"normalization": "LayerNorm"}, "model.normalization 'LayerNorm' with Mamba-2 layers is not supported by megatron-core"),
        (
            {"attention": AttentionShape(heads=8, kv_groups=4, head_dim=8, rope_base=1e4)},
            "model.attention.rope_base: megatron-core's hybrid",
        ),
        ({"moe": MoeShape(experts=12, topk=2, ffn=8, score="softmax")}, "model.moe.expert_bias true needs score 'sigmoid'"),
        ({"moe": MoeShape(experts=12, topk=2, ffn=8, pre_softmax=True)}, "model.moe.pre_softmax true needs score 'softmax'"),
        ({"moe": MoeShape(experts=12, topk=2, ffn=8, routing_groups=4)}, "model.moe.routing_groups and groups_per_token belong together"),
        (
            {"moe": MoeShape(experts=12, topk=2, ffn=8, routing_groups=5, groups_per_token=1)},
            "model.moe.routing_groups 5 must divide experts 12 and not be below groups_per_token 1",
        ),
        (
            {"moe": MoeShape(experts=12, topk=4, ffn=8, routing_groups=4, groups_per_token=1)},
            "model.moe.topk 4 must be a multiple of groups_per_token 1 and at most the 3 experts of those groups",
        ),
        ({"mamba": None}, "model.mamba is missing: layer_pattern 'ME*-ME' has 'M' layers"),
        ({"attention": None}, "model.attention is missing: layer_pattern 'ME*-ME' has '*' layers"),
        ({"mlp": None}, "model.mlp is missing: layer_pattern 'ME*-ME' has '-' layers"),
        ({"moe": None}, "model.moe is missing: layer_pattern 'ME*-ME' has 'E' layers"),
        ({"padded_vocab_size": 98}, "model.padded_vocab_size 98 is below vocab_size 99"),
        ({"attention": AttentionShape(heads=10, kv_groups=4, head_dim=8)}, "model.attention.heads 10 is not a multiple of kv_groups 4"),
        ({"mamba": MambaShape(heads=9, head_dim=8, groups=2, state=4)}, "model.mamba.heads 9 is not a multiple of groups 2"),
        ({"moe": MoeShape(experts=4, topk=5, ffn=8)}, "model.moe.topk 5 is above experts 4"),
        (
            {"linear_bias": True},
            "model.linear_bias with a mixture of experts is not supported by megatron-core's shared expert; set it to false",
        ),
        ({"hidden_size": 0}, "model.hidden_size 0 must be above 0"),
        ({"padded_vocab_size": 0}, "model.padded_vocab_size 0 must be above 0"),
        ({"norm_epsilon": -1e-5}, "model.norm_epsilon -1e-05 must be above 0"),
        ({"init_std": float("nan")}, "model.init_std nan must be above 0"),
        ({"attention": AttentionShape(heads=8, kv_groups=0, head_dim=8)}, "model.attention.kv_groups 0 must be above 0"),
        ({"mamba": MambaShape(heads=9, head_dim=8, groups=-1, state=4)}, "model.mamba.groups -1 must be above 0"),
        ({"moe": MoeShape(experts=4, topk=0, ffn=8)}, "model.moe.topk 0 must be above 0"),
        ({"moe": MoeShape(experts=4, topk=1, ffn=8, shared_ffn=0)}, "model.moe.shared_ffn 0 must be above 0"),
        ({"mlp": MlpShape(ffn=-3)}, "model.mlp.ffn -3 must be above 0"),
        ({"moe": MoeShape(experts=4, topk=True, ffn=8)}, "model.moe.topk True must be a number"),
    ],
)
def test_each_bad_number_has_its_message(change, message):
    (found,) = replace(SHAPE, **change).problems()
    assert found.startswith(message)


def test_a_size_that_is_true_is_refused_before_a_cache_takes_it_for_one():
    true, one = (replace(SHAPE, moe=replace(SHAPE.moe, experts=(4, 8), topk=topk)) for topk in (True, 1))
    assert true == one and true.problems()
    moe = one.at(1).moe
    assert moe is not None and type(moe.topk) is int


def test_several_problems_come_together():
    bad = replace(SHAPE, mlp=None, padded_vocab_size=1, moe=MoeShape(experts=2, topk=3, ffn=8))
    assert len(bad.problems()) == 3


def test_an_axis_exists_only_where_its_layers_do():
    assert parent_width(SHAPE, A.MAMBA_HEADS) == 18
    dense = replace(SHAPE, layer_pattern="*-")
    assert [axis for axis in A if parent_width(dense, axis) is None] == [
        *(A.MOE_FFN, A.SHARED_FFN, A.MAMBA_HEADS, A.MAMBA_HEAD_DIM, A.MAMBA_STATE, A.EXPERTS, A.TOPK),
    ]
    unshared = replace(SHAPE, moe=MoeShape(experts=4, topk=1, ffn=8))
    assert parent_width(unshared, A.SHARED_FFN) is None
    assert parent_width(replace(SHAPE, moe=None), A.EXPERTS) is None
    assert [axis for axis, _ in parent_plan(dense).widths] == [A.HIDDEN, A.FFN, A.HEADS]


@pytest.mark.parametrize(
    ("shard_groups", "heads", "kv_groups", "groups"),
    [(8, 40, 8, 8), (4, 32, 2, 4), (8, 24, 4, 8), (8, 20, 4, 4), (3, 24, 4, 12)],
)
def test_heads_are_grouped_by_both_kv_groups_and_shards_where_that_divides_them(shard_groups, heads, kv_groups, groups):
    shape = replace(SHAPE, attention=AttentionShape(heads=heads, kv_groups=kv_groups, head_dim=8))
    (spec,) = build_space(shape, {A.HEADS: (heads,)}, shard_groups=shard_groups).axes
    assert spec.groups == groups


def test_groups_of_the_other_axes():
    axes = {A.HIDDEN: (56, 40), A.FFN: (48, 24), A.MOE_FFN: (40, 8), A.SHARED_FFN: (72, 64), A.MAMBA_HEADS: (18, 6), A.EXPERTS: (12, 4)}
    space = build_space(SHAPE, axes, shard_groups=8)
    assert {spec.axis: spec.groups for spec in space.axes} == {
        A.HIDDEN: 1,
        A.FFN: 8,
        A.MOE_FFN: 8,
        A.SHARED_FFN: 8,
        A.MAMBA_HEADS: 6,
        A.EXPERTS: 4,
    }
    assert space.parent == parent_plan(SHAPE) and space.shard_groups == 8


@pytest.mark.parametrize(("choices", "groups"), [((128, 120), 8), ((128, 100), 4), ((6, 4), 2), ((6, 5), 1)])
def test_expert_groups_are_the_largest_that_divide_every_choice(choices, groups):
    assert expert_groups(choices) == groups


def test_fractions_count_from_the_parent():
    space = build_space(SHAPE, {A.FFN: (1.0, 0.5, 16)}, shard_groups=8)
    assert space.axes[0].choices == (48, 24, 16)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({A.FFN: (48, 0.3)}, "elastic.axes.ffn: fraction 0.3 of 48 is 14.4, not a whole width; write the width itself"),
        ({A.FFN: (48, 1.5)}, "elastic.axes.ffn: fraction 1.5 of 48 is 72, not a whole width"),
        ({A.FFN: (40, 24)}, "elastic.axes.ffn: the first choice must be the parent's width 48, not 40"),
        ({A.FFN: ()}, "elastic.axes.ffn: the first choice must be the parent's width 48, not nothing"),
        ({A.FFN: (48, 20)}, "elastic.axes.ffn: choice 20 is not a multiple of its 8 groups; use 16 or 24"),
        ({A.MAMBA_HEADS: (18, 10)}, "elastic.axes.mamba_heads: choice 10 is not a multiple of its 6 groups; use 6 or 12"),
        ({A.EXPERTS: (12, 2)}, "elastic.axes.experts: 2 experts are fewer than model.moe.topk 3; keep at least 3"),
        ({A.LAYERS: (6, 5)}, "elastic.drop_order names 0 layers, but axis 'layers' drops up to 1"),
    ],
)
def test_each_bad_space_has_its_message(axes, message):
    with pytest.raises(ConfigError) as caught:
        build_space(SHAPE, axes, shard_groups=8)
    (found,) = [line for line in caught.value.problems if message in line]
    assert found in str(caught.value)


def test_fractions_that_land_on_no_group_are_refused_with_the_remedy():
    """A fraction is never rounded: it names a width of the axis, a whole one and a multiple of the groups, or nothing is built."""
    for fraction, remedy in [(0.3, "is 14.4, not a whole width; write the width itself"), (0.25, "12 is not a multiple of its 8 groups")]:
        with pytest.raises(ConfigError) as caught:
            build_space(SHAPE, {A.FFN: (1.0, fraction)}, shard_groups=8)
        assert any(remedy in line for line in caught.value.problems)
    with pytest.raises(ConfigError, match="use 8 or 16"):
        build_space(SHAPE, {A.FFN: AxisChoices(choices=(1.0, 0.25), per_layer=True)}, shard_groups=8)


def test_per_layer_axes_know_their_layers():
    space = build_space(SHAPE, {A.MOE_FFN: AxisChoices(choices=(40, 0.4), per_layer=True), A.HIDDEN: (56, 40)}, shard_groups=8)
    hidden, moe_ffn = space.axes
    assert (moe_ffn.layers, moe_ffn.places, moe_ffn.choices) == ((1, 5), 2, (40, 16)) and (hidden.layers, hidden.places) == ((), 1)
    assert [moe_ffn.place_of(layer) for layer in (1, 5)] == [0, 1]
    with pytest.raises(
        ConfigError, match="elastic.axes.hidden: per_layer is true, but the axis belongs to the whole model; remove per_layer"
    ):
        build_space(SHAPE, {A.HIDDEN: AxisChoices(choices=(56, 40), per_layer=True)})
    with pytest.raises(ConfigError, match="sizes that differ from layer to layer make no elastic parent"):
        build_space(resize(SHAPE, space.plan({A.MOE_FFN: (40, 16)})), {A.HIDDEN: (56, 40)})


def test_axes_of_the_router_s_experts():
    routed = replace(SHAPE, moe=MoeShape(experts=12, topk=4, ffn=40, routing_groups=4, groups_per_token=2))
    (spec,) = build_space(routed, {A.EXPERTS: (12, 8)}).axes
    assert spec.groups == 4, "experts stay inside their routing group"
    (topk,) = build_space(SHAPE, {A.TOPK: (3, 2, 1)}).axes
    assert (topk.groups, topk.sharded) == (1, "")
    with pytest.raises(ConfigError, match="elastic.axes.topk: not with group-limited routing"):
        build_space(routed, {A.TOPK: (4, 2)})
    with pytest.raises(
        ConfigError, match="elastic.axes.experts: 4 experts leave 2 in the 2 groups of a token, fewer than model.moe.topk 4"
    ):
        build_space(routed, {A.EXPERTS: (12, 4)})
    with pytest.raises(ConfigError, match="elastic.expert_groups 3 is not a multiple of model.moe.routing_groups 4"):
        build_space(routed, {A.EXPERTS: (12, 8)}, num_expert_groups=3)


def test_patterns_are_written_out():
    assert replace(SHAPE, layer_pattern="M2|E*-").layer_pattern == "MME*-"
    gpt = replace(SHAPE, layer_pattern="TX3")
    assert gpt.layer_pattern == "TXXX" and gpt.is_gpt and not SHAPE.is_gpt
    assert (gpt.layers_with("attention"), gpt.layers_with("moe"), gpt.has("mamba")) == ((0, 1, 2, 3), (1, 2, 3), False)


def test_an_axis_the_model_lacks_is_refused():
    with pytest.raises(ConfigError, match="elastic.axes.ffn: the model has no such axis") as caught:
        build_space(replace(SHAPE, layer_pattern="M*"), {A.FFN: (48,), A.EXPERTS: (12,)})
    assert len(caught.value.problems) == 2


def test_resize_gives_the_sub_model_s_shape():
    plan = SubmodelPlan.of(dict(parent_plan(SHAPE).widths) | {A.HIDDEN: 40, A.MOE_FFN: 8, A.EXPERTS: 4, A.HEADS: 8}, (0, 3))
    small = resize(SHAPE, plan)
    assert small.layer_pattern == "E*ME" and small.hidden_size == 40
    assert small.moe == MoeShape(experts=4, topk=3, ffn=8, shared_ffn=72)
    assert small.attention == AttentionShape(heads=8, kv_groups=4, head_dim=10)
    assert small.mamba == SHAPE.mamba


def test_resize_keeps_the_widths_of_the_kept_layers():
    plan = SubmodelPlan.of(dict(parent_plan(SHAPE).widths) | {A.MOE_FFN: (40, 8), A.MAMBA_HEADS: (18, 6), A.FFN: 48}, (0,))
    small = resize(SHAPE, plan)
    assert small.moe is not None and small.moe.ffn == (40, 8) and small.mamba is not None and small.mamba.heads == 6
    assert small.layer_pattern == "E*-ME" and not small.homogeneous
    assert [small.at(n).moe.ffn for n in (0, 4)] == [40, 8]
    with pytest.raises(PlanError, match=r"moe_ffn \(40, 8, 8\) does not name one width for each of the 2 layers that have it"):
        resize(SHAPE, SubmodelPlan.of({A.MOE_FFN: (40, 8, 8)}))


@quick
@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), plans(shape))))
def test_resizing_twice_is_resizing_once(case):
    shape, plan = case
    assume(len(plan.dropped_layers) < shape.num_layers)
    assert resize(shape, parent_plan(shape)) == shape
    once = resize(shape, plan)
    assert resize(once, parent_plan(once)) == once
    kept = [layer for layer in range(shape.num_layers) if plan.keeps_layer(layer)]
    assert [layer_widths(once, parent_plan(once), n) for n in range(len(kept))] == [layer_widths(shape, plan, n) for n in kept]


@quick
@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), plans(shape))))
def test_a_layer_of_a_per_layer_model_has_its_own_sizes(case):
    shape, plan = case
    assume(len(plan.dropped_layers) < shape.num_layers)
    small = resize(shape, plan)
    assert small.homogeneous == all(isinstance(width, int) for _, width in parent_plan(small).widths)
    for layer in range(small.num_layers):
        own = small.at(layer)
        assert own.homogeneous and own.problems() == []
        assert {axis: own_width for axis, own_width in parent_plan(own).widths}.items() >= layer_widths(
            small, parent_plan(small), layer
        ).items()


def test_resize_refuses_what_does_not_fit():
    with pytest.raises(PlanError) as caught:
        resize(SHAPE, SubmodelPlan.of({A.HIDDEN: 57, A.FFN: 0}, (6,)))
    assert caught.value.problems == [
        "hidden 57 does not fit the parent's 56",
        "ffn 0 does not fit the parent's 48",
        "dropped layer 6 is not one of 6",
    ]
    with pytest.raises(PlanError, match=r"ffn 8: the model has no such axis \(layer_pattern 'M'\)"):
        resize(replace(SHAPE, layer_pattern="M"), SubmodelPlan.of({A.FFN: 8}))
