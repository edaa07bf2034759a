"""A rank that is killed stops the others at once, with one line each and exit code 75, and nothing is lost: started again, the run ends
bit for bit as one that nobody disturbed.

Two processes as torchrun would start them, with experts on both, by the command line's own entry point.
Run: pytest tests/train/test_faults.py; with twenty kills at random moments: pytest -m slow tests/train/test_faults.py
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.train.faults import during, sign_of_loss
from tests.train import harness
from tests.train.harness import die
from tests.train.two_ranks import at_step, finish, same_end, start

EXIT_SECONDS = 60.0
"""How long the others may take to notice."""
EXIT_CODE = 75


def killed_in_a_step() -> None:
    """Die between the forward passes of two microbatches; the other rank waits for tokens of its experts."""
    from megatron_elastic.train import step

    loss = step._loss
    step._loss = lambda run, *args: die() if at_step(run) else loss(run, *args)


def killed_in_a_collective() -> None:
    """Die while numbers travel: the sum of gradients is under way when the process ends."""
    from megatron_elastic.train import step

    finalize, now = step.finalize_model_grads, step.accumulate_gradients

    def accumulate(run: Any, *args: Any) -> Any:
        step.finalize_model_grads = dying if at_step(run) else finalize
        return now(run, *args)

    def dying(*args: Any) -> None:
        torch.distributed.all_reduce(torch.ones(4_000_000), async_op=True)
        die()

    step.accumulate_gradients = accumulate


def killed_after_the_shards() -> None:
    """Die when both ranks have written their files and nothing describes them yet; on rank 0, which would."""
    from megatron_elastic.checkpoint.sharded import save

    write = save.write_description
    save.write_description = lambda temporary, *args: die() if temporary.name == ".tmp-step-short-0000002" else write(temporary, *args)


def killed_while_writing() -> None:
    """Die in the thread that writes, some time after the save began."""
    from megatron_elastic.checkpoint.sharded.save import PendingSave
    from megatron_elastic.checkpoint.sharded.storage import Shards

    begin, write = PendingSave.__init__, Shards.write

    def remember(self: PendingSave, directory: Path, shards: Shards, *args: Any) -> None:
        shards.dies = directory.name == "step-short-0000002"  # pyright: ignore[reportAttributeAccessIssue]
        begin(self, directory, shards, *args)

    def late(self: Shards) -> Any:
        if self.dies:  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(0.3)
            die()
        return write(self)

    setattr(PendingSave, "__init__", remember)  # noqa: B010 - its type is not quite the same
    Shards.write = late


CASES: dict[Callable[[], None], tuple[int, str, str, tuple[str, ...]]] = {
    # The rank that dies, what the other one was doing, what the next start goes on from, changes of the recipe.
    killed_in_a_step: (1, "step 2 of stage short", "step-short-0000002", ()),
    killed_in_a_collective: (1, "step 2 of stage short", "step-short-0000002", ()),
    killed_after_the_shards: (0, "the save of step-short-0000002", "step-short-0000001", ()),
    killed_while_writing: (1, ".*", "step-short-0000001", ("checkpoint.asynchronous=true",)),
}


@pytest.mark.dist
@pytest.mark.parametrize(
    "fault",
    [pytest.param(case, marks=[pytest.mark.slow] if case in (killed_in_a_collective, killed_while_writing) else []) for case in CASES],
    ids=lambda function: function.__name__,
)
def test_the_others_stop_and_nothing_is_lost(fault: Callable[[], None], undisturbed: Path, data: Path, tmp_path: Path) -> None:
    victim, activity, source, changes = CASES[fault]
    ranks = start(tmp_path / "run", data, *changes, faults={victim: fault})
    assert ranks[victim].end(harness.SECONDS) == -signal.SIGKILL, ranks[victim].text
    other = ranks[1 - victim]
    assert other.end(EXIT_SECONDS) == EXIT_CODE, other.text
    errors = [line for line in other.text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in other.text, other.text
    broken = "Connection (?:closed|reset) by peer|Broken pipe"
    assert re.fullmatch(
        f"error: rank {1 - victim} lost contact with another rank during {activity} \\((?:{broken})\\): that process died or hangs, .*"
        "start again to go on from the last whole checkpoint",
        errors[0],
    )
    output = finish(tmp_path / "run", data, *changes)
    assert output.startswith(f"resumed from {tmp_path / 'run' / 'checkpoints' / source} (stage short")
    same_end(tmp_path / "run", undisturbed)


def stopped_in_a_step() -> None:
    """Hang alive in a step."""
    from megatron_elastic.train import step

    loss = step._loss
    step._loss = lambda run, *args: os.kill(os.getpid(), signal.SIGSTOP) if at_step(run) else loss(run, *args)


def impatient() -> None:
    """Wait in a collective for seconds, not minutes."""
    from megatron_elastic import parallel

    parallel.COLLECTIVE_MINUTES = 0.1


@pytest.mark.dist
def test_a_rank_that_hangs_is_found(data: Path, tmp_path: Path) -> None:
    ranks = start(tmp_path / "run", data, faults={0: impatient, 1: stopped_in_a_step})
    try:
        assert ranks[0].end(harness.SECONDS) == EXIT_CODE, ranks[0].text
        assert "error: rank 0 lost contact with another rank during step 2 of stage short (Timed out waiting 6000ms)" in ranks[0].text
    finally:
        ranks[1].process.kill()
        ranks[1].process.join()


def asleep_in_a_step() -> None:
    """Wait for something that never comes, outside every collective."""
    from megatron_elastic.train import step

    loss = step._loss
    step._loss = lambda run, *args: wait_for_ever() if at_step(run) else loss(run, *args)


def wait_for_ever() -> None:
    """What a file system does that is gone."""
    time.sleep(3600)


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_that_hangs_shows_its_stacks_and_all_end(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    ranks = start(tmp_path / "run", data, "log.hang_seconds=20", faults={1: asleep_in_a_step})
    assert [rank.end(harness.SECONDS) for rank in ranks] == [EXIT_CODE, EXIT_CODE], ranks[0].text + ranks[1].text
    assert "error: rank 1 has made no progress for 20 s and is taken for hung" in ranks[1].text
    assert "in wait_for_ever" in ranks[1].text and "most recent call first" in ranks[1].text
    # It waited as long: it ends by itself too, or notices that the other has.
    assert re.search("^error: rank 0 (?:lost contact with another rank during step 2|has made no progress)", ranks[0].text, re.MULTILINE)
    finish(tmp_path / "run", data)
    same_end(tmp_path / "run", undisturbed)


KILLS = 20


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_at_random_moments(data: Path, tmp_path: Path) -> None:
    """A random rank, at any moment from the first line on, saving in the background; each time both are started again."""
    changes = ("stages.short.steps=12", "checkpoint.asynchronous=true")
    began = time.monotonic()
    finish(tmp_path / "whole", data, changes[0])
    draw, longest = random.Random(4), time.monotonic() - began
    kills, runs, running = 0, 1, tmp_path / "run-1"
    while kills < KILLS:
        ranks = start(running, data, *changes)
        while not ranks[0].text and ranks[0].process.is_alive():
            time.sleep(0.01)
        time.sleep(draw.uniform(0, longest / 2))
        victim = draw.choice(ranks)
        victim.process.kill()
        codes = [rank.end(EXIT_SECONDS) for rank in ranks]
        kills += -signal.SIGKILL in codes
        assert set(codes) <= {-signal.SIGKILL, EXIT_CODE, 0}, ranks[0].text + ranks[1].text
        if codes == [0, 0]:
            same_end(running, tmp_path / "whole")
            runs, running = runs + 1, tmp_path / f"run-{runs + 1}"
    finish(running, data, *changes)
    same_end(running, tmp_path / "whole")


SIGNS = {
    "[pair.cc:553] Connection closed by peer [127.0.0.1]:48811. This is typically caused by": "Connection closed by peer",
    "[pair.cc:537] Read error [127.0.0.1]:39612: Connection reset by peer. This is": "Connection reset by peer",
    "[unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete": "Timed out waiting 8000ms",
    "Timed out after 301 seconds waiting for clients. 1/2 clients joined.": "Timed out after 301 seconds",
    "[pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4": None,
    "The size of tensor a (3) must match the size of tensor b (4)": None,
    "CUDA out of memory": None,
}


@pytest.mark.parametrize("message", SIGNS)
def test_only_a_broken_connection_is_a_lost_rank(message: str) -> None:
    assert sign_of_loss(RuntimeError(message)) == SIGNS[message]
    assert sign_of_loss(ValueError(message)) is None
    if SIGNS[message] is None:
        with pytest.raises(RuntimeError, match=re.escape(message)), during("a test"):
            raise RuntimeError(message)
