"""A run: the model, what it learns from, and where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_elastic.checkpoint import find_model_checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from megatron_elastic.config import to_plain
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.errors import CheckpointError, ConfigError
from megatron_elastic.models.build import build_model
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.recipe import Recipe, StageConfig
from megatron_elastic.recipe_files import flatten
from megatron_elastic.train.data import Datasets, build_datasets, open_data
from megatron_elastic.train.decide import Decider

EXPERT_BIAS_RATE = 1e-3
"""How far megatron-core moves the selection bias of the experts in a step of the parent's training."""


class Run:
    """Everything that lasts longer than a step.

    model: this rank's part of the model; chunk: the same in megatron's DDP; stage_index, step: the next step to take;
    handle, teacher, decider: set once the model is elastic.
    """

    def __init__(self, recipe: Recipe, parallel: ParallelContext) -> None:
        self.recipe, self.parallel, self.directory = recipe, parallel, Path(recipe.run_dir)
        self.model: Any = build_model(
            recipe.model, parallel, seed=recipe.seed, params_dtype=parameter_dtype(recipe), expert_bias_rate=EXPERT_BIAS_RATE
        )
        config = self.model.config
        config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.chunk = DistributedDataParallel(config, ddp, self.model)
        self.optimizer = build_optimizer(recipe, self.chunk)
        config.grad_scale_func = self.optimizer.scale_loss
        self.stage_index, self.step = 0, 0
        self.handle: ElasticHandle | None = None
        self.teacher: Any = None
        self.decider: Decider | None = None
        self._datasets: tuple[str, Datasets] | None = None

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints are."""
        return self.directory / "checkpoints"

    @property
    def stage(self) -> StageConfig:
        """The stage of the next step."""
        return self.recipe.stages[self.stage_index]

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
        latest = latest_checkpoint(self.checkpoints)
        if latest is not None:
            state = load_checkpoint(latest, model=self.model, parallel=self.parallel, shape=self.recipe.model, optimizer=self.optimizer)
            self.stage_index, self.step = state["stage_index"], state["step"]
            self._check_recipe(latest, state["recipe"])
            if state["elastic"]:
                self._resume_elastic(state)
            return (
                f"resumed from {latest} (stage {self.stage.name}, step {self.step})"
                if self.stage_index < len(self.recipe.stages)
                else "finished already"
            )
        if self.recipe.parent is not None:
            load_checkpoint(
                find_model_checkpoint(Path(self.recipe.parent)), model=self.model, parallel=self.parallel, shape=self.recipe.model
            )
            self.optimizer.reload_model_params()
            return f"started from the parent {self.recipe.parent}"
        if self.recipe.stages[0].elastic:
            raise ConfigError(
                f"stages[0] ({self.recipe.stages[0].name}) is elastic but there is no parent; set parent: PATH or begin with a stage with elastic: false"
            )
        return "started from fresh weights"

    def _resume_elastic(self, state: dict[str, Any]) -> None:
        self.become_elastic(self.parent_checkpoint())
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

    def parent_checkpoint(self) -> Path:
        """The checkpoint of the frozen parent: the end of the stage that trained it, or the recipe's. Raises CheckpointError."""
        trained = [stage.name for stage in self.recipe.stages if not stage.elastic]
        if trained:
            path = self.checkpoints / f"stage-{trained[-1]}"
            if not path.is_dir():
                raise CheckpointError(f"the parent's checkpoint {path} is gone; train stage {trained[-1]!r} again or set parent: PATH")
            return path
        assert self.recipe.parent is not None
        return find_model_checkpoint(Path(self.recipe.parent))

    def become_elastic(self, parent: Path) -> None:
        """Load the frozen parent, make the model elastic and set up its router. Does nothing the second time."""
        if self.handle is not None:
            return
        space = self.recipe.space
        assert space is not None
        self.teacher = build_model(self.recipe.model, self.parallel, seed=self.recipe.seed, params_dtype=parameter_dtype(self.recipe))
        load_checkpoint(parent, model=self.teacher, parallel=self.parallel, shape=self.recipe.model)
        self.teacher.requires_grad_(False)
        self.teacher.eval()
        assert self.recipe.elastic is not None
        rate = self.recipe.elastic.expert_bias_rate
        self.handle = elasticize(self.model, space, self.parallel, self.recipe.model, expert_bias_rate=rate)
        self.decider = Decider(self.recipe, space)

    def save(self, *, stage_end: bool) -> Path:
        """Write a checkpoint of the current position; the end of a stage is kept for good."""
        decider = self.decider
        name = f"stage-{self.recipe.stages[self.stage_index - 1].name}" if stage_end else f"step-{self.stage.name}-{self.step:07d}"
        router = decider.router if decider else None
        optimizer = decider.optimizer if decider else None
        state = {
            "stage_index": self.stage_index,
            "step": self.step,
            "elastic": decider is not None,
            "recipe": learned_by(self.recipe),
            "router": None if router is None else router.state_dict(),
            "router_optimizer": None if optimizer is None else optimizer.state_dict(),
        }
        return save_checkpoint(
            self.checkpoints / name,
            model=self.model,
            optimizer=self.optimizer,
            state=state,
            parallel=self.parallel,
            shape=self.recipe.model,
            space=self.recipe.space,
            plans=decider.family().plans if decider else {},
        )


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


def build_optimizer(recipe: Recipe, chunk: DistributedDataParallel) -> Any:
    """megatron-core's distributed AdamW over one DDP chunk, with fp32 master weights; learning rates are set every step."""
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
    return get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)
