"""A family of every kind of parent, with per-layer axes, goes the whole way: trained, resumed, cut out, verified; what is cut out is ordinary.

Run: pytest tests/train/test_parents.py
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_elastic.checkpoint import open_checkpoint
from megatron_elastic.space import resize
from tests.train.harness import command, in_new_process, rows

RECIPES = Path(__file__).parents[2] / "recipes"
SMALLER = (
    *("stages.parent.sequence_length=36", "stages.short.sequence_length=36", "stages.long.sequence_length=72"),
    *("stages.parent.global_batch_size=8", "stages.short.global_batch_size=8", "stages.long.global_batch_size=8"),
    *("stages.parent.micro_batch_size=2", "stages.short.micro_batch_size=2", "stages.long.micro_batch_size=2"),
    *("stages.parent.steps=3", "stages.short.steps=4", "stages.long.steps=2", "stages.parent.warmup_steps=1"),
    *("stages.short.warmup_steps=1", "stages.long.warmup_steps=0", "router.samples_per_decision=4", "router.learn_share=0.6"),
    *("eval.interval=3", "eval.samples=3", "checkpoint.interval=2"),
)


def _run(*arguments: str) -> str:
    code, out, err = in_new_process(command, *arguments)
    assert code == 0, err
    return out


@pytest.mark.parametrize(("name", "straight_through"), [("demo_dense", False), ("demo_moe", True)])
def test_the_whole_way(tmp_path: Path, data: Path, name: str, straight_through: bool) -> None:
    where = (f"run_dir={tmp_path / 'run'}", f"data.path={data}")
    overrides = (*where, *SMALLER, f"router.straight_through={str(straight_through).lower()}")
    recipe = str(RECIPES / f"{name}.yaml")
    _run("train", recipe, "--stage", "parent", *overrides)
    _run("train", recipe, "--stage", "short", *overrides)
    _run("train", recipe, *overrides)
    steps = rows(tmp_path / "run")
    assert [row["stage"] for row in steps] == ["parent"] * 3 + ["short"] * 4 + ["long"] * 2
    assert all(math.isfinite(row["loss"]) for row in steps)
    assert {budget for row in steps for budget in row["by_budget"]} >= {"full", "medium"}
    run = str(tmp_path / "run")
    family = open_checkpoint(tmp_path / "run" / "checkpoints" / "stage-long")
    _run("extract", run, "--out", str(tmp_path / "members"))
    for budget in ("medium", "small"):
        member = open_checkpoint(tmp_path / "members" / budget)
        assert member.shape == resize(family.shape, family.plans[budget])
    _run("extract", run, "--target", "0.5", "--out", str(tmp_path / "half"))
    between = open_checkpoint(tmp_path / "half").shape
    assert between.hidden_size <= family.shape.hidden_size
    report = _run("verify", run, "--members", str(tmp_path / "members"), "--data", str(data), "--sequence-length", "36", "--tokens", "2000")
    assert all(name in report for name in ("full", "medium", "small"))
    assert "<html" in Path(_page(run)).read_text(encoding="utf-8")


def _page(run: str) -> str:
    """The report of a run."""
    _run("report", run)
    return str(Path(run) / "report" / "report.html")
