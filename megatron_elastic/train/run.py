"""A run: the model, what it learns from, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_elastic.checkpoint import (
    PendingSave,
    find_model_checkpoint,
    load_checkpoint,
    load_latest,
    open_checkpoint,
    prune,
    save_checkpoint,
)
from megatron_elastic.checkpoint.files import CHECKPOINTS
from megatron_elastic.config import to_plain
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.errors import CheckpointError, ConfigError
from megatron_elastic.importance.reap import REAPED
from megatron_elastic.importance.sort import SORTED
from megatron_elastic.models.build import build_model
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.preemption import StopSignal
from megatron_elastic.recipe import Recipe, StageConfig
from megatron_elastic.recipe_files import flatten
from megatron_elastic.train.data import Datasets, build_datasets, open_data
from megatron_elastic.train.decide import Decider
from megatron_elastic.train.faults import during
from megatron_elastic.watchdog import Watchdog, write_heartbeat

EXPERT_BIAS_RATE = 1e-3
"""How far megatron-core moves the selection bias of the experts in a step of the parent's training."""
PARENT_DATA = "parent_data"
"""Key of a checkpoint's provenance: what its parent had been trained on before."""
_OF_THE_PARENT = ("parent", "license", SORTED, REAPED, PARENT_DATA)
"""Keys of a parent's provenance that are true of what is trained from it."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Who looks after a run while it goes on: what tells it to stop, and what ends it when it hangs."""

    stop: StopSignal
    watchdog: Watchdog


class Run:
    """Everything that lasts longer than a step.

    parts: of the model on this rank (one unless the pipeline is interleaved); chunks: the same in megatron's DDP; stage_index, step: the
    next step to take; unevaluated: whether the evaluation after the last step is still to be made; handle, teacher, decider: set once the
    model is elastic. watch: None for a run that nobody stops.
    """

    def __init__(self, recipe: Recipe, parallel: ParallelContext, watch: Watch | None = None) -> None:
        self.recipe, self.parallel, self.directory = recipe, parallel, Path(recipe.run_dir)
        self._watch = watch
        self.parts: list[Any] = [
            build_model(
                recipe.model,
                parallel,
                seed=recipe.seed,
                params_dtype=parameter_dtype(recipe),
                expert_bias_rate=EXPERT_BIAS_RATE,
                recompute=recipe.parallel.recompute,
                part=part,
            )
            for part in range(parallel.virtual_pipeline)
        ]
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.chunks = [DistributedDataParallel(part.config, ddp, part) for part in self.parts]
        self.optimizer = build_optimizer(recipe, self.chunks)
        self.stage_index, self.step, self.unevaluated = 0, 0, False
        self.handle: ElasticHandle | None = None
        self.teacher: Any = None
        self.decider: Decider | None = None
        self._datasets: tuple[str, Datasets] | None = None
        self._saving: PendingSave | None = None
        self._saved = self._position
        self._origin: Mapping[str, Any] = {}

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints are."""
        return self.directory / CHECKPOINTS

    @property
    def stage(self) -> StageConfig:
        """The stage of the next step."""
        return self.recipe.stages[self.stage_index]

    @property
    def _position(self) -> tuple[int, int, bool]:
        """Where the run stands: what a checkpoint says of it."""
        return self.stage_index, self.step, self.unevaluated

    def progressed(self) -> None:
        """Say that the run goes on; stop here, on all ranks alike, if any was told to. A collective of all processes. Raises StoppedError.

        Called wherever a run can stop: before a step, and between the windows of an evaluation.
        """
        if self._watch is None:
            return
        self._watch.watchdog.feed()
        if self.parallel.is_main:
            write_heartbeat(self.directory, self.stage.name, self.step, tokens_done(self, self.step))
        self._watch.stop.check(self.parallel, f"start again to go on from stage {self.stage.name}, step {self.step}")

    def _alive(self) -> None:
        """The same on one rank alone, for what may take long and cannot be left."""
        if self._watch is not None:
            self._watch.watchdog.feed()

    @property
    def elastic_progress(self) -> float:
        """Share of all elastic steps that is done: what temperature and logit scale run over."""
        stages = self.recipe.stages
        total = sum(stage.total_steps for stage in stages if stage.elastic)
        done = sum(stage.total_steps for stage in stages[: self.stage_index] if stage.elastic) + (self.step if self.stage.elastic else 0)
        return done / max(total - 1, 1) if done < total else 1.0

    def datasets(self) -> Datasets:
        """The data of the current stage."""
        stage = self.stage
        if self._datasets is None or self._datasets[0] != stage.name:
            assert self.recipe.data is not None
            info = open_data(self.recipe.data.path, self.recipe.model.vocab_size)
            data = build_datasets(
                info,
                sequence_length=stage.sequence_length,
                train_samples=stage.total_steps * stage.global_batch_size,
                valid_samples=self.recipe.eval.samples,
                seed=self.recipe.seed,
                cache_dir=self.directory / "data_cache",
                parallel=self.parallel,
            )
            self._datasets = (stage.name, data)
        return self._datasets[1]

    def resume(self) -> str:
        """Continue from the latest checkpoint, else start from the recipe's parent, else from fresh weights. Says which."""
        found = load_latest(self.checkpoints, model=self.parts, parallel=self.parallel, shape=self.recipe.model, optimizer=self.optimizer)
        if found is not None:
            state, self._origin = found.state, _of_the_parent(open_checkpoint(found.path).provenance)
            self.stage_index, self.step = state["stage_index"], state["step"]
            self.unevaluated = state.get("unevaluated", False)  # a checkpoint from before a run could stop in an evaluation
            self._saved = self._position
            self._check_recipe(found.path, state["recipe"])
            if state["elastic"]:
                self._resume_elastic(state)
            where = (
                f"resumed from {found.path} (stage {self.stage.name}, step {self.step})"
                if self.stage_index < len(self.recipe.stages)
                else "finished already"
            )
            return "\n".join([*found.notes, where])
        if self.recipe.parent is not None:
            parent = find_model_checkpoint(Path(self.recipe.parent))
            load_checkpoint(parent, model=self.parts, parallel=self.parallel, shape=self.recipe.model)
            provenance = open_checkpoint(parent).provenance
            self._origin = {**_of_the_parent(provenance), PARENT_DATA: provenance.get("data")}
            self.optimizer.reload_model_params()
            return f"started from the parent {self.recipe.parent}"
        if self.recipe.stages[0].elastic:
            raise ConfigError(
                f"stages[0] ({self.recipe.stages[0].name}) is elastic but there is no parent; set parent: PATH or begin with a stage with elastic: false"
            )
        return "started from fresh weights"

    def _resume_elastic(self, state: dict[str, Any]) -> None:
        self.become_elastic(parent_checkpoint(self.recipe))
        assert self.decider is not None
        if self.decider.router is not None and self.decider.optimizer is not None:
            self.decider.router.load_state_dict(state["router"])
            self.decider.optimizer.load_state_dict(state["router_optimizer"])

    def _check_recipe(self, checkpoint: Path, stored: dict[str, Any]) -> None:
        """Raise CheckpointError when the run was made by a recipe that learns something else: a mixture of two runs is neither."""
        now = learned_by(self.recipe)
        different = [key for key in {**stored, **now} if stored.get(key) != now.get(key)]
        if different:
            changes = ", ".join(f"{key} was {stored.get(key)!r} and is {now.get(key)!r}" for key in different[:4])
            more = f" and {len(different) - 4} more" if len(different) > 4 else ""
            raise CheckpointError(
                f"{str(checkpoint)!r} was made by another recipe: {changes}{more}; choose another run_dir or delete this one"
            )

    def become_elastic(self, parent: Path) -> None:
        """Load the frozen parent, make the model elastic and set up its router. Does nothing the second time."""
        if self.handle is not None:
            return
        space = self.recipe.space
        assert space is not None
        # Forward only, so that cutting its share of the layers into parts would gain nothing.
        layout = replace(self.parallel, virtual_pipeline=1)
        self.teacher = build_model(self.recipe.model, layout, seed=self.recipe.seed, params_dtype=parameter_dtype(self.recipe))
        load_checkpoint(parent, model=self.teacher, parallel=self.parallel, shape=self.recipe.model)
        self.teacher.requires_grad_(False)
        self.teacher.eval()
        assert self.recipe.elastic is not None
        rate = self.recipe.elastic.expert_bias_rate
        self.handle = elasticize(self.parts, space, self.parallel, self.recipe.model, expert_bias_rate=rate)
        self.decider = Decider(self.recipe, space, self.parallel.device)

    def save(self, *, stage_end: bool) -> None:
        """Save the current position, after the save before it is finished; the end of a stage is kept for good, and waited for."""
        self._alive()
        self.finish_save(block=True)
        self._saved, decider = self._position, self.decider
        name = f"stage-{self.recipe.stages[self.stage_index - 1].name}" if stage_end else f"step-{self.stage.name}-{self.step:07d}"
        router = decider.router if decider else None
        optimizer = decider.optimizer if decider else None
        state = {
            "stage_index": self.stage_index,
            "step": self.step,
            "unevaluated": self.unevaluated,
            "elastic": decider is not None,
            "recipe": learned_by(self.recipe),
            "router": None if router is None else router.state_dict(),
            "router_optimizer": None if optimizer is None else optimizer.state_dict(),
        }
        with during(f"the save of {name}"):
            self._saving = save_checkpoint(
                self.checkpoints / name,
                model=self.parts,
                optimizer=self.optimizer,
                state=state,
                parallel=self.parallel,
                shape=self.recipe.model,
                family=(self.recipe.space, decider.family().plans if decider else {}),
                provenance=self._provenance(),
                asynchronous=self.recipe.checkpoint.asynchronous and not stage_end,
            )
        self.finish_save(block=False)
        self._alive()

    def save_rest(self) -> None:
        """Save what no checkpoint holds yet, and wait until all is on the disk; before the run stops. Returns on all ranks at the same moment.

        A stage that has not taken a step has nothing to save: the stage before it was saved at its end.
        """
        if self.step > 0 and self._position != self._saved:
            self.save(stage_end=False)
        self.finish_save(block=True)
        dist.barrier(group=self.parallel.world)  # rank 0 deletes old checkpoints while the others are done

    def _provenance(self) -> dict[str, Any]:
        """Where the model comes from: what its parent says of itself (its name, its licence, how it is sorted), and what it has been trained on."""
        if self.recipe.data is None:  # whoever calls the step themselves brings their own rows
            return dict(self._origin)
        steps = {stage.name: stage.total_steps for stage in self.recipe.stages[: self.stage_index]}
        if self.step:
            steps[self.stage.name] = self.step
        sizes = {stage.name: stage.global_batch_size * stage.sequence_length for stage in self.recipe.stages}
        stages = ", ".join(f"{name}: {count * sizes[name]:,} tokens" for name, count in steps.items())
        data = f"{Path(self.recipe.data.path).name} ({stages or 'no step yet'})"  # where the text lies is nobody else's business
        before = self._origin.get(PARENT_DATA)
        return {**self._origin, "data": f"{before}; then {data}" if before else data}

    def finish_save(self, *, block: bool) -> None:
        """Publish the checkpoint that is being written, once every rank has written, and delete the oldest. Every rank calls it.

        block: wait for it. Raises CheckpointError on every rank when one could not write.
        """
        if self._saving is None:
            return
        with during(f"the save of {self._saving.directory.name}"):
            if not self._saving.finish(block=block):
                return
        self._saving = None
        if self.parallel.is_main:
            prune(self.checkpoints, self.recipe.checkpoint.keep_last, [f"stage-{stage.name}" for stage in self.recipe.stages])


def tokens_done(run: Run, step: int) -> int:
    """Tokens of the whole run up to `step` of the current stage."""
    done = sum(s.total_steps * s.global_batch_size * s.sequence_length for s in run.recipe.stages[: run.stage_index])
    return done + step * run.stage.global_batch_size * run.stage.sequence_length


def learned_by(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe decides what is learned, as dotted keys: all but where it is written, shown and laid out."""
    parts = ("model", "precision", "seed", "elastic", "router", "distill", "optimizer", "stages")
    plain = to_plain(recipe)
    return flatten({part: plain[part] for part in parts})


def parameter_dtype(recipe: Recipe) -> torch.dtype:
    """The type of parameters and activations. The few that megatron-core makes in fp32 (A_log, D, the experts' selection bias) stay so.

    Its Float16Module is not used: it would cast those too, and turn the model's output into fp32 before the loss can do that in chunks.
    """
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.precision]


def build_optimizer(recipe: Recipe, chunks: list[DistributedDataParallel]) -> Any:
    """megatron-core's distributed AdamW over DDP chunks, with fp32 master weights; learning rates are set every step."""
    settings = recipe.optimizer
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        use_distributed_optimizer=True,
        bf16=recipe.precision == "bf16",
        params_dtype=parameter_dtype(recipe),
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def _of_the_parent(provenance: Mapping[str, Any]) -> dict[str, Any]:
    return {key: provenance[key] for key in _OF_THE_PARENT if key in provenance}


def parent_checkpoint(recipe: Recipe) -> Path:
    """The checkpoint of a recipe's parent: the end of the stage that trains it, else the recipe's `parent`. Raises CheckpointError or ConfigError."""
    trained = [stage.name for stage in recipe.stages if not stage.elastic]
    if trained:
        path = Path(recipe.run_dir) / CHECKPOINTS / f"stage-{trained[-1]}"
        if not path.is_dir():
            raise CheckpointError(f"the parent's checkpoint {path} is not there; train stage {trained[-1]!r} first or set parent: PATH")
        return path
    if recipe.parent is None:
        raise ConfigError("the recipe has no parent; set parent: PATH or add a stage with elastic: false")
    return find_model_checkpoint(Path(recipe.parent))
