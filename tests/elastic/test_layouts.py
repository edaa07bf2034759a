"""One hard plan, forward at TP2, EP2 and PP2, equals one process; every rank has the same share of work.

Run: pytest tests/elastic/test_layouts.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.elastic.family import build_family, narrowed, relative, text

LAYOUTS = {"TP2": {"tensor": 2}, "EP2": {"expert": 2}, "PP2": {"pipeline": 2}}


def plan_logits(rank: int, world_size: int, layout: dict[str, int], choice: int, mode: str) -> Any:
    """Logits of one plan on a layout (None on ranks that have none), as a rank of the pool computes them."""
    from megatron_elastic.parallel import ParallelContext

    parallel = ParallelContext.initialize(**layout)
    try:
        model, space, handle, _ = build_family(parallel)
        model.eval()
        with torch.no_grad(), handle.use(narrowed(space, None, choice), mode):
            return _pipeline_forward(model, parallel, *text(length=24))
    finally:
        parallel.destroy()


def _pipeline_forward(model: Any, parallel: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
    """Forward through all stages; the parent's width travels between them."""
    import torch.distributed as dist

    shape = (tokens.shape[1], tokens.shape[0], model.config.hidden_size)
    if not parallel.is_first_stage:
        received = torch.empty(shape)
        dist.recv(received, src=parallel.rank - 1)
        model.set_input_tensor(received)
    output = model(tokens, positions, None, runtime_gather_output=True)
    if not parallel.is_last_stage:
        assert output.shape == shape, "a narrower tensor would be read as garbage"
        dist.send(output.contiguous(), dst=parallel.rank + 1)
        return None
    return output


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["slice", "mask"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_computes_the_same_on_every_layout(ranks: Callable[..., list[Any]], _one_process: Any, layout: str, mode: str) -> None:
    model, space, handle, _ = build_family(_one_process)
    for choice in (1, 2):
        with torch.no_grad(), handle.use(narrowed(space, None, choice), mode):
            tokens, positions = text(length=24)
            expected = model(tokens, positions, None)
        for logits in ranks(plan_logits, 2, LAYOUTS[layout], choice, mode):
            assert logits is None or relative(logits, expected) < 1e-5


def kept_rows(rank: int, world_size: int) -> dict[str, int]:
    """Kept rows of every elastic linear on this rank at TP2."""
    from megatron_elastic.elastic.linear import LinearSite
    from megatron_elastic.parallel import ParallelContext

    parallel = ParallelContext.initialize(tensor=2)
    try:
        model, space, handle, _ = build_family(parallel)
        with handle.use(narrowed(space, None)):
            sites = {name: module.site for name, module in model.named_modules() if isinstance(getattr(module, "site", None), LinearSite)}
            return {name: sum(length for part in site.kept() for _, length in part or ((0, 0),)) for name, site in sites.items()}
    finally:
        parallel.destroy()


@pytest.mark.dist
def test_every_rank_keeps_the_same_share(ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(kept_rows, 2)
    assert first and first == second
