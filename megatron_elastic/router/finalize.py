"""From a trained router to the plans of its family. Uses tensors' methods only, so that importing this does not import torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.cost import widths_of
from megatron_elastic.errors import ConfigError, PlanError, raise_all
from megatron_elastic.planning import Cost, describe_miss, order_budgets

if TYPE_CHECKING:
    from megatron_elastic.router.network import BudgetRouter

NEST_MODES = ("check", "enforce")


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
    budgets: Mapping[str, float],
    cost_fn: Cost,
    tolerance: float,
    *,
    num_layers: int,
    full: str | None,
    nest: str = "check",
) -> FamilyReport:
    """The most probable plan of each budget, with what is wrong with it; for showing during training.

    budgets: name -> target cost; full: the budget that is the parent whatever the router says, or None; tolerance: relative.
    nest: "check" reports a budget that is wider than a larger one, "enforce" narrows it to the larger one's width.
    Raises ConfigError for another `nest` or a budget the router was not made for.
    """
    if nest not in NEST_MODES:
        raise ConfigError(f"router.nest {nest!r} is unknown; use {' or '.join(NEST_MODES)}")
    names = order_budgets(budgets)
    widths: dict[str, dict[ElasticAxis, int]] = {}
    for name in names:
        logits = {} if name == full else router.logits_of(name)
        widths[name] = {spec.axis: spec.choices[int(logits[spec.axis].argmax())] if logits else spec.parent for spec in space.axes}
    problems = []
    for larger, smaller in itertools.pairwise(names):
        for axis in widths[smaller]:
            if widths[smaller][axis] <= widths[larger][axis]:
                continue
            if nest == "check":
                problems.append(
                    f"budget {smaller!r} has {axis.value} {widths[smaller][axis]}, wider than {widths[larger][axis]} of {larger!r}; "
                    "train the router longer or set router.nest: enforce"
                )
            else:
                widths[smaller][axis] = widths[larger][axis]
    plans = {name: space.plan(widths[name]) for name in names}
    costs = {name: float(cost_fn(widths_of(plan, num_layers))) for name, plan in plans.items()}
    problems += [
        f"{describe_miss(name, costs[name], budgets[name], tolerance)}; "
        + ("the full budget is the parent, use its cost" if name == full else "train the router longer or widen router.tolerance")
        for name in names
        if abs(costs[name] / budgets[name] - 1.0) > tolerance
    ]
    return FamilyReport(plans, costs, problems)


def finalize(
    router: BudgetRouter,
    space: ElasticSpace,
    budgets: Mapping[str, float],
    cost_fn: Cost,
    tolerance: float,
    *,
    num_layers: int,
    full: str | None,
    nest: str = "check",
) -> dict[str, SubmodelPlan]:
    """The plans of a trained family, from the largest budget to the smallest; arguments as in `examine`.

    Raises PlanError listing every plan that does not nest or is further than `tolerance` from its target.
    """
    report = examine(router, space, budgets, cost_fn, tolerance, num_layers=num_layers, full=full, nest=nest)
    raise_all(PlanError, report.problems, "the router's plans are no family yet")
    return report.plans


def hardened(router: BudgetRouter, scale: float) -> dict[str, dict[ElasticAxis, list[float]]]:
    """Probabilities over choices for every budget and axis at logit scale `scale`, without noise; for logs and reports."""
    return {
        name: {axis: (scale * logits.detach()).softmax(-1).tolist() for axis, logits in router.logits_of(name).items()}
        for name in router.budget_names
    }
