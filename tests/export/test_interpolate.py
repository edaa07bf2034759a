"""`extract --target`: a cost that no budget was trained for gets a plan of the run's router between the plans of the two budgets beside it.

Run: pytest tests/export/test_interpolate.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.checkpoint import open_checkpoint
from megatron_elastic.config import decode_recipe, load_recipe
from megatron_elastic.planning import nearest_plan, plan_cost
from megatron_elastic.preflight import recipe_cost
from megatron_elastic.space import resize
from tests.train import harness
from tests.train.harness import command, in_new_process, plain_recipe


@pytest.fixture(scope="module", params=["learned", "uniform"])
def run(tmp_path_factory: Any, request: Any) -> Path:
    """A family with a width for each layer on two axes, trained for a few steps."""
    root = tmp_path_factory.mktemp("family")
    data = in_new_process(harness.write_data, root)
    recipe = plain_recipe(root / "run", data)
    recipe["elastic"]["axes"] |= {
        "moe_ffn": {"choices": [56, 44, 16], "per_layer": True},
        "mamba_state": {"choices": [7, 5, 3], "per_layer": True},
        "mamba_head_dim": [6, 4],
        "topk": [3, 2],
    }
    recipe["elastic"]["budgets"] = {"full": 1.0, "medium": 0.62, "small": 0.34}
    recipe["router"]["choice"] = request.param
    recipe["stages"][0]["steps"], recipe["stages"][1]["steps"], recipe["stages"][2]["steps"] = 2, 2, 1
    in_new_process(harness.train, decode_recipe(recipe, "tiny.yaml"))
    return root / "run"


def test_a_target_between_two_budgets(run: Path, tmp_path: Path) -> None:
    recipe, info = load_recipe(run / "recipe.yaml"), open_checkpoint(run / "checkpoints" / "stage-long")
    cost, space = recipe_cost(recipe), recipe.space
    assert space is not None and info.space == space
    middle = sum(plan_cost(recipe.model, info.plans[name], cost) for name in ("medium", "small")) / 2
    near = nearest_plan(space, recipe.model, middle, cost, within=info.plans["medium"], around=info.plans["small"])
    target = plan_cost(recipe.model, near, cost)
    code, out, err = in_new_process(command, "extract", str(run), "--target", f"{target:g}", "--out", str(tmp_path / "half"))
    assert code == 0 and out.startswith(f"{tmp_path / 'half'}: plan, "), err
    plan = SubmodelPlan.from_dict(json.loads((tmp_path / "half" / "megatron_elastic.json").read_text())["provenance"]["plan"])
    space.check(plan)
    assert info.plans["medium"].contains(plan) and plan.contains(info.plans["small"])
    assert abs(plan_cost(recipe.model, plan, cost) / target - 1) <= recipe.router.tolerance[1]
    assert open_checkpoint(tmp_path / "half").shape == resize(recipe.model, plan)


def test_the_target_of_a_budget_is_that_budget(run: Path, tmp_path: Path) -> None:
    for target, budget in ((1.0, "full"), (0.62, "medium")):
        code, _, err = in_new_process(command, "extract", str(run), "--target", str(target), "--out", str(tmp_path / budget))
        assert code == 0, err
        plan = SubmodelPlan.from_dict(json.loads((tmp_path / budget / "megatron_elastic.json").read_text())["provenance"]["plan"])
        assert plan == open_checkpoint(run / "checkpoints" / "stage-long").plans[budget]


def test_refusals(run: Path, tmp_path: Path) -> None:
    def refusal(*arguments: object) -> str:
        code, _, err = in_new_process(command, "extract", *map(str, arguments), "--out", str(tmp_path / "out"))
        assert code == 2 and err.startswith("error: ") and "Traceback" not in err, err
        return err

    assert "--budget and --target exclude each other; give one" in refusal(run, "--budget", "small", "--target", "0.5")
    learned = load_recipe(run / "recipe.yaml").router.choice == "learned"
    outside = refusal(run, "--target", "0.01")
    assert ("is outside the router's budgets" if learned else "no plan nested in budget 'small' costs that") in outside
    assert "holds no family; give --target for the run of an elastic stage" in refusal(
        run / "checkpoints" / "stage-parent", "--target", "0.5"
    )
    recipe = (run / "recipe.yaml").rename(run / "away.yaml")
    try:
        assert "is not inside a run" in refusal(run, "--target", "0.5")
    finally:
        recipe.rename(run / "recipe.yaml")
