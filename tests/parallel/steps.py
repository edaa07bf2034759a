"""Two training steps of a family on some layout, and everything that came out of them as whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.models.weights import Shard, shards
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.recipe import (
    DistillConfig,
    ElasticConfig,
    OptimizerConfig,
    ParallelConfig,
    PinnedBudget,
    Recipe,
    RouterConfig,
    StageConfig,
)
from megatron_elastic.router.sampling import derived_generator
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import AxisChoices
from megatron_elastic.train.data import MicroBatch, pack_samples
from megatron_elastic.train.loop import start_parallel
from megatron_elastic.train.run import Run, parent_checkpoint
from megatron_elastic.train.step import StepMetrics, train_step
from tests.elastic.family import layer_axes, narrowed, staggered, tiny_space

SEQUENCE, BATCH, MICRO, TOGETHER, STEPS = 24, 8, 1, 2, 2


def recipe_of(shape: ModelShape, parent: Path | None, mode: str, parallel: dict[str, Any], **changes: Any) -> Recipe:
    """A recipe with every axis elastic, per layer where that can be, and four budgets; hard: all pinned; soft: all learned but the parent."""
    space = tiny_space(shape, layer_axes(shape))
    plans = (staggered(space, None), narrowed(space, None, 1), staggered(space, None, 2))
    names = ("large", "medium", "small")
    learned = dict(zip(names, (0.8, 0.6, 0.4), strict=True))
    pinned = {name: PinnedBudget(plan=widths(plan, shape)) for name, plan in zip(names, plans, strict=True)}
    recipe = Recipe(
        format_version=1,
        model=shape,
        parent=None if parent is None else str(parent),
        seed=5,  # its draws have all four budgets in each step
        elastic=ElasticConfig(
            axes={spec.axis.value: AxisChoices(choices=spec.choices, per_layer=spec.per_layer) for spec in space.axes},
            budgets={"full": 1.0, **(pinned if mode == "hard" else learned)},
            shard_groups=space.shard_groups,
            drop_order=space.drop_order,
            expert_bias_rate=0.01,
        ),
        router=RouterConfig(hidden=24, samples_per_decision=TOGETHER, budget_weight=0.1, tolerance=(0.05, 0.02)),
        distill=DistillConfig(kl_weight=1.0, ce_weight=0.3, temperature=1.5, chunk_tokens=7, teacher_bytes=2e4),
        optimizer=OptimizerConfig(weight_decay=0.01, eps=1e-4),  # Adam takes a full step on the rounding of a gradient that is zero
        parallel=ParallelConfig(**parallel),
        stages=(
            StageConfig(name="short", sequence_length=SEQUENCE, global_batch_size=BATCH, micro_batch_size=MICRO, steps=4 * STEPS, lr=1e-3),
        ),
    )
    return replace(recipe, **changes)


def widths(plan: SubmodelPlan, shape: ModelShape) -> dict[str, int | tuple[int, ...]]:
    """A plan as a recipe pins it."""
    return {axis.value: width for axis, width in plan.widths} | {"layers": shape.num_layers - len(plan.dropped_layers)}


def rows(vocab: int, parallel: ParallelContext) -> Iterator[MicroBatch]:
    """This replica's microbatches: several documents of awkward lengths in each, some tokens without a loss."""
    for step in range(STEPS):
        for first in range(parallel.data_rank * MICRO, BATCH, parallel.data * MICRO):
            yield pack_samples([sample(vocab, step * BATCH + first + n) for n in range(MICRO)], first)


def sample(vocab: int, number: int) -> dict[str, torch.Tensor]:
    """One sample of documents of 5, 11 and the rest of its tokens (in an order of its own)."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, vocab, (SEQUENCE + 1,), generator=draw)
    lengths = [5, 11, SEQUENCE - 16][number % 3 :] + [5, 11, SEQUENCE - 16][: number % 3]
    mask = (torch.rand(SEQUENCE, generator=draw) > 0.2).float()
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": positions}


@dataclass
class Outcome:
    """Of each step: metrics; gradients and weights by full name; gradients and weights of the router, [] without one."""

    metrics: list[StepMetrics]
    gradients: list[dict[str, torch.Tensor]]
    weights: list[dict[str, torch.Tensor]]
    router: list[dict[str, torch.Tensor]]


def outcome(rank: int, world: int, recipe: Recipe) -> Outcome | None:
    """Train two steps on this rank; what came out, on rank 0."""
    parallel = start_parallel(recipe)
    try:
        run = Run(recipe, parallel)
        run.resume()
        run.become_elastic(parent_checkpoint(run.recipe))
        return two_steps(run)
    finally:
        parallel.destroy()


def two_steps(run: Run) -> Outcome | None:
    """Take two steps from wherever the run stands; the router is moved off its start."""
    found, decider = Outcome([], [], [], []), run.decider
    assert decider is not None
    router = {} if decider.router is None else dict(decider.router.named_parameters())
    for name, parameter in router.items():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=derived_generator("moved", name))
    update = run.optimizer.step

    def recorded() -> Any:
        found.gradients.append(gathered(run, "main_grad"))
        return update()

    run.optimizer.step = recorded
    data = rows(run.recipe.model.vocab_size, run.parallel)
    for _ in range(STEPS):
        found.metrics.append(train_step(run, data))
        run.step += 1
        found.weights.append(gathered(run, "weight"))
        gradients = {f"{name}.grad": p.grad.clone() for name, p in router.items() if p.grad is not None}
        found.router.append(gradients | {name: p.detach().clone() for name, p in router.items()})
    return found if run.parallel.is_main else None


def gathered(run: Run, what: str) -> dict[str, torch.Tensor]:
    """Full tensors of the whole model, weights or reduced gradients. Every copy that any rank has must be the same."""
    if what == "main_grad":
        for chunk in run.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for bucket in buffer.buckets:  # a reduce-scatter left each replica its share of the gradients
                    shares = list(bucket.grad_data.chunk(buffer.data_parallel_group.size()))
                    dist.all_gather(shares, shares[buffer.data_parallel_group.rank()].clone(), group=buffer.data_parallel_group)
    mine = [shard for part in run.parts for shard in shards(part)]
    if what == "main_grad":
        mine = [replace(shard, tensor=shard.tensor.main_grad) for shard in mine if hasattr(shard.tensor, "main_grad")]
    plain = [replace(shard, tensor=shard.tensor.detach().clone()) for shard in mine]
    everyone: list[list[Shard]] = [[]] * run.parallel.world_size
    dist.all_gather_object(everyone, plain)
    pieces: dict[str, dict[int, Shard]] = {}
    for shard in (shard for rank in everyone for shard in rank):
        known = pieces.setdefault(shard.name, {}).setdefault(shard.rank, shard)
        torch.testing.assert_close(
            shard.tensor, known.tensor, rtol=1e-5, atol=1e-7, msg=lambda text, n=shard.name: f"{n}: copies differ: {text}"
        )
    return {
        name: found[0].join([found[rank].tensor for rank in range(found[0].size if found[0].dim is not None else 1)])
        for name, found in pieces.items()
    }
