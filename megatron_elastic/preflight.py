"""Everything about a recipe that can be refused before torch is imported: budgets, decisions and the layout.

`load_recipe` checks each value by itself; this module checks what the parts mean together. `validate` prints the outcome, and
a run refuses to start on the same problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.cost import cost_function
from megatron_elastic.errors import ConfigError, PlanError
from megatron_elastic.fit import model_problems, release_problems, space_problems
from megatron_elastic.plan_coordinates import Cost
from megatron_elastic.planning import check_targets, plan_cost, reachable, uniform_family, uniform_plan
from megatron_elastic.recipe import PinnedBudget, Recipe, StageConfig
from megatron_elastic.router.schedules import learning_rate
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import parent_plan


def cost_sequence_length(recipe: Recipe) -> int:
    """Tokens of the sequences for which FLOPs are counted: those of the last stage, or the longest the model is meant for."""
    return recipe.stages[-1].sequence_length if recipe.stages else recipe.model.max_sequence_length


def check_sequence_length(shape: ModelShape, length: int, key: str) -> None:
    """Raise ConfigError when FLOPs per token cannot be counted for sequences of `length`; `key` names it in the message."""
    chunk = shape.mamba.chunk if shape.mamba and shape.has("mamba") else 1
    if length < 1 or (length > chunk and length % chunk):
        near = max(chunk, length // chunk * chunk)
        raise ConfigError(f"{key} {length} is not a multiple of model.mamba.chunk {chunk}; use {near}")


def recipe_cost(recipe: Recipe) -> Cost:
    """The cost that `elastic.cost` names (active parameters for a recipe without elasticity)."""
    elastic, length = recipe.elastic, cost_sequence_length(recipe)
    if elastic is None:
        return cost_function(recipe.model, "active_params", length)
    return cost_function(recipe.model, elastic.cost, length, elastic.memory)


def budget_targets(recipe: Recipe, cost: Cost) -> dict[str, float]:
    """Budget -> absolute target: a fraction of the parent's cost, a cost as it stands, or the exact cost of a pinned plan."""
    if recipe.elastic is None:
        return {}
    parent, pinned = plan_cost(recipe.model, parent_plan(recipe.model), cost), recipe.pinned_plans()
    targets = {}
    for name, budget in recipe.elastic.budgets.items():
        if isinstance(budget, PinnedBudget):
            targets[name] = plan_cost(recipe.model, pinned[name], cost)
        else:
            targets[name] = absolute_target(budget, parent)
    return targets


def absolute_target(target: float, parent: float) -> float:
    """A target cost as it stands, or, up to 1, as a fraction of the parent's. Raises PlanError for one that is not above 0."""
    if not target > 0:
        raise PlanError(f"target {target:g} must be above 0")
    return float(target * parent if target <= 1 else target)


def budget_plans(recipe: Recipe, cost: Cost) -> dict[str, SubmodelPlan]:
    """Budget -> plan: the pinned one, else the uniform plan at the target, nested in the next larger budget's."""
    space = recipe.space
    if recipe.elastic is None or space is None:
        return {}
    return uniform_family(space, recipe.model, wanted(recipe, cost), cost, recipe.router.tolerance[1])


def wanted(recipe: Recipe, cost: Cost) -> dict[str, float | SubmodelPlan]:
    """Budget -> absolute target, or the plan it pins (the parent's for the first)."""
    pinned = recipe.pinned_plans()
    return {name: pinned.get(name, target) for name, target in budget_targets(recipe, cost).items()}


def plan_of_target(recipe: Recipe, target: float, cost: Cost, plans: Mapping[str, SubmodelPlan] | None = None) -> SubmodelPlan:
    """The uniform plan at an absolute cost between the recipe's budgets: nested in the next larger budget's plan, the next smaller one's in it.

    plans: of the budgets; None: those of `budget_plans`.
    The plan of a budget itself at that budget's target. Raises PlanError for a target that no plan reaches within the final tolerance,
    naming the nearest cost that one does.
    """
    space, tolerance = recipe.space, recipe.router.tolerance[1]
    if space is None:
        raise PlanError("the recipe has no elastic block, so that there is no plan for a target; add one")
    plans, targets = budget_plans(recipe, cost) if plans is None else plans, budget_targets(recipe, cost)
    equal = [name for name in plans if targets[name] == target]
    if equal:
        return plans[equal[0]]
    larger, smaller = [name for name in plans if targets[name] > target], [name for name in plans if targets[name] < target]
    if not larger:
        raise PlanError(f"target {target:.6g} is above the parent's cost {reachable(space, recipe.model, cost)[1]:.6g}; ask for less")
    above, below = min(larger, key=targets.__getitem__), max(smaller, key=targets.__getitem__, default=None)
    outer, inner = plans[above], plans[below] if below is not None else None
    found = uniform_plan(space, recipe.model, target, cost, within=outer, around=inner, tolerance=tolerance)
    reached = plan_cost(recipe.model, found, cost)
    if abs(reached / target - 1) > tolerance:
        between = f"between budgets {above!r} and {below!r}" if below is not None else f"nested in budget {above!r}"
        raise PlanError(
            f"target {target:.6g}: no plan {between} costs that within {tolerance:.3g}; the nearest reachable cost is {reached:.6g}: ask for it"
        )
    return found


def recipe_problems(recipe: Recipe) -> list[str]:
    """Every reason why this recipe cannot run, one line each."""
    space, sizes = recipe.space, recipe.parallel.sizes
    in_layout = model_problems(recipe.model, sizes) + (space_problems(space, recipe.model, sizes) if space else [])
    problems = list(dict.fromkeys(in_layout)) + release_problems(recipe.model, sizes)
    for number, stage in enumerate(recipe.stages):
        key = f"stages[{number}] ({stage.name})"
        problems += _decision_problems(recipe, stage, key) + _row_problems(recipe, stage, key)
    problems += _order_problems(recipe)
    if recipe.elastic is None or space is None:
        return problems
    if recipe.elastic.cost == "flops":
        check_sequence_length(recipe.model, cost_sequence_length(recipe), "the last stage's sequence_length")
    cost = recipe_cost(recipe)
    return problems + check_targets(space, recipe.model, wanted(recipe, cost), cost, recipe.router.tolerance[1])


def recipe_notes(recipe: Recipe) -> list[str]:
    """What is worth knowing but no reason to refuse the recipe, one line each."""
    if recipe.data is None:
        return ["no data section: this recipe can be planned, not trained; set data.path"] if recipe.stages else []
    if not Path(recipe.data.path).is_dir():
        return [f"data.path {recipe.data.path!r} is not there yet; write it with `megatron-elastic data`"]
    return []


def _order_problems(recipe: Recipe) -> list[str]:
    """The parent's stages come first, and a warm-up ends before its stage."""
    problems, elastic = [], False
    for stage in recipe.stages:
        if elastic and not stage.elastic:
            problems.append(f"stages.{stage.name}: a stage with elastic: false cannot follow an elastic one; put it first")
        elastic = elastic or stage.elastic
        try:
            learning_rate(0, stage.warmup_steps, stage.total_steps, stage.lr, stage.min_lr)
        except ConfigError as error:
            problems.append(f"stages.{stage.name}: {error}")
    return problems


def _decision_problems(recipe: Recipe, stage: StageConfig, key: str) -> list[str]:
    """A decision spans whole micro-batches of all replicas that exchange tokens, and a global batch whole decisions."""
    if not stage.elastic:
        return []
    group, replicas = recipe.router.samples_per_decision, recipe.parallel.replicas_together
    together = stage.micro_batch_size * replicas
    problems = []
    if stage.global_batch_size % group:
        problems.append(f"{key}: global_batch_size {stage.global_batch_size} is not a multiple of router.samples_per_decision {group}")
    if group % together:
        problems.append(
            f"{key}: micro_batch_size {stage.micro_batch_size} x {replicas} replicas that share experts (parallel.expert "
            f"{recipe.parallel.expert}) = {together} samples are computed together and must divide router.samples_per_decision {group}"
        )
    return problems


def _row_problems(recipe: Recipe, stage: StageConfig, key: str) -> list[str]:
    """A row of tokens is cut over context-parallel ranks, two chunks each, and a rank's share over the tensor-parallel ones."""
    parallel = recipe.parallel
    shards = (2 * parallel.context if parallel.context > 1 else 1) * parallel.token_shards
    tokens = stage.micro_batch_size * stage.sequence_length
    if tokens % shards:
        return [
            f"{key}: micro_batch_size {stage.micro_batch_size} x sequence_length {stage.sequence_length} = {tokens} tokens are cut into {shards} "
            f"(parallel.tensor {parallel.tensor}, context {parallel.context}); use a multiple"
        ]
    return []
