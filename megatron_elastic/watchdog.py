"""How a run shows that it is alive: a heartbeat file for who looks from outside, and a watchdog that ends a rank which hangs.

A rank that hangs in a collective is found by the others, through the time limit of collectives. What hangs elsewhere (a file system, a lock), or
on all ranks at once, is found here, and its own stacks say where. No torch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_elastic.errors import EXIT_RANK_LOST
from megatron_elastic.formats import HEARTBEAT

HEARTBEAT_FILE = "heartbeat.json"
"""Name of the heartbeat in a run."""
_STDERR = 2


def write_heartbeat(run_dir: Path, stage: str, step: int, tokens: int) -> None:
    """Write heartbeat.json in one step: the next step of a stage, the tokens of the whole run so far, and the time (seconds since 1970)."""
    temporary = run_dir / f".tmp-{HEARTBEAT_FILE}"
    beat = {**HEARTBEAT.stamp, "stage": stage, "step": step, "tokens": tokens, "time": time.time()}
    temporary.write_text(json.dumps(beat) + "\n", encoding="utf-8")
    temporary.replace(run_dir / HEARTBEAT_FILE)


class Watchdog:
    """Ends this process when `feed` is not called for so long, inside a `with` block.

    The stacks of all threads go to standard error and the exit code is that of a lost rank; the other ranks notice that it is gone, and end.
    A thread waits for it, so code that keeps the interpreter's lock for good is not found.
    seconds: at least that long without progress; 0: never.
    """

    def __init__(self, seconds: float, rank: int) -> None:
        self._seconds, self._rank = seconds, rank
        self._fed = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self.feed()
        if self._seconds > 0:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()

    def feed(self) -> None:
        """Progress was made: wait anew."""
        self._fed = time.monotonic()

    def _watch(self) -> None:
        while (left := self._fed + self._seconds - time.monotonic()) > 0:
            if self._ended.wait(left):
                return
        if not self._ended.is_set():
            self._end()

    def _end(self) -> None:
        # To the file descriptor itself: the stream may be locked by what hangs, and a file of the run may hang as well.
        text = (
            f"error: rank {self._rank} has made no progress for {self._seconds:g} s and is taken for hung; start again to go on from the last whole "
            "checkpoint, with a larger log.hang_seconds if it was only slow. Its threads:\n"
        )
        os.write(_STDERR, text.encode())
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        os._exit(EXIT_RANK_LOST)
