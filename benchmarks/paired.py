"""Timing on a machine that is not quiet: variants take turns in one process, and only ratios within a turn are compared."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least two values (quartiles by linear interpolation)."""
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.q1:.3f} to {self.q3:.3f})"


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long one run took.

    wall: by the clock on the wall; cpu: computing time of all threads of this process, which leaves out waiting for a core.
    """

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Timed:
    """What is timed (`run`), and what has to happen before each time (`prepare`, not timed)."""

    run: Callable[[], object]
    prepare: Callable[[], object]

    def once(self) -> Seconds:
        """Time one run. The garbage collector waits: it would charge one variant for another's garbage."""
        self.prepare()
        gc.collect()
        gc.disable()
        try:
            wall, cpu = time.perf_counter(), time.process_time()
            self.run()
            return Seconds(time.perf_counter() - wall, time.process_time() - cpu)
        finally:
            gc.enable()


def take_turns(variants: Mapping[str, Timed], rounds: int, *, warm_up: int, done: Callable[[int], object]) -> dict[str, list[Seconds]]:
    """Every variant's times in each of `rounds` rounds; round n starts with variant n, so that none always follows the same one.

    warm_up: rounds that are run first and not counted; done: called after each counted round with the number of rounds so far.
    """
    names = list(variants)
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    for turn in range(-warm_up, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken = variants[name].once()
            if turn >= 0:
                seconds[name].append(taken)
        if turn >= 0:
            done(turn + 1)
    return seconds


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Spread of the ratios of two variants' times, each ratio from one round."""
    return Spread.of([one / other for one, other in zip(numerators, denominators, strict=True)])
