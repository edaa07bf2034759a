"""Estimates of time against figures that others have published, and the rules that make them up.

Run: pytest tests/test_estimate.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_elastic.config import load_recipe
from megatron_elastic.estimate import EFFICIENCY, estimate_stage, forward_flops, kind_of, soft_share, stage_flops
from megatron_elastic.hardware import GPUS
from megatron_elastic.preflight import budget_plans, recipe_cost
from megatron_elastic.shape import AttentionShape, MlpShape, ModelShape
from megatron_elastic.space import parent_plan

RECIPES = Path(__file__).parents[1] / "recipes"
H100 = GPUS["H100-SXM"]


def recipe_30b(*overrides):
    return load_recipe(RECIPES / "nemotron_3_nano_30b.yaml", ["parallel.recompute=none", *overrides])


def test_the_30b_and_its_parent_take_about_900_h100_hours_for_10b_tokens():
    """NVIDIA's study of this parent (Model-Optimizer, examples/megatron_bridge/tutorials); its student has 22B parameters, 3.0B active."""
    recipe = recipe_30b("stages.long=null", "stages.short.tokens=10_000_000_000")
    plans = budget_plans(recipe, recipe_cost(recipe))
    whole = estimate_stage(recipe, recipe.stages[0], plans, H100, 64)
    assert whole.gpu_hours == pytest.approx(900, rel=0.15)
    narrow = replace(recipe, router=replace(recipe.router, choice="uniform"))
    medium = replace(recipe.stages[0], budget_probs={"full": 0.0, "medium": 1.0, "small": 0.0})  # 2.8B active
    assert estimate_stage(narrow, medium, plans, H100, 64).gpu_hours == pytest.approx(900, rel=0.15)


def test_qwen3_8b_to_6b_takes_about_6000_h100_hours_for_90b_tokens():
    """NVIDIA Model-Optimizer, examples/nemo_run/prune_distill: 24 layers are left, sequences of 4,096 tokens."""
    teacher = ModelShape(
        layer_pattern="T36",
        hidden_size=4096,
        vocab_size=151936,
        gated=True,
        attention=AttentionShape(heads=32, kv_groups=8, head_dim=128),
        mlp=MlpShape(ffn=12288),
    )
    student = replace(teacher, layer_pattern="T24")
    flops = forward_flops(teacher, parent_plan(teacher), 4096) + 3 * forward_flops(student, parent_plan(student), 4096)
    hours = flops * 90e9 / (H100.bf16_flops * EFFICIENCY[kind_of(student)].share) / 3600
    assert hours == pytest.approx(6000, rel=0.1)


def test_a_forward_pass_is_two_flops_a_parameter_and_half_of_the_square_of_attention():
    shape = ModelShape(
        layer_pattern="T2",
        hidden_size=64,
        vocab_size=100,
        attention=AttentionShape(heads=4, kv_groups=4, head_dim=16),
        mlp=MlpShape(ffn=256),
    )
    matrices = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 64 * 100
    assert forward_flops(shape, parent_plan(shape), 32) == 2 * matrices + 2 * (2 * 2 * 32 * 64) / 2


def test_passes_of_a_token():
    recipe = recipe_30b()
    plans, stage = budget_plans(recipe, recipe_cost(recipe)), recipe.stages[0]
    parent = forward_flops(recipe.model, parent_plan(recipe.model), stage.sequence_length)
    small = forward_flops(recipe.model, plans["small"], stage.sequence_length)
    assert stage_flops(recipe, stage, plans) == pytest.approx(4 * parent)  # the router learns to the end: full width
    assert stage_flops(recipe, replace(stage, elastic=False), plans) == pytest.approx(3 * parent)
    again = recipe_30b("parallel.recompute=full")
    assert stage_flops(again, stage, plans) == pytest.approx(5 * parent)
    selective = recipe_30b("parallel.recompute=selective")
    assert 4 * parent < stage_flops(selective, stage, plans) < 4.1 * parent
    half = recipe_30b("router.learn_share=0.5")
    drawn = replace(half.stages[1], budget_probs={"full": 0.0, "medium": 0.0, "small": 1.0})
    half = replace(half, stages=(half.stages[0], drawn))
    parent, small = (forward_flops(half.model, plan, 49152) for plan in (parent_plan(half.model), plans["small"]))
    assert soft_share(half, drawn) == 0 and stage_flops(half, drawn, plans) == pytest.approx(parent + 3 * small)


def test_the_router_learns_in_the_first_share_of_all_elastic_steps():
    recipe = load_recipe(RECIPES / "demo_hybrid.yaml", ["stages.short.steps=30", "stages.long.steps=10", "router.learn_share=0.8"])
    assert [soft_share(recipe, stage) for stage in recipe.stages] == [0, 1, pytest.approx(0.2)]


def test_time_falls_with_gpus_and_grows_with_the_pipeline():
    recipe = load_recipe(RECIPES / "nemotron_nano_v2_12b.yaml", ["parallel={tensor: 8}"])
    plans, stage = budget_plans(recipe, recipe_cost(recipe)), recipe.stages[0]
    one, eight = (estimate_stage(recipe, stage, plans, H100, gpus) for gpus in (8, 64))
    assert one.step_seconds == pytest.approx(8 * eight.step_seconds) and one.gpu_hours == pytest.approx(eight.gpu_hours)
    assert one.tokens_per_second == pytest.approx(1536 * 8192 / one.step_seconds)
    deep = replace(recipe, parallel=replace(recipe.parallel, tensor=4, pipeline=2))
    assert estimate_stage(deep, stage, plans, H100, 64).step_seconds == pytest.approx(eight.step_seconds * (1 + 1 / 192))
    slow = replace(recipe, precision="fp32")
    assert estimate_stage(slow, stage, plans, H100, 8).step_seconds == pytest.approx(one.step_seconds * 989 / 67)
