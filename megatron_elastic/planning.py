"""Which plans of a space come near a cost: nearest plans, uniform plans, and whether a family of budgets can nest.

A space of at most `ENUMERATED_PLANS` plans is searched whole (`plan_grid`), so that every answer is exact. A larger one, such as one
with a width for each layer, is searched step by step (`plan_search`). Plain Python and numpy, no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.cost import widths_of
from megatron_elastic.errors import ConfigError, raise_all
from megatron_elastic.plan_coordinates import Coordinates, Cost, Floats, Indices
from megatron_elastic.plan_grid import Flags, Grid
from megatron_elastic.plan_search import Search
from megatron_elastic.shape import ModelShape

ENUMERATED_PLANS = 200_000
"""Largest number of plans that are all costed."""

Chances = Mapping[ElasticAxis, Sequence[Sequence[float]]]
"""Probabilities of an axis' choices at each of its places: axis -> [places][choices]."""
Targets = Mapping[str, float | SubmodelPlan]
"""Budget -> absolute cost, or the plan it pins; from the largest budget to the smallest."""
LEAST_CHANCE = 1e-30
"""Stands for a probability of zero in logarithms."""


def num_plans(space: ElasticSpace) -> int:
    """How many plans the space holds."""
    return math.prod(len(spec.choices) ** spec.places for spec in space.axes)


def plan_cost(shape: ModelShape, plan: SubmodelPlan, cost: Cost) -> float:
    """The exact cost of a hard plan."""
    return float(cost(widths_of(plan, shape.num_layers)))


def order_budgets(budgets: Mapping[str, float]) -> tuple[str, ...]:
    """Names from the largest target to the smallest. Raises ConfigError unless the targets are positive and distinct."""
    problems = [f"budget {name!r}: target {target:g} must be positive" for name, target in budgets.items() if not target > 0]
    names = tuple(sorted(budgets, key=lambda name: -budgets[name]))
    problems += [
        f"budgets {a!r} and {b!r} have the same target {budgets[a]:g}; remove one"
        for a, b in itertools.pairwise(names)
        if budgets[a] == budgets[b]
    ]
    raise_all(ConfigError, problems if budgets else ["there is no budget; name at least one"], "budgets")
    return names


def describe_miss(name: str, cost: float, target: float, tolerance: float) -> str:
    """How far a budget's cost is from its target, for messages."""
    return f"budget {name!r}: cost {cost:.6g} is {cost / target - 1:+.1%} from its target {target:.6g} (tolerance {tolerance:.1%})"


def narrowest(space: ElasticSpace) -> SubmodelPlan:
    """The plan with the smallest choice everywhere; it is nested in every other."""
    return space.plan({spec.axis: spec.choices[-1] for spec in space.axes})


def reachable(space: ElasticSpace, shape: ModelShape, cost: Cost) -> tuple[float, float]:
    """Costs of the narrowest plan and of the parent; every cost grows with every width."""
    return plan_cost(shape, narrowest(space), cost), plan_cost(shape, space.parent, cost)


def nearest_plan(
    space: ElasticSpace,
    shape: ModelShape,
    target: float,
    cost: Cost,
    *,
    within: SubmodelPlan | None = None,
    around: SubmodelPlan | None = None,
) -> SubmodelPlan:
    """The plan nested in `within` (default: any plan), and in which `around` is nested, whose cost is nearest to `target`, an absolute cost.

    Exact in a space that is enumerated, and of equally near plans the more uniform one. Otherwise a plan that no change of one
    coordinate brings nearer, nor any of the most promising changes of two.
    """
    outer, inner = within or space.parent, around or narrowest(space)
    if num_plans(space) > ENUMERATED_PLANS:
        return _search_uniform(space, shape, target, cost, outer, inner, 0.0)
    grid = Grid.of(space, shape.num_layers, cost)
    miss = np.where(grid.between(outer, inner), np.abs(grid.costs - target), np.inf)
    return grid.plan_at(np.where(miss == miss.min(), grid.spread, np.inf))


def uniform_plan(
    space: ElasticSpace,
    shape: ModelShape,
    target: float,
    cost: Cost,
    *,
    within: SubmodelPlan | None = None,
    around: SubmodelPlan | None = None,
    tolerance: float = 0.02,
) -> SubmodelPlan:
    """The plan between `within` and `around` that shrinks every axis by most nearly the same fraction, at about the cost `target`.

    Of the plans whose cost deviates from `target` by at most `tolerance` (relative) the one whose kept fractions spread least
    (standard deviation over the coordinates); the nearest plan when none is that near. In a space too large to enumerate: the plan
    nearest to a fraction that all keep, which is that of the step of the uniform ladder nearest to the target.
    """
    outer, inner = within or space.parent, around or narrowest(space)
    if num_plans(space) > ENUMERATED_PLANS:
        return _search_uniform(space, shape, target, cost, outer, inner, tolerance)
    grid = Grid.of(space, shape.num_layers, cost)
    miss = np.where(grid.between(outer, inner), np.abs(grid.costs / target - 1), np.inf)
    eligible = miss <= max(tolerance, miss.min())
    return grid.plan_at(np.where(eligible, grid.spread, np.inf))


def _search_uniform(
    space: ElasticSpace, shape: ModelShape, target: float, cost: Cost, outer: SubmodelPlan, inner: SubmodelPlan, tolerance: float
) -> SubmodelPlan:
    """A plan within `tolerance` of the target, as near as can be to keeping one fraction of everything."""
    coordinates = Coordinates.of(space, shape.num_layers)
    low, high, fractions = coordinates.index_of(outer), coordinates.index_of(inner), coordinates.fractions()
    kept = sorted({float(n) for row in fractions for n in row}, reverse=True)
    steps = sorted({*kept, *((a + b) / 2 for a, b in itertools.pairwise(kept))}, reverse=True)
    ladder = np.array([_clip([int(np.abs(row - step).argmin()) for row in fractions], low, high) for step in steps])
    common = steps[int(np.abs(coordinates.costs(cost, ladder) - target).argmin())] if steps else 1.0
    merits = [-((row - common) ** 2) for row in fractions]
    return coordinates.plan_at(Search(coordinates, cost, low, high, merits).find(target, tolerance))


def _clip(index: Sequence[int], low: Indices, high: Indices) -> Indices:
    return np.clip(np.array(index, dtype=np.int64), low, high)


def uniform_family(space: ElasticSpace, shape: ModelShape, targets: Targets, cost: Cost, tolerance: float) -> dict[str, SubmodelPlan]:
    """For each budget the plan it pins, or the uniform plan at its target nested in the plan before and leaving room for those pinned after.

    A target out of reach gets the nearest plan, and a pinned plan stands whether it nests or not (`check_targets` names both).
    """
    coordinates, plans, outer = Coordinates.of(space, shape.num_layers), {}, space.parent
    for name, target in targets.items():
        if isinstance(target, SubmodelPlan):
            plans[name] = outer = target
            continue
        inner = _room_for(space, coordinates, targets, name)
        # A pinned plan that does not fit in here is named when its turn comes.
        inner = inner if outer.contains(inner) else narrowest(space)
        plans[name] = outer = uniform_plan(space, shape, target, cost, within=outer, around=inner, tolerance=tolerance)
    return plans


def most_probable_family(
    space: ElasticSpace,
    shape: ModelShape,
    targets: Targets,
    cost: Cost,
    probabilities: Mapping[str, Chances],
    tolerance: float,
) -> dict[str, SubmodelPlan] | None:
    """For each budget the most probable plan of a family: within `tolerance` of its target, nested in the larger budget's plan, and leaving
    room for the smaller ones. None when there is no such family, or in a space too large to enumerate none is found.

    probabilities: of the choices at each place, independent of each other, for every budget that pins no plan. In a space too large to
    enumerate the plans come from the most probable choices by exchanges of one or two (`plan_search`).
    """
    if num_plans(space) > ENUMERATED_PLANS:
        return _search_family(space, shape, targets, cost, probabilities, tolerance)
    grid = Grid.of(space, shape.num_layers, cost)
    fits: dict[str, Flags] = {}
    room = np.ones(grid.dims, dtype=bool)
    for name, target in reversed(list(targets.items())):
        near = grid.is_plan(target) if isinstance(target, SubmodelPlan) else np.abs(grid.costs / target - 1) <= tolerance
        fits[name] = near & room
        room = grid.containing_any(fits[name])
    plans, inside = {}, np.ones(grid.dims, dtype=bool)
    for name, target in targets.items():
        possible = fits[name] & inside
        if not possible.any():
            return None
        if not isinstance(target, SubmodelPlan):
            target = grid.plan_at(np.where(possible, -grid.log_chances(_logs(grid.coordinates, probabilities[name])), np.inf))
        plans[name], inside = target, grid.nested_in_any(grid.is_plan(target))
    return plans


def _logs(coordinates: Coordinates, chances: Chances) -> list[Floats]:
    """For each coordinate the logarithms of the probabilities of its choices."""
    return [np.log(np.maximum(np.array(chances[spec.axis][n], dtype=np.float64), LEAST_CHANCE)) for spec, n in coordinates.places]


def _search_family(
    space: ElasticSpace, shape: ModelShape, targets: Targets, cost: Cost, probabilities: Mapping[str, Chances], tolerance: float
) -> dict[str, SubmodelPlan] | None:
    """From the largest budget to the smallest, each between the plan before it and those that smaller budgets pin."""
    coordinates, plans, outer = Coordinates.of(space, shape.num_layers), {}, space.parent
    for name, target in targets.items():
        if isinstance(target, SubmodelPlan):
            found = target if outer.contains(target) else None
        else:
            low, high = coordinates.index_of(outer), coordinates.index_of(_room_for(space, coordinates, targets, name))
            if (low > high).any():
                return None
            search = Search(coordinates, cost, low, high, _logs(coordinates, probabilities[name]))
            found = coordinates.plan_at(search.find(target, tolerance))
            if abs(plan_cost(shape, found, cost) / target - 1) > tolerance:
                found = None
        if found is None:
            return None
        plans[name] = outer = found
    return plans


def _room_for(space: ElasticSpace, coordinates: Coordinates, targets: Targets, name: str) -> SubmodelPlan:
    """The widest plan that smaller budgets than `name` pin; the narrowest of the space when they pin none."""
    smaller = list(targets)[list(targets).index(name) + 1 :]
    pinned = [target for other in smaller if isinstance(target := targets[other], SubmodelPlan)]
    return coordinates.plan_at(np.min([coordinates.index_of(plan) for plan in (narrowest(space), *pinned)], axis=0))


def check_targets(space: ElasticSpace, shape: ModelShape, targets: Targets, cost: Cost, tolerance: float) -> list[str]:
    """Problems of budgets that no family of nested plans can meet, one line each; empty when a family exists.

    targets: the parent first or not. A family is a chain of plans, each nested in the one before and within `tolerance` (relative) of
    its target. In a space that is enumerated the answer is exact; in a larger one the chain follows uniform plans.
    """
    if num_plans(space) > ENUMERATED_PLANS:
        return _check_by_search(space, shape, targets, cost, tolerance)
    grid, problems = Grid.of(space, shape.num_layers, cost), []
    inside = np.ones(grid.dims, dtype=bool)
    for name, target in targets.items():
        if isinstance(target, SubmodelPlan):
            chosen = grid.is_plan(target)
            if not (chosen & inside).any():
                problems.append(_not_nested(name))
        else:
            miss = np.where(inside, np.abs(grid.costs / target - 1), np.inf)
            chosen = miss <= max(tolerance, miss.min())
            if miss.min() > tolerance:
                problems.append(_unreachable(name, target, float(grid.costs.ravel()[miss.argmin()]), tolerance))
        inside = grid.nested_in_any(chosen & inside)
        if not inside.any():
            inside = grid.nested_in_any(chosen)
    return problems


def _not_nested(name: str) -> str:
    return f"elastic.budgets.{name}: its pinned plan is not nested in the larger budgets; narrow it or reorder the budgets"


def _unreachable(name: str, target: float, nearest: float, tolerance: float) -> str:
    return (
        f"elastic.budgets.{name}: no plan nested in the larger budgets costs {target:.6g} within {tolerance:.3g}; "
        f"the nearest reachable cost is {nearest:.6g}: set it, or add choices to elastic.axes"
    )


def _check_by_search(space: ElasticSpace, shape: ModelShape, targets: Targets, cost: Cost, tolerance: float) -> list[str]:
    outer, problems = space.parent, []
    for name, plan in uniform_family(space, shape, targets, cost, tolerance).items():
        target, found = targets[name], plan_cost(shape, plan, cost)
        if isinstance(target, SubmodelPlan):
            problems += [] if outer.contains(plan) else [_not_nested(name)]
        elif abs(found / target - 1) > tolerance:
            problems.append(_unreachable(name, target, found, tolerance))
        outer = plan
    return problems
