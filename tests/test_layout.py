"""The layout table: which entries a plan keeps, the same ones on every number of shards, and the names and shapes of a model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.errors import CheckpointError
from megatron_elastic.layout import BUFFERS, Dim, Segment, axis_groups, dims_of, full_shapes, kept_widths, layer_of, submodel_name
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape
from megatron_elastic.space import AxisChoices, build_space, parent_width, resize
from tests.shape_strategies import layer_widths, plans, quick, shapes

A = ElasticAxis
AXES = [A.FFN, A.HEADS, A.MAMBA_HEADS]


def expand(runs):
    """Indices of the entries in runs."""
    return [start + n for start, length in runs for n in range(length)]


@st.composite
def dims(draw):
    """A dim, how many shards it can be cut into, and two nested plans of its axes."""
    shards = draw(st.integers(1, 4))
    repeat = shards * draw(st.integers(1, 2)) if draw(st.booleans()) else 1
    segments, parent, wide, narrow = [], {}, {}, {}
    for axis in draw(st.lists(st.sampled_from([*AXES, None]), min_size=1, max_size=5)):
        if axis is None:
            segments.append(Segment(math.lcm(repeat, shards) * draw(st.integers(1, 3))))
            continue
        groups = math.lcm(repeat, shards) * draw(st.integers(1, 2))
        if axis not in parent:
            parent[axis] = math.lcm(*range(1, 5), repeat, shards) * draw(st.integers(2, 3)) * 4
        if parent[axis] % groups:
            groups = math.lcm(repeat, shards)
        unit = draw(st.integers(1, 3))
        segments.append(Segment(parent[axis] * unit, axis, groups))
    for axis, width in parent.items():
        groups = math.lcm(*(s.groups for s in segments if s.axis is axis))
        a, b = sorted(draw(st.lists(st.integers(1, width // groups), min_size=2, max_size=2)))
        narrow[axis], wide[axis] = (a * groups, width), (b * groups, width)
    return Dim(tuple(segments), repeat), shards, wide, narrow


def shard_columns(dim, shards):
    """Entries of the full dim in the order in which shard after shard holds them: each shard takes its part of every segment."""
    if dim.repeat > 1:
        return [list(range(n * dim.size // shards, (n + 1) * dim.size // shards)) for n in range(shards)]
    columns, start = [[] for _ in range(shards)], 0
    for segment in dim.segments:
        part = segment.size // shards
        for shard, column in enumerate(columns):
            column += range(start + shard * part, start + (shard + 1) * part)
        start += segment.size
    return columns


@quick
@given(dims())
def test_shards_keep_the_same_entries_as_the_whole(case):
    dim, shards, kept, _ = case
    whole, local = set(expand(dim.runs(kept))), expand(dim.runs(kept, shards))
    columns = shard_columns(dim, shards)
    together = [column[n] for column in columns for n in local]
    assert len(together) == len(whole), "every shard keeps the same number"
    assert together == [entry for column in columns for entry in column if entry in whole]


@quick
@given(dims())
def test_a_narrower_plan_keeps_a_subset(case):
    dim, _, wide, narrow = case
    assert set(expand(dim.runs(narrow))) <= set(expand(dim.runs(wide))) <= set(range(dim.size))


@quick
@given(dims())
def test_runs_are_ascending_and_merged_and_count_the_widths(case):
    dim, shards, kept, _ = case
    runs = dim.runs(kept)
    assert all(length > 0 for _, length in runs)
    assert all(sum(a) < b[0] for a, b in zip(runs, runs[1:], strict=False))
    widths = [s.size * kept[s.axis][0] // kept[s.axis][1] if s.axis else s.size for s in dim.segments]
    assert sum(length for _, length in runs) == sum(widths)
    assert dim.runs({}) == ((0, dim.size),)
    assert dim.runs({}, shards) == ((0, dim.size // shards),)


QKV = ModelShape(layer_pattern="*", hidden_size=6, vocab_size=7, attention=AttentionShape(heads=8, kv_groups=2, head_dim=3))


def test_qkv_is_interleaved_per_kv_group():
    space = build_space(QKV, {A.HEADS: (8, 4)}, shard_groups=2)
    rows, columns = dims_of("decoder.layers.0.self_attention.linear_qkv.weight", QKV, axis_groups(space))
    assert (rows.size, columns.size) == ((8 + 2 + 2) * 3, 6)
    kept = kept_widths(space, space.plan({A.HEADS: 4}), 0)
    # A KV group is 4 query heads (12 rows), a key and a value (3 rows each); 2 query heads (6 rows) stay, and key and value.
    assert expand(rows.runs(kept)) == [*range(0, 6), *range(12, 18), *range(18, 24), *range(30, 36)]
    assert rows.runs(kept, 2) == ((0, 6), (12, 6))
    (context,) = dims_of("decoder.layers.0.self_attention.linear_proj.weight", QKV, axis_groups(space))[1:]
    assert context.runs(kept) == ((0, 6), (12, 6))


def test_query_heads_with_more_groups_than_keys():
    space = build_space(QKV, {A.HEADS: (8, 4)}, shard_groups=4)
    rows, _ = dims_of("decoder.layers.0.self_attention.linear_qkv.weight", QKV, axis_groups(space))
    kept = kept_widths(space, space.plan({A.HEADS: 4}), 0)
    # Four groups of two query heads: of each pair the first head stays.
    assert expand(rows.runs(kept))[:12] == [0, 1, 2, 6, 7, 8, *range(12, 18)]


MAMBA = ModelShape(layer_pattern="M", hidden_size=5, vocab_size=7, mamba=MambaShape(heads=4, head_dim=3, groups=2, state=5))


def test_in_proj_is_z_x_b_c_dt():
    space = build_space(MAMBA, {A.MAMBA_HEADS: (4, 2)})
    rows, _ = dims_of("decoder.layers.0.mixer.in_proj.weight", MAMBA, axis_groups(space))
    assert rows.size == 12 + 12 + 10 + 10 + 4
    kept = kept_widths(space, space.plan({A.MAMBA_HEADS: 2}), 0)
    z, x, states, dt = [0, 1, 2, 6, 7, 8], [12, 13, 14, 18, 19, 20], list(range(24, 44)), [44, 46]
    assert expand(rows.runs(kept)) == [*z, *x, *states, *dt]
    # One of two shards: half of each part, one SSM group.
    assert expand(rows.runs(kept, 2)) == [0, 1, 2, 6, 7, 8, *range(12, 22), 22]
    conv, one, taps = dims_of("decoder.layers.0.mixer.conv1d.weight", MAMBA, axis_groups(space))
    assert (conv.size, one.size, taps.size) == (32, 1, 4)
    assert expand(conv.runs(kept)) == [0, 1, 2, 6, 7, 8, *range(12, 32)]


EVERYTHING = ModelShape(
    layer_pattern="M*-E",
    hidden_size=10,
    vocab_size=11,
    attention=AttentionShape(heads=4, kv_groups=2, head_dim=3, qkv_bias=True),
    mlp=MlpShape(ffn=8),
    moe=MoeShape(experts=6, topk=2, ffn=12, shared_ffn=9),
    mamba=MambaShape(heads=4, head_dim=3, groups=2, state=5),
)


def test_every_name_and_shape_of_a_model():
    assert full_shapes(EVERYTHING) == {
        "embedding.word_embeddings.weight": (11, 10),
        "decoder.final_norm.weight": (10,),
        "output_layer.weight": (11, 10),
        "decoder.layers.0.mixer.in_proj.layer_norm_weight": (10,),
        "decoder.layers.0.mixer.in_proj.weight": (48, 10),
        "decoder.layers.0.mixer.conv1d.weight": (32, 1, 4),
        "decoder.layers.0.mixer.conv1d.bias": (32,),
        "decoder.layers.0.mixer.A_log": (4,),
        "decoder.layers.0.mixer.D": (4,),
        "decoder.layers.0.mixer.dt_bias": (4,),
        "decoder.layers.0.mixer.norm.weight": (12,),
        "decoder.layers.0.mixer.out_proj.weight": (10, 12),
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": (10,),
        "decoder.layers.1.self_attention.linear_qkv.weight": (24, 10),
        "decoder.layers.1.self_attention.linear_proj.weight": (10, 12),
        "decoder.layers.1.self_attention.linear_qkv.bias": (24,),
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight": (10,),
        "decoder.layers.2.mlp.linear_fc1.weight": (8, 10),
        "decoder.layers.2.mlp.linear_fc2.weight": (10, 8),
        "decoder.layers.3.pre_mlp_layernorm.weight": (10,),
        "decoder.layers.3.mlp.router.weight": (6, 10),
        "decoder.layers.3.mlp.router.expert_bias": (6,),
        "decoder.layers.3.mlp.experts.experts.linear_fc1.weight": (6, 12, 10),
        "decoder.layers.3.mlp.experts.experts.linear_fc2.weight": (6, 10, 12),
        "decoder.layers.3.mlp.shared_experts.linear_fc1.weight": (9, 10),
        "decoder.layers.3.mlp.shared_experts.linear_fc2.weight": (10, 9),
    }


@quick
@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), plans(shape))))
def test_kept_entries_of_every_tensor_have_the_shape_of_the_resized_model(case):
    shape, plan = case
    assume(len(plan.dropped_layers) < shape.num_layers)
    small = full_shapes(resize(shape, plan))
    # Any common divisor may be the number of groups; those the parts impose are the ones that matter here.
    groups = {A.HEADS: shape.attention.kv_groups if shape.attention else 1, A.MAMBA_HEADS: shape.mamba.groups if shape.mamba else 1}
    found = {}
    for name in full_shapes(shape):
        renamed, layer = submodel_name(name, plan), layer_of(name)
        if renamed is not None:
            widths = {A.HIDDEN: plan.width(A.HIDDEN)} if layer is None else layer_widths(shape, plan, layer)
            kept = {axis: (width, parent_width(shape, axis)) for axis, width in widths.items()}
            cut = dims_of(name, shape, lambda axis: groups.get(axis, 1))
            found[renamed] = tuple(sum(length for _, length in dim.runs(kept)) for dim in cut)
    assert found == small


def test_optional_tensors():
    tied = ModelShape(
        layer_pattern="*-",
        hidden_size=4,
        vocab_size=5,
        tied_embeddings=True,
        linear_bias=True,
        attention=QKV.attention,
        mlp=MlpShape(ffn=3),
    )
    names = set(full_shapes(tied))
    assert "output_layer.weight" not in names and "decoder.layers.0.self_attention.linear_qkv.bias" not in names
    assert {n for n in names if n.endswith("bias")} == {
        "decoder.layers.0.self_attention.linear_proj.bias",
        "decoder.layers.1.mlp.linear_fc1.bias",
        "decoder.layers.1.mlp.linear_fc2.bias",
    }
    assert [n for n in full_shapes(EVERYTHING) if n.endswith(BUFFERS)] == ["decoder.layers.3.mlp.router.expert_bias"]


def test_layers_are_renumbered():
    plan = SubmodelPlan.of({}, (1, 3))
    names = [submodel_name(f"decoder.layers.{n}.mixer.D", plan) for n in (0, 1, 2, 3, 11)]
    assert names == ["decoder.layers.0.mixer.D", None, "decoder.layers.1.mixer.D", None, "decoder.layers.9.mixer.D"]
    assert submodel_name("output_layer.weight", plan) == "output_layer.weight"
    assert (layer_of("decoder.layers.12.mixer.D"), layer_of("decoder.final_norm.weight")) == (12, None)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", "a layer of mamba"),
        ("decoder.layers.3.mlp.linear_fc1.weight", "a layer of moe"),
        ("decoder.layers.9.mixer.D", "this model"),
        ("lm_head.weight", "this model"),
    ],
)
def test_a_foreign_name_is_refused(name, where):
    with pytest.raises(CheckpointError) as caught:
        dims_of(name, EVERYTHING, axis_groups(None))
    assert str(caught.value) == f"parameter {name!r} is not one of {where} with layer_pattern 'M*-E'; is it a checkpoint of another model?"


def test_kept_widths_names_only_what_is_narrower_in_the_layer():
    space = build_space(EVERYTHING, {A.HIDDEN: (10, 7), A.EXPERTS: (6, 4)})
    plan = space.plan({A.HIDDEN: 7, A.EXPERTS: 4})
    assert kept_widths(space, plan, 3) == {A.HIDDEN: (7, 10), A.EXPERTS: (4, 6)}
    assert kept_widths(space, plan, 0) == kept_widths(space, plan, None) == {A.HIDDEN: (7, 10)}
    assert kept_widths(space, space.plan({A.EXPERTS: 4}), 3) == {A.EXPERTS: (4, 6)}


def test_each_layer_has_its_own_kept_width():
    shape = replace(EVERYTHING, layer_pattern="M-M-")
    choices = AxisChoices(choices=(8, 6, 4), per_layer=True)
    space = build_space(shape, {A.FFN: choices, A.MAMBA_STATE: (5, 2)}, shard_groups=2)
    plan = space.plan({A.FFN: (8, 4), A.MAMBA_STATE: 2})
    assert [kept_widths(space, plan, layer) for layer in (0, 1, 3)] == [{A.MAMBA_STATE: (2, 5)}, {}, {A.FFN: (4, 8)}]


def test_mamba_s_head_channels_and_states_are_cut_inside_their_blocks():
    space = build_space(MAMBA, {A.MAMBA_HEADS: (4, 2), A.MAMBA_HEAD_DIM: (3, 2), A.MAMBA_STATE: (5, 4)})
    rows, _ = dims_of("decoder.layers.0.mixer.in_proj.weight", MAMBA, axis_groups(space))
    kept = kept_widths(space, space.plan({A.MAMBA_HEADS: 2, A.MAMBA_HEAD_DIM: 2, A.MAMBA_STATE: 4}), 0)
    # z and x: of both SSM groups the first head, of it two of three channels; B and C: four of five states of each group; dt: a head.
    states = [*range(24, 28), *range(29, 33), *range(34, 38), *range(39, 43)]
    assert expand(rows.runs(kept)) == [0, 1, 6, 7, 12, 13, 18, 19, *states, 44, 46]
    assert expand(rows.runs(kept, 2)) == [0, 1, 6, 7, *range(12, 16), *range(17, 21), 22]


def test_both_halves_of_a_gated_projection_are_cut():
    shape = replace(EVERYTHING, gated=True)
    space = build_space(shape, {A.FFN: (8, 4)}, shard_groups=2)
    rows, _ = dims_of("decoder.layers.2.mlp.linear_fc1.weight", shape, axis_groups(space))
    assert expand(rows.runs(kept_widths(space, space.plan({A.FFN: 4}), 2))) == [0, 1, 4, 5, 8, 9, 12, 13]


GPT = replace(EVERYTHING, layer_pattern="TX", mamba=None, normalization="LayerNorm", attention=replace(EVERYTHING.attention, qk_norm=True))


def test_a_gpt_layer_has_the_names_of_both_its_sublayers():
    names = full_shapes(GPT)
    assert {n.removeprefix("decoder.layers.1.") for n in names if n.startswith("decoder.layers.1.")} == {
        *(f"self_attention.linear_qkv.{n}" for n in ("layer_norm_weight", "layer_norm_bias", "weight", "bias")),
        *(f"self_attention.{n}_layernorm.{part}" for n in "qk" for part in ("weight", "bias")),
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "pre_mlp_layernorm.bias",
        "mlp.router.weight",
        "mlp.router.expert_bias",
        *(f"mlp.experts.experts.linear_fc{n}.weight" for n in "12"),
        *(f"mlp.shared_experts.linear_fc{n}.weight" for n in "12"),
    }
    assert names["decoder.layers.0.self_attention.q_layernorm.weight"] == (3,)
    assert {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"} <= set(names) and "decoder.final_norm.weight" not in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_bias" in names
    with pytest.raises(CheckpointError, match="is not one of a layer of attention and moe with"):
        dims_of("decoder.layers.1.mlp.linear_fc1.weight", GPT, axis_groups(None))
