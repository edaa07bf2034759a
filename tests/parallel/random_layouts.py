"""Random recipes on random layouts, and one rank of such a layout put to work without the others (torch's fake process group)."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from megatron_elastic.axes import ElasticSpace
from megatron_elastic.checkpoint import save_checkpoint
from megatron_elastic.config import decode_recipe, to_plain
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.errors import ElasticError
from megatron_elastic.models.build import build_model
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.preflight import recipe_problems
from megatron_elastic.recipe import DistillConfig, ElasticConfig, ParallelConfig, PinnedBudget, Recipe, RouterConfig, StageConfig
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import AxisChoices
from megatron_elastic.testing.tiny import randomize_
from megatron_elastic.train.data import MicroBatch, pack_samples, share_of_context
from megatron_elastic.train.forward import batch_loss, hidden_states, loss_terms
from megatron_elastic.train.loop import start_parallel
from megatron_elastic.train.run import Run, parent_checkpoint
from megatron_elastic.train.step import train_step
from tests.elastic.family import narrowed, staggered
from tests.shape_strategies import shapes, spaces_of

MOST_RANKS = 64
"""Every rank forms the groups of all others, which takes long in large worlds and proves nothing more."""


@dataclass(frozen=True)
class Case:
    """A recipe, the number of processes it is started on, and the one that is looked at."""

    recipe: Recipe
    world: int
    rank: int

    def __str__(self) -> str:
        plain = {key: value for key, value in to_plain(self.recipe).items() if key in ("model", "elastic", "parallel", "stages")}
        return f"rank {self.rank} of {self.world}: {plain}"


@st.composite
def layouts(draw: st.DrawFn) -> ParallelConfig:
    """Any layout of at most MOST_RANKS ranks; along most dimensions one."""
    parallel = ParallelConfig(
        tensor=draw(st.sampled_from((1, 1, 2, 2, 3, 4, 8))),
        sequence_parallel=draw(st.sampled_from((None, None, False))),
        pipeline=draw(st.sampled_from((1, 1, 1, 2, 3, 4))),
        virtual_pipeline=draw(st.sampled_from((1, 1, 2))),
        expert=draw(st.sampled_from((1, 1, 2, 4, 8))),
        expert_tensor=draw(st.sampled_from((None, None, None, 1, 2, 4))),
        context=draw(st.sampled_from((1, 1, 2, 4))),
    )
    assume(least_ranks(parallel) <= MOST_RANKS)
    return parallel


def least_ranks(parallel: ParallelConfig) -> int:
    """The fewest processes a layout fits on."""
    return parallel.pipeline * math.lcm(parallel.tensor * parallel.context, parallel.expert * parallel.sizes.expert_tensor)


@st.composite
def fitted(draw: st.DrawFn, shape: ModelShape, parallel: ParallelConfig) -> ModelShape:
    """`shape`, where most sizes that the layout divides are made divisible: sizes drawn alone hardly ever are."""
    tensor, either = parallel.tensor, math.lcm(parallel.tensor, parallel.sizes.expert_tensor)

    def times(unit: int) -> int:
        return draw(st.sampled_from((*(unit,) * 11, 1)))

    parts, attention, mlp, moe, mamba = parallel.pipeline * parallel.virtual_pipeline, shape.attention, shape.mlp, shape.moe, shape.mamba
    pattern, rows = shape.layer_pattern, shape.vocab_rows
    if times(2) == 2:
        length = parts * draw(st.integers(1, 2))
        pattern = (pattern * length)[:length]
    if attention is not None:
        # kept under the ranks, or a multiple of them: with one KV group for several ranks megatron-core takes another way
        kv = draw(st.sampled_from((attention.kv_groups * tensor, attention.kv_groups, 1, 2)))
        attention = replace(attention, kv_groups=kv, heads=math.lcm(kv, times(tensor)) * draw(st.integers(1, 4)))
    if moe is not None:
        shared = moe.shared_ffn and moe.shared_ffn * times(either)
        moe = replace(moe, experts=moe.experts * times(parallel.expert), ffn=moe.ffn * times(either), shared_ffn=shared)
    if mamba is not None:
        groups = mamba.groups * times(tensor)
        mamba = replace(mamba, groups=groups, heads=groups * times(parallel.context) * draw(st.integers(1, 3)))
    return replace(
        shape,
        layer_pattern=pattern,
        padded_vocab_size=-(-rows // tensor) * tensor if times(2) == 2 else shape.padded_vocab_size,
        attention=attention,
        mlp=mlp and replace(mlp, ffn=mlp.ffn * times(either)),
        moe=moe,
        mamba=mamba,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A recipe of any kind with one elastic stage of awkward lengths, on any layout, whether it fits or not."""
    shape, parallel = draw(shapes()), draw(layouts())
    if draw(st.sampled_from((*(True,) * 9, False))):  # or most would be refused for the same few reasons
        parallel = _plausible(parallel, experts=shape.has("moe"))
    shape = draw(fitted(shape, parallel))
    groups = draw(st.sampled_from((math.lcm(parallel.tensor, parallel.sizes.expert_tensor),) * 5 + (None,)))
    if groups and any(width % groups for width in _neurons(shape)):
        groups = None
    space = draw(spaces_of(shape, groups, parallel.expert))
    micro = draw(st.integers(1, 3))
    shards = parallel.token_shards * 2 * parallel.context
    length = draw(st.sampled_from((shards, shards, shards, 1))) * draw(st.integers(1, 5))
    world = least_ranks(parallel) * draw(st.sampled_from((1, 1, 1, 2))) + draw(st.sampled_from((*(0,) * 19, 1)))
    return Case(recipe_of(shape, space, parallel, length, micro), world, draw(st.integers(0, world - 1)))


def recipe_of(shape: ModelShape, space: ElasticSpace, parallel: ParallelConfig, length: int, micro: int) -> Recipe:
    """A recipe of one elastic stage with the parent and the smallest plan as budgets. length: tokens of a sample; micro: samples of a microbatch."""
    decision = micro * parallel.replicas_together
    return Recipe(
        format_version=1,
        model=shape,
        elastic=ElasticConfig(
            axes={spec.axis.value: AxisChoices(choices=spec.choices, per_layer=spec.per_layer) for spec in space.axes},
            budgets={"full": 1.0, "small": PinnedBudget(plan={spec.axis.value: spec.choices[-1] for spec in space.axes})},
            shard_groups=space.shard_groups,
            drop_order=space.drop_order,
        ),
        router=RouterConfig(samples_per_decision=decision),
        distill=DistillConfig(ce_weight=0.5),  # the parent's own plan has no other loss
        parallel=parallel,
        stages=(StageConfig(name="one", sequence_length=length, global_batch_size=4 * decision, micro_batch_size=micro, steps=2, lr=1e-3),),
    )


def _neurons(shape: ModelShape) -> list[int]:
    widths = (shape.mlp and shape.mlp.ffn, shape.moe and shape.moe.ffn, shape.moe and shape.moe.shared_ffn)
    return [width for width in widths if isinstance(width, int)]


def _plausible(parallel: ParallelConfig, *, experts: bool) -> ParallelConfig:
    """`parallel` without what makes no sense whatever the sizes are."""
    if experts:
        parallel = replace(parallel, sequence_parallel=None, expert_tensor=None if parallel.expert == 1 else parallel.expert_tensor)
    else:
        parallel = replace(parallel, expert=1, expert_tensor=None)
    return replace(parallel, virtual_pipeline=1) if parallel.pipeline == 1 else parallel


def refusal(case: Case) -> str | None:
    """What `validate` and the start of a run on that many processes say against a recipe; None when it may run."""
    try:
        recipe = decode_recipe(to_plain(case.recipe), "recipe")
        problems = recipe_problems(recipe)
    except ElasticError as error:
        return str(error)
    problems += recipe.parallel.sizes.process_problems(case.world)
    return problems[0] if problems else None


def row(recipe: Recipe, first: int = 0) -> MicroBatch:
    """The whole row of the microbatch that begins at sample `first`, of one or two documents a sample."""
    stage, samples = recipe.stages[0], []
    for number in range(first, first + stage.micro_batch_size):
        draw, length = torch.Generator().manual_seed(number), stage.sequence_length
        cut = min(1 + number, length)
        positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])
        tokens = torch.randint(0, recipe.model.vocab_size, (length + 1,), generator=draw)
        samples.append({"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(length), "position_ids": positions})
    return pack_samples(samples, first)


def work(recipe: Recipe, parallel: ParallelContext) -> None:
    """Build all parts of this rank, make them elastic, and run each forward and backward under two plans in both modes."""
    shape, space = recipe.model, recipe.space
    assert space is not None
    parts: list[Any] = [build_model(shape, parallel, part=part) for part in range(parallel.virtual_pipeline)]
    handle = elasticize(parts, space, parallel, shape)
    batch = share_of_context(row(recipe), parallel)
    for plan in (narrowed(space, None), staggered(space, None)):
        for mode in ("slice", "mask"):
            with handle.use(plan, mode):
                for number, part in enumerate(parts):
                    forward_backward(recipe, parallel, part, number, batch)


def forward_backward(recipe: Recipe, parallel: ParallelContext, part: Any, number: int, batch: MicroBatch) -> None:
    """One part of the model on a microbatch; what it would receive from the part before is made up."""
    hidden = recipe.model.hidden_size
    tokens = batch.tokens.numel() // (parallel.tensor if parallel.sequence_parallel else 1)
    if not parallel.first_part(number):
        part.set_input_tensor([torch.randn(tokens, 1, hidden).requires_grad_()])
    output = hidden_states(part, batch)
    if parallel.last_part(number):
        terms = loss_terms(recipe.model.vocab_size, recipe.distill, elastic=False)
        loss = batch_loss(part, output, batch, terms, None, None, parallel)
        loss.total.backward()
    else:
        assert output.shape == (tokens, 1, hidden)
        output.sum().backward()


@dataclass
class Summary:
    """What became of the cases: reasons of those that were refused; those built; failures, smallest first."""

    refused: Counter[str]
    built: list[Case]
    failures: list[str]
    tried: int = 0
    """Different layouts and kinds of model."""


def _filled(output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    output.fill_(0.5)


def try_layouts(examples: int) -> Summary:
    """Random cases, one rank each, all in this process; torch.distributed must not run in it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    summary, failed, seen = Summary(Counter(), [], []), [], set[str]()

    @settings(
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(cases())
    def check(case: Case) -> None:
        kind = str((case.recipe.parallel, case.recipe.model.layer_pattern))
        if kind in seen:
            return  # hypothesis likes to change little
        seen.add(kind)
        reason = refusal(case)
        if reason is not None:
            summary.refused[reason] += 1
            return
        # The fake group refuses to deal out an empty tensor, which a rank without tokens for any expert has.
        dist.init_process_group("fake", rank=case.rank, world_size=case.world, store=FakeStore())
        try:
            parallel = start_parallel(case.recipe)
            try:
                with mock.patch("torch.distributed.all_to_all_single", _filled):
                    work(case.recipe, parallel)
            finally:
                parallel.destroy()
            summary.built.append(case)
        except Exception:  # noqa: BLE001 - anything that is not a refusal is what is looked for
            failed.append((len(str(case)), f"{case}\n{traceback.format_exc()}"))
        finally:
            dist.destroy_process_group()

    check()
    summary.tried = len(seen)
    summary.failures = [text for _, text in sorted(failed)]
    return summary


def steps(rank: int, world: int, recipes: list[Recipe]) -> list[tuple[float, float]]:
    """One training step of each recipe from its parent, on gloo ranks: (loss, gradient norm) of each."""
    found = []
    for recipe in recipes:
        parallel = start_parallel(recipe)
        try:
            run = Run(recipe, parallel)
            run.resume()
            run.become_elastic(parent_checkpoint(run.recipe))
            micro, together = recipe.stages[0].micro_batch_size, recipe.stages[0].micro_batch_size * parallel.data
            mine = range(parallel.data_rank * micro, recipe.stages[0].global_batch_size, together)
            metrics = train_step(run, iter([row(recipe, first) for first in mine]))
            found.append((metrics.loss, metrics.grad_norm))
        finally:
            parallel.destroy()
    return found


def save_parent(recipe: Recipe, directory: Path, parallel: ParallelContext) -> Recipe:
    """The recipe with a checkpoint of its parent, weights moved off their start, written by one process."""
    model = build_model(recipe.model, parallel)
    randomize_(model, seed=5)
    save_checkpoint(directory, model=model, shape=recipe.model, parallel=parallel)
    return replace(recipe, parent=str(directory), run_dir=str(directory / "run"))
