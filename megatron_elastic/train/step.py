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
from megatron.core.distributed import finalize_model_grads

from megatron_elastic.distill.windows import windows
from megatron_elastic.errors import ElasticError
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.recipe import StageConfig
from megatron_elastic.router.sampling import group_of_sample
from megatron_elastic.router.schedules import learning_rate
from megatron_elastic.train.data import MicroBatch, share_of_context
from megatron_elastic.train.decide import GroupDecision
from megatron_elastic.train.forward import batch_loss, hidden_states, loss_terms
from megatron_elastic.train.run import Run, parameter_dtype
from megatron_elastic.train.schedule import map_microbatches, train_microbatches

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
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    names = [PARENT] if not groups else list(run.decider.targets) if run.decider else []
    sums = _loss_sums(names, accumulate_gradients(run, groups, batches), parallel)
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


def accumulate_gradients(run: Run, groups: list[GroupDecision], batches: Iterator[MicroBatch]) -> list[dict[str, Any]]:
    """Gradients of a step in the buffers of DDP, reduced over all ranks and divided by the tokens of the global batch.

    The frozen parent goes first over a window of microbatches and leaves its final hidden states on the last stage; then the student runs
    over the same window on any schedule. Returns what the last stage reports of each of this rank's microbatches.
    """
    stage, parallel = run.stage, run.parallel
    count = stage.global_batch_size // (stage.micro_batch_size * parallel.data)
    outputs = []
    for size in window_sizes(run, count) if groups else [count]:
        window = [share_of_context(next(batches), parallel) for _ in range(size)]
        outputs += train_microbatches(
            run.chunks, parallel, window, partial(_forward, run, groups), partial(_loss, run, groups, teacher_states(run, window, groups))
        )
    tokens = sum((output["tokens"] for output in outputs), torch.zeros((), dtype=torch.int, device=parallel.device))
    finalize_model_grads(run.chunks, tokens)
    return outputs


def window_sizes(run: Run, count: int) -> list[int]:
    """Microbatches of each window of a step's `count`: one without a pipeline, else as many as the recipe has memory for."""
    parallel, stage = run.parallel, run.stage
    if parallel.pipeline == 1:
        return [1] * count
    tokens = stage.micro_batch_size * stage.sequence_length // (parallel.context * run.recipe.parallel.token_shards)
    state = tokens * run.recipe.model.hidden_size * parameter_dtype(run.recipe).itemsize
    return windows(count, state, run.recipe.distill.teacher_bytes, parallel.pipeline if parallel.virtual_pipeline > 1 else 1)


def teacher_states(run: Run, window: list[MicroBatch], groups: list[GroupDecision]) -> dict[int, torch.Tensor]:
    """First sample of a microbatch -> the frozen parent's final hidden states [tokens of this rank, 1, hidden], on the last stage."""
    if not groups:
        return {}
    offload = run.recipe.distill.offload
    states = map_microbatches(
        [run.teacher], run.parallel, window, lambda batch, hidden: (batch.first_sample, hidden.cpu() if offload else hidden)
    )
    return dict(states)


def _check_finite(stage: StageConfig, step: int, what: str, value: float) -> None:
    """Stop before what is not finite reaches a checkpoint; `value` is the same on every rank."""
    if not math.isfinite(value):
        raise ElasticError(
            f"stage {stage.name!r}, step {step}: the {what} is {value}; lower stages.{stage.name}.lr or start from an earlier checkpoint"
        )


def _forward(run: Run, groups: list[GroupDecision], part: Any, batch: MicroBatch) -> torch.Tensor:
    """Hidden states after one part of the model, in the size that was drawn for the microbatch's group."""
    if not groups:
        return hidden_states(part, batch)
    assert run.handle is not None and run.decider is not None
    with run.handle.use(run.decider.decision_of(_group(run, groups, batch))):
        return hidden_states(part, batch)


def _group(run: Run, groups: list[GroupDecision], batch: MicroBatch) -> GroupDecision:
    return groups[group_of_sample(batch.first_sample, run.recipe.router.samples_per_decision)]


def _loss(
    run: Run, groups: list[GroupDecision], teacher: dict[int, torch.Tensor], batch: MicroBatch, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(sum over tokens, number of tokens, what to report): divided by the tokens of the global batch when the step ends."""
    terms = loss_terms(run.recipe.model.vocab_size, run.recipe.distill, elastic=bool(groups))
    states = teacher.pop(batch.first_sample).to(hidden.device) if groups else None
    loss = batch_loss(run.parts[-1], hidden, batch, terms, run.teacher if groups else None, states, run.parallel)
    name = _group(run, groups, batch).budget if groups else PARENT
    tokens = loss.num_tokens.to(torch.int)
    return loss.total, tokens, {"budget": name, "sum": loss.total.detach(), "tokens": tokens}


def _loss_sums(names: list[str], outputs: list[dict[str, Any]], parallel: ParallelContext) -> torch.Tensor:
    """[names, 2]: sums of the loss and of tokens over the global batch, on every rank, on the CPU."""
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=parallel.device)
    for output in outputs:
        row = names.index(output["budget"])
        sums[row, 0] += output["sum"].double()
        sums[row, 1] += output["tokens"].double()
    dist.all_reduce(sums, group=parallel.world)
    return sums.cpu() / parallel.tensor  # every tensor-parallel rank knows the loss of all of its group's tokens


def _mean_ratios(groups: list[GroupDecision]) -> dict[str, float]:
    ratios: dict[str, list[float]] = {}
    for group in groups:
        ratios.setdefault(group.budget, []).append(float(torch.as_tensor(group.cost_ratio).detach()))
    return {name: sum(values) / len(values) for name, values in ratios.items()}
