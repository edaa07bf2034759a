"""Costs: a count is the sum over the extracted model's tensors, the anchors are exact, and expected widths give the expectation.

Every parent (hybrid, dense GPT, MoE GPT), homogeneous and per layer. Bytes have their own file, test_memory.py.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.cost import (
    COSTS,
    SoftChoices,
    Widths,
    active_params,
    cost_function,
    flops_per_token,
    total_params,
    widths_of,
)
from megatron_elastic.errors import ConfigError
from megatron_elastic.layout import BUFFERS, full_shapes
from megatron_elastic.router.objective import expected_widths
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape
from megatron_elastic.space import AxisChoices, build_space, parent_plan, resize
from tests.shape_strategies import plans, quick, spaces

A = ElasticAxis
NANO_3 = ModelShape(
    layer_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    hidden_size=2688,
    vocab_size=131072,
    attention=AttentionShape(heads=32, kv_groups=2, head_dim=128),
    moe=MoeShape(experts=128, topk=6, ffn=1856, shared_ffn=3712),
    mamba=MambaShape(heads=64, head_dim=64, groups=8, state=128),
)
V2_12B = ModelShape(
    layer_pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    hidden_size=5120,
    vocab_size=131072,
    attention=AttentionShape(heads=40, kv_groups=8, head_dim=128),
    mlp=MlpShape(ffn=20480),
    mamba=MambaShape(heads=128, head_dim=80, groups=8, state=128),
)
V2_9B = replace(V2_12B, layer_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", hidden_size=4480, mlp=MlpShape(ffn=15680))
LLAMA_8B = ModelShape(
    layer_pattern="T32",
    hidden_size=4096,
    vocab_size=128256,
    activation="silu",
    gated=True,
    attention=AttentionShape(heads=32, kv_groups=8, head_dim=128, rope_base=5e5),
    mlp=MlpShape(ffn=14336),
)
QWEN3_30B = ModelShape(
    layer_pattern="X48",
    hidden_size=2048,
    vocab_size=151936,
    activation="silu",
    gated=True,
    attention=AttentionShape(heads=32, kv_groups=4, head_dim=128, qk_norm=True, rope_base=1e6),
    moe=MoeShape(experts=128, topk=8, ffn=768, score="softmax", expert_bias=False),
)
TINY = ModelShape(
    layer_pattern="ME*-M",
    hidden_size=12,
    vocab_size=19,
    attention=AttentionShape(heads=8, kv_groups=2, head_dim=3, qkv_bias=True),
    mlp=MlpShape(ffn=20),
    moe=MoeShape(experts=6, topk=2, ffn=9, shared_ffn=7),
    mamba=MambaShape(heads=4, head_dim=5, groups=2, state=6, chunk=4),
)


def parent_widths(shape):
    return widths_of(parent_plan(shape), shape.num_layers)


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [
        (NANO_3, 31_577_937_344, 3_580_073_408),
        (V2_12B, 12_310_001_152, 12_310_001_152),
        (V2_9B, 8_888_227_328, 8_888_227_328),
        (LLAMA_8B, 8_030_261_248, 8_030_261_248),
        (QWEN3_30B, 30_532_122_624, 3_353_032_704),
    ],
    ids=["nano-3-30b", "nano-v2-12b", "nano-v2-9b", "llama-3.1-8b", "qwen3-30b-a3b"],
)
def test_published_models_are_counted_exactly(shape, total, active):
    assert total_params(shape, parent_widths(shape)) == total
    assert active_params(shape, parent_widths(shape)) == active


FAMILIES = spaces().flatmap(lambda family: st.tuples(st.just(family[0]), st.one_of(plans(family[1]), plans(family[0]))))
"""A parent, and a plan of a space of it or one of any widths; both may be per layer."""


@quick
@given(FAMILIES)
def test_a_count_is_the_sum_over_the_extracted_tensors(case):
    shape, plan = case
    small = resize(shape, plan)
    tensors = {name: size for name, size in full_shapes(small).items() if not name.endswith(BUFFERS)}
    widths = widths_of(plan, shape.num_layers)
    assert total_params(shape, widths) == sum(math.prod(size) for size in tensors.values())
    resting = 0
    for layer in small.layers_with("moe"):
        moe: Any = small.at(layer).moe
        stacked = sum(math.prod(size) for name, size in tensors.items() if name.startswith(f"decoder.layers.{layer}.mlp.experts.experts."))
        resting += stacked // moe.experts * (moe.experts - moe.topk)
    assert active_params(shape, widths) == total_params(shape, widths) - resting


@quick
@given(FAMILIES, st.integers(1, 64))
def test_a_plan_costs_what_its_extracted_model_costs(case, length):
    shape, plan = case
    small = resize(shape, plan)
    for kind in COSTS:
        cost, of_small = (cost_function(of, kind, length) for of in (shape, small))
        assert cost(widths_of(plan, shape.num_layers)) == pytest.approx(of_small(parent_widths(small)), rel=1e-15, abs=0)


@quick
@given(spaces().flatmap(lambda family: st.tuples(st.just(family[0]), plans(family[1]))))
def test_a_nested_plan_never_costs_more(case):
    shape, plan = case
    for kind in COSTS:
        cost = cost_function(shape, kind, 16)
        assert cost(widths_of(plan, shape.num_layers)) <= cost(parent_widths(shape))


def test_u5_shared_expert_router_gate_and_groups_are_counted_as_built():
    """A public budget formula counts the shared expert with the wrong factor, no router, no gate, and always 8 Mamba groups."""
    moe = ModelShape(
        layer_pattern="E", hidden_size=10, vocab_size=7, gated=True, moe=MoeShape(experts=6, topk=2, ffn=9, shared_ffn=5, expert_bias=False)
    )
    router, expert, shared, ends = 6 * 10, 3 * 10 * 9, 3 * 10 * 5, 2 * 7 * 10 + 2 * 10
    assert total_params(moe, parent_widths(moe)) == ends + router + 6 * expert + shared
    assert active_params(moe, parent_widths(moe)) == ends + router + 2 * expert + shared
    ungated = replace(moe, gated=False)
    assert total_params(ungated, parent_widths(ungated)) == ends + router + (6 * expert + shared) * 2 // 3
    mamba = ModelShape(layer_pattern="M", hidden_size=6, vocab_size=7, mamba=MambaShape(heads=6, head_dim=5, groups=3, state=4, conv=2))
    projections, convolution, rest = 6 * (30 + 30 + 12 + 12 + 6) + 30 * 6, (30 + 12 + 12) * (2 + 1), 3 * 6 + 30 + 6
    assert total_params(mamba, parent_widths(mamba)) == 2 * 7 * 6 + 6 + projections + convolution + rest


def test_u6_every_letter_of_a_pattern_is_counted():
    """A public counter stops at `-`, at `|` and at the suffix of multi-token prediction."""
    piped = replace(TINY, layer_pattern="ME|*-|M")
    assert piped == TINY and total_params(piped, parent_widths(piped)) == total_params(TINY, parent_widths(TINY))
    assert total_params(replace(TINY, layer_pattern="ME*M"), parent_widths(replace(TINY, layer_pattern="ME*M"))) == (
        total_params(TINY, parent_widths(TINY)) - 12 - 2 * 12 * 20
    )
    (problem,) = replace(TINY, layer_pattern="ME*-M/*E").problems()
    assert "multi-token prediction (MTP) heads ('/') cannot be elastic" in problem


def test_first_layers_dense():
    """As DeepSeek's models: dense layers before those with experts, one attention in all of them."""
    shape = ModelShape(
        layer_pattern="TXX",
        hidden_size=10,
        vocab_size=7,
        gated=True,
        attention=AttentionShape(heads=4, kv_groups=2, head_dim=3, qk_norm=True, qkv_bias=True),
        mlp=MlpShape(ffn=14),
        moe=MoeShape(experts=4, topk=1, ffn=5),
    )
    attention, dense, router, expert, norms = 10 * (12 + 6 + 6) + 24 + 12 * 10 + 2 * 3, 3 * 10 * 14, 4 * 10, 3 * 10 * 5, 20
    assert total_params(shape, parent_widths(shape)) == (3 * (attention + norms) + dense + 2 * (router + 4 * expert) + 2 * 7 * 10 + 10)
    plan = SubmodelPlan.of(
        dict(parent_plan(shape).widths) | {A.HEADS: (4, 2, 2), A.EXPERTS: (4, 2), A.FFN: 7, A.MOE_FFN: (5, 3)}, dropped_layers=(1,)
    )
    heads = attention * 2 - 2 * (2 * 3 * 10) - 2 * 3  # one of the two attentions left has 2 heads less
    assert total_params(shape, widths_of(plan, 3)) == heads + 2 * norms + dense // 2 + router // 2 + 2 * 3 * 10 * 3 + 2 * 7 * 10 + 10


def test_flops_by_hand():
    dense = ModelShape(
        layer_pattern="*-", hidden_size=6, vocab_size=7, attention=AttentionShape(heads=4, kv_groups=2, head_dim=3), mlp=MlpShape(ffn=5)
    )
    qkv, proj, scores, mlp, head = 6 * (12 + 6 + 6), 12 * 6, 2 * 10 * 12, 2 * 6 * 5, 6 * 7
    assert flops_per_token(dense, parent_widths(dense), 10) == 2 * (qkv + proj + scores + mlp + head)
    tied = replace(dense, tied_embeddings=True)
    assert flops_per_token(tied, parent_widths(tied), 10) == flops_per_token(dense, parent_widths(dense), 10)


def test_flops_of_the_scan_by_hand():
    shape = ModelShape(
        layer_pattern="M", hidden_size=6, vocab_size=7, mamba=MambaShape(heads=4, head_dim=5, groups=2, state=3, conv=4, chunk=8)
    )
    in_proj, out_proj, head = 6 * (20 + 20 + 6 + 6 + 4), 20 * 6, 6 * 7  # the convolution is no matrix product
    scan = 8 * 3 * 2 + 4 * (8 * 5 + 2 * 3 * 5)  # C B^T per group; (C B^T) x, the chunk's state and C h per head
    assert flops_per_token(shape, parent_widths(shape), 16) == 2 * (in_proj + out_proj + head + scan)
    shorter = 2 * (in_proj + out_proj + head + 4 * 3 * 2 + 4 * (4 * 5 + 2 * 3 * 5))
    assert flops_per_token(shape, parent_widths(shape), 4) == shorter


def test_flops_of_gated_experts_by_hand():
    shape = ModelShape(
        layer_pattern="TX",
        hidden_size=6,
        vocab_size=7,
        normalization="LayerNorm",
        gated=True,
        attention=AttentionShape(heads=4, kv_groups=2, head_dim=2, qk_norm=True, rope_base=1e4),
        mlp=MlpShape(ffn=5),
        moe=MoeShape(experts=8, topk=3, ffn=4, shared_ffn=9),
    )
    attention = 6 * (8 + 4 + 4) + 8 * 6 + 2 * 10 * 8  # rotary embeddings and norms are no matrix products
    dense, experts, router, head = 3 * 6 * 5, 3 * (3 * 6 * 4) + 3 * 6 * 9, 6 * 8, 6 * 7
    assert flops_per_token(shape, parent_widths(shape), 10) == 2 * (2 * attention + dense + experts + router + head)


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="elastic.cost 'latency' is unknown; use total_params, active_params, flops, memory"):
        cost_function(TINY, "latency", 8)


GPT = ModelShape(
    layer_pattern="TXXT",
    hidden_size=12,
    vocab_size=19,
    tied_embeddings=True,
    gated=True,
    normalization="LayerNorm",
    attention=AttentionShape(heads=8, kv_groups=2, head_dim=3, qkv_bias=True, qk_norm=True),
    mlp=MlpShape(ffn=20),
    moe=MoeShape(experts=6, topk=3, ffn=9, shared_ffn=7),
)
HOMOGENEOUS = build_space(
    TINY,
    {
        A.HIDDEN: (12, 7),
        A.FFN: (20, 8),
        A.MOE_FFN: (9, 3),
        A.HEADS: (8, 4),
        A.MAMBA_HEADS: (4, 2),
        A.MAMBA_HEAD_DIM: (5, 2),
        A.MAMBA_STATE: (6, 1),
        A.EXPERTS: (6, 3),
        A.TOPK: (2, 1),
        A.LAYERS: (5, 4),
    },
    shard_groups=1,
    drop_order=(3,),
)


def each(*choices: int) -> AxisChoices:
    """Choices of an axis that has a width on every layer."""
    return AxisChoices(choices=choices, per_layer=True)


PER_LAYER = build_space(
    replace(TINY, layer_pattern="MEM*E"),
    {A.HIDDEN: (12, 7), A.MAMBA_HEADS: each(4, 2), A.MAMBA_HEAD_DIM: (5, 2), A.MAMBA_STATE: each(6, 1)}
    | {A.MOE_FFN: each(9, 3), A.TOPK: each(2, 1), A.LAYERS: (5, 3)},
    drop_order=(1, 0),
    shard_groups=1,
)
PER_LAYER_GPT = build_space(
    GPT,
    {A.HIDDEN: (12, 7), A.FFN: each(20, 8), A.HEADS: each(8, 4), A.EXPERTS: each(6, 3), A.TOPK: (3, 1), A.LAYERS: (4, 3)},
    drop_order=(2,),
    shard_groups=1,
)
SHAPES = {"homogeneous": (TINY, HOMOGENEOUS), "per-layer": (replace(TINY, layer_pattern="MEM*E"), PER_LAYER), "gpt": (GPT, PER_LAYER_GPT)}


def soft_choices(space: ElasticSpace, seed: int = 5) -> SoftChoices:
    """A random decision of an axis (or layer) on its own, leaf tensors [places, choices]."""
    generator = torch.Generator().manual_seed(seed)
    draws = {spec.axis: torch.rand(spec.places, len(spec.choices), dtype=torch.float64, generator=generator) for spec in space.axes}
    return SoftChoices(space, {axis: draw.softmax(-1).requires_grad_() for axis, draw in draws.items()})


def soft_widths(shape: ModelShape, soft: SoftChoices) -> Widths:
    """What the cost model is handed for a decision."""
    return replace(expected_widths(soft.space, soft.probabilities, shape.num_layers), soft=soft)


def enumerated(shape: ModelShape, soft: SoftChoices, kind: str, length: int) -> torch.Tensor:
    """The expectation, plan by plan."""
    places = [(spec, place) for spec in soft.space.axes for place in range(spec.places)]
    total, cost = torch.zeros((), dtype=torch.float64), cost_function(shape, kind, length)
    costs, indices = [], list(itertools.product(*(range(len(spec.choices)) for spec, _ in places)))
    for index in indices:
        widths: dict = {}
        for (spec, _), i in zip(places, index, strict=True):
            widths[spec.axis] = (*widths.get(spec.axis, ()), spec.choices[i])
        plan = soft.space.plan({axis: width if len(width) > 1 else width[0] for axis, width in widths.items()})
        costs.append(float(cost(widths_of(plan, shape.num_layers))))
    columns = torch.tensor(indices).unbind(1)
    chances = torch.stack([soft.probabilities[spec.axis][place][column] for (spec, place), column in zip(places, columns, strict=True)])
    return total + chances.prod(0) @ torch.tensor(costs, dtype=torch.float64)


@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("family", SHAPES)
def test_expected_widths_give_the_expectation_over_plans(family, kind):
    shape, space = SHAPES[family]
    soft = soft_choices(space)
    expected, by_plan = cost_function(shape, kind, 8)(soft_widths(shape, soft)), enumerated(shape, soft, kind, 8)
    torch.testing.assert_close(expected, by_plan, rtol=1e-12, atol=0)

    inputs = list(soft.probabilities.values())
    one, other = (torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True) for value in (expected, by_plan))
    for spec, a, b in zip(space.axes, one, other, strict=True):
        torch.testing.assert_close(a[:, 0] - a[:, 1], b[:, 0] - b[:, 1], rtol=1e-10, atol=1e-9)
        # Widening any axis costs more; but only active parameters, FLOPs and activations know how many experts are chosen.
        assert (a[:, 0] > a[:, 1]).all() or (spec.axis is A.TOPK and kind in ("total_params", "memory"))


def test_one_hot_tensors_give_the_exact_count():
    plan = HOMOGENEOUS.plan({A.HIDDEN: 7, A.EXPERTS: 3, A.LAYERS: 4})
    tensors = Widths(
        {axis: torch.tensor(width, dtype=torch.float32) for axis, width in plan.widths},
        [torch.tensor(float(plan.keeps_layer(n))) for n in range(5)],
    )
    assert total_params(TINY, tensors).item() == total_params(TINY, widths_of(plan, 5))


def test_arrays_of_widths_give_arrays_of_costs():
    hidden, experts = np.ix_([12, 7], [6, 3])
    costs = total_params(TINY, Widths(dict(parent_plan(TINY).widths) | {A.HIDDEN: hidden, A.EXPERTS: experts}, [1] * 5))
    for (i, width), (j, count) in itertools.product(enumerate((12, 7)), enumerate((6, 3))):
        plan = SubmodelPlan.of(dict(parent_plan(TINY).widths) | {A.HIDDEN: width, A.EXPERTS: count})
        assert costs[i, j] == total_params(TINY, widths_of(plan, 5))


def test_arrays_of_widths_per_layer():
    shape, hidden = SHAPES["per-layer"][0], np.array([12.0, 7.0])
    states = (np.array([6.0, 1.0]), 1)
    plan = dict(parent_plan(shape).widths)
    for kind in COSTS:
        cost = cost_function(shape, kind, 16)
        costs = cost(Widths(plan | {A.HIDDEN: hidden, A.MAMBA_STATE: states}, [1, np.array([1.0, 0.0]), 1, 1, 1]))
        for i, (width, state, dropped) in enumerate(((12, 6, ()), (7, 1, (1,)))):
            one = SubmodelPlan.of(plan | {A.HIDDEN: width, A.MAMBA_STATE: (state, 1)}, dropped)
            assert costs[i] == cost(widths_of(one, 5))


def test_costs_of_per_layer_decisions_are_cheap():
    """A training step asks for one; the bound is far above what it takes (2 ms), and far below an evaluation for each plan."""
    widths = {A.MOE_FFN: each(1856, 928), A.SHARED_FFN: each(3712, 1856), A.HEADS: each(32, 16), A.MAMBA_HEADS: each(64, 32)}
    widths |= {A.MAMBA_HEAD_DIM: each(64, 32), A.MAMBA_STATE: each(128, 64), A.EXPERTS: each(128, 64), A.TOPK: each(6, 3)}
    space = build_space(NANO_3, {A.HIDDEN: (2688, 1344), **widths}, shard_groups=4)
    expected, cost = soft_widths(NANO_3, soft_choices(space)), cost_function(NANO_3, "active_params", 8)
    cost(expected)
    start = time.process_time()
    cost(expected)
    assert time.process_time() - start < 0.1
