"""Hard plans of every parent, homogeneous and per layer, forward at TP2, EP2 and PP2, equal one process; every rank has the same share of work.

Run: pytest tests/elastic/test_layouts.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_elastic.axes import ElasticSpace, SubmodelPlan
from tests.elastic.family import PARENTS, build_family, narrowed, relative, staggered, text

LAYOUTS = {"TP2": {"tensor": 2}, "EP2": {"expert": 2}, "PP2": {"pipeline": 2}}
CASES = [(parent, layout) for parent in PARENTS for layout in LAYOUTS if not (parent == "dense" and layout == "EP2")]


def _runs(space: ElasticSpace) -> list[tuple[SubmodelPlan, str]]:
    """Plans, homogeneous and not, in both modes."""
    plans = [narrowed(space, None, 1), narrowed(space, None, 2), staggered(space, None), staggered(space, None, 1)]
    return [(plan, mode) for plan in plans for mode in ("slice", "mask")]


def plan_logits(rank: int, world_size: int, parent: str, layout: dict[str, int]) -> list[torch.Tensor | None]:
    """Logits of every plan on a layout (None on ranks that have none), as a rank of the pool computes them."""
    from megatron_elastic.parallel import ParallelContext

    parallel = ParallelContext.initialize(**layout)
    try:
        model, space, handle, _ = build_family(parallel, parent, per_layer=True)
        model.eval()
        found = []
        for plan, mode in _runs(space):
            with torch.no_grad(), handle.use(plan, mode):
                found.append(_pipeline_forward(model, parallel, *text(length=24)))
        return found
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
@pytest.mark.parametrize(("parent", "layout"), CASES)
def test_a_plan_computes_the_same_on_every_layout(ranks: Callable[..., list[Any]], _one_process: Any, parent: str, layout: str) -> None:
    model, space, handle, _ = build_family(_one_process, parent, per_layer=True)
    model.eval()
    expected = []
    for plan, mode in _runs(space):
        with torch.no_grad(), handle.use(plan, mode):
            expected.append(model(*text(length=24), None))
    found = ranks(plan_logits, 2, parent, LAYOUTS[layout])
    assert any(logits is not None for rank in found for logits in rank)
    for rank in found:
        for logits, reference in zip(rank, expected, strict=True):
            assert logits is None or relative(logits, reference) < 1e-5


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
