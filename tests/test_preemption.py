"""A signal is noted and nothing else, all ranks learn of it, and the process that stops keeps its exit code.

Run: pytest tests/test_preemption.py; whole runs that are told to stop: tests/train/test_preemption.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_elastic.errors import EXIT_RANK_LOST, EXIT_REQUEUE, EXIT_USER_ERROR, StoppedError
from megatron_elastic.preemption import SIGNALS, StopSignal, listening


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """The handlers of the tests' own process."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_both_signals_are_noted_however_often_and_the_handlers_come_back() -> None:
    assert set(SIGNALS) == {signal.SIGTERM, signal.SIGUSR1}
    for number in SIGNALS:
        before = [signal.getsignal(one) for one in SIGNALS]
        with listening() as stop:
            stop.check(None, "nothing is lost")
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            with pytest.raises(StoppedError, match=f"^told to stop by {number.name}; nothing is lost$"):
                stop.check(None, "nothing is lost")
        assert [signal.getsignal(one) for one in SIGNALS] == before


ENDS = """
import os, signal, typer
from megatron_elastic.cli.main import run
from megatron_elastic.errors import StoppedError
from megatron_elastic.preemption import listening

def command():
    try:
        with listening() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            stop.check(None, "all is saved")
    except StoppedError:
        os.kill(os.getpid(), signal.SIGTERM)
        raise

app = typer.Typer()
app.command()(command)
run(app, [])
"""


@pytest.mark.parametrize(("rank", "said"), [("0", "stopped: told to stop by SIGUSR1; all is saved\n"), ("1", "")])
def test_the_exit_code_is_one_of_its_own_whatever_comes_meanwhile(rank: str, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], env=os.environ | {"RANK": rank}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (EXIT_REQUEUE, said)


def test_exit_codes_differ_and_are_no_signals() -> None:
    codes = {0, 1, EXIT_USER_ERROR, EXIT_RANK_LOST, EXIT_REQUEUE}
    assert len(codes) == 5 and max(codes) < 128 and (EXIT_RANK_LOST, EXIT_REQUEUE) == (75, 85)


def said_on(rank: int, world_size: int, told: dict[int, int]) -> list[str]:
    """What a rank hears at a point before any was told and at one after it."""
    from megatron_elastic.parallel import ParallelContext

    parallel, stop, heard = ParallelContext.initialize(), StopSignal(), []
    for number in (0, told.get(rank, 0)):
        if number:
            stop.tell(number)
        try:
            stop.check(parallel, f"rank {rank}")
            heard.append("")
        except StoppedError as error:
            heard.append(str(error))
    parallel.destroy()
    return heard


@pytest.mark.dist
@pytest.mark.parametrize("told", [{1: signal.SIGUSR1}, {0: signal.SIGTERM}, {0: signal.SIGTERM, 1: signal.SIGTERM}])
def test_what_one_rank_is_told_stops_all(ranks: Callable[..., list[Any]], told: dict[int, int]) -> None:
    name = signal.Signals(max(told.values())).name
    assert ranks(said_on, 2, told) == [["", f"told to stop by {name}; rank {rank}"] for rank in range(2)]
