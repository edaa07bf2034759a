"""Proves that a ParallelContext knows its place in every layout, and that a user error of one rank stops all of them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_elastic.errors import ConfigError, DataError
from megatron_elastic.parallel import ParallelContext

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
