"""Costs: a count is the sum over the extracted model's tensors, the anchors are exact, and expected widths give the expectation."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.cost import (
    COSTS,
    Widths,
    active_params,
    cost_function,
    flops_per_token,
    total_params,
    weight_bytes,
    widths_of,
)
from megatron_elastic.errors import ConfigError
from megatron_elastic.layout import BUFFERS, full_shapes
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape, build_space, parent_plan, resize
from tests.shape_strategies import plans, quick, shapes

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
    [(NANO_3, 31_577_937_344, 3_580_073_408), (V2_12B, 12_310_001_152, 12_310_001_152), (V2_9B, 8_888_227_328, 8_888_227_328)],
    ids=["nano-3-30b", "nano-v2-12b", "nano-v2-9b"],
)
def test_published_models_are_counted_exactly(shape, total, active):
    assert total_params(shape, parent_widths(shape)) == total
    assert active_params(shape, parent_widths(shape)) == active


@quick
@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), plans(shape))))
def test_a_count_is_the_sum_over_the_extracted_tensors(case):
    shape, plan = case
    small = resize(shape, plan)
    tensors = {name: size for name, size in full_shapes(small).items() if not name.endswith(BUFFERS)}
    widths = widths_of(plan, shape.num_layers)
    assert total_params(shape, widths) == sum(math.prod(size) for size in tensors.values())
    idle = small.moe.experts - small.moe.topk if small.moe else 0
    resting = sum(idle * math.prod(size[1:]) for name, size in tensors.items() if ".experts.experts." in name)
    assert active_params(shape, widths) == total_params(shape, widths) - resting


@quick
@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), plans(shape))), st.integers(1, 64))
def test_a_plan_costs_what_its_extracted_model_costs(case, length):
    shape, plan = case
    small = resize(shape, plan)
    for cost in (total_params, active_params, weight_bytes, lambda s, w: flops_per_token(s, w, length)):
        assert cost(shape, widths_of(plan, shape.num_layers)) == cost(small, parent_widths(small))


@quick
@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), plans(shape))))
def test_a_nested_plan_never_costs_more(case):
    shape, plan = case
    for kind in COSTS:
        cost = cost_function(shape, kind, 16)
        assert cost(widths_of(plan, shape.num_layers)) <= cost(parent_widths(shape))


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


@pytest.mark.parametrize(("name", "bytes_per_weight"), [("fp32", 4), ("bf16", 2), ("fp8", 1), ("nvfp4", 0.5625)])
def test_weight_bytes(name, bytes_per_weight):
    assert weight_bytes(TINY, parent_widths(TINY), name) == total_params(TINY, parent_widths(TINY)) * bytes_per_weight


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="weight format 'int3' is unknown; use fp32, bf16, fp8, nvfp4"):
        weight_bytes(TINY, parent_widths(TINY), "int3")
    with pytest.raises(ConfigError, match="elastic.cost 'latency' is unknown; use total_params, active_params, flops, memory"):
        cost_function(TINY, "latency", 8)


SPACE = build_space(
    TINY,
    {A.HIDDEN: (12, 7), A.FFN: (20, 8), A.MOE_FFN: (9, 3), A.HEADS: (8, 4), A.MAMBA_HEADS: (4, 2), A.EXPERTS: (6, 3), A.LAYERS: (5, 4)},
    shard_groups=1,
    drop_order=(3,),
)


@pytest.mark.parametrize("kind", COSTS)
def test_expected_widths_give_the_expectation_over_plans(kind):
    torch.manual_seed(5)
    pis = {spec.axis: torch.rand(2, dtype=torch.float64).softmax(0).requires_grad_() for spec in SPACE.axes}
    axes = {axis: torch.tensor(float(width), dtype=torch.float64) for axis, width in parent_plan(TINY).widths}
    for spec in SPACE.axes:
        axes[spec.axis] = pis[spec.axis] @ torch.tensor(spec.choices, dtype=torch.float64)
    survival = [pis[A.LAYERS][0] if layer == 3 else 1.0 for layer in range(5)]
    cost = cost_function(TINY, kind, 8)
    expected = cost(Widths(axes, survival))

    enumerated = torch.zeros((), dtype=torch.float64)
    for index in itertools.product(range(2), repeat=len(SPACE.axes)):
        plan = SPACE.plan({spec.axis: spec.choices[i] for spec, i in zip(SPACE.axes, index, strict=True)})
        probability = math.prod(pis[spec.axis][i] for spec, i in zip(SPACE.axes, index, strict=True))
        enumerated = enumerated + probability * cost(widths_of(plan, 5))
    torch.testing.assert_close(expected, enumerated, rtol=1e-13, atol=0)

    inputs = list(pis.values())
    one, other = (torch.autograd.grad(value, inputs, allow_unused=True) for value in (expected, enumerated))
    for spec, a, b in zip(SPACE.axes, one, other, strict=True):
        # Widening any axis costs more. Experts beyond topk are counted only in totals, with the router the one exception.
        assert a is not None and a[0] > a[1] if spec.axis is not A.LAYERS else a[0] > 0
        torch.testing.assert_close(a[0] - a[1], b[0] - b[1], rtol=1e-12, atol=0)


def test_one_hot_tensors_give_the_exact_count():
    plan = SPACE.plan({A.HIDDEN: 7, A.EXPERTS: 3, A.LAYERS: 4})
    tensors = Widths(
        {axis: torch.tensor(float(width)) for axis, width in plan.widths}, [torch.tensor(float(plan.keeps_layer(n))) for n in range(5)]
    )
    assert total_params(TINY, tensors).item() == total_params(TINY, widths_of(plan, 5))


def test_arrays_of_widths_give_arrays_of_costs():
    hidden, experts = np.ix_([12, 7], [6, 3])
    costs = total_params(TINY, Widths(dict(parent_plan(TINY).widths) | {A.HIDDEN: hidden, A.EXPERTS: experts}, [1] * 5))
    for (i, width), (j, count) in itertools.product(enumerate((12, 7)), enumerate((6, 3))):
        plan = SubmodelPlan.of(dict(parent_plan(TINY).widths) | {A.HIDDEN: width, A.EXPERTS: count})
        assert costs[i, j] == total_params(TINY, widths_of(plan, 5))
