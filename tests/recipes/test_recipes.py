"""The recipes that ship: each loads and passes every check, and the pinned plans have the published sizes within 1 %."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megatron_elastic.config import load_recipe
from megatron_elastic.cost import active_params, total_params, widths_of
from megatron_elastic.preflight import recipe_problems
from megatron_elastic.recipe import PinnedBudget

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
NEMOTRON = {
    "nemotron_3_nano_30b": {"full": (31.58e9, 3.58e9), "medium": (23.9e9, 2.82e9), "small": (12.25e9, 2.0e9)},
    "nemotron_nano_v2_12b": {"full": (12.31e9,) * 2, "medium": (8.89e9,) * 2, "small": (6.0e9,) * 2},
    "nemotron_nano_v2_9b": {"full": (8.89e9,) * 2, "medium": (6.0e9,) * 2, "small": (4.0e9,) * 2},
}


def path_of(name):
    return next(path for path in RECIPES if path.stem == name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_has_no_problems(path):
    assert recipe_problems(load_recipe(path)) == []


def test_the_recipes_are_all_there():
    assert {"demo_hybrid", *NEMOTRON} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("name", NEMOTRON)
def test_pinned_plans_have_the_published_sizes(name):
    recipe = load_recipe(path_of(name))
    plans = recipe.pinned_plans()
    assert list(plans) == list(NEMOTRON[name])
    for budget, (total, active) in NEMOTRON[name].items():
        widths = widths_of(plans[budget], recipe.model.num_layers)
        assert total_params(recipe.model, widths) == pytest.approx(total, rel=0.01)
        assert active_params(recipe.model, widths) == pytest.approx(active, rel=0.01)
    assert all(larger.contains(smaller) for larger, smaller in itertools.pairwise(plans.values()))


@pytest.mark.parametrize("name", NEMOTRON)
def test_widths_suit_matrix_units_and_nvfp4_blocks(name):
    recipe = load_recipe(path_of(name))
    assert recipe.space is not None and recipe.elastic is not None
    for spec in recipe.space.axes:
        if spec.axis.value == "hidden":
            assert all(choice % 64 == 0 for choice in spec.choices)
        if spec.axis.value.endswith("ffn"):
            # A group's prefix is whole blocks of 16, so that a slice does not cut a scale in two.
            assert all(choice % (16 * spec.groups) == 0 for choice in spec.choices)
    assert all(isinstance(budget, PinnedBudget) for budget in list(recipe.elastic.budgets.values())[1:])


@pytest.mark.parametrize("name", NEMOTRON)
def test_stages_are_the_published_two(name):
    recipe = load_recipe(path_of(name))
    short, long = recipe.stages
    assert (short.sequence_length, short.global_batch_size, short.budget_probs) == (8192, 1536, None)
    assert (long.sequence_length, long.global_batch_size) == (49152, 512)
    assert long.budget_probs is not None and list(long.budget_probs.values()) == [0.5, 0.3, 0.2]
    tokens = (100e9, 60e9) if name == "nemotron_3_nano_30b" else (65e9, 45e9)
    assert (short.tokens, long.tokens) == tokens
    assert "not been trained at this scale yet" in path_of(name).read_text(encoding="utf-8")
