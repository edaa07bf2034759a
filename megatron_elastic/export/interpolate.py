"""Plans of a trained family at costs between its budgets, from the checkpoint of a run."""

from __future__ import annotations

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.checkpoint.files import CheckpointInfo
from megatron_elastic.config import load_recipe
from megatron_elastic.errors import CheckpointError, PlanError
from megatron_elastic.planning import plan_cost
from megatron_elastic.preflight import absolute_target, budget_targets, plan_of_target, recipe_cost

RECIPE_FILE = "recipe.yaml"


def plan_at_target(info: CheckpointInfo, target: float) -> SubmodelPlan:
    """The plan of a run's family at a cost: up to 1 a fraction of the parent's, above 1 absolute, in what the recipe's `elastic.cost` counts.

    It lies between the plans of the two budgets beside it. Where the run has a router, it is the most probable one that costs this much
    (`router.finalize.plan_between`), else the uniform one. Raises CheckpointError for a checkpoint outside a run or without a family,
    ConfigError for a target outside the budgets, PlanError when no plan costs that.
    """
    file = info.path.parent.parent / RECIPE_FILE
    if info.space is None or not info.plans:
        raise CheckpointError(f"checkpoint {str(info.path)!r} holds no family; give --target for the run of an elastic stage")
    if not file.is_file():
        raise CheckpointError(
            f"checkpoint {str(info.path)!r} is not inside a run (there is no {str(file)!r}); give --plan instead of --target"
        )
    recipe = load_recipe(file)
    if recipe.space != info.space:
        raise CheckpointError(
            f"{str(file)!r} is not the recipe of checkpoint {str(info.path)!r}: its elastic axes differ; restore that file"
        )
    cost = recipe_cost(recipe)
    wanted = absolute_target(target, plan_cost(recipe.model, info.space.parent, cost))
    state = _router_state(info)
    if state is None:
        return plan_of_target(recipe, wanted, cost)
    from megatron_elastic.router.finalize import plan_between
    from megatron_elastic.router.network import BudgetRouter

    budgets = budget_targets(recipe, cost)
    router = BudgetRouter(info.space, budgets, seed=recipe.seed, width=recipe.router.hidden)
    router.load_state_dict(state)
    missing = [name for name in budgets if name not in info.plans]
    if missing:
        raise PlanError(f"checkpoint {str(info.path)!r} has no plan for budget {missing[0]!r} yet; train on, or give --plan")
    return plan_between(router, info.space, info.shape, budgets, info.plans, wanted, cost, tolerance=recipe.router.tolerance[1])


def _router_state(info: CheckpointInfo) -> dict | None:
    from megatron.core import dist_checkpointing

    from megatron_elastic.checkpoint.sharded.state import RUN

    return dist_checkpointing.load_common_state_dict(str(info.path))[RUN]["router"]
