"""The loop. It fits on a page: stages in order, steps in a stage, callbacks around them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import yaml

from megatron_elastic.checkpoint.files import ASSETS, RANKING_FILE, RECIPE_FILE, find_model_checkpoint, kept_with, open_checkpoint
from megatron_elastic.checkpoint.new_directory import publish_new, scratch_beside
from megatron_elastic.config import to_plain
from megatron_elastic.errors import CheckpointError, ConfigError, DataError, ElasticError, PlanError, StoppedError, raise_all
from megatron_elastic.fit import round_problems
from megatron_elastic.formats import FAMILY, VERSIONS
from megatron_elastic.importance.sort import unsorted_axes
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.preemption import StopSignal
from megatron_elastic.preflight import recipe_problems
from megatron_elastic.recipe import Recipe, StageConfig
from megatron_elastic.train.callbacks import Callback, Checkpointing, Evaluation, Progress, Record
from megatron_elastic.train.data import (
    DataInfo,
    MicroBatch,
    batches,
    check_held_out,
    check_replicas,
    fixed_batches,
    open_data,
    share_of_context,
)
from megatron_elastic.train.faults import during, ending
from megatron_elastic.train.forward import batch_loss, loss_terms
from megatron_elastic.train.run import Run, Watch, parent_checkpoint
from megatron_elastic.train.schedule import map_microbatches
from megatron_elastic.train.step import train_step
from megatron_elastic.watchdog import Watchdog

FAMILY_FILE = "family.json"
LARGEST_DIVERGENCE = 1e-6
"""Nats per token between a parent and the full budget of its family that still count as none."""


def train(recipe: Recipe, *, stage: str | None = None, steps: int | None = None, stop: StopSignal | None = None) -> None:
    """Run the stages of a recipe, from the latest checkpoint if there is one.

    stage: run up to the end of this stage only; steps: cut every stage to so many steps, to try a recipe out. stop: what tells this process
    to stop (`preemption.listening`); None: nothing does.
    Raises ElasticError kinds on every rank, before work starts, for anything that cannot run; RankLostError on the ranks that are left when
    one is lost; StoppedError on every rank when one was told to stop, and the run is saved.
    """
    recipe = cut_stages(recipe, steps)
    with during("the start"):
        parallel = start_parallel(recipe)
    with ending(parallel), Watchdog(recipe.log.hang_seconds, parallel.rank) as watchdog:
        with during("the start"):
            _start_together(recipe, stage, parallel)
            run = Run(recipe, parallel, Watch(stop or StopSignal(), watchdog))
            _say(run, run.resume())
            _keep_recipe(run)
            _take_over(run, ASSETS)  # the tokenizer and so on, for its members
            _take_over(run, RANKING_FILE)  # for its report
            record = Record(run)
        callbacks: list[Callback] = [Progress(record), Evaluation(record), Checkpointing()]
        last = [s.name for s in recipe.stages].index(stage) + 1 if stage else len(recipe.stages)
        try:
            while run.stage_index < last:
                with during(f"stage {run.stage.name}"):
                    run_stage(run, callbacks)
        except StoppedError:
            record.close()
            with during("the end"):
                run.save_rest()
            raise
        if run.decider is not None and run.stage_index == len(recipe.stages):
            finish(run, trial=steps is not None)


def start_parallel(recipe: Recipe) -> ParallelContext:
    """The layout that a recipe asks for, on the processes that were started."""
    layout = recipe.parallel
    return ParallelContext.initialize(
        layout.tensor,
        layout.pipeline,
        layout.expert,
        layout.expert_tensor,
        layout.context,
        virtual_pipeline=layout.virtual_pipeline,
        sequence_parallel=layout.sequence_parallel,
        dispatcher=layout.dispatcher,
        seed=recipe.seed,
    )


def run_stage(run: Run, callbacks: list[Callback]) -> None:
    """The rest of the current stage, then its checkpoint. Raises StoppedError on every rank when any was told to stop."""
    stage, parallel = run.stage, run.parallel
    run.progressed()
    if stage.elastic and run.handle is None:
        run.become_elastic(parent_checkpoint(run.recipe))
        check_teacher(run)
        assert run.handle is not None
        _say(run, run.handle.summary())
        if unsorted := unsorted_axes(run.handle.space, open_checkpoint(parent_checkpoint(run.recipe)).provenance):
            names = ", ".join(axis.value for axis in unsorted)
            _say(
                run,
                f"warning: the parent's {names} are not sorted by importance: members keep their first components, not the best; see `rank`, `sort`",
            )
    data = batches(
        run.datasets().train,
        global_batch_size=stage.global_batch_size,
        micro_batch_size=stage.micro_batch_size,
        data_rank=parallel.data_rank,
        data_size=parallel.data,
        consumed_samples=run.step * stage.global_batch_size,
    )
    for callback in callbacks:
        callback.on_stage_start(run)
    while run.step < stage.total_steps:
        run.progressed()
        with during(f"step {run.step} of stage {stage.name}"):
            metrics = train_step(run, data)
        run.step += 1
        for callback in callbacks:
            callback.on_step(run, metrics)
    for callback in callbacks:
        callback.on_stage_end(run)
    run.stage_index, run.step = run.stage_index + 1, 0
    run.save(stage_end=True)


def cut_stages(recipe: Recipe, steps: int | None) -> Recipe:
    """The recipe with every stage cut to at most `steps` steps (its warm-up with it). Raises ConfigError for fewer than one."""
    if steps is None:
        return recipe
    if steps < 1:
        raise ConfigError(f"--steps {steps} must be at least 1")
    stages = tuple(
        replace(
            stage, steps=min(steps, stage.total_steps), tokens=None, warmup_steps=min(stage.warmup_steps, min(steps, stage.total_steps) - 1)
        )
        for stage in recipe.stages
    )
    return replace(recipe, stages=stages)


def _start_together(recipe: Recipe, stage: str | None, parallel: ParallelContext) -> None:
    """Every check that needs no model, on every rank; all stop together."""
    error: ElasticError | None = None
    try:
        names = [s.name for s in recipe.stages]
        if not names:
            raise ConfigError("stages is empty: nothing to train; add a stage")
        if stage is not None and stage not in names:
            raise ConfigError(f"--stage {stage!r} is not a stage of the recipe; stages: {', '.join(names)}")
        if recipe.data is None:
            raise DataError("data is missing; set data.path to a directory written by `megatron-elastic data`")
        raise_all(ConfigError, recipe_problems(recipe), "recipe")
        _check_stages(recipe, open_data(recipe.data.path, recipe.model.vocab_size), parallel)
    except ElasticError as found:
        error = found
    parallel.raise_together(error)


def _check_stages(recipe: Recipe, info: DataInfo, parallel: ParallelContext) -> None:
    """Refuse now what would stop a later stage after the earlier ones have run. Raises ConfigError with every problem."""
    problems = []
    for stage in recipe.stages:
        checks = (
            partial(check_held_out, info, recipe.eval.samples, stage.sequence_length),
            partial(check_replicas, stage.global_batch_size, stage.micro_batch_size, parallel.data),
            partial(check_rounds, stage, parallel),
        )
        for check in checks:
            try:
                check()
            except ElasticError as error:
                problems.append(f"stages.{stage.name}: {error}")
    raise_all(ConfigError, problems, "recipe")


def check_rounds(stage: StageConfig, parallel: ParallelContext) -> None:
    """Raise ConfigError when the interleaved schedule cannot run a replica's microbatches in whole rounds of the pipeline."""
    for problem in round_problems(stage.global_batch_size, stage.micro_batch_size, parallel.data, parallel.sizes):
        raise ConfigError(problem)


def check_teacher(run: Run) -> None:
    """At the first elastic step the model is the parent: KL(parent || full budget) must be 0. Raises CheckpointError if it is not."""
    stage, parallel = run.stage, run.parallel
    row = fixed_batches(
        run.datasets().valid, 1, micro_batch_size=stage.micro_batch_size, data_rank=parallel.data_rank, data_size=parallel.data
    )[0]
    error = None
    for found in divergence_from_parent(run, share_of_context(row, parallel)):
        if not found <= LARGEST_DIVERGENCE:
            error = CheckpointError(
                f"KL(parent || full budget) is {found:.3g} per token at the start of stage {stage.name!r}, not 0: the parent's checkpoint is not this model's"
            )
    parallel.raise_together(error)  # one rank alone looks at text, the others at padding


def divergence_from_parent(run: Run, batch: MicroBatch) -> list[float]:
    """KL(parent || full budget), nats for each token of the stage's sequence; one number on the last stage, none elsewhere. A collective."""
    terms = replace(loss_terms(run.recipe.model.vocab_size, run.recipe.distill, elastic=True), kl_weight=1.0)
    parents = map_microbatches([run.teacher], run.parallel, [batch], lambda _, hidden: hidden)

    def divergence(_: MicroBatch, hidden: torch.Tensor) -> float:
        loss = batch_loss(run.parts[-1], hidden, batch, terms, run.teacher, parents[0], run.parallel)
        return float(loss.kl) / run.stage.sequence_length

    return map_microbatches(run.parts, run.parallel, [batch], divergence)


def _keep_recipe(run: Run) -> None:
    """The resolved recipe and the versions of what ran it, beside the results."""
    if not run.parallel.is_main:
        return
    run.directory.mkdir(parents=True, exist_ok=True)
    (run.directory / RECIPE_FILE).write_text(yaml.safe_dump(to_plain(run.recipe), sort_keys=False), encoding="utf-8")
    versions = VERSIONS.stamp | {name: version(name) for name in ("torch", "megatron-core", "numpy")}
    (run.directory / "versions.json").write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")


def _take_over(run: Run, name: str) -> None:
    """Copy what is kept under `name` with the parent (a directory or a file) into the run, once, so that the run can be used without the parent.

    Raises CheckpointError on every rank when it cannot be written.
    """
    error: ElasticError | None = None
    target = run.directory / name
    if run.parallel.is_main and run.recipe.parent is not None and not target.exists():
        try:
            found = kept_with(find_model_checkpoint(Path(run.recipe.parent)), name)
            if found is not None:
                with scratch_beside(target) as scratch:
                    copy = shutil.copytree if found.is_dir() else shutil.copyfile
                    publish_new(copy(found, scratch / name), target)
        except ElasticError as caught:
            error = caught
    run.parallel.raise_together(error)


def finish(run: Run, *, trial: bool) -> None:
    """Turn the router into the family's plans and write family.json. Raises PlanError when they are no family (a trial only says so)."""
    decider = run.decider
    assert decider is not None
    report = decider.family()
    if not trial:
        raise_all(PlanError, report.problems, "the router's plans are no family yet")
    if run.parallel.is_main:
        write_family(run.directory / FAMILY_FILE, report.plans, report.costs, decider.targets, run.recipe)
        for problem in report.problems:
            _say(run, f"warning: {problem}")


def write_family(path: Path, plans: dict, costs: dict[str, float], targets: dict[str, float], recipe: Recipe) -> None:
    """family.json: budget -> plan, its cost and its target."""
    assert recipe.elastic is not None
    budgets = {name: {"plan": plan.to_dict(), "cost": costs[name], "target": targets[name]} for name, plan in plans.items()}
    data = {**FAMILY.stamp, "cost": recipe.elastic.cost, "budgets": budgets}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _say(run: Run, text: str) -> None:
    if run.parallel.is_main:
        print(text, flush=True)  # noqa: T201 - progress for the user
