"""Bytes: weights by format, caches and activations by hand; their sum; the exact expectation of a peak that expected widths miss."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.cost import SoftChoices, Widths, cost_function, total_params, widths_of
from megatron_elastic.errors import ConfigError
from megatron_elastic.memory import (
    MemoryTarget,
    activation_bytes,
    conv_state_bytes,
    kv_cache_bytes,
    memory_bytes,
    ssm_state_bytes,
    weight_bytes,
)
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape
from megatron_elastic.space import build_space, parent_plan, resize
from tests.shape_strategies import plans, quick, spaces
from tests.test_cost import LLAMA_8B, NANO_3, TINY, enumerated, parent_widths, soft_choices, soft_widths

A = ElasticAxis


def test_every_weight_has_four_or_two_bytes():
    total = total_params(TINY, parent_widths(TINY))
    assert weight_bytes(TINY, parent_widths(TINY), "fp32") == 4 * total
    assert weight_bytes(TINY, parent_widths(TINY), "bf16") == weight_bytes(TINY, parent_widths(TINY)) == 2 * total


@pytest.mark.parametrize(("name", "per_weight"), [("fp8", 1), ("nvfp4", 0.5625)])
def test_only_matrices_between_tokens_are_narrow(name, per_weight):
    in_proj, out_proj, qkv, proj, fc1, fc2 = 12 * (20 + 20 + 24 + 4), 20 * 12, 12 * (24 + 6 + 6), 24 * 12, 12 * 20, 20 * 12
    routed, shared = 6 * 2 * 12 * 9, 2 * 12 * 7
    narrow = 2 * (in_proj + out_proj) + qkv + proj + fc1 + fc2 + routed + shared
    scales = 2 * 2 + 2 + 2 + 6 * 2 + 2  # one for each matrix, of each expert too
    rest = total_params(TINY, parent_widths(TINY)) - narrow
    assert rest == 2 * 19 * 12 + 6 * 12 + 36 + 6 * 12 + 2 * (44 * 5 + 3 * 4 + 20)  # ends, norms, qkv bias, router, convolutions, A, D, dt
    assert weight_bytes(TINY, parent_widths(TINY), name) == narrow * per_weight + 4 * scales + 2 * rest


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigError, match="weight format 'int3' is unknown; use fp32, bf16, fp8, nvfp4"):
        weight_bytes(TINY, parent_widths(TINY), "int3")


def test_the_cache_of_published_models():
    assert kv_cache_bytes(NANO_3, parent_widths(NANO_3), 1, 2**20) == 6 * 2**30  # 6 layers, 2 KV heads of 128: 6 KiB a token
    assert kv_cache_bytes(LLAMA_8B, parent_widths(LLAMA_8B), 4, 8192, "fp8") == 4 * 8192 * 64 * 2**10  # 64 KiB a token
    assert ssm_state_bytes(NANO_3, parent_widths(NANO_3), 1) == 23 * 64 * 64 * 128 * 4
    assert conv_state_bytes(NANO_3, parent_widths(NANO_3), 1) == 23 * (64 * 64 + 2 * 8 * 128) * 4 * 2


def test_caches_follow_the_axes_that_cut_them():
    plan = SubmodelPlan.of(
        dict(parent_plan(TINY).widths) | {A.HEADS: 2, A.MAMBA_HEADS: (4, 2), A.MAMBA_HEAD_DIM: (2, 5), A.MAMBA_STATE: (6, 1)}
    )
    widths, whole = widths_of(plan, 5), parent_widths(TINY)
    assert kv_cache_bytes(TINY, widths, 3, 10) == kv_cache_bytes(TINY, whole, 3, 10) == 2 * 2 * 3 * 2 * 3 * 10
    assert ssm_state_bytes(TINY, widths, 3, "bf16") == 3 * 2 * (4 * 2 * 6 + 2 * 5 * 1)
    assert conv_state_bytes(TINY, widths, 3) == 3 * 4 * 2 * (4 * 2 + 2 * 2 * 6 + 2 * 5 + 2 * 2 * 1)
    shallow = widths_of(replace(plan, dropped_layers=(0, 2)), 5)
    assert kv_cache_bytes(TINY, shallow, 3, 10) == 0
    assert ssm_state_bytes(TINY, shallow, 3, "bf16") == 3 * 2 * 2 * 5 * 1
    dense = replace(LLAMA_8B, layer_pattern="T")
    assert ssm_state_bytes(dense, parent_widths(dense), 3) == conv_state_bytes(dense, parent_widths(dense), 3) == 0


def alone(pattern: str, **parts: Any) -> ModelShape:
    """A model of hidden size 10 with these parts."""
    return ModelShape(layer_pattern=pattern, hidden_size=10, vocab_size=19, **parts)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        (alone("*", attention=AttentionShape(heads=1, kv_groups=1, head_dim=4)), 10 + 10 + 4 + 8),
        (alone("*", attention=AttentionShape(heads=9, kv_groups=1, head_dim=4)), 10 + 36 + 8 + 36),
        (alone("-", mlp=MlpShape(ffn=8)), 10 + 10 + 8),
        (alone("-", mlp=MlpShape(ffn=30)), 10 + 30 + 30),
        (alone("-", mlp=MlpShape(ffn=30), gated=True), 10 + 60 + 30),
        (alone("E", moe=MoeShape(experts=9, topk=3, ffn=20)), 10 + 3 * (20 + 20)),
        (alone("E", moe=MoeShape(experts=9, topk=3, ffn=20, shared_ffn=4), gated=True), 10 + 10 + 3 * (40 + 20)),
        (alone("E", moe=MoeShape(experts=9, topk=3, ffn=1, shared_ffn=4)), 10 + 10 + 10 + 3 * 10),
        (alone("E", moe=MoeShape(experts=9, topk=1, ffn=5, shared_ffn=50)), 10 + 10 + 50 + 50),
        (alone("E", moe=MoeShape(experts=9, topk=1, ffn=1, shared_ffn=9), gated=True), 10 + 10 + 18 + 9),
    ],
    ids=["qkv", "context", "fc1", "activated", "gated", "experts", "experts-shared", "copies", "shared", "shared-gated"],
)
def test_activations_of_one_layer_by_hand(shape, numbers):
    assert activation_bytes(shape, parent_widths(shape), 7) == 7 * 2 * numbers
    assert activation_bytes(shape, parent_widths(shape), 7, "fp32") == 7 * 4 * numbers


def test_activations_of_a_scan_by_hand():
    shape = alone("M", mamba=MambaShape(heads=4, head_dim=5, groups=2, state=6, chunk=4))
    projected, convolved = 20 + 44 + 4, 44
    states = 4 * 5 * 6 * 4  # fp32
    assert activation_bytes(shape, parent_widths(shape), 9) == 9 * 2 * (10 + projected + convolved + 20) + 3 * states
    wide = replace(shape, hidden_size=900)
    assert activation_bytes(wide, parent_widths(wide), 9) == 9 * 2 * (900 + 900 + projected)


def test_the_peak_is_that_of_the_widest_layer_that_is_computed():
    shape = alone("---*", mlp=MlpShape(ffn=30), attention=AttentionShape(heads=1, kv_groups=1, head_dim=1))
    plan = SubmodelPlan.of({A.HIDDEN: 10, A.FFN: (30, 12, 20), A.HEADS: 1})
    peaks = [
        activation_bytes(shape, widths_of(replace(plan, dropped_layers=d), 4), 1, "fp32") for d in ((), (0,), (0, 2), (0, 1, 2), range(4))
    ]
    assert [peak / 4 for peak in peaks] == [10 + 60, 10 + 40, 10 + 24, 20 + 3, 20]


def test_memory_is_the_sum():
    target = MemoryTarget(
        weight_format="nvfp4", cache_format="fp8", state_format="bf16", activation_format="fp32", batch=3, prefill_tokens=5
    )
    widths = parent_widths(TINY)
    for length, named in ((8, target), (40, replace(target, sequence_length=40))):
        parts = weight_bytes(TINY, widths, "nvfp4") + kv_cache_bytes(TINY, widths, 3, length, "fp8")
        parts += (
            ssm_state_bytes(TINY, widths, 3, "bf16") + conv_state_bytes(TINY, widths, 3, "fp32") + activation_bytes(TINY, widths, 5, "fp32")
        )
        assert memory_bytes(TINY, widths, named, 8) == cost_function(TINY, "memory", 8, named)(widths) == parts
    whole = replace(target, prefill_tokens=None)
    grown = memory_bytes(TINY, widths, whole, 8) - memory_bytes(TINY, widths, target, 8)
    assert grown == activation_bytes(TINY, widths, 8, "fp32") - activation_bytes(TINY, widths, 5, "fp32") > 0
    assert cost_function(TINY, "memory", 8)(widths) == memory_bytes(TINY, widths, MemoryTarget(), 8)


def test_bad_numbers_are_named():
    assert MemoryTarget().problems() == []
    assert MemoryTarget(sequence_length=0, batch=-1, prefill_tokens=0).problems() == [
        "elastic.memory.sequence_length 0 must be above 0",
        "elastic.memory.batch -1 must be above 0",
        "elastic.memory.prefill_tokens 0 must be above 0",
    ]


TARGETS = st.builds(
    MemoryTarget,
    weight_format=st.sampled_from(["fp32", "bf16", "fp8", "nvfp4"]),
    sequence_length=st.one_of(st.none(), st.integers(1, 99)),
    batch=st.integers(1, 3),
    prefill_tokens=st.one_of(st.none(), st.integers(1, 200)),
)


@quick
@given(spaces().flatmap(lambda f: st.tuples(st.just(f[0]), st.one_of(plans(f[1]), plans(f[0])))), TARGETS)
def test_a_plan_takes_what_its_extracted_model_takes(case, target):
    shape, plan = case
    small = resize(shape, plan)
    here, there = memory_bytes(shape, widths_of(plan, shape.num_layers), target, 16), memory_bytes(small, parent_widths(small), target, 16)
    assert here == pytest.approx(there, rel=1e-14, abs=0)


@quick
@given(spaces().flatmap(lambda f: st.tuples(st.just(f), plans(f[1]))))
def test_a_one_hot_decision_has_the_peak_of_its_plan(case):
    (shape, space), plan = case
    if not space.axes:
        return
    probabilities = {
        spec.axis: torch.tensor([[float(n == chosen) for n in spec.choices] for chosen in space.choices_of(plan, spec.axis)])
        for spec in space.axes
    }
    expected = activation_bytes(shape, soft_widths(shape, SoftChoices(space, probabilities)), 9)
    assert float(expected) == pytest.approx(float(activation_bytes(shape, widths_of(plan, shape.num_layers), 9)), rel=1e-6)


def test_the_peak_of_expected_widths_is_not_the_expected_peak():
    """Two sublayers of which now one, now the other is the larger: a peak of expectations misses half of the difference."""
    shape = alone("*-", attention=AttentionShape(heads=8, kv_groups=1, head_dim=4), mlp=MlpShape(ffn=40))
    space = build_space(shape, {A.HEADS: (8, 1), A.FFN: (40, 4)}, shard_groups=1)
    soft = soft_choices(space)
    half = {axis: torch.full((1, 2), 0.5, dtype=torch.float64, requires_grad=True) for axis in soft.probabilities}
    widths = soft_widths(shape, SoftChoices(space, half))
    expected = activation_bytes(shape, widths, 1, "fp32")
    # attention 10 + 8 + 64 or 20 + 8 + 4; MLP 10 + 80 or 20 + 4
    assert float(expected.detach()) / 4 == (90 + 90 + 82 + 32) / 4
    numbers = {axis: width.item() if isinstance(width, torch.Tensor) else width for axis, width in widths.axes.items()}
    assert activation_bytes(shape, Widths(numbers, [1, 1]), 1, "fp32") / 4 == 10 + 44 < (90 + 90 + 82 + 32) / 4
    (slope,) = torch.autograd.grad(expected, half[A.FFN])
    assert (slope[0, 0] - slope[0, 1]).item() / 4 == 90 - (82 + 32) / 2


def test_a_decision_without_its_choices_is_refused_loudly():
    widths = soft_widths(TINY, soft_choices(build_space(TINY, {A.HIDDEN: (12, 7)})))
    with pytest.raises(RuntimeError, match="requires grad"):
        activation_bytes(TINY, replace(widths, soft=None), 9)


def test_peaks_of_a_grid_of_plans():
    hidden, heads, kept = np.ix_([12.0, 7.0], [8.0, 2.0], [1.0, 0.0])
    plan = dict(parent_plan(TINY).widths)
    peaks = activation_bytes(TINY, Widths(plan | {A.HIDDEN: hidden, A.HEADS: heads}, [kept, 1, 1, 1, 0]), 9)
    for i, j, k in itertools.product(range(2), repeat=3):
        one = SubmodelPlan.of(plan | {A.HIDDEN: (12, 7)[i], A.HEADS: (8, 2)[j]}, (4,) if k == 0 else (0, 4))
        assert peaks[i, j, k] == activation_bytes(TINY, widths_of(one, 5), 9)


def test_the_expectation_of_three_choices_and_a_drop_order():
    shape = alone("-*-", mlp=MlpShape(ffn=40), attention=AttentionShape(heads=6, kv_groups=2, head_dim=2))
    space = build_space(
        shape, {A.HIDDEN: (10, 6, 3), A.FFN: (40, 20, 10), A.HEADS: (6, 4, 2), A.LAYERS: (3, 2, 1)}, shard_groups=1, drop_order=(0, 2)
    )
    soft = soft_choices(space, seed=8)
    torch.testing.assert_close(
        cost_function(shape, "memory", 5)(soft_widths(shape, soft)), enumerated(shape, soft, "memory", 5), rtol=1e-12, atol=0
    )
