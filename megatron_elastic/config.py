"""Recipes: one YAML file says everything about a run. defaults <- YAML <- key=value and @FILE from the command line.

Decoding is strict: an unknown key, a wrong type or a value out of range is an error that names the key, and all of them are
reported at once. Plain Python, no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import dacite

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.errors import ConfigError, ElasticError, PlanError, raise_all
from megatron_elastic.fit import space_problems
from megatron_elastic.formats import RECIPE
from megatron_elastic.recipe import ElasticConfig, PinnedBudget, Recipe, StageConfig
from megatron_elastic.recipe_files import apply_overrides, key_problems, read_yaml

T = TypeVar("T")


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file with overrides applied and everything checked. Raises ConfigError with every problem at once."""
    return decode_recipe(apply_overrides(read_yaml(path), overrides), str(path))


def decode_recipe(data: dict[str, Any], source: str) -> Recipe:
    """A checked recipe from plain data; `source` names it in errors."""
    RECIPE.check(data, source)
    recipe = decode(Recipe, data, source)
    raise_all(ConfigError, _recipe_problems(recipe), source)
    return recipe


def decode(kind: type[T], data: dict[str, Any], source: str) -> T:
    """The dataclass `kind` from plain data: every key and every type checked, no value. `source` names the data in errors.

    Raises ConfigError listing every unknown or missing key at once, or naming a value of the wrong type.
    """
    raise_all(ConfigError, key_problems(data, kind), source)
    try:
        return dacite.from_dict(kind, data, dacite.Config(strict=True, cast=[tuple], type_hooks={float: _to_float}))
    except dacite.WrongTypeError as error:
        wanted = str(error.field_type).replace("<class '", "").replace("'>", "").replace("typing.Literal", "one of ")
        raise ConfigError(f"{source}: {error.field_path} {error.value!r} ({type(error.value).__name__}) must be {wanted}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {error}") from None


def _to_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _recipe_problems(recipe: Recipe) -> list[str]:
    in_model = recipe.model.problems()
    problems = list(in_model)
    problems += [line for number, stage in enumerate(recipe.stages) for line in _stage_problems(recipe, stage, number)]
    names = [stage.name for stage in recipe.stages]
    problems += [f"stages: the name {name!r} is used twice; rename one" for name in sorted({n for n in names if names.count(n) > 1})]
    sizes = {key: size for key, size in to_plain(recipe.parallel).items() if isinstance(size, int) and not isinstance(size, bool)}
    layout = [f"parallel.{key} {size} must be at least 1" for key, size in sizes.items() if size < 1]
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
        "distill.teacher_bytes",
        "optimizer.eps",
    ),
    "at least 0": (
        *("router.budget_weight", "router.clip_grad", "distill.kl_weight", "distill.ce_weight", "optimizer.weight_decay"),
        *("optimizer.clip_grad", "checkpoint.keep_last", "log.hang_seconds"),
    ),
    "at least 0 and below 1": ("optimizer.betas", "router.width_threshold"),
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
    problems = elastic.memory.problems() if elastic.memory else []
    if elastic.memory is not None and elastic.cost != "memory":
        problems.append(
            f"elastic.memory says what cost 'memory' counts, but elastic.cost is {elastic.cost!r}; set it to memory or remove the block"
        )
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
        problems += space_problems(space, recipe.model, recipe.parallel.sizes)
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
        budget.on(space)
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
