"""Proves that everything is on a GPU that has to be, on a stand-in of one (tests/accelerator.py): `train` through every stage, its evaluations and
checkpoints, a resume, the commands that read the run, and every dimension of a layout on two ranks, each bit for bit as on the CPU.

`tests/test_gpu_check.py` has the part of it that `make test` has time for.

Run: pytest tests/train/test_accelerator.py -m slow
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.recipe import Recipe
from tests.train import harness
from tests.train.harness import command, different, in_new_process, rows, stored, tiny_recipe
from tests.train.two_ranks import finish, same_end, start

pytestmark = pytest.mark.slow
LAST = "checkpoints/stage-long"


def on_the_accelerator(function: Any, *args: Any) -> Any:
    """function(*args) with a GPU in this process."""
    from tests.accelerator import install

    install()
    return function(*args)


def train_in_two_parts(recipe: Recipe) -> str:
    """Train up to the end of the second stage, then the rest."""
    harness.train(recipe, steps=2, stage="short")
    return harness.train(recipe, steps=2)


def commands(run_dir: Path, data: Path) -> dict[str, tuple[int, str, str]]:
    """What the commands that run a model say of a run."""
    out = run_dir.with_name(f"{run_dir.name}-ranked")
    lines = {
        "eval": ("--data", str(data)),
        "generate": ("--prompt", "text", "--all-budgets", "--tokens", "4", "--temperature", "0.9", "--seed", "3"),
        "verify": ("--data", str(data), "--tokens", "300"),
        "rank": ("--data", str(data), "--out", str(out), "--tokens", "200", "--depth-tokens", "36", "--sequence-length", "36"),
    }
    return {name: command(name, str(run_dir), *options) for name, options in lines.items()}


@pytest.mark.timeout(600)
def test_a_run_and_what_reads_it_equal_the_cpus(tmp_path: Path, data: Path) -> None:
    cpu, gpu = tiny_recipe(tmp_path / "cpu", data), tiny_recipe(tmp_path / "gpu", data)
    in_new_process(train_in_two_parts, cpu)
    assert "resumed from" in in_new_process(on_the_accelerator, train_in_two_parts, gpu)
    for kind in ("train", "eval", "untrained"):
        assert rows(tmp_path / "gpu", kind) == rows(tmp_path / "cpu", kind) != []
    assert different(stored(tmp_path / "gpu" / LAST), stored(tmp_path / "cpu" / LAST)) == []
    expected = in_new_process(commands, tmp_path / "cpu", data)
    found = in_new_process(on_the_accelerator, commands, tmp_path / "gpu", data)
    for name, (code, said, errors) in found.items():
        assert code == expected[name][0] == 0, (name, errors)
        assert said.replace(str(tmp_path / "gpu"), str(tmp_path / "cpu")) == expected[name][1], name


def have_two() -> None:
    """Two GPUs on this node, one for each rank."""
    from tests.accelerator import install

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    install(gpus=2)


@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "context", "expert"])
def test_two_ranks_equal_two_on_the_cpu(tmp_path: Path, data: Path, layout: str) -> None:
    changes = ("parallel.expert=1", f"parallel.{layout}=2", "stages.short.steps=2")
    finish(tmp_path / "cpu", data, *changes)
    ranks = start(tmp_path / "gpu", data, *changes, faults={0: have_two, 1: have_two})
    assert [rank.end(2 * harness.SECONDS) for rank in ranks] == [0, 0], ranks[0].text + ranks[1].text
    same_end(tmp_path / "gpu", tmp_path / "cpu")
