"""The recipes that ship: each loads and passes every check, parents are the published models, families have the published sizes within 1 %,
stages are the papers', and every number of a stage says where it comes from.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from megatron_elastic.config import load_recipe
from megatron_elastic.cost import active_params, total_params, widths_of
from megatron_elastic.hf.families import family_of_config
from megatron_elastic.planning import plan_cost
from megatron_elastic.preflight import budget_plans, budget_targets, recipe_cost, recipe_problems
from megatron_elastic.recipe import PinnedBudget
from tests.hf.public_configs import PUBLIC

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
FAMILIES = {
    "nemotron_3_nano_30b": {"full": (31.58e9, 3.58e9), "medium": (23.9e9, 2.82e9), "small": (12.25e9, 2.0e9)},
    "nemotron_nano_v2_12b": {"full": (12.31e9,) * 2, "medium": (8.89e9,) * 2, "small": (6.0e9,) * 2},
    "nemotron_nano_v2_9b": {"full": (8.89e9,) * 2, "medium": (6.0e9,) * 2, "small": (4.0e9,) * 2},
    "qwen3_30b_a3b": {"full": (30.53e9, 3.353e9), "medium": (23.54e9, 2.74e9), "small": (11.96e9, 1.84e9)},
    "llama31_8b": {"full": (8.03e9,) * 2, "medium": (5.9e9,) * 2, "small": (4.42e9,) * 2},
}
"""Recipe -> budget -> total and active parameters; those of Nemotron are published, but for the family of the 9B."""
CONFIGS = {
    "nemotron_nano_v2_12b": "nvidia/NVIDIA-Nemotron-Nano-12B-v2",
    "nemotron_3_nano_30b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "llama31_8b": "meta-llama/Llama-3.1-8B",
}
"""Recipe -> the published config.json of its parent."""
LARGE = tuple(FAMILIES)


def path_of(name):
    return next(path for path in RECIPES if path.stem == name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_has_no_problems(path):
    assert recipe_problems(load_recipe(path)) == []


def test_the_recipes_are_all_there():
    others = {"demo_hybrid", "demo_dense", "demo_moe", "smollm2_135m", "matformer"}
    assert {path.stem for path in RECIPES} == {*LARGE, *others}


@pytest.mark.parametrize(("name", "public"), CONFIGS.items())
def test_parents_are_the_published_models(name, public):
    config, count = PUBLIC[public]
    recipe = load_recipe(path_of(name))
    assert recipe.model == family_of_config(config).read(config)
    assert total_params(recipe.model, widths_of(recipe.pinned_plans()["full"], recipe.model.num_layers)) == count


def test_qwen3_30b_activates_3_3_billion_parameters():
    recipe = load_recipe(path_of("qwen3_30b_a3b"))
    active = active_params(recipe.model, widths_of(recipe.pinned_plans()["full"], recipe.model.num_layers))
    assert int(active / 1e8) == 33


@pytest.mark.parametrize("name", LARGE)
def test_families_have_their_sizes(name):
    recipe = load_recipe(path_of(name))
    cost = recipe_cost(recipe)
    targets, plans = budget_targets(recipe, cost), budget_plans(recipe, cost)
    assert list(plans) == list(FAMILIES[name])
    assert recipe.elastic is not None
    for budget, (total, active) in FAMILIES[name].items():
        widths = widths_of(plans[budget], recipe.model.num_layers)
        if isinstance(recipe.elastic.budgets[budget], PinnedBudget) or budget == "full":
            assert total_params(recipe.model, widths) == pytest.approx(total, rel=0.01)
            assert active_params(recipe.model, widths) == pytest.approx(active, rel=0.01)
        else:  # the router's member may miss its target by the tolerance
            assert targets[budget] == pytest.approx(total, rel=0.002)
            assert abs(plan_cost(recipe.model, plans[budget], cost) / targets[budget] - 1) <= recipe.router.tolerance[1]
    assert all(larger.contains(smaller) for larger, smaller in itertools.pairwise(plans.values()))


def test_the_12b_has_depth_and_a_width_for_every_ffn():
    recipe = load_recipe(path_of("nemotron_nano_v2_12b"))
    assert recipe.space is not None and recipe.router.tolerance[1] <= 0.01
    specs = {spec.axis.value: spec for spec in recipe.space.axes}
    assert specs["ffn"].per_layer and specs["ffn"].places == 28
    assert specs["layers"].choices == (62, 60, 58, 56, 54)
    pattern = recipe.model.layer_pattern
    pairs = list(zip(recipe.space.drop_order[::2], recipe.space.drop_order[1::2], strict=True))
    assert all(second == first + 1 and pattern[first] + pattern[second] == "M-" for first, second in pairs)
    starts = sorted(first for first, _ in pairs)
    assert all(later > earlier + 2 for earlier, later in itertools.pairwise(starts))


@pytest.mark.parametrize("name", LARGE)
def test_widths_suit_matrix_units_and_nvfp4_blocks(name):
    space = load_recipe(path_of(name)).space
    assert space is not None
    for spec in space.axes:
        if spec.axis.value == "hidden":
            assert all(choice % 64 == 0 for choice in spec.choices)
        if spec.axis.value.endswith("ffn"):
            # A group's prefix is whole blocks of 16, so that a slice does not cut a scale in two.
            assert all(choice % (16 * spec.groups) == 0 for choice in spec.choices)


def test_every_member_of_llama_is_a_llama_of_transformers():
    recipe = load_recipe(path_of("llama31_8b"))
    assert recipe.space is not None and recipe.model.attention is not None
    assert all(not spec.per_layer for spec in recipe.space.axes)
    assert all(choice % recipe.model.attention.heads == 0 for choice in recipe.space.axes[0].choices)


@pytest.mark.parametrize("name", LARGE)
def test_stages_are_the_published_two(name):
    recipe = load_recipe(path_of(name))
    short, long = recipe.stages
    assert recipe.precision == "bf16"
    assert (short.sequence_length, short.global_batch_size, short.budget_probs) == (8192, 1536, None)
    assert (long.sequence_length, long.global_batch_size) == (40960 if name == "qwen3_30b_a3b" else 49152, 512)
    assert long.budget_probs is not None and list(long.budget_probs.values()) == [0.5, 0.3, 0.2]
    tokens, lr = ((100e9, 60e9), 1e-4) if "30b" in name else ((65e9, 45e9), 9e-5)
    assert (short.tokens, long.tokens) == tokens
    assert {(stage.lr, stage.router_lr, stage.warmup_steps) for stage in recipe.stages} == {(lr, 1e-2, 60)}
    assert all(stage.sequence_length <= recipe.model.max_sequence_length for stage in recipe.stages)


@pytest.mark.parametrize("name", [*LARGE, "smollm2_135m"])
def test_every_number_of_a_stage_has_its_source(name):
    text = path_of(name).read_text(encoding="utf-8")
    stages = text[text.index("\nstages:") :].splitlines()
    numbers = [line for line in stages if re.match(r"    (?!micro_batch_size)\w+: [\d{]", line)]
    assert len(numbers) == 15
    assert [line for line in numbers if not re.search(r"# (ours|arXiv|NVIDIA)", line)] == []
    assert re.search(r"not been trained at this (scale|length) yet", text)


def test_matformer_nests_nothing_but_the_ffn():
    recipe = load_recipe(path_of("matformer"))
    assert recipe.space is not None and recipe.model.mlp is not None
    (spec,) = recipe.space.axes
    assert spec.choices == (512, 256, 128, 64) and recipe.model.hidden_size * 4 == spec.parent
    assert [dict(plan.widths)[spec.axis] for plan in recipe.pinned_plans().values()] == list(spec.choices)
    assert recipe.router.choice == "uniform" and (recipe.distill.kl_weight, recipe.distill.ce_weight) == (0.0, 1.0)
    assert [stage.elastic for stage in recipe.stages] == [False, True] and recipe.stages[1].budget_probs is None
