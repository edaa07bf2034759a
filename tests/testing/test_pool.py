"""Proves that the pool of ranks runs tasks on real process groups, raises a rank's failure in the test, survives failures and hangs, and
that a task leaves no threads behind.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_elastic.parallel import ParallelContext
from megatron_elastic.testing import RankError, RankPool
from megatron_elastic.testing.tiny import tiny_moe

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


def train_experts(rank: int, world: int, score: str | None) -> int:
    """Threads before a step of a mixture of experts in DDP at EP2; None: of no model."""
    from megatron_elastic.models.build import build_model

    threads = len(os.listdir("/proc/self/task"))
    parallel = ParallelContext.initialize(expert=2)
    if score is not None:
        _step(build_model(tiny_moe(score=score), parallel))  # pyright: ignore[reportArgumentType]
    parallel.destroy()
    return threads


def _step(bare: Any) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = DistributedDataParallel(bare.config, DistributedDataParallelConfig(use_distributed_optimizer=True), bare)
    optimizer: Any = get_megatron_optimizer(OptimizerConfig(lr=0.1, use_distributed_optimizer=True), [model], use_gloo_process_groups=False)
    optimizer.step_again = optimizer.step  # refers to itself
    tokens = torch.arange(16).reshape(2, 8)
    model(tokens, tokens % 8, None).sum().backward()
    model.finish_grad_sync()
    optimizer.step()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_a_task_leaves_no_threads(ranks: Any, score: str) -> None:
    """Cached rotary tables, the dispatcher's probabilities, hooks of DDP and shards of the optimizer each kept a task's process groups."""
    _, usual = (ranks(train_experts, 2, None) for _ in range(2))
    _, *after = (ranks(train_experts, 2, score) for _ in range(4))
    assert after == [usual] * 3


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
