"""A run of two ranks of which one is told to stop: both save the same step, whatever they are at, and end with exit code 85 together; started
again, the run ends bit for bit as one that nobody disturbed, and every evaluation is there.

Run: pytest tests/train/test_preemption.py; the other places where a run can be: pytest -m slow tests/train/test_preemption.py
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.errors import EXIT_REQUEUE
from tests.train import harness
from tests.train.two_ranks import finish, same_end, start


def tell(number: int) -> None:
    """What a scheduler does to this process."""
    os.kill(os.getpid(), number)


def told_in_an_evaluation() -> None:
    """Be told while the first budget is evaluated after the last step."""
    from megatron_elastic.train import callbacks, evaluate

    losses, compute = callbacks.held_out_losses, evaluate.map_microbatches

    def tells(*args: Any) -> Any:
        print("a window", flush=True)
        tell(signal.SIGUSR1)
        return compute(*args)

    def evaluates(run: Any) -> Any:
        evaluate.map_microbatches = tells if (run.stage.name, run.step) == ("short", 3) else compute
        return losses(run)

    callbacks.held_out_losses = evaluates


def told_at_the_start_of_a_stage() -> None:
    """Be told in the evaluation before the first elastic step: the stage before is saved already."""
    from megatron_elastic.train import callbacks

    losses = callbacks.held_out_losses

    def evaluates(run: Any) -> Any:
        if (run.stage.name, run.step) == ("short", 0):
            tell(signal.SIGTERM)
        return losses(run)

    callbacks.held_out_losses = evaluates


def told_at_the_end_of_a_stage() -> None:
    """Be told while the untrained members are evaluated, after all other evaluations."""
    from megatron_elastic.train import callbacks

    losses = callbacks.untrained_losses

    def evaluates(run: Any) -> Any:
        tell(signal.SIGTERM)
        return losses(run)

    callbacks.untrained_losses = evaluates


def told_while_saving_as_well() -> None:
    """Be told in the second elastic step, again in the thread that writes what is saved then, and again when it gets its name."""
    import psutil

    from megatron_elastic.checkpoint.sharded import save
    from megatron_elastic.checkpoint.sharded.storage import Shards
    from megatron_elastic.train import step

    loss, write, publish = step._loss, Shards.write, save.publish

    def tells(run: Any, *args: Any) -> Any:
        if (run.stage.name, run.step) == ("short", 1):
            tell(signal.SIGTERM)
            Shards.write, save.publish = writes, publishes
        return loss(run, *args)

    def writes(self: Shards) -> Any:
        assert psutil.Process().children() == [], "a process that a signal to all would kill"
        tell(signal.SIGUSR1)
        written = write(self)
        tell(signal.SIGTERM)
        return written

    def publishes(*args: Any) -> None:
        tell(signal.SIGUSR1)
        publish(*args)
        print("told while saving", flush=True)

    step._loss = tells


CASES: dict[Callable[[], None], tuple[tuple[int, ...], str, tuple[str, ...]]] = {
    # The ranks that are told, what the next start goes on from, changes of the recipe.
    told_in_an_evaluation: ((1,), "step-short-0000003 (stage short, step 3)", ()),
    told_at_the_start_of_a_stage: ((0,), "stage-parent (stage short, step 0)", ()),
    told_at_the_end_of_a_stage: ((1,), "step-short-0000003 (stage short, step 3)", ()),
    told_while_saving_as_well: (
        (0, 1), "step-short-0000002 (stage short, step 2)", ("checkpoint.interval=100", "checkpoint.asynchronous=true"),
    ),
}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(
    "fault",
    [pytest.param(case, marks=[] if case is told_in_an_evaluation else [pytest.mark.slow]) for case in CASES],
    ids=lambda function: function.__name__,
)
def test_all_stop_at_the_same_step_and_nothing_is_lost(fault: Any, undisturbed: Path, data: Path, tmp_path: Path) -> None:
    told, source, changes = CASES[fault]
    run_dir = tmp_path / "run"
    ranks = start(run_dir, data, *changes, faults=dict.fromkeys(told, fault))
    assert [rank.end(harness.SECONDS) for rank in ranks] == [EXIT_REQUEUE, EXIT_REQUEUE], ranks[0].text + ranks[1].text
    assert "Traceback" not in ranks[0].text + ranks[1].text and "stopped" not in ranks[1].text
    stops = [line for line in ranks[0].text.splitlines() if line.startswith("stopped: ")]
    assert len(stops) == 1 and stops[0].endswith(f"; start again to go on from {source.split('(')[1][:-1]}"), ranks[0].text
    assert (run_dir / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == source.split()[0]
    assert not list((run_dir / "checkpoints").glob(".*"))
    beat = json.loads((run_dir / "heartbeat.json").read_text(encoding="utf-8"))
    assert f"stage {beat['stage']}, step {beat['step']}" in source
    if fault is told_while_saving_as_well:
        assert "told while saving" in ranks[0].text
    if fault is told_in_an_evaluation:
        assert ranks[1].text.count("a window") == 1, "the evaluation went on"
    output = finish(run_dir, data, *changes)
    assert output.startswith(f"resumed from {run_dir / 'checkpoints' / source}")
    same_end(run_dir, undisturbed)
