"""Two processes as torchrun would start them, by the command line's own entry point, with a fault prepared in one of them or in both.

The run has experts on both, and its end must not depend on what happened on the way.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.train import harness
from tests.train.harness import RECIPE, different, rows, stored
from tests.train.test_bad_input import free_port

RECIPE_CHANGES = (
    "parallel.expert=2",
    "stages.parent.steps=1",
    "stages.parent.warmup_steps=0",
    "stages.short.steps=3",
    "stages.long=null",
    "checkpoint.interval=1",
    "eval.interval=100",
    "log.tensorboard=false",
)
LAST = "stage-short"
Faults = Mapping[int, Callable[[], None]]
"""Rank -> what prepares its fault."""


@dataclass
class Rank:
    """One process of a run; its output is in a file."""

    process: Any
    log: Path

    def end(self, seconds: float) -> int:
        """Its exit code. Fails when it takes longer than so many seconds."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still there after {seconds:g} s; it said:\n{self.text}"
        return self.process.exitcode

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self.log.read_text(encoding="utf-8") if self.log.is_file() else ""


def be_rank(rank: int, port: int, log: Path, arguments: list[str], sabotage: Callable[[], None] | None) -> None:
    """Body of a process: the command line, after `sabotage` has prepared a fault."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    torch.set_num_threads(1)
    if sabotage is not None:
        sabotage()
    from megatron_elastic.cli.main import build_app, run

    run(build_app(), arguments)


def start_command(arguments: Sequence[str], logs: Path, faults: Faults | None = None) -> list[Rank]:
    """Start both ranks of a command; their output goes to files that begin like `logs`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.harness", "megatron_elastic.train.loop", "megatron_elastic.export.verify"])
    port, ranks = free_port(), []
    for number in range(2):
        log = logs.with_name(f"{logs.name}-{time.monotonic_ns()}-rank{number}.log")
        process = context.Process(target=be_rank, args=(number, port, log, list(arguments), (faults or {}).get(number)), daemon=False)
        process.start()
        ranks.append(Rank(process, log))
    return ranks


def start(run_dir: Path, data: Path, *changes: str, faults: Faults | None = None) -> list[Rank]:
    """Start both ranks of a run."""
    return start_command(["train", str(RECIPE), f"run_dir={run_dir}", f"data.path={data}", *RECIPE_CHANGES, *changes], run_dir, faults)


def finish(run_dir: Path, data: Path, *changes: str) -> str:
    """Run to the end, undisturbed; what rank 0 said."""
    ranks = start(run_dir, data, *changes)
    assert [rank.end(harness.SECONDS) for rank in ranks] == [0, 0], ranks[0].text + ranks[1].text
    return ranks[0].text


def at_step(run: Any) -> bool:
    """Whether a run is in its third elastic step."""
    return (run.stage.name, run.step) == ("short", 2)


def same_end(run_dir: Path, whole: Path) -> None:
    """Assert that a run ended as the undisturbed one, and that every step has the same losses however often it was taken or evaluated."""
    assert different(stored(run_dir / "checkpoints" / LAST), stored(whole / "checkpoints" / LAST)) == []
    assert (run_dir / "family.json").read_bytes() == (whole / "family.json").read_bytes()
    for kind in ("train", "eval", "untrained"):
        expected = {(row["stage"], row["step"]): row for row in rows(whole, kind)}
        found = rows(run_dir, kind)
        assert {(row["stage"], row["step"]) for row in found} == expected.keys(), kind
        assert [row for row in found if row != expected[row["stage"], row["step"]]] == []
    assert not list((run_dir / "checkpoints").glob(".*"))
