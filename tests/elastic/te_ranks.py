"""Ranks that find the stand-in for Transformer Engine installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_elastic.testing.pool import RankPool

STAND_IN = str(Path(__file__).parents[1] / "te_stand_in")


class StandInRanks:
    """Pools of processes of their own, because megatron-core looks for Transformer Engine once, when it is imported."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._pools: dict[int, RankPool] = {}

    def __call__(self, task: Callable[..., Any], *args: Any, world: int = 1) -> list[Any]:
        """Run task(rank, world, *args) on `world` ranks; the results in rank order."""
        pool = self._pools.setdefault(world, RankPool(world))
        sys.path.insert(0, STAND_IN)  # ranks take over this process' path when they start
        try:
            return pool.run(task, *args)
        finally:
            sys.path.remove(STAND_IN)

    def close(self) -> None:
        """End them."""
        for pool in self._pools.values():
            pool.close()
