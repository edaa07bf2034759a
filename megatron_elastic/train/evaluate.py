"""Held-out loss of every budget."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_elastic.distill.losses import OutputLossTerms
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.train.data import MicroBatch, fixed_batches
from megatron_elastic.train.forward import batch_loss, hidden_states
from megatron_elastic.train.run import Run
from megatron_elastic.train.step import PARENT


def held_out_losses(run: Run) -> dict[str, float]:
    """Budget -> cross-entropy per token on the held-out samples, under its current hard plan; the parent alone before elasticity."""
    batches = _batches(run)
    if run.decider is None or run.handle is None:
        return {PARENT: _mean_loss(run, run.model, batches)}
    return _by_plan(run, run.model, run.handle, batches)


def untrained_losses(run: Run) -> dict[str, float]:
    """The same for the frozen parent's weights: where the members of the family started."""
    space = run.recipe.space
    assert space is not None
    handle = elasticize(run.teacher, space, run.parallel, run.recipe.model)
    try:
        return _by_plan(run, run.teacher, handle, _batches(run))
    finally:
        handle.remove()


def _batches(run: Run) -> list[MicroBatch]:
    return fixed_batches(
        run.datasets().valid,
        run.recipe.eval.samples,
        micro_batch_size=run.stage.micro_batch_size,
        data_rank=run.parallel.data_rank,
        data_size=run.parallel.data,
    )


def _by_plan(run: Run, model: Any, handle: ElasticHandle, batches: list[MicroBatch]) -> dict[str, float]:
    assert run.decider is not None
    losses = {}
    for name, plan in run.decider.family().plans.items():
        with handle.use(plan):
            losses[name] = _mean_loss(run, model, batches)
    return losses


@torch.no_grad()
def _mean_loss(run: Run, model: Any, batches: list[MicroBatch]) -> float:
    terms = OutputLossTerms(
        vocab_size=run.recipe.model.vocab_size, kl_weight=0.0, ce_weight=1.0, chunk_tokens=run.recipe.distill.chunk_tokens
    )
    sums = torch.zeros(2, dtype=torch.float64)
    training = model.training
    model.eval()
    for batch in batches:
        loss = batch_loss(model, hidden_states(model, batch), batch, terms, None, None)
        sums += torch.stack([loss.ce, loss.num_tokens]).double()
    model.train(training)
    dist.all_reduce(sums, group=run.parallel.world)
    return float(sums[0] / sums[1])
