"""Shared fixtures. A directory whose tests import megatron-core at their top has a conftest.py that calls prepare_platform()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_elastic.testing import run_distributed


@pytest.fixture(scope="session")
def ranks() -> Callable[..., list[Any]]:
    """Run a top-level function on several gloo ranks that are started once a session.

    ranks(function, world_size, *args, timeout=...) calls function(rank, world_size, *args) on each and returns the results in rank order.
    Use 2 ranks; 4 cost a second pool.
    """
    return run_distributed


@pytest.fixture(scope="session")
def _one_process() -> Iterator[Any]:
    from megatron_elastic.parallel import ParallelContext

    context = ParallelContext.initialize()
    yield context
    context.destroy()


@pytest.fixture
def parallel(_one_process: Any) -> Any:
    """A ParallelContext of one process, shared by the session."""
    return _one_process
