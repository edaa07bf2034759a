"""From a trained router to the plans of its family. Uses tensors' methods only, so that importing this does not import torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.errors import PlanError, raise_all
from megatron_elastic.plan_coordinates import Cost
from megatron_elastic.planning import Chances, describe_miss, most_probable_family, nearest_plan, order_budgets, plan_cost
from megatron_elastic.shape import ModelShape

if TYPE_CHECKING:
    import torch

    from megatron_elastic.router.network import BudgetRouter


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """The plans a router stands for now, from the largest budget to the smallest.

    plans: budget -> plan; costs: budget -> exact cost; problems: why they are no family yet, one line each with values and remedy.
    """

    plans: dict[str, SubmodelPlan]
    costs: dict[str, float]
    problems: list[str]


def examine(
    router: BudgetRouter,
    space: ElasticSpace,
    shape: ModelShape,
    budgets: Mapping[str, float],
    cost: Cost,
    *,
    fixed: Mapping[str, SubmodelPlan],
    tolerance: float,
) -> FamilyReport:
    """The family a router stands for now: for each budget the most probable plan within `tolerance` (relative) of its target that nests.

    The argmax of every axis alone can be far off: the router's loss sees the cost of a mixture. budgets: name -> target cost;
    fixed: budget -> plan for those the router does not choose, the parent among them. A budget no plan fits gets the nearest one, and
    a problem.
    """
    names = order_budgets(budgets)
    wanted = {name: fixed.get(name, budgets[name]) for name in names}
    chances = {name: _chances(router.logits_of(name)) for name in names if name not in fixed}
    plans = most_probable_family(space, shape, wanted, cost, chances, tolerance)
    if plans is None:
        plans, outer = {}, space.parent
        for name in names:
            outer = fixed[name] if name in fixed else nearest_plan(space, shape, budgets[name], cost, within=outer)
            plans[name] = outer
    return report_of(plans, shape, budgets, cost, tolerance)


def _chances(logits: Mapping[ElasticAxis, torch.Tensor], scale: float = 1.0) -> Chances:
    return {axis: (scale * value.detach()).softmax(-1).tolist() for axis, value in logits.items()}


def report_of(
    plans: Mapping[str, SubmodelPlan], shape: ModelShape, budgets: Mapping[str, float], cost: Cost, tolerance: float
) -> FamilyReport:
    """Plans with their exact costs, from the largest budget to the smallest, and every one that misses its target or does not nest."""
    names = order_budgets(budgets)
    costs = {name: plan_cost(shape, plans[name], cost) for name in names}
    problems = [
        f"{describe_miss(name, costs[name], budgets[name], tolerance)}; add choices to elastic.axes or widen router.tolerance"
        for name in names
        if abs(costs[name] / budgets[name] - 1) > tolerance
    ]
    problems += [
        f"budget {smaller!r} is wider than {larger!r} on some axis; give it a plan that nests"
        for larger, smaller in itertools.pairwise(names)
        if not plans[larger].contains(plans[smaller])
    ]
    return FamilyReport({name: plans[name] for name in names}, costs, problems)


def finalize(
    router: BudgetRouter,
    space: ElasticSpace,
    shape: ModelShape,
    budgets: Mapping[str, float],
    cost: Cost,
    *,
    fixed: Mapping[str, SubmodelPlan],
    tolerance: float,
) -> dict[str, SubmodelPlan]:
    """The plans of a trained family, from the largest budget to the smallest; arguments as in `examine`.

    Raises PlanError listing every budget that no plan fits.
    """
    report = examine(router, space, shape, budgets, cost, fixed=fixed, tolerance=tolerance)
    raise_all(PlanError, report.problems, "the router's plans are no family")
    return report.plans


def plan_between(
    router: BudgetRouter,
    space: ElasticSpace,
    shape: ModelShape,
    budgets: Mapping[str, float],
    plans: Mapping[str, SubmodelPlan],
    target: float,
    cost: Cost,
    *,
    tolerance: float,
) -> SubmodelPlan:
    """The plan of a target cost that no budget was trained for: nested in the next larger budget's plan, the next smaller one's in it.

    The router is asked with its input interpolated between the two budgets, and the most probable plan between their plans that is
    within `tolerance` of `target` is taken. budgets: name -> target cost; plans: their plans, a family. The plan of a budget itself when
    `target` is that budget's. Raises ConfigError for a target outside the trained ones, PlanError when no plan between fits.
    """
    position = router.position_of_target(target)
    larger, smaller = router.budget_names[math.floor(position)], router.budget_names[math.ceil(position)]
    if larger == smaller:
        return plans[larger]
    wanted = {larger: plans[larger], "": target, smaller: plans[smaller]}
    chances = {"": _chances(router(router.budget_input(position)))}
    family = most_probable_family(space, shape, wanted, cost, chances, tolerance)
    if family is None:
        near = nearest_plan(space, shape, target, cost, within=plans[larger], around=plans[smaller])
        raise PlanError(
            f"target {target:.6g}: no plan between budgets {larger!r} and {smaller!r} costs that within {tolerance:.3g}; "
            f"the nearest reachable cost is {plan_cost(shape, near, cost):.6g}: ask for it"
        )
    return family[""]


def hardened(router: BudgetRouter, scale: float) -> dict[str, Chances]:
    """Budget -> axis -> [places][choices]: probabilities at logit scale `scale`, without noise; for logs and reports."""
    return {name: _chances(router.logits_of(name), scale) for name in router.budget_names}
