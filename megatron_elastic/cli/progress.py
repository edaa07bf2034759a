"""A progress bar for what takes longer than a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

SECONDS_BEFORE_PROGRESS = 5.0
"""What ends sooner shows no progress bar."""


@contextmanager
def progress_bar(title: str, count: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """A function progress(done, in all) whose bar, with the remaining time, appears on stderr after SECONDS_BEFORE_PROGRESS.

    count: the column that says how much is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(TextColumn(title), BarColumn(), count, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task(title, total=None)
    began = time.monotonic()

    def progress(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if not bar.live.is_started and time.monotonic() - began > SECONDS_BEFORE_PROGRESS:
            bar.start()

    try:
        yield progress
    finally:
        if bar.live.is_started:  # a bar that was never shown would still print an empty line
            bar.stop()
