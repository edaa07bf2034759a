"""Every recipe runs in miniature: with the overrides of recipes/miniature/ a large one loads, plans and trains on one process, and stays
the recipe in everything but its sizes. (The demos are small as they are: tests/train/test_parents.py and tests/test_smoke.py run them.)

Run: pytest tests/recipes/test_miniatures.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.config import load_recipe, to_plain
from megatron_elastic.preflight import budget_plans, budget_targets, recipe_cost, recipe_problems
from megatron_elastic.recipe import Recipe
from tests.train import harness
from tests.train.harness import command, in_new_process, rows

RECIPES = Path(__file__).parents[2] / "recipes"
MINIATURES = sorted(path.stem for path in (RECIPES / "miniature").glob("*.yaml") if path.stem != "laptop")
FAST = ("nemotron_nano_v2_12b", "matformer")
"""Trained by `make test`: a hybrid with depth and an FFN width for every layer, and a family without a router. The others are `slow`."""
TRAINED = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in (*MINIATURES, "matformer")]


def overrides(name: str) -> tuple[str, ...]:
    """What makes a miniature of a recipe; nothing for one that is small as it is."""
    return tuple(f"@{RECIPES / 'miniature' / file}.yaml" for file in ("laptop", name)) if name in MINIATURES else ()


def small(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", overrides(name))


def large(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml")


def test_every_recipe_that_is_only_planned_has_a_miniature():
    planned = [path.stem for path in RECIPES.glob("*.yaml") if "not been trained at this" in path.read_text(encoding="utf-8")]
    assert sorted(planned) == MINIATURES


@pytest.mark.parametrize("name", MINIATURES)
def test_a_miniature_plans(name: str) -> None:
    recipe = small(name)
    assert recipe_problems(recipe) == []
    cost = recipe_cost(recipe)
    plans, targets = budget_plans(recipe, cost), budget_targets(recipe, cost)
    assert len(set(plans.values())) == 3
    wide, middle, narrow = targets.values()
    assert wide > middle > narrow
    assert wide < 4e6, "it runs on a laptop"


@pytest.mark.parametrize("name", MINIATURES)
def test_a_miniature_is_the_recipe_but_for_its_sizes(name: str) -> None:
    little, big = small(name), large(name)
    for part in ("distill", "optimizer", "router"):
        assert getattr(little, part) == getattr(big, part), part
    assert little.elastic is not None and big.elastic is not None
    assert list(little.elastic.axes) == list(big.elastic.axes) and list(little.elastic.budgets) == list(big.elastic.budgets)
    assert (little.elastic.cost, little.elastic.shard_groups) == (big.elastic.cost, big.elastic.shard_groups)
    parent, *stages = little.stages
    assert not parent.elastic
    assert [(s.name, s.elastic, s.budget_probs, s.router_lr) for s in stages] == [
        (s.name, s.elastic, s.budget_probs, s.router_lr) for s in big.stages
    ]
    assert set(big.model.layer_pattern) == set(little.model.layer_pattern)
    assert _habits(little) == _habits(big)


def _habits(recipe: Recipe) -> dict[str, Any]:
    """What of a model is no size: activations, norms, how a router scores, which parts there are."""
    plain = to_plain(recipe.model)
    parts = {f"{part}.{key}": value for part, fields in plain.items() if isinstance(fields, dict) for key, value in fields.items()}
    plain = {key: value for key, value in plain.items() if not isinstance(value, dict)}
    sizes = {"layer_pattern", "hidden_size", "vocab_size", "padded_vocab_size", "max_sequence_length", "attention.heads"}
    sizes |= {"attention.kv_groups", "attention.head_dim", "mlp.ffn", "moe.experts", "moe.topk", "moe.ffn", "moe.shared_ffn"}
    sizes |= {f"mamba.{key}" for key in ("heads", "head_dim", "groups", "state", "chunk")}
    return {key: value for key, value in (plain | parts).items() if key not in sizes}


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> Path:
    """The text of this module's runs."""
    return in_new_process(harness.write_data, tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("name", TRAINED)
def test_a_miniature_trains(name: str, data: Path, tmp_path: Path) -> None:
    stages = small(name).stages
    shorter = [
        f"stages.{stage.name}.{key}={value}"
        for stage in stages
        for key, value in (("global_batch_size", 8), ("micro_batch_size", 4), ("sequence_length", 64 if stage.name == "long" else 32))
    ]
    last = stages[1] if name in FAST else stages[-1]  # two checkpoints are faster than three
    where = (f"run_dir={tmp_path}", f"data.path={data}", "eval.samples=1")
    recipe = str(RECIPES / f"{name}.yaml")
    code, _, err = in_new_process(command, "train", recipe, *overrides(name), *where, *shorter, "--steps", "1", "--stage", last.name)
    assert code == 0, err
    steps = rows(tmp_path)
    assert [row["stage"] for row in steps] == [stage.name for stage in stages[: stages.index(last) + 1]]
    assert all(math.isfinite(row["loss"]) for row in steps)
    if last is stages[-1]:
        family = json.loads((tmp_path / "family.json").read_text(encoding="utf-8"))
        assert list(family["budgets"]) == list(small(name).elastic.budgets)
