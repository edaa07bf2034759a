"""Proves that the pool of ranks runs tasks on real process groups, raises a rank's failure in the test, and survives failures and hangs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_elastic.errors import ConfigError, DataError
from megatron_elastic.parallel import ParallelContext
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


def layout_of(rank: int, world: int, layout: dict[str, int]) -> dict[str, Any]:
    parallel = ParallelContext.initialize(**layout)
    names = "tensor pipeline expert expert_tensor data tensor_rank pipeline_rank expert_rank expert_tensor_rank data_rank is_main is_first_stage is_last_stage"
    found = {name: getattr(parallel, name) for name in names.split()}
    parallel.destroy()
    return found


def refuse(rank: int, world: int, failing: list[int], same: bool) -> str | None:
    parallel = ParallelContext.initialize()
    error = DataError("no data" if same else f"no data on {rank}") if rank in failing else None
    try:
        parallel.raise_together(error)
    except DataError as raised:
        return str(raised)
    finally:
        parallel.destroy()
    return None


def too_many(rank: int, world: int, layout: dict[str, int]) -> str:
    with pytest.raises(ConfigError) as caught:
        ParallelContext.initialize(**layout)
    return str(caught.value)


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


def test_places_in_a_layout(ranks: Any) -> None:
    first, second = ranks(layout_of, 2, {"tensor": 2})
    assert (first["tensor"], first["expert_tensor"], first["data"]) == (2, 2, 1)
    assert (first["tensor_rank"], second["tensor_rank"], second["expert_tensor_rank"]) == (0, 1, 1)
    first, second = ranks(layout_of, 2, {"pipeline": 2})
    assert (first["is_first_stage"], first["is_last_stage"], second["is_first_stage"], second["is_last_stage"]) == (True, False, False, True)
    first, second = ranks(layout_of, 2, {"expert": 2})
    assert (first["data"], first["expert_tensor"], second["expert_rank"], second["data_rank"]) == (2, 1, 1, 1)
    assert (first["is_main"], second["is_main"]) == (True, False)


def test_an_error_of_any_rank_is_raised_on_all(ranks: Any) -> None:
    assert ranks(refuse, 2, [1], True) == ["no data", "no data"]
    assert ranks(refuse, 2, [0, 1], True) == ["no data", "no data"]
    assert ranks(refuse, 2, [0, 1], False) == ["rank 0: no data on 0\nrank 1: no data on 1"] * 2
    assert ranks(refuse, 2, [], True) == [None, None]


def test_a_world_that_cannot_be_divided_is_refused(ranks: Any) -> None:
    assert "start a multiple of 4" in ranks(too_many, 2, {"tensor": 2, "pipeline": 2})[0]
    assert "start a multiple of 4 or lower parallel.expert" in ranks(too_many, 2, {"expert": 4})[1]
