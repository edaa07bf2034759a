"""A run that was saved in the middle of an elastic stage at TP2 x PP2 goes on at EP2 and on one process as if it had never moved;
a whole run on other layouts is that of one process.

Run: pytest tests/parallel/test_moving_run.py
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.config import load_recipe, to_plain
from tests.train import harness
from tests.train.harness import in_new_process, plain_recipe, rows, stored

RECIPES = Path(__file__).parents[2] / "recipes"
SAVED = "step-short-0000002"
STAGES = [
    {"name": "parent", "elastic": False, "steps": 2, "lr": 4e-3},
    {"name": "short", "steps": 4, "lr": 2e-3},
]


class Stop(Exception):
    """Raised where a run is cut off."""


def recipe_data(run_dir: Path, data: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    """The tiny recipe cut short, with a checkpoint after the second elastic step."""
    common = {"sequence_length": 36, "global_batch_size": 8, "micro_batch_size": 2, "min_lr": 1e-3}
    router = plain_recipe(run_dir, data)["router"] | {"learn_share": 1.0}
    # Adam takes a full step on the rounding of a gradient that is zero, as that of the keys' bias here.
    changes = {"stages": [common | stage for stage in STAGES], "optimizer": {"eps": 1e-4}, "router": router}
    return plain_recipe(run_dir, data, parallel=parallel, checkpoint={"interval": 2, "keep_last": 9}, **changes)


def trained(rank: int, world: int, plain: dict[str, Any], steps: int | None) -> None:
    """Train on this rank, cut off after so many steps."""
    from megatron_elastic.config import decode_recipe
    from megatron_elastic.train import loop

    step, done = loop.train_step, []

    def counted(*args: Any) -> Any:
        if len(done) == steps:
            raise Stop
        done.append(None)
        return step(*args)

    loop.train_step = counted
    try:
        harness.train(decode_recipe(plain, "tiny.yaml"))
    except Stop:
        pass
    finally:
        loop.train_step = step


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> Path:
    return in_new_process(harness.write_data, tmp_path_factory.mktemp("text"))


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_moves_between_layouts(ranks: Any, data: Path, tmp_path: Path) -> None:
    ranks(trained, 1, recipe_data(tmp_path / "stayed", data, {}), None)
    ranks(trained, 4, recipe_data(tmp_path / "moved", data, {"tensor": 2, "pipeline": 2}), 4)
    assert (tmp_path / "moved" / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == SAVED
    for layout, world in (({"expert": 2}, 2), ({}, 1)):
        there = tmp_path / f"on {world}"
        shutil.copytree(tmp_path / "moved", there)
        ranks(trained, world, recipe_data(there, data, layout), None)
        assert_same_rows(there, tmp_path / "stayed")
        assert_close(there, tmp_path / "stayed", SAVED)
        assert_close(there, tmp_path / "stayed", "stage-short")


def assert_same_rows(moved: Path, stayed: Path) -> None:
    """The same decisions, and losses to 1e-5, in every step."""
    found, expected = rows(moved), rows(stayed)
    assert [(row["stage"], row["step"]) for row in found] == [(row["stage"], row["step"]) for row in expected]
    for two, one in zip(found, expected, strict=True):
        assert list(two["by_budget"]) == list(one["by_budget"]) and len(two["by_budget"]) > (one["stage"] == "short")
        for key in ("loss", "by_budget", "cost_ratio"):
            assert two[key] == pytest.approx(one[key], rel=1e-5, abs=1e-7), (one["stage"], one["step"], key)


def assert_close(moved: Path, stayed: Path, name: str) -> None:
    """Weights, moments, steps, the router and its optimizer of a checkpoint, to rounding."""
    found, expected = stored(moved / "checkpoints" / name), stored(stayed / "checkpoints" / name)
    assert found.keys() == expected.keys()
    far = {}
    for key, tensor in expected.items():
        error = float((found[key].double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1e-9))
        if error > 1e-4:
            far[key] = error
    assert not far, far
    assert any("exp_avg" in key for key in expected)


SHORT = (
    *(
        "stages.parent.steps=2",
        "stages.short.steps=2",
        "stages.long.steps=1",
        "stages.parent.warmup_steps=0",
        "stages.short.warmup_steps=0",
    ),
    *("stages.long.warmup_steps=0", "router.samples_per_decision=4", "router.learn_share=1.0", "eval.interval=1", "eval.samples=3"),
    *(
        f"stages.{stage}.{key}"
        for stage in ("parent", "short")
        for key in ("sequence_length=64", "global_batch_size=8", "micro_batch_size=2")
    ),
    *("stages.long.sequence_length=128", "stages.long.global_batch_size=8", "stages.long.micro_batch_size=2", "optimizer.eps=1e-4"),
)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "layout"), [("demo_dense", {"pipeline": 2, "virtual_pipeline": 3}), ("demo_hybrid", {"context": 2})], ids=["VPP", "CP2"]
)
def test_a_whole_run_is_the_same_on_a_layout(ranks: Any, data: Path, tmp_path: Path, name: str, layout: dict[str, int]) -> None:
    """Both kinds of stage, the check of the teacher, and evaluation over an odd number of microbatches."""
    recipe = load_recipe(RECIPES / f"{name}.yaml", [f"data.path={data}", *SHORT])
    for run_dir, world, parallel in ((tmp_path / "one", 1, {}), (tmp_path / "two", 2, layout)):
        ranks(trained, world, to_plain(recipe) | {"run_dir": str(run_dir), "parallel": parallel}, None)
    for kind in ("train", "eval"):
        found, expected = rows(tmp_path / "two", kind), rows(tmp_path / "one", kind)
        assert len(found) == len(expected) > 4
        for two, one in zip(found, expected, strict=True):
            assert two["loss"] == pytest.approx(one["loss"], rel=2e-5), (kind, one["stage"], one["step"])
