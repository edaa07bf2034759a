"""Held-out loss of every budget."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_elastic.distill.losses import OutputLossTerms
from megatron_elastic.train.data import MicroBatch, fixed_batches
from megatron_elastic.train.forward import batch_loss, hidden_states
from megatron_elastic.train.run import Run
from megatron_elastic.train.step import PARENT


def held_out_losses(run: Run) -> dict[str, float]:
    """Budget -> cross-entropy per token on the held-out samples, under its current hard plan; the parent alone before elasticity."""
    stage, parallel = run.stage, run.parallel
    batches = fixed_batches(
        run.datasets().valid,
        run.recipe.eval.samples,
        micro_batch_size=stage.micro_batch_size,
        data_rank=parallel.data_rank,
        data_size=parallel.data,
    )
    if run.decider is None or run.handle is None:
        return {PARENT: _mean_loss(run, batches)}
    losses = {}
    for name, plan in run.decider.family().plans.items():
        with run.handle.use(plan):
            losses[name] = _mean_loss(run, batches)
    return losses


@torch.no_grad()
def _mean_loss(run: Run, batches: list[MicroBatch]) -> float:
    terms = OutputLossTerms(vocab_size=run.recipe.model.vocab_size, kl_weight=0.0, ce_weight=1.0, chunk_tokens=run.recipe.distill.chunk_tokens)
    sums = torch.zeros(2, dtype=torch.float64)
    run.model.eval()
    for batch in batches:
        loss = batch_loss(run.model, hidden_states(run.model, batch), batch, terms, None, None)
        sums += torch.stack([loss.ce, loss.num_tokens]).double()
    run.model.train()
    dist.all_reduce(sums, group=run.parallel.world)
    return float(sums[0] / sums[1])
