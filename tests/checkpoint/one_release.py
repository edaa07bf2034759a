"""What one megatron-core release does in test_two_releases.py: a program that runs in that release's environment.

python -m tests.checkpoint.one_release begin DIRECTORY DATA
python -m tests.checkpoint.one_release take_over DIRECTORY DATA FROM
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from megatron_elastic.checkpoint import load_checkpoint, save_checkpoint
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe
from megatron_elastic.train.run import Run
from tests.checkpoint import tiny_run
from tests.train import harness

UNTIL, LAST = "short", "long"
"""The stage that one release ends with, in the middle of what the router learns, and the one that the other continues with."""
GPTS = {"dense": tiny_dense(gated=False), "moe": tiny_moe()}


def begin(directory: Path, data: Path) -> None:
    """Train a family up to the end of stage UNTIL in `directory`/begun, and a copy of it to its end in `directory`/ended; save each of GPTS
    after its first step, and keep the losses of its second."""
    harness.train(harness.tiny_recipe(directory / "begun", data), stage=UNTIL)
    shutil.copytree(directory / "begun", directory / "ended")
    harness.train(harness.tiny_recipe(directory / "ended", data))
    parallel = ParallelContext.initialize()
    for name, shape in GPTS.items():
        run = tiny_run.start(parallel, shape=shape)
        tiny_run.train(run, 0, 1)
        save_checkpoint(directory / name, model=run.model, optimizer=run.optimizer, shape=shape, parallel=parallel)
        _second_step(run, directory / f"{name}.json")
    parallel.destroy()


def take_over(directory: Path, data: Path, source: Path) -> None:
    """Read what another release began in `source` and write it again at once, in `directory`/again*; train the family to its end
    in `directory`/continued, and each of GPTS by a second step."""
    for name in ("again", "continued"):
        shutil.copytree(source / "begun", directory / name)
    parallel = ParallelContext.initialize()
    family = Run(harness.tiny_recipe(directory / "again", data), parallel)
    family.resume()
    family.save(stage_end=True)
    for name, shape in GPTS.items():
        run = tiny_run.start(parallel, shape=shape, seed=8)
        load_checkpoint(source / name, model=run.model, optimizer=run.optimizer, shape=shape, parallel=parallel)
        save_checkpoint(directory / f"again-{name}", model=run.model, optimizer=run.optimizer, shape=shape, parallel=parallel)
        _second_step(run, directory / f"again-{name}.json")
    parallel.destroy()
    harness.train(harness.tiny_recipe(directory / "continued", data))


def _second_step(run: tiny_run.Run, losses: Path) -> None:
    tiny_run.train(run, 1, 1)
    losses.write_text(json.dumps(run.losses[-2:]), encoding="utf-8")


def main() -> None:
    """Do what the command line says."""
    command, *paths = sys.argv[1:]
    {"begin": begin, "take_over": take_over}[command](*map(Path, paths))


if __name__ == "__main__":
    main()
