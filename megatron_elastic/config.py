"""Recipes: one YAML file says everything about a run. defaults <- YAML <- key=value from the command line.

Decoding is strict: an unknown key, a wrong type or a value out of range is an error that names the key, and all of them are
reported at once. Plain Python, no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import dacite

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.errors import ConfigError, ElasticError, PlanError, raise_all
from megatron_elastic.recipe_files import apply_overrides, key_problems, read_yaml
from megatron_elastic.shape import ModelShape, build_space

RECIPE_FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedBudget:
    """A budget whose plan is given; its target is the exact cost of that plan."""

    plan: Mapping[str, int]
    """Axis -> width, the parent's where an axis is not named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """What can shrink, and the sizes that are asked for."""

    axes: Mapping[str, tuple[int | float, ...]]
    """Axis -> choices from wide to narrow, the parent's width first; a fraction counts from the parent's."""
    budgets: Mapping[str, float | int | PinnedBudget]
    """Name -> target cost: up to 1 a fraction of the parent's, above 1 absolute; or a pinned plan. The first must be the parent (1.0)."""
    cost: Literal["total_params", "active_params", "flops", "memory"] = "active_params"
    """What a target is counted in."""
    shard_groups: int = 8
    """The largest tensor parallelism the family can be trained or served with."""
    expert_groups: int | None = None
    """The largest expert parallelism; null: the largest of 8, 4, 2, 1 that divides every choice."""
    drop_order: tuple[int, ...] = ()
    """Layers (from 0) in the order they are dropped when `layers` shrinks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """The network that chooses a size for each budget."""

    choice: Literal["learned", "uniform"] = "learned"
    """learned: trained with the model; uniform: frozen plans that shrink every axis by about the same fraction."""
    hidden: int = 256
    """Width of its hidden layer."""
    samples_per_decision: int = 8
    """Consecutive samples of the global batch that share one decision."""
    temperature: tuple[float, float] = (1.0, 0.05)
    """Gumbel-softmax temperature at the start and the end of the router's learning (geometric)."""
    logit_scale: tuple[float, float] = (1.0, 10.0)
    """Multiplies the logits, at the start and the end (linear)."""
    budget_weight: float = 1.0
    """Weight of |cost/target - 1| against the distillation loss."""
    tolerance: tuple[float, float] = (0.05, 0.02)
    """Relative deviation from a target without loss, at the start and the end; the end is what a plan must meet."""
    learn_share: float = 1.0
    """Share of the elastic steps in which the router learns; then its plans are fixed and trained in slice mode."""
    clip_grad: float = 1.0
    """Largest norm of the router's gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """The loss of elastic stages; a stage without elasticity trains on cross-entropy alone."""

    kl_weight: float = 1.0
    """Weight of the forward KL divergence from the frozen parent."""
    ce_weight: float = 0.0
    """Weight of the cross-entropy with the text."""
    temperature: float = 1.0
    """Softens both distributions; the divergence is multiplied by its square."""
    chunk_tokens: int = 1024
    """Tokens whose logits exist at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the text is."""

    path: str
    """A directory written by `megatron-elastic data`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW on megatron-core's distributed optimizer."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Largest norm of the model's gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How ranks are used; what is left over is data parallelism."""

    tensor: int = 1
    """Ranks that share every layer."""
    pipeline: int = 1
    """Ranks in a row that share the layers."""
    expert: int = 1
    """Ranks that share the experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """One stage of a run; stages run in order and the optimizer's moments carry over within elastic stages."""

    name: str
    """Its name in the log and on the command line."""
    elastic: bool = True
    """Whether the family is trained; false trains the parent alone."""
    sequence_length: int
    """Tokens of a sample."""
    global_batch_size: int
    """Samples of a step."""
    micro_batch_size: int
    """Samples computed together on one rank."""
    steps: int | None = None
    """Steps; either this or `tokens`."""
    tokens: int | None = None
    """Tokens; either this or `steps`."""
    lr: float
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end (cosine)."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    router_lr: float = 1e-2
    """Learning rate of the router, about a hundred times the model's."""
    budget_probs: Mapping[str, float] | None = None
    """Budget -> probability of being drawn; null: all alike."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole stage."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return -(-self.tokens // (self.global_batch_size * self.sequence_length))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the run is saved."""

    interval: int = 100
    """Steps between checkpoints; a stage's end is always saved."""
    keep: int = 2
    """Checkpoints that are kept beside the end of each stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Held-out loss of every budget during training."""

    interval: int = 50
    """Steps between evaluations."""
    samples: int = 32
    """Held-out samples, of the stage's sequence length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is written while training."""

    interval: int = 1
    """Steps between progress lines."""
    tensorboard: bool = True
    """Whether scalars are written for TensorBoard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A whole run."""

    format_version: int
    """Version of this format."""
    model: ModelShape
    """The parent."""
    parent: str | None = None
    """A checkpoint of the parent to start from (a run or a checkpoint directory); null: a stage with elastic: false trains it."""
    run_dir: str = "runs/default"
    """Where everything of the run is written."""
    precision: Literal["fp32"] = "fp32"
    """Arithmetic of the model."""
    seed: int = 1234
    """Seed of weights, data order and decisions."""
    elastic: ElasticConfig | None = None
    """The family; null when only a parent is trained."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """The router."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """The objective."""
    data: DataConfig | None = None
    """The text; null in recipes that are only planned."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The layout."""
    stages: tuple[StageConfig, ...] = ()
    """The stages in order."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging."""

    @property
    def space(self) -> ElasticSpace | None:
        """The elastic space, None without an `elastic` block. Raises ConfigError listing every problem."""
        if self.elastic is None:
            return None
        axes = {ElasticAxis(name): choices for name, choices in self.elastic.axes.items()}
        return build_space(
            self.model,
            axes,
            shard_groups=self.elastic.shard_groups,
            num_expert_groups=self.elastic.expert_groups,
            drop_order=self.elastic.drop_order,
        )

    def pinned_plans(self) -> dict[str, SubmodelPlan]:
        """Budget -> plan for the budgets that pin one, and the parent for the first budget."""
        space = self.space
        if self.elastic is None or space is None:
            return {}
        plans = {next(iter(self.elastic.budgets)): space.parent}
        for name, budget in self.elastic.budgets.items():
            if isinstance(budget, PinnedBudget):
                plans[name] = space.plan({ElasticAxis(axis): width for axis, width in budget.plan.items()})
        return plans


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file with overrides applied and everything checked. Raises ConfigError with every problem at once."""
    return decode_recipe(apply_overrides(read_yaml(path), overrides), str(path))


def decode_recipe(data: dict[str, Any], source: str) -> Recipe:
    """A checked recipe from plain data; `source` names it in errors."""
    if data.get("format_version") != RECIPE_FORMAT_VERSION:
        raise ConfigError(
            f"{source}: format_version {data.get('format_version')!r} is not {RECIPE_FORMAT_VERSION}; set it to {RECIPE_FORMAT_VERSION}"
        )
    raise_all(ConfigError, key_problems(data, Recipe), source)
    try:
        recipe = dacite.from_dict(Recipe, data, dacite.Config(strict=True, cast=[tuple], type_hooks={float: _to_float}))
    except dacite.MissingValueError as error:
        raise ConfigError(f"{source}: {error.field_path} is missing; add it") from None
    except dacite.WrongTypeError as error:
        wanted = str(error.field_type).replace("<class '", "").replace("'>", "").replace("typing.Literal", "one of ")
        raise ConfigError(f"{source}: {error.field_path} {error.value!r} ({type(error.value).__name__}) must be {wanted}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {error}") from None
    raise_all(ConfigError, _recipe_problems(recipe), source)
    return recipe


def _to_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _recipe_problems(recipe: Recipe) -> list[str]:
    in_model = recipe.model.problems()
    problems = list(in_model)
    problems += [line for number, stage in enumerate(recipe.stages) for line in _stage_problems(recipe, stage, number)]
    names = [stage.name for stage in recipe.stages]
    problems += [f"stages: the name {name!r} is used twice; rename one" for name in sorted({n for n in names if names.count(n) > 1})]
    layout = [f"parallel.{key} {size} must be at least 1" for key, size in to_plain(recipe.parallel).items() if size < 1]
    problems += layout + (bounds := _bound_problems(recipe))
    if recipe.elastic is not None and not (in_model or layout or bounds):
        problems += _elastic_problems(recipe, recipe.elastic)
    return problems


_BOUNDS: Mapping[str, tuple[str, ...]] = {
    "at least 1": (
        *("elastic.shard_groups", "elastic.expert_groups", "router.hidden", "router.samples_per_decision", "distill.chunk_tokens"),
        *("checkpoint.interval", "eval.interval", "eval.samples", "log.interval"),
    ),
    "above 0": (
        "router.temperature",
        "router.logit_scale",
        "router.tolerance",
        "router.learn_share",
        "distill.temperature",
        "optimizer.eps",
    ),
    "at least 0": (
        *("router.budget_weight", "router.clip_grad", "distill.kl_weight", "distill.ce_weight", "optimizer.weight_decay"),
        *("optimizer.clip_grad", "checkpoint.keep"),
    ),
    "at least 0 and below 1": ("optimizer.betas",),
}
"""Bound -> keys whose value (or every value of a list) must keep to it."""


def _within(value: float, bound: str) -> bool:
    least = {"at least 1": 1, "above 0": sys.float_info.min}.get(bound, 0)
    return least <= value < (1 if bound.endswith("below 1") else math.inf)


def _bound_problems(recipe: Recipe) -> list[str]:
    plain, problems = to_plain(recipe), []
    for bound, keys in _BOUNDS.items():
        for key in keys:
            section, name = key.split(".")
            value = (plain[section] or {}).get(name)
            values = value if isinstance(value, list) else [] if value is None else [value]
            problems += [f"{key} {value} must be {bound}" for one in values[:2] if not _within(one, bound)][:1]
    if recipe.distill.kl_weight == recipe.distill.ce_weight == 0:
        problems.append("distill.kl_weight and distill.ce_weight are both 0; raise one, or nothing is trained")
    return problems


def _elastic_problems(recipe: Recipe, elastic: ElasticConfig) -> list[str]:
    problems = []
    if recipe.router.learn_share > 1:
        problems.append(f"router.learn_share {recipe.router.learn_share} must be at most 1")
    for name in elastic.axes:
        if name not in list(ElasticAxis):
            near = difflib.get_close_matches(name, list(ElasticAxis), 1)
            problems.append(
                f"elastic.axes.{name} is not an axis; " + (f"did you mean {near[0]}?" if near else f"axes: {', '.join(ElasticAxis)}")
            )
    first = next(iter(elastic.budgets.values()), None)
    if first != 1:
        problems.append(f"elastic.budgets: the first budget must be the parent, 1.0, not {first!r}")
    for name, budget in elastic.budgets.items():
        if not isinstance(budget, PinnedBudget) and budget <= 0:
            problems.append(f"elastic.budgets.{name} {budget} must be positive")
    if problems:
        return problems
    try:
        space = recipe.space
        assert space is not None
        problems += space.check_shards(recipe.parallel.tensor, recipe.parallel.expert)
        for name, budget in elastic.budgets.items():
            if isinstance(budget, PinnedBudget):
                problems += _pinned_problems(space, f"elastic.budgets.{name}.plan", budget)
    except ElasticError as error:
        problems += error.problems
    return problems


def _pinned_problems(space: ElasticSpace, key: str, budget: PinnedBudget) -> list[str]:
    unknown = [axis for axis in budget.plan if axis not in list(ElasticAxis)]
    if unknown:
        return [f"{key}: {axis!r} is not an axis; axes: {', '.join(ElasticAxis)}" for axis in unknown]
    try:
        space.plan({ElasticAxis(axis): width for axis, width in budget.plan.items()})
    except PlanError as error:
        return [f"{key}: {line}" for line in error.problems]
    return []


def _stage_problems(recipe: Recipe, stage: StageConfig, number: int) -> list[str]:
    key, problems = f"stages[{number}] ({stage.name})", []
    if (stage.steps is None) == (stage.tokens is None):
        problems.append(f"{key}: give either steps or tokens")
    rates = {"lr": stage.lr, "min_lr": stage.min_lr, "router_lr": stage.router_lr, "warmup_steps": stage.warmup_steps}
    for name in ("sequence_length", "global_batch_size", "micro_batch_size", "steps", "tokens"):
        value = getattr(stage, name)
        if value is not None and value < 1:
            problems.append(f"{key}: {name} {value} must be at least 1")
    problems += [f"{key}: {name} {rate} must be at least 0" for name, rate in rates.items() if not 0 <= rate < math.inf]
    if stage.min_lr > stage.lr:
        problems.append(f"{key}: min_lr {stage.min_lr} is above lr {stage.lr}")
    if stage.global_batch_size % max(stage.micro_batch_size, 1):
        problems.append(
            f"{key}: global_batch_size {stage.global_batch_size} is not a multiple of micro_batch_size {stage.micro_batch_size}"
        )
    if stage.elastic and recipe.elastic is None:
        problems.append(f"{key}: an elastic stage needs an elastic block; add one or set elastic: false")
    if stage.budget_probs is not None and recipe.elastic is not None:
        unknown = sorted(set(stage.budget_probs) - set(recipe.elastic.budgets))
        if unknown:
            problems.append(f"{key}: budget_probs names {', '.join(unknown)}; budgets: {', '.join(recipe.elastic.budgets)}")
        if min(stage.budget_probs.values(), default=0) < 0 or abs(sum(stage.budget_probs.values()) - 1) > 1e-6:
            problems.append(f"{key}: budget_probs {dict(stage.budget_probs)} must be at least 0 and sum to 1")
    return problems


def to_plain(value: Any) -> Any:
    """Plain data of a recipe for YAML or JSON (the resolved recipe that a run keeps)."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value
