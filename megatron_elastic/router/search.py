"""Which plans a space holds for given costs: chains of nested plans near targets, and uniformly narrowed plans. No torch.

Costs of many plans are computed at once: `cost.cost_function` is plain arithmetic and takes NumPy arrays for widths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.cost import Number, Widths, widths_of
from megatron_elastic.errors import ConfigError, raise_all

CostFunction = Callable[[Widths], Number]
"""A cost model, from `cost.cost_function`."""

Costs = NDArray[np.float64]
Choice = tuple[int, ...]
"""One width per elastic axis, in the order of `ElasticSpace.axes` (for `layers`, how many are kept)."""

MAX_EXACT = 1_000_000
"""Spaces of at most so many plans are searched exactly."""


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


def plan_cost(plan: SubmodelPlan, cost_fn: CostFunction, num_layers: int) -> float:
    """The exact cost of a plan."""
    return float(cost_fn(widths_of(plan, num_layers)))


def describe_miss(name: str, cost: float, target: float, tolerance: float) -> str:
    """How far a budget's cost is from its target, for messages."""
    return f"budget {name!r}: cost {cost:.6g} is {cost / target - 1:+.1%} from its target {target:.6g} (tolerance {tolerance:.1%})"


def _plan(space: ElasticSpace, choice: Choice) -> SubmodelPlan:
    return space.plan({spec.axis: width for spec, width in zip(space.axes, choice, strict=True)})


def _costs(space: ElasticSpace, num_layers: int, cost_fn: CostFunction, choices: Sequence[Costs]) -> Costs:
    """Costs for arrays of widths, one per elastic axis, that broadcast against each other."""
    axes: dict[ElasticAxis, Number] = dict(space.parent.widths)
    survival: list[Number] = [1] * num_layers
    for spec, widths in zip(space.axes, choices, strict=True):
        if spec.axis is ElasticAxis.LAYERS:
            for position, layer in enumerate(space.drop_order):
                survival[layer] = (spec.parent - widths <= position).astype(np.float64)
        else:
            axes[spec.axis] = widths
    shape = np.broadcast_shapes(*(widths.shape for widths in choices))
    return np.broadcast_to(np.asarray(cost_fn(Widths(axes, survival)), np.float64), shape)


def _grid_costs(space: ElasticSpace, num_layers: int, cost_fn: CostFunction, grid: Sequence[Choice]) -> Costs:
    """Costs of the product of each axis' widths in `grid`, one array dimension per axis."""
    return _costs(space, num_layers, cost_fn, np.ix_(*(np.asarray(widths, np.float64) for widths in grid)))


def _best_chain(costs: Costs, targets: Sequence[float], tolerance: float, *, first_is_parent: bool) -> list[tuple[int, ...]] | None:
    """Grid indices of the nested chain with the smallest sum of deviations, each at most `tolerance`; None when there is none.

    Indices grow as widths shrink, so a plan nests in every plan of no larger indices: the best chain that ends in a plan is that
    plan's deviation and the smallest value in the box above it, a running minimum along each axis.
    """
    ends: list[Costs] = []
    for position, target in enumerate(targets):
        deviation = np.abs(costs / target - 1.0)
        value = np.where(deviation <= tolerance, deviation, np.inf)
        if position == 0 and first_is_parent:
            parent = value.flat[0]
            value = np.full_like(value, np.inf)
            value.flat[0] = parent
        if ends:
            above = ends[-1]
            for axis in range(costs.ndim):
                above = np.minimum.accumulate(above, axis=axis)
            value = value + above
        ends.append(value)
    if not np.isfinite(ends[-1].min()):
        return None
    chain: list[tuple[int, ...]] = []
    box = ends[-1]
    for position in reversed(range(len(targets))):
        chain.append(tuple(int(i) for i in np.unravel_index(int(box.argmin()), box.shape)))
        if position:
            box = ends[position - 1][tuple(slice(0, i + 1) for i in chain[-1])]
    return chain[::-1]


def _thinned(specs: Sequence[AxisSpec]) -> list[Choice]:
    """At most MAX_EXACT plans: every other inner choice of the longest axis is left out until they fit."""
    grid = [spec.choices for spec in specs]
    while math.prod(map(len, grid)) > MAX_EXACT and max(map(len, grid)) > 2:
        longest = max(range(len(grid)), key=lambda a: len(grid[a]))
        widths = grid[longest]
        grid[longest] = (widths[0], *widths[2:-1:2], widths[-1])
    return grid


def _refine(
    space: ElasticSpace, num_layers: int, cost_fn: CostFunction, chain: list[Choice], targets: Sequence[float], fixed: int
) -> list[Choice]:
    """Local search: re-choose two axes of one budget at a time, inside its neighbours, until no deviation falls."""
    chain, improved = list(chain), True
    while improved:
        improved = False
        for position, pair in itertools.product(range(fixed, len(chain)), itertools.combinations(range(len(space.axes)), 2)):
            plan = chain[position]
            above = chain[position - 1] if position else tuple(spec.parent for spec in space.axes)
            below = chain[position + 1] if position + 1 < len(chain) else tuple(min(spec.choices) for spec in space.axes)
            grid = [
                tuple(n for n in spec.choices if below[a] <= n <= above[a]) if a in pair else (plan[a],)
                for a, spec in enumerate(space.axes)
            ]
            deviation = np.abs(_grid_costs(space, num_layers, cost_fn, grid) / targets[position] - 1.0)
            best = np.unravel_index(int(deviation.argmin()), deviation.shape)
            now = tuple(grid[a].index(plan[a]) for a in range(len(grid)))
            if deviation[best] < deviation[now] - 1e-12:
                chain[position] = tuple(grid[a][int(i)] for a, i in enumerate(best))
                improved = True
    return chain


def nearest_nested_plans(
    space: ElasticSpace, targets: Mapping[str, float], cost_fn: CostFunction, tolerance: float, *, num_layers: int, full: str | None
) -> dict[str, SubmodelPlan]:
    """The chain of nested plans whose costs are nearest to the targets, from the largest to the smallest: the start-up check.

    targets: budget -> cost; full: the budget that is the parent, or None. Exact up to MAX_EXACT plans; beyond, an exact search of a
    coarser space and a local one. Raises ConfigError naming every target that stays further than `tolerance` and the nearest cost.
    """
    names = order_budgets(targets)
    if full is not None and names[0] != full:
        raise ConfigError(f"budget {full!r} is the parent but {names[0]!r} has a larger target; the full budget must be the largest")
    grid, wanted = _thinned(space.axes), [targets[name] for name in names]
    costs = _grid_costs(space, num_layers, cost_fn, grid)
    found = _best_chain(costs, wanted, tolerance, first_is_parent=full is not None)
    within = found is not None
    if found is None:
        found = _best_chain(costs, wanted, math.inf, first_is_parent=full is not None)
    assert found is not None  # without a tolerance every chain counts
    chain = [tuple(widths[i] for widths, i in zip(grid, index, strict=True)) for index in found]
    if not within and any(len(widths) < len(spec.choices) for widths, spec in zip(grid, space.axes, strict=True)):
        chain = _refine(space, num_layers, cost_fn, chain, wanted, 0 if full is None else 1)
    plans = {name: _plan(space, choice) for name, choice in zip(names, chain, strict=True)}
    problems = []
    for name, plan in plans.items():
        cost = plan_cost(plan, cost_fn, num_layers)
        if abs(cost / targets[name] - 1.0) > tolerance:
            remedy = "the full budget is the parent; use its cost" if name == full else "change the target or the choices in elastic.axes"
            problems.append(f"{describe_miss(name, cost, targets[name], tolerance)} in the nearest nested plan; {remedy}")
    raise_all(ConfigError, problems, "budgets that no nested plan reaches")
    return plans


def uniform_plan(space: ElasticSpace, target: float, cost_fn: CostFunction, *, num_layers: int) -> SubmodelPlan:
    """The plan that narrows all axes alike, with the cost nearest to `target`: each axis has the choice nearest to r x its parent.

    Every fraction r is tried. Where r lies exactly between two choices both are nearest, and every combination of them counts.
    """
    parents = [spec.parent for spec in space.axes]
    halves = {Fraction(a + b, 2 * spec.parent) for spec in space.axes for a, b in itertools.pairwise(spec.choices)}
    candidates: dict[Choice, None] = {tuple(parents): None}
    for fraction in sorted(halves, reverse=True):
        nearest = [_nearest(spec, fraction * spec.parent) for spec in space.axes]
        candidates.update(dict.fromkeys(itertools.product(*nearest)))
    table = np.asarray(list(candidates), np.float64).reshape(len(candidates), len(space.axes))
    costs = np.broadcast_to(_costs(space, num_layers, cost_fn, list(table.T)), (len(candidates),))
    return _plan(space, list(candidates)[int(np.abs(costs / target - 1.0).argmin())])


def _nearest(spec: AxisSpec, width: Fraction) -> Choice:
    """The choices nearest to `width`: one, or two at equal distance."""
    least = min(abs(choice - width) for choice in spec.choices)
    return tuple(choice for choice in spec.choices if abs(choice - width) == least)
