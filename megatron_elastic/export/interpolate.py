"""Plans of a family at costs between its budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.checkpoint.files import DESCRIPTION, RECIPE_FILE, in_run_of
from megatron_elastic.checkpoint.plain import RUN, read_plain
from megatron_elastic.config import load_recipe
from megatron_elastic.errors import CheckpointError, PlanError
from megatron_elastic.export.sources import Source, describe
from megatron_elastic.planning import plan_cost
from megatron_elastic.preflight import absolute_target, budget_targets, plan_of_target, recipe_cost
from megatron_elastic.recipe import Recipe


def recipe_of_run(source: Source) -> Recipe | None:
    """The recipe of the run (or the import) that a checkpoint is in; None when it is in none."""
    file = in_run_of(source.path, RECIPE_FILE)
    return None if file is None else load_recipe(file)


def plan_at_target(source: Source, target: float, recipe: Recipe | None) -> SubmodelPlan:
    """The plan of a family at a cost: up to 1 a fraction of the parent's, above 1 absolute, in what the recipe's `elastic.cost` counts.

    It lies between the plans of the two budgets beside it. Where the source has a router, it is the most probable one that costs this much
    (`router.finalize.plan_between`), else the uniform one (`preflight.plan_of_target`). recipe: the run's, or the one that makes a plain model a family.
    Raises CheckpointError without a family or a recipe, ConfigError for a target outside the budgets, PlanError when no plan costs that.
    """
    if source.space is None or not source.plans:
        raise CheckpointError(f"{describe(source)} holds no family; give --target for the run of an elastic stage, or with --recipe")
    if recipe is None:
        raise CheckpointError(f"{describe(source)} is not inside a run, so that nothing says what a target counts; give --recipe or --plan")
    if recipe.space is None:
        raise CheckpointError(
            f"the recipe of {describe(source)} has no elastic block, which says what a target counts; give --recipe or --plan"
        )
    if recipe.space != source.space:
        raise CheckpointError(
            f"the recipe is not that of {describe(source)}: its elastic axes differ; restore {RECIPE_FILE}, or give --plan"
        )
    cost = recipe_cost(recipe)
    wanted = absolute_target(target, plan_cost(recipe.model, source.space.parent, cost))
    state = _router_state(source.path)
    if state is None:
        return plan_of_target(recipe, wanted, cost, source.plans)
    from megatron_elastic.router.finalize import plan_between
    from megatron_elastic.router.network import BudgetRouter

    budgets = budget_targets(recipe, cost)
    router = BudgetRouter(source.space, budgets, seed=recipe.seed, width=recipe.router.hidden)
    try:
        router.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError):
        raise CheckpointError(f"the router in {describe(source)} is not one of its recipe; restore {RECIPE_FILE}, or give --plan") from None
    missing = [name for name in budgets if name not in source.plans]
    if missing:
        raise PlanError(f"{describe(source)} has no plan for budget {missing[0]!r} yet; train on, or give --plan")
    return plan_between(router, source.space, source.shape, budgets, source.plans, wanted, cost, tolerance=recipe.router.tolerance[1])


def _router_state(path: Path) -> dict[str, Any] | None:
    """The router of a training checkpoint; None for anything else. Raises CheckpointError when the checkpoint holds more than plain data."""
    if not (path / DESCRIPTION).is_file():
        return None
    run = read_plain(path).get(RUN)
    return run.get("router") if isinstance(run, dict) else None
