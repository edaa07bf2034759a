"""One step of training on megatron-core's own schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_elastic.errors import ElasticError
from megatron_elastic.recipe import StageConfig
from megatron_elastic.router.sampling import group_of_sample
from megatron_elastic.router.schedules import learning_rate
from megatron_elastic.train.data import MicroBatch
from megatron_elastic.train.decide import GroupDecision
from megatron_elastic.train.forward import batch_loss, hidden_states, loss_terms
from megatron_elastic.train.run import Run

PARENT = "parent"
"""The name under which a stage without elasticity reports its loss."""


@dataclass(frozen=True)
class StepMetrics:
    """What a step has to tell.

    loss: objective per token; by_budget: budget -> loss per token of the samples it ran; cost_ratio: budget -> mean cost over target.
    """

    stage: str
    step: int
    loss: float
    by_budget: dict[str, float]
    cost_ratio: dict[str, float]
    tokens: int
    seconds: float
    lr: float
    grad_norm: float
    router_grad_norm: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


def train_step(run: Run, batches: Iterator[MicroBatch]) -> StepMetrics:
    """Draw decisions, run forward and backward over the step's microbatches, update the model, then the router.

    Raises ElasticError on every rank when the loss or the gradient is not finite.
    """
    started, stage, step, parallel = time.perf_counter(), run.stage, run.step, run.parallel
    progress = run.elastic_progress
    groups = run.decider.decide(stage, step, progress) if stage.elastic and run.decider else []
    run.chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    outputs = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, run, groups),
        data_iterator=batches,
        model=[run.chunk],
        num_microbatches=stage.global_batch_size // (stage.micro_batch_size * parallel.data),
        seq_length=stage.micro_batch_size * stage.sequence_length,
        micro_batch_size=1,
        forward_only=False,
    )
    names = [PARENT] if not groups else list(run.decider.targets) if run.decider else []
    sums = _loss_sums(names, outputs, run)
    tokens = sums[:, 1].sum()
    lr = learning_rate(step, stage.warmup_steps, stage.total_steps, stage.lr, stage.min_lr)
    for options in run.optimizer.param_groups:
        options["lr"] = lr
    loss = float(sums[:, 0].sum() / tokens)
    _check_finite(stage, step, "loss", loss if torch.isfinite(sums).all() else math.nan)
    grad_norm = float(run.optimizer.step()[1] or 0.0)
    _check_finite(stage, step, "gradient's norm", grad_norm)
    router_norm = 0.0
    if groups and run.decider:
        router_lr = learning_rate(step, stage.warmup_steps, stage.total_steps, stage.router_lr, stage.router_lr * 0.1)
        router_norm = run.decider.learn(groups, tokens, router_lr, progress, parallel)
        _check_finite(stage, step, "router's gradient's norm", router_norm)
    return StepMetrics(
        stage=stage.name,
        step=step,
        loss=loss,
        by_budget={name: float(total / count) for name, (total, count) in zip(names, sums, strict=True) if count > 0},
        cost_ratio=_mean_ratios(groups),
        tokens=stage.global_batch_size * stage.sequence_length,
        seconds=time.perf_counter() - started,
        lr=lr,
        grad_norm=grad_norm,
        router_grad_norm=router_norm,
    )


def _check_finite(stage: StageConfig, step: int, what: str, value: float) -> None:
    """Stop before what is not finite reaches a checkpoint; `value` is the same on every rank."""
    if not math.isfinite(value):
        raise ElasticError(
            f"stage {stage.name!r}, step {step}: the {what} is {value}; lower stages.{stage.name}.lr or start from an earlier checkpoint"
        )


def _forward_step(run: Run, groups: list[GroupDecision], batches: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
    """megatron's forward step: hidden states of one microbatch, and the function that turns them into a loss."""
    batch = next(batches)
    if not groups:
        return hidden_states(run.model, batch), partial(_loss, run, batch, None, None)
    group = groups[group_of_sample(batch.first_sample, run.recipe.router.samples_per_decision)]
    assert run.handle is not None and run.decider is not None
    with torch.no_grad():
        teacher_hidden = hidden_states(run.teacher, batch)
    with run.handle.use(run.decider.decision_of(group)):
        hidden = hidden_states(run.model, batch)
    return hidden, partial(_loss, run, batch, group, teacher_hidden)


def _loss(
    run: Run, batch: MicroBatch, group: GroupDecision | None, teacher_hidden: torch.Tensor | None, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(sum over tokens, number of tokens, what to report): megatron divides by the tokens of the global batch."""
    terms = loss_terms(run.recipe.model.vocab_size, run.recipe.distill, elastic=group is not None)
    loss = batch_loss(run.model, hidden, batch, terms, run.teacher if group else None, teacher_hidden)
    name = PARENT if group is None else group.budget
    return loss.total, loss.num_tokens.to(torch.int), {"budget": name, "sum": loss.total.detach(), "tokens": loss.num_tokens}


def _loss_sums(names: list[str], outputs: list[dict[str, Any]], run: Run) -> torch.Tensor:
    """[names, 2]: sums of the loss and of tokens over the global batch, on every rank."""
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    for output in outputs:
        row = names.index(output["budget"])
        sums[row, 0] += output["sum"].double()
        sums[row, 1] += output["tokens"].double()
    dist.all_reduce(sums, group=run.parallel.world)
    return sums


def _mean_ratios(groups: list[GroupDecision]) -> dict[str, float]:
    ratios: dict[str, list[float]] = {}
    for group in groups:
        ratios.setdefault(group.budget, []).append(float(torch.as_tensor(group.cost_ratio).detach()))
    return {name: sum(values) / len(values) for name, values in ratios.items()}
