"""Proves that the pool of ranks runs tasks on real process groups, raises a rank's failure in the test, and survives failures and hangs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_elastic.testing import RankError, RankPool

pytestmark = pytest.mark.dist


def add_ranks(rank: int, world: int, start: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([rank + start])
    dist.all_reduce(total)
    return rank, total


def fail_on_rank_one(rank: int, world: int, what: str) -> None:
    if rank == 1:
        raise ValueError(what)


def hang_on_rank_one(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_results_come_back_in_rank_order(ranks: Any) -> None:
    assert ranks(add_ranks, 2, 10) == [(0, torch.tensor([21])), (1, torch.tensor([21]))]


def test_a_failure_is_raised_with_its_rank_and_the_pool_goes_on(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 in fail_on_rank_one:.*ValueError: oh no"):
        ranks(fail_on_rank_one, 2, "oh no")
    assert [rank for rank, _ in ranks(add_ranks, 2, 0)] == [0, 1]


@pytest.mark.slow
def test_a_hang_is_raised_and_the_next_task_gets_fresh_ranks() -> None:
    pool = RankPool(2)
    try:
        pool.run(add_ranks, 0)
        with pytest.raises(RankError, match=r"hang_on_rank_one did not end in 1 s; ranks \[1\] hang"):
            pool.run(hang_on_rank_one, timeout=1.0)
        assert len(pool.run(add_ranks, 0)) == 2
    finally:
        pool.close()
