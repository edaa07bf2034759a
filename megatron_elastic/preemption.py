"""How a process is told to stop, and how all ranks of a run stop at the same point.

A scheduler says so before it takes the machine away: SLURM with the signal of `--signal`, before its time limit and before it preempts a job
where the site enables that; other sites, and other schedulers, with SIGTERM alone. One rank may be told or all. The handler only notes it: work
goes on to the next point that all ranks share, and there one small all-reduce says whether any of them was told. Signals reach the main
thread between two lines of Python, so that the threads that write checkpoints never see one; there are no worker processes that could.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_elastic.errors import StoppedError

if TYPE_CHECKING:
    from megatron_elastic.parallel import ParallelContext

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What tells a process to stop."""


class StopSignal:
    """Whether this process was told to stop; `listening` makes one that hears."""

    def __init__(self) -> None:
        self._number = 0

    def tell(self, number: int, frame: object = None) -> None:
        """Note signal `number`: the handler. A second one changes nothing that matters, whatever is going on."""
        self._number = number

    def check(self, parallel: ParallelContext | None, outcome: str) -> None:
        """Raise StoppedError on every rank when any was told; do nothing otherwise. A collective of all processes.

        parallel: the ranks; None for a process alone. outcome: what became of the work, for the message.
        """
        number = self._number if parallel is None or parallel.world_size == 1 else self._highest(parallel)
        if number:
            raise StoppedError(f"told to stop by {signal.Signals(number).name}; {outcome}")

    def _highest(self, parallel: ParallelContext) -> int:
        """The highest number of a signal that a rank was told by, the same on every rank; 0: none."""
        import torch
        import torch.distributed as dist

        told = torch.tensor([self._number], device=parallel.device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=parallel.world)
        return int(told)


@contextmanager
def listening() -> Iterator[StopSignal]:
    """Catch `SIGNALS` in the block, which must run in the main thread.

    After a StoppedError they stay caught: the process ends then with a code of its own, which a second signal must not replace.
    """
    stop = StopSignal()
    before = {number: signal.signal(number, stop.tell) for number in SIGNALS}
    for number in SIGNALS:
        signal.siginterrupt(number, False)  # not every library is ready for system calls that are cut short
    stopped = False
    try:
        yield stop
    except StoppedError:
        stopped = True
        raise
    finally:
        for number, handler in before.items():
            if not stopped and handler is not None:  # None: not set from Python, so that it cannot be set again
                signal.signal(number, handler)
