"""Which plans of a space come near a cost: nearest plans, uniform plans, and whether a family of budgets can nest.

A space whose choices multiply to at most `ENUMERATED_PLANS` is searched whole: `cost.py` is handed arrays of widths, one
entry a plan, so every cost is known at once. A larger one is searched by coordinate descent. Plain Python and numpy, no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.cost import Number, Widths, widths_of
from megatron_elastic.errors import ConfigError, raise_all
from megatron_elastic.shape import ModelShape

ENUMERATED_PLANS = 200_000
"""Largest number of plans that are all costed."""

Cost = Callable[[Widths], Number]
"""A cost as `cost.cost_function` returns it."""
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def num_plans(space: ElasticSpace) -> int:
    """How many plans the space holds."""
    return math.prod(len(spec.choices) for spec in space.axes)


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


def reachable(space: ElasticSpace, shape: ModelShape, cost: Cost) -> tuple[float, float]:
    """Costs of the narrowest plan and of the parent; every cost grows with every width."""
    smallest = space.plan({spec.axis: spec.choices[-1] for spec in space.axes})
    return plan_cost(shape, smallest, cost), plan_cost(shape, space.parent, cost)


def nearest_plan(space: ElasticSpace, shape: ModelShape, target: float, cost: Cost, *, within: SubmodelPlan | None = None) -> SubmodelPlan:
    """The plan nested in `within` (default: any plan) whose cost is nearest to `target`, an absolute cost.

    Exact in a space that is enumerated. Otherwise coordinate descent from the uniform plan, one or two axes at a time, which
    ends in a plan that no change of two axes brings nearer. Of equally near plans the more uniform one.
    """
    outer = within or space.parent
    if num_plans(space) > ENUMERATED_PLANS:
        return _descend(space, shape, target, cost, outer)
    grid = _Grid.of(space, shape, cost)
    miss = np.where(grid.nested_in(outer), np.abs(grid.costs - target), np.inf)
    return grid.plan_at(np.where(miss == miss.min(), grid.spread, np.inf))


def uniform_plan(
    space: ElasticSpace,
    shape: ModelShape,
    target: float,
    cost: Cost,
    *,
    within: SubmodelPlan | None = None,
    tolerance: float = 0.02,
) -> SubmodelPlan:
    """The plan nested in `within` that shrinks every axis by most nearly the same fraction, at about the cost `target`.

    Of the plans whose cost deviates from `target` by at most `tolerance` (relative) the one whose kept fractions spread least
    (standard deviation over the axes); the nearest plan when none is that near. In a space too large to enumerate: the step of
    the uniform ladder nearest to the target, improved by coordinate descent while it misses the tolerance.
    """
    outer = within or space.parent
    if num_plans(space) > ENUMERATED_PLANS:
        ladder = min(_ladder(space, outer), key=lambda plan: abs(plan_cost(shape, plan, cost) - target))
        near = abs(plan_cost(shape, ladder, cost) - target) <= tolerance * target
        return ladder if near else _descend(space, shape, target, cost, outer)
    grid = _Grid.of(space, shape, cost)
    miss = np.where(grid.nested_in(outer), np.abs(grid.costs / target - 1), np.inf)
    eligible = miss <= max(tolerance, miss.min())
    return grid.plan_at(np.where(eligible, grid.spread, np.inf))


def most_probable_family(
    space: ElasticSpace,
    shape: ModelShape,
    targets: Mapping[str, float | SubmodelPlan],
    cost: Cost,
    probabilities: Mapping[str, Mapping[ElasticAxis, Sequence[float]]],
    tolerance: float,
) -> dict[str, SubmodelPlan] | None:
    """For each budget the most probable plan of a family: within `tolerance` of its target, nested in the larger budget's plan, and leaving
    room for the smaller ones. None when there is no such family.

    targets: budget -> absolute cost, or the plan it pins; from the largest budget to the smallest.
    probabilities: budget -> axis -> of its choices, independent of each other, for every budget that pins no plan. In a space too large
    to enumerate only the most probable choices are looked at.
    """
    likely = _likely_subspace(space, targets, probabilities)
    grid = _Grid.of(likely, shape, cost)
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
            logs = [np.log([max(chance[n], 1e-30) for n in spec.choices]) for spec, chance in _chances(space, likely, probabilities[name])]
            target = grid.plan_at(np.where(possible, -sum(np.ix_(*logs), np.zeros(grid.dims)), np.inf))
        plans[name], inside = target, grid.nested_in(target)
    return plans


def _chances(
    space: ElasticSpace, likely: ElasticSpace, probabilities: Mapping[ElasticAxis, Sequence[float]]
) -> list[tuple[AxisSpec, dict[int, float]]]:
    """Each axis of `likely` with the probability of every choice that `space` has."""
    return [
        (spec, dict(zip(whole.choices, probabilities[spec.axis], strict=True))) for spec, whole in zip(likely.axes, space.axes, strict=True)
    ]


def _likely_subspace(
    space: ElasticSpace, targets: Mapping[str, float | SubmodelPlan], probabilities: Mapping[str, Mapping[ElasticAxis, Sequence[float]]]
) -> ElasticSpace:
    """The space without its least probable choices, until it can be enumerated; the parent's and those of pinned plans stay."""
    pinned = [space.parent, *(target for target in targets.values() if isinstance(target, SubmodelPlan))]
    kept = {spec.axis: list(spec.choices) for spec in space.axes}
    best: dict[tuple[ElasticAxis, int], float] = {}
    for chances in probabilities.values():
        for spec, chance in _chances(space, space, chances):
            for choice, value in chance.items():
                best[spec.axis, choice] = max(value, best.get((spec.axis, choice), 0.0))
    protected = {(spec.axis, space.choice_of(plan, spec.axis)) for spec in space.axes for plan in pinned}
    droppable = sorted((value, key) for key, value in best.items() if key not in protected)
    while math.prod(len(choices) for choices in kept.values()) > ENUMERATED_PLANS and droppable:
        axis, choice = droppable.pop(0)[1]
        kept[axis].remove(choice)
    return replace(space, axes=tuple(replace(spec, choices=tuple(kept[spec.axis])) for spec in space.axes))


def check_targets(
    space: ElasticSpace, shape: ModelShape, targets: Mapping[str, float | SubmodelPlan], cost: Cost, tolerance: float
) -> list[str]:
    """Problems of budgets that no family of nested plans can meet, one line each; empty when a family exists.

    targets: budget -> absolute cost, or the plan it pins; from the largest budget to the smallest, the parent first or not.
    A family is a chain of plans, each nested in the one before and within `tolerance` (relative) of its target. In a space
    that is enumerated the answer is exact; in a larger one the chain follows the nearest plans.
    """
    if num_plans(space) > ENUMERATED_PLANS:
        return _check_by_descent(space, shape, targets, cost, tolerance)
    grid, problems = _Grid.of(space, shape, cost), []
    inside = np.ones(grid.dims, dtype=bool)
    for name, target in targets.items():
        if isinstance(target, SubmodelPlan):
            chosen = grid.is_plan(target)
            if not (chosen & inside).any():
                problems.append(
                    f"elastic.budgets.{name}: its pinned plan is not nested in the larger budgets; narrow it or reorder the budgets"
                )
        else:
            miss = np.where(inside, np.abs(grid.costs / target - 1), np.inf)
            chosen = miss <= max(tolerance, miss.min())
            if miss.min() > tolerance:
                problems.append(_unreachable(name, target, float(grid.costs.ravel()[miss.argmin()]), tolerance))
        inside = grid.nested_in_any(chosen & inside)
        if not inside.any():
            inside = grid.nested_in_any(chosen)
    return problems


def _unreachable(name: str, target: float, nearest: float, tolerance: float) -> str:
    return (
        f"elastic.budgets.{name}: no plan nested in the larger budgets costs {target:.6g} within {tolerance:.3g}; "
        f"the nearest reachable cost is {nearest:.6g}: set it, or add choices to elastic.axes"
    )


def _check_by_descent(
    space: ElasticSpace, shape: ModelShape, targets: Mapping[str, float | SubmodelPlan], cost: Cost, tolerance: float
) -> list[str]:
    outer, problems = space.parent, []
    for name, target in targets.items():
        if isinstance(target, SubmodelPlan):
            if not outer.contains(target):
                problems.append(
                    f"elastic.budgets.{name}: its pinned plan is not nested in the larger budgets; narrow it or reorder the budgets"
                )
            outer = target
        else:
            outer = _descend(space, shape, target, cost, outer)
            found = plan_cost(shape, outer, cost)
            if abs(found / target - 1) > tolerance:
                problems.append(_unreachable(name, target, found, tolerance))
    return problems


@dataclass(frozen=True, slots=True)
class _Grid:
    """Every plan of a space as one entry of an array with a dim per axis, choices from wide to narrow.

    costs: the cost of each plan; spread: standard deviation of its kept fractions over the axes.
    """

    space: ElasticSpace
    costs: Floats
    spread: Floats

    @property
    def dims(self) -> tuple[int, ...]:
        return self.costs.shape

    @classmethod
    def of(cls, space: ElasticSpace, shape: ModelShape, cost: Cost) -> _Grid:
        open_widths = np.ix_(*(np.array(spec.choices, dtype=np.float64) for spec in space.axes))
        widths: dict[ElasticAxis, Number] = {axis: float(width) for axis, width in space.parent.widths}
        survival: list[Number] = [1.0] * shape.num_layers
        fractions = []
        for spec, width in zip(space.axes, open_widths, strict=True):
            fractions.append(width / spec.parent)
            if spec.axis is ElasticAxis.LAYERS:
                for order, layer in enumerate(space.drop_order):
                    survival[layer] = (spec.parent - width <= order).astype(np.float64)
            else:
                widths[spec.axis] = width
        dims = tuple(len(spec.choices) for spec in space.axes)
        costs = np.broadcast_to(np.asarray(cost(Widths(widths, survival)), dtype=np.float64), dims)
        spread = np.std(np.broadcast_arrays(*fractions), axis=0) if fractions else np.zeros(dims)
        return cls(space, costs, spread)

    def plan_at(self, penalty: Floats) -> SubmodelPlan:
        """The plan with the least penalty (of equal ones the widest)."""
        index = np.unravel_index(int(penalty.argmin()), self.dims)
        return self.space.plan({spec.axis: spec.choices[int(at)] for spec, at in zip(self.space.axes, index, strict=True)})

    def is_plan(self, plan: SubmodelPlan) -> Flags:
        """Marks the entry of one plan."""
        marks = np.zeros(self.dims, dtype=bool)
        marks[tuple(spec.choices.index(self.space.choice_of(plan, spec.axis)) for spec in self.space.axes)] = True
        return marks

    def nested_in_any(self, marks: Flags) -> Flags:
        """Marks every plan that is nested in at least one marked plan."""
        for dim in range(marks.ndim):
            marks = np.logical_or.accumulate(marks, axis=dim)
        return marks

    def containing_any(self, marks: Flags) -> Flags:
        """Marks every plan in which at least one marked plan is nested."""
        for dim in range(marks.ndim):
            marks = np.flip(np.logical_or.accumulate(np.flip(marks, dim), axis=dim), dim)
        return marks

    def nested_in(self, plan: SubmodelPlan) -> Flags:
        """Marks every plan nested in `plan`."""
        return self.nested_in_any(self.is_plan(plan))


def _allowed(space: ElasticSpace, outer: SubmodelPlan) -> list[tuple[AxisSpec, tuple[int, ...]]]:
    """Every axis with its choices that are nested in `outer`."""
    return [(spec, tuple(n for n in spec.choices if n <= space.choice_of(outer, spec.axis))) for spec in space.axes]


def _ladder(space: ElasticSpace, outer: SubmodelPlan) -> list[SubmodelPlan]:
    """The plans that keep about one fraction of every axis, for every fraction at which one of them changes."""
    allowed = _allowed(space, outer)
    fractions = sorted({n / spec.parent for spec, choices in allowed for n in choices}, reverse=True)
    steps = [(a + b) / 2 for a, b in zip(fractions, fractions[1:], strict=False)]
    plans = [
        space.plan({spec.axis: min(choices, key=lambda n: (abs(n / spec.parent - fraction), -n)) for spec, choices in allowed})
        for fraction in sorted([*fractions, *steps], reverse=True)
    ]
    return list(dict.fromkeys(plans))


def _descend(space: ElasticSpace, shape: ModelShape, target: float, cost: Cost, outer: SubmodelPlan) -> SubmodelPlan:
    """Coordinate descent on the distance from `target`, from the nearest step of the ladder; moves change one or two axes."""
    allowed = _allowed(space, outer)

    def miss(plan: SubmodelPlan) -> float:
        return abs(plan_cost(shape, plan, cost) - target)

    best = min(_ladder(space, outer), key=miss)
    while True:
        now = {spec.axis: space.choice_of(best, spec.axis) for spec, _ in allowed}
        singles = [{spec.axis: n} for spec, choices in allowed for n in choices if n != now[spec.axis]]
        moves = [*singles, *(a | b for i, a in enumerate(singles) for b in singles[:i] if a.keys() != b.keys())]
        found = min((space.plan(now | move) for move in moves), key=miss, default=best)
        if miss(found) >= miss(best):
            return best
        best = found
