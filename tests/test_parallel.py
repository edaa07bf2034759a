"""Proves that a ParallelContext knows its device and its place in every layout, and that a user error of one rank stops all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_elastic.errors import ConfigError, DataError
from megatron_elastic.parallel import ParallelContext, place_of

pytestmark = pytest.mark.dist


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


@pytest.mark.parametrize(
    ("local_rank", "gpus", "expected"), [(0, 0, "cpu"), (7, 0, "cpu"), (0, 1, "cuda:0"), (0, 8, "cuda:0"), (7, 8, "cuda:7")]
)
def test_a_process_computes_on_the_gpu_of_its_number(local_rank: int, gpus: int, expected: str) -> None:
    assert place_of(local_rank, gpus) == expected


def test_a_process_without_a_gpu_among_some_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        place_of(3, 2)
    assert str(caught.value) == (
        "process 3 of this node (LOCAL_RANK) has no GPU: 2 are visible; start at most 2 a node (gpus_per_node of the cluster file), "
        "or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
    )
    with pytest.raises(ConfigError, match="has no GPU: 1 is visible; start at most 1 a node"):
        place_of(1, 1)
    with pytest.raises(ConfigError, match="LOCAL_RANK is not set, so that this process cannot know which of 8 GPUs"):
        place_of(None, 8)
    assert place_of(None, 0) == "cpu"


def test_places_in_a_layout(ranks: Any) -> None:
    first, second = ranks(layout_of, 2, {"tensor": 2})
    assert (first["tensor"], first["expert_tensor"], first["data"]) == (2, 2, 1)
    assert (first["tensor_rank"], second["tensor_rank"], second["expert_tensor_rank"]) == (0, 1, 1)
    first, second = ranks(layout_of, 2, {"pipeline": 2})
    assert (first["is_first_stage"], first["is_last_stage"]) == (True, False)
    assert (second["is_first_stage"], second["is_last_stage"]) == (False, True)
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


def test_one_process_raises_its_error_as_it_is(parallel: ParallelContext) -> None:
    error = ConfigError("no")
    with pytest.raises(ConfigError) as caught:
        parallel.raise_together(error)
    assert caught.value is error
    parallel.raise_together(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_computes_on_the_cpu(parallel: ParallelContext) -> None:
    assert parallel.device == torch.device("cpu")
