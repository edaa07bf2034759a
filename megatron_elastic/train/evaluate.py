"""Held-out loss of every budget."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_elastic.distill.losses import OutputLossTerms
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.train.data import MicroBatch, fixed_batches, share_of_context
from megatron_elastic.train.forward import batch_loss
from megatron_elastic.train.run import Run
from megatron_elastic.train.schedule import map_microbatches
from megatron_elastic.train.step import PARENT

WINDOW = 8
"""Microbatches for each rank of a pipeline between two places where an evaluation can be left."""


def held_out_losses(run: Run) -> dict[str, float]:
    """Budget -> cross-entropy per token on the held-out samples, under its current hard plan; the parent alone before elasticity.

    A collective of all processes. Raises StoppedError on all of them when the run is told to stop meanwhile.
    """
    batches = _batches(run)
    if run.decider is None or run.handle is None:
        return {PARENT: _mean_loss(run, run.parts, batches)}
    return _by_plan(run, run.parts, run.handle, batches)


def untrained_losses(run: Run) -> dict[str, float]:
    """The same for the frozen parent's weights: where the members of the family started. Raises StoppedError as well."""
    space = run.recipe.space
    assert space is not None
    handle = elasticize(run.teacher, space, run.parallel, run.recipe.model)
    try:
        return _by_plan(run, [run.teacher], handle, _batches(run))
    finally:
        handle.remove()


def _batches(run: Run) -> list[MicroBatch]:
    parallel = run.parallel
    rows = fixed_batches(
        run.datasets().valid,
        run.recipe.eval.samples,
        micro_batch_size=run.stage.micro_batch_size,
        data_rank=parallel.data_rank,
        data_size=parallel.data,
    )
    return [share_of_context(row, parallel) for row in rows]


def _by_plan(run: Run, parts: list[Any], handle: ElasticHandle, batches: list[MicroBatch]) -> dict[str, float]:
    assert run.decider is not None
    losses = {}
    for name, plan in run.decider.family().plans.items():
        with handle.use(plan):
            losses[name] = _mean_loss(run, parts, batches)
    return losses


def _mean_loss(run: Run, parts: list[Any], batches: list[MicroBatch]) -> float:
    terms = OutputLossTerms(
        vocab_size=run.recipe.model.vocab_size, kl_weight=0.0, ce_weight=1.0, chunk_tokens=run.recipe.distill.chunk_tokens
    )
    sums, size = torch.zeros(2, dtype=torch.float64, device=run.parallel.device), WINDOW * run.parallel.pipeline
    for start in range(0, len(batches), size):
        run.progressed()
        for loss in map_microbatches(
            parts,
            run.parallel,
            batches[start : start + size],
            lambda batch, hidden: batch_loss(parts[-1], hidden, batch, terms, None, None, run.parallel),
        ):
            sums += torch.stack([loss.ce, loss.num_tokens]).double()
    dist.all_reduce(sums, group=run.parallel.world)
    return float(sums[0] / sums[1])  # tensor-parallel ranks count the same tokens in both
