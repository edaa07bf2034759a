"""A whole run on a tiny family: it is made of megatron-core's parts, says everything it should, and is the same run on one process, on two,
and when it is taken up again stage by stage.

Run: pytest tests/train/test_loop.py
"""

from __future__ import annotations

import json
import math
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.checkpoint import open_checkpoint
from megatron_elastic.config import load_recipe
from megatron_elastic.planning import plan_cost
from megatron_elastic.preflight import budget_targets, recipe_cost
from megatron_elastic.recipe_files import read_yaml
from megatron_elastic.router.sampling import draw_budget
from tests.train import harness
from tests.train.harness import RECIPE, different, in_new_process, plain_recipe, rows, stored, tiny_recipe

STEPS = {"parent": 3, "short": 5, "long": 3}
SEQUENCE = {"parent": 36, "short": 36, "long": 72}
BATCH, MICROBATCHES, GROUPS = 8, 4, 2
BUDGETS = ["full", "medium", "small"]
AXES = read_yaml(RECIPE)["elastic"]["axes"]


def recorded_run(run_dir: Path, data: Path) -> dict[str, Any]:
    """Train, and count what megatron-core was asked to do."""
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import schedules

    from megatron_elastic.checkpoint.sharded.optimizer import inner_optimizers
    from megatron_elastic.train import loop, run, step

    calls: Counter[str] = Counter()
    schedule, batches, runs = schedules.forward_backward_no_pipelining, loop.batches, []

    def recorded_schedule(**options: Any) -> Any:
        if not options["forward_only"]:  # forward only: the frozen parent, and evaluation
            calls["schedule"] += 1
            calls["microbatches"] += options["num_microbatches"]
            calls["schedule on DDP"] += all(type(chunk) is DistributedDataParallel for chunk in options["model"])
        return schedule(**options)

    def counted(name: str, function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return wrapped

    def recorded_batches(dataset: Any, **options: Any) -> Any:
        calls["batches of GPTDataset"] += type(dataset) is GPTDataset
        return batches(dataset, **options)

    def kept(*args: Any) -> Any:
        runs.append(run.Run(*args))
        return runs[-1]

    loop.batches = recorded_batches
    schedules.forward_backward_no_pipelining = recorded_schedule
    DistributedOptimizer.step_with_ready_grads = counted("optimizer", DistributedOptimizer.step_with_ready_grads)
    GPTDataset.__getitem__ = counted("samples", GPTDataset.__getitem__)
    step.finalize_model_grads = counted("gradients finalized", step.finalize_model_grads)
    loop.Run = kept
    output = harness.train(tiny_recipe(run_dir, data))
    assert len(runs) == 1
    optimizers = inner_optimizers(runs[0].optimizer)
    return {
        "output": output,
        "calls": dict(calls),
        "optimizers": [(type(one) is DistributedOptimizer, type(one.optimizer).__name__) for one in optimizers],
        "teacher": {name: tensor.clone() for name, tensor in runs[0].teacher.named_parameters()},
        "teacher is frozen": not any(p.requires_grad for p in runs[0].teacher.parameters()) and not runs[0].teacher.training,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any, data: Path) -> tuple[Path, dict[str, Any]]:
    """(directory, what was recorded) of one uninterrupted run on one process."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, in_new_process(recorded_run, directory, data)


def test_it_runs_on_megatrons_schedule_ddp_optimizer_and_dataset(run: tuple[Path, dict[str, Any]]) -> None:
    _, record = run
    steps, calls = sum(STEPS.values()), record["calls"]
    # The frozen parent goes before each microbatch of an elastic step, which is a window of one.
    assert calls["schedule"] == calls["schedule on DDP"] == STEPS["parent"] + MICROBATCHES * (steps - STEPS["parent"])
    assert calls["gradients finalized"] == steps
    assert calls["microbatches"] == MICROBATCHES * steps
    assert record["optimizers"] and all(distributed and inner in ("Adam", "AdamW") for distributed, inner in record["optimizers"])
    assert calls["optimizer"] == len(record["optimizers"]) * steps
    assert calls["batches of GPTDataset"] == len(STEPS)
    assert calls["samples"] >= BATCH * steps


def test_every_step_has_a_row(run: tuple[Path, dict[str, Any]]) -> None:
    found, tokens = rows(run[0]), 0
    assert [(row["stage"], row["step"]) for row in found] == [(stage, step) for stage, steps in STEPS.items() for step in range(steps)]
    for row in found:
        assert row["tokens"] == tokens
        tokens += BATCH * SEQUENCE[row["stage"]]
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0 and row["lr"] > 0
        assert (row["router_grad_norm"] > 0) == (row["stage"] == "short" or (row["stage"], row["step"]) == ("long", 0))
        # Groups are equally large, so that the mean over budgets, weighted by their groups, is the loss.
        assert min(row["by_budget"].values()) <= row["loss"] + 1e-9 and row["loss"] <= max(row["by_budget"].values()) + 1e-9
    assert [row["lr"] for row in found[:3]] == pytest.approx([2e-3, 4e-3, 1e-3])
    parent = [row["loss"] for row in found if row["stage"] == "parent"]
    assert parent[0] == pytest.approx(math.log(264), abs=0.1) and parent[-1] < parent[0] - 0.5


def test_budgets_are_those_drawn_for_groups_of_samples(run: tuple[Path, dict[str, Any]]) -> None:
    chances = {"short": dict.fromkeys(BUDGETS, 1 / 3), "long": {"full": 0.4, "medium": 0.3, "small": 0.3}}
    drawn = [
        [draw_budget(1, row["stage"], row["step"], group, chances[row["stage"]]) for group in range(GROUPS)]
        for row in rows(run[0])
        if row["stage"] != "parent"
    ]
    elastic = [row for row in rows(run[0]) if row["stage"] != "parent"]
    assert [set(budgets) for budgets in drawn] == [set(row["by_budget"]) for row in elastic] == [set(row["cost_ratio"]) for row in elastic]
    assert {name for budgets in drawn for name in budgets} == set(BUDGETS)
    assert max(len(set(budgets)) for budgets in drawn) > 1, "no step has microbatches of different budgets"
    assert all(list(row["by_budget"]) == ["parent"] and not row["cost_ratio"] for row in rows(run[0]) if row["stage"] == "parent")
    for row in elastic:
        assert all(row["cost_ratio"][name] == 1 for name in ("full", "medium") if name in row["cost_ratio"])  # both have fixed plans
        if (row["stage"], row["step"]) in (("long", 1), ("long", 2)):
            assert row["cost_ratio"].get("small", 1) == pytest.approx(1, abs=0.02)  # its plan is fixed now
        else:
            assert 0.5 < row["cost_ratio"].get("small", 1) < 2.8
    first = next(row for row in elastic if "full" in row["by_budget"] and row["step"] == 0)
    assert first["by_budget"]["full"] == 0, "the parent diverges from itself"
    assert all(row["by_budget"]["medium"] > 1e-3 for row in elastic if "medium" in row["by_budget"])


def test_held_out_losses_per_budget(run: tuple[Path, dict[str, Any]]) -> None:
    found = rows(run[0], "eval")
    assert [(row["stage"], row["step"]) for row in found] == [
        ("parent", 0), ("parent", 3), ("short", 0), ("short", 3), ("short", 5), ("long", 0), ("long", 3)
    ]  # fmt: skip
    elastic = [row for row in found if row["stage"] != "parent"]
    assert all(list(row["loss"]) == BUDGETS for row in elastic)
    assert all(math.isfinite(loss) for row in found for loss in row["loss"].values())
    start, last_parent = elastic[0]["loss"], found[1]["loss"]["parent"]
    assert start["full"] == pytest.approx(last_parent, rel=1e-6), "the full budget is not the parent"
    assert start["small"] > start["full"] + 0.1
    for row in elastic:
        assert set(row["router"]) == set(BUDGETS) and set(row["router"]["small"]) == set(AXES)
        assert all(sum(pi) == pytest.approx(1, abs=1e-5) for axes in row["router"].values() for places in axes.values() for pi in places)
        assert list(row["plans"]) == list(row["cost_ratio"]) == BUDGETS
    assert [row["temperature"] for row in elastic] == sorted((row["temperature"] for row in elastic), reverse=True)
    assert elastic[0]["temperature"] == pytest.approx(1.0) and elastic[0]["router"] != elastic[-1]["router"]


def test_family_file_holds_the_last_plans_and_their_exact_costs(run: tuple[Path, dict[str, Any]], data: Path) -> None:
    family = json.loads((run[0] / "family.json").read_text(encoding="utf-8"))
    recipe = tiny_recipe(run[0], data)
    space, cost = recipe.space, recipe_cost(recipe)
    assert space is not None and family["format_version"] == 1 and list(family["budgets"]) == BUDGETS
    plans = {name: SubmodelPlan.from_dict(entry["plan"]) for name, entry in family["budgets"].items()}
    for name, plan in plans.items():
        space.check(plan)
        assert family["budgets"][name]["cost"] == plan_cost(recipe.model, plan, cost)
        assert family["budgets"][name]["target"] == budget_targets(recipe, cost)[name]
    assert plans["full"] == space.parent and plans["medium"] == recipe.pinned_plans()["medium"]
    assert plans == dict(open_checkpoint(run[0] / "checkpoints" / "stage-long").plans)
    assert rows(run[0], "eval")[-1]["plans"] == {name: plan.to_dict() for name, plan in plans.items()}


def test_tensorboard_has_every_scalar(run: tuple[Path, dict[str, Any]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run[0] / "tensorboard")).Reload()
    scalars = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    whole = [sum(list(STEPS.values())[: list(STEPS).index(row["stage"])]) + row["step"] for row in rows(run[0])]
    assert list(scalars["train/loss"]) == whole == list(range(11))
    for tag in ("train/lr", "train/grad_norm", "train/router_grad_norm", "train/tokens_per_second"):
        assert list(scalars[tag]) == whole
    assert scalars["train/loss"][4] == pytest.approx(rows(run[0])[4]["loss"])
    assert list(scalars["eval/loss/small"]) == [3, 6, 8, 11]  # the end of one stage is the beginning of the next
    assert {"train/by_budget/medium", "train/cost_ratio/small", "eval/cost_ratio/small", "eval/temperature"} <= set(scalars)


def test_progress_lines(run: tuple[Path, dict[str, Any]]) -> None:
    lines = run[1]["output"].splitlines()
    assert lines[0] == "started from fresh weights"
    assert any(line.startswith("elastic: ") and "mamba_heads (6 modules)" in line for line in lines)
    steps = [line for line in lines if "tokens/s" in line]
    assert len(steps) == 11 and all(line.endswith(" left") for line in steps)
    assert steps[3].split()[:4] == ["short", "1/5", "loss", "full"] and "cost/target full 1.00" in steps[3]
    assert sum("held-out loss full" in line for line in lines) == 5


def test_recipe_versions_and_checkpoints_are_kept(run: tuple[Path, dict[str, Any]], data: Path) -> None:
    assert load_recipe(run[0] / "recipe.yaml") == tiny_recipe(run[0], data)
    versions = json.loads((run[0] / "versions.json").read_text(encoding="utf-8"))
    assert versions["torch"] == version("torch") and versions["megatron-core"] == version("megatron-core")
    names = sorted(path.name for path in (run[0] / "checkpoints").iterdir())
    assert names == ["latest", "stage-long", "stage-parent", "stage-short", "step-long-0000002", "step-short-0000004"]
    assert (run[0] / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == "stage-long"


def test_what_learns_and_what_is_frozen(run: tuple[Path, dict[str, Any]]) -> None:
    directory, record = run
    parent, short, end = (stored(directory / "checkpoints" / f"stage-{name}") for name in STEPS)
    weights = [name for name in end if not name.startswith(("optimizer", "common"))]
    bias = [name for name in weights if name.endswith("expert_bias")]
    assert len(bias) == 2
    assert all(parent[name].any() and torch.equal(parent[name], end[name]) for name in bias), "the bias of the experts is not frozen"
    assert [name for name in weights if name not in bias and torch.equal(parent[name], end[name])] == []
    router = [name for name in end if name.startswith("common.run.router.")]
    assert len(router) == 16 and not any(torch.equal(short[name], end[name]) for name in router)
    assert record["teacher is frozen"]
    assert all(torch.equal(record["teacher"][name], parent[name]) for name in record["teacher"] if name in parent)
    assert len([name for name in record["teacher"] if name in parent]) > 10


def rank_run(rank: int, world: int, recipe_data: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train on one rank of several; its router's weights at the end."""
    from megatron_elastic.config import decode_recipe
    from megatron_elastic.train import loop, run

    runs: list[Any] = []

    def kept(*args: Any) -> Any:
        runs.append(run.Run(*args))
        return runs[-1]

    loop.Run = kept
    try:
        harness.train(decode_recipe(recipe_data, "tiny.yaml"))
    finally:
        loop.Run = run.Run
    assert runs[0].parallel.data == world and runs[0].parallel.rank == rank
    return {name: tensor.clone() for name, tensor in runs[0].decider.router.state_dict().items()}


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{}, {"expert": 2}], ids=["DP2", "EP2"])
def test_two_ranks_take_the_same_run(
    run: tuple[Path, dict[str, Any]], data: Path, ranks: Any, tmp_path: Path, layout: dict[str, int]
) -> None:
    routers = ranks(rank_run, 2, plain_recipe(tmp_path / "run", data, parallel=layout))
    assert not different(*routers), "the router is not the same on both ranks"
    alone, together = rows(run[0]), rows(tmp_path / "run")
    assert len(alone) == len(together)
    for one, two in zip(alone, together, strict=True):
        assert list(one["by_budget"]) == list(two["by_budget"])
        for key in ("loss", "grad_norm", "router_grad_norm", "lr"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7), (one["stage"], one["step"], key)
        for key in ("by_budget", "cost_ratio"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7), (one["stage"], one["step"], key)
    for one, two in zip(rows(run[0], "eval"), rows(tmp_path / "run", "eval"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    router = {
        name: tensor for name, tensor in stored(run[0] / "checkpoints" / "stage-long").items() if name.startswith("common.run.router.")
    }
    for name, tensor in routers[0].items():
        torch.testing.assert_close(tensor, router[f"common.run.router.{name}"], rtol=1e-4, atol=1e-6)


def test_stage_by_stage_is_the_same_run(run: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path) -> None:
    recipe, ends = tiny_recipe(tmp_path / "run", data), []
    for stage in ("parent", "short", None):
        output = in_new_process(train_until, recipe, stage)
        ends.append(((tmp_path / "run" / "checkpoints" / "latest").read_text(encoding="utf-8").strip(), output.splitlines()[0]))
        assert (tmp_path / "run" / "family.json").exists() == (stage is None)
    assert [end for end, _ in ends] == ["stage-parent", "stage-short", "stage-long"]
    assert ends[1][1].endswith("stage-parent (stage short, step 0)") and ends[2][1].endswith("stage-short (stage long, step 0)")
    assert rows(tmp_path / "run") == rows(run[0]) and rows(tmp_path / "run", "eval") == rows(run[0], "eval")
    assert different(stored(tmp_path / "run" / "checkpoints" / "stage-long"), stored(run[0] / "checkpoints" / "stage-long")) == []
    (tmp_path / "run" / "family.json").unlink()
    assert in_new_process(train_until, recipe, None) == "finished already\n"
    assert len(rows(tmp_path / "run")) == 11 and (tmp_path / "run" / "family.json").exists()


def train_until(recipe: Any, stage: str | None) -> str:
    return harness.train(recipe, stage=stage)


def test_a_parent_alone(data: Path, tmp_path: Path) -> None:
    stages = plain_recipe(tmp_path, data)["stages"][:1]
    recipe = tiny_recipe(tmp_path / "run", data, elastic=None, stages=stages, log={"tensorboard": False})
    in_new_process(harness.train, recipe)
    assert [list(row["by_budget"]) for row in rows(tmp_path / "run")] == [["parent"]] * 3
    info = open_checkpoint(tmp_path / "run" / "checkpoints" / "stage-parent")
    assert info.space is None and not info.plans
    assert not (tmp_path / "run" / "family.json").exists() and not (tmp_path / "run" / "tensorboard").exists()


def test_a_family_of_frozen_plans_from_a_given_parent(run: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path) -> None:
    """`parent:` another run's parent, `router.choice: uniform`: no router anywhere, every plan at its target."""
    recipe = plain_recipe(tmp_path / "run", data, parent=str(run[0] / "checkpoints" / "stage-parent"))
    stages = [stage | {"steps": 3} for stage in recipe["stages"][1:]]
    router = {"choice": "uniform", "samples_per_decision": 4, "tolerance": [0.05, 0.05]}
    output = in_new_process(harness.train, tiny_recipe(tmp_path / "run", data, parent=recipe["parent"], stages=stages, router=router))
    assert output.splitlines()[0] == f"started from the parent {recipe['parent']}"
    found = rows(tmp_path / "run")
    assert len(found) == 6 and all(row["router_grad_norm"] == 0 for row in found)
    assert all(ratio == pytest.approx(1, abs=0.05) for row in found for ratio in row["cost_ratio"].values())
    assert all("router" not in row for row in rows(tmp_path / "run", "eval"))
    start = rows(tmp_path / "run", "eval")[0]["loss"]["full"]
    assert start == pytest.approx(rows(run[0], "eval")[2]["loss"]["full"], rel=1e-6)
    plans = json.loads((tmp_path / "run" / "family.json").read_text(encoding="utf-8"))["budgets"]
    assert all(entry["cost"] / entry["target"] == pytest.approx(1, abs=0.05) for entry in plans.values())
    assert not any(name.startswith("common.run.router") for name in stored(tmp_path / "run" / "checkpoints" / "stage-long"))
