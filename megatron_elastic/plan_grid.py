"""Every plan of a space at once: an array with a dim for each coordinate. For spaces small enough. Plain Python and numpy, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_elastic.axes import ElasticSpace, SubmodelPlan
from megatron_elastic.plan_coordinates import Coordinates, Cost, Floats

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Grid:
    """Every plan of a space as one entry of an array with a dim per coordinate, choices from wide to narrow.

    costs: the cost of each plan; spread: standard deviation of its kept fractions over the coordinates.
    """

    coordinates: Coordinates
    costs: Floats
    spread: Floats

    @property
    def dims(self) -> tuple[int, ...]:
        """Choices at each coordinate."""
        return self.costs.shape

    @classmethod
    def of(cls, space: ElasticSpace, num_layers: int, cost: Cost) -> Grid:
        """The grid of a space of a model of `num_layers` layers."""
        coordinates = Coordinates.of(space, num_layers)
        dims, choices = coordinates.sizes, coordinates.choices()
        if not choices:
            return cls(coordinates, np.asarray(cost(coordinates.widths([])), dtype=np.float64), np.zeros(()))
        costs = np.broadcast_to(np.asarray(cost(coordinates.widths(np.ix_(*choices))), dtype=np.float64), dims)
        # The moments, not the fractions themselves, are summed over the grid: a space of many coordinates has a large one.
        first, second = np.zeros(dims), np.zeros(dims)
        for fraction in np.ix_(*coordinates.fractions()):
            first, second = first + fraction, second + fraction**2
        spread = np.sqrt(np.maximum(second / len(dims) - (first / len(dims)) ** 2, 0.0))
        return cls(coordinates, costs, spread)

    def plan_at(self, penalty: Floats) -> SubmodelPlan:
        """The plan with the least penalty (of equal ones the widest)."""
        return self.coordinates.plan_at(int(at) for at in np.unravel_index(int(penalty.argmin()), self.dims))

    def log_chances(self, chances: Sequence[Floats]) -> Floats:
        """The sum over coordinates of the logarithms of `chances`, one row of them for each coordinate."""
        total = np.zeros(self.dims)
        for part in np.ix_(*chances) if chances else ():
            total = total + part
        return total

    def is_plan(self, plan: SubmodelPlan) -> Flags:
        """Marks the entry of one plan."""
        marks = np.zeros(self.dims, dtype=bool)
        marks[tuple(self.coordinates.index_of(plan))] = True
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

    def between(self, outer: SubmodelPlan, inner: SubmodelPlan) -> Flags:
        """Marks every plan that is nested in `outer` and in which `inner` is nested."""
        return self.nested_in_any(self.is_plan(outer)) & self.containing_any(self.is_plan(inner))
