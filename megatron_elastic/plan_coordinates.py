"""Plans of a space as rows of numbers, so that many can be costed at once. Plain Python and numpy, no torch.

A *coordinate* is a place with more than one choice: one for a homogeneous axis, one a layer for a per-layer axis. A plan is then the
index of its choice at each coordinate, from 0 (the widest) on; a plan is nested in another when no index is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan, Width
from megatron_elastic.cost import Number, Widths

Cost = Callable[[Widths], Number]
"""A cost as `cost.cost_function` returns it."""
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
"""The choice at each coordinate, [coordinates]; of several plans [plans, coordinates]."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The places of a space at which there is something to choose, in the order of its axes.

    places: (axis, number of the place) of each coordinate.
    """

    space: ElasticSpace
    num_layers: int
    places: tuple[tuple[AxisSpec, int], ...]

    @classmethod
    def of(cls, space: ElasticSpace, num_layers: int) -> Coordinates:
        """The coordinates of a space of a model of `num_layers` layers."""
        return cls(space, num_layers, tuple((spec, n) for spec in space.axes if len(spec.choices) > 1 for n in range(spec.places)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices at each coordinate."""
        return tuple(len(spec.choices) for spec, _ in self.places)

    def choices(self) -> list[Floats]:
        """The widths of each coordinate, widest first."""
        return [np.array(spec.choices, dtype=np.float64) for spec, _ in self.places]

    def fractions(self) -> list[Floats]:
        """The share of the parent's width that each choice keeps."""
        return [np.array(spec.choices, dtype=np.float64) / spec.parent for spec, _ in self.places]

    def index_of(self, plan: SubmodelPlan) -> Indices:
        """The choices of a plan of the space."""
        return np.array([spec.choices.index(self.space.choices_of(plan, spec.axis)[n]) for spec, n in self.places], dtype=np.int64)

    def plan_at(self, index: Iterable[int]) -> SubmodelPlan:
        """The plan with these choices."""
        widths: dict[ElasticAxis, tuple[int, ...]] = {}
        for (spec, _), at in zip(self.places, index, strict=True):
            widths[spec.axis] = (*widths.get(spec.axis, ()), spec.choices[int(at)])
        chosen: dict[ElasticAxis, Width] = {axis: row[0] if len(row) == 1 else row for axis, row in widths.items()}
        return self.space.plan(chosen)

    def widths(self, values: Sequence[Number]) -> Widths:
        """The widths of every axis and layer for the cost model.

        values: for each coordinate a number or an array of them; all of them broadcast against each other.
        """
        given = {(spec.axis, n): value for (spec, n), value in zip(self.places, values, strict=True)}
        axes: dict[ElasticAxis, Number | tuple[Number, ...]] = dict(self.space.parent.widths)
        survival: list[Number] = [1.0] * self.num_layers
        for spec in self.space.axes:
            row = tuple(given.get((spec.axis, n), float(spec.parent)) for n in range(spec.places))
            if spec.axis is ElasticAxis.LAYERS:
                for order, layer in enumerate(self.space.drop_order):
                    survival[layer] = np.asarray(spec.parent - row[0] <= order).astype(np.float64)
            else:
                axes[spec.axis] = row if spec.per_layer else row[0]
        return Widths(axes, survival)

    def costs(self, cost: Cost, rows: Indices) -> Floats:
        """The cost of each plan of `rows` [plans, coordinates]."""
        values = [choices[column] for choices, column in zip(self.choices(), rows.T, strict=True)]
        return np.broadcast_to(np.asarray(cost(self.widths(values)), dtype=np.float64), (len(rows),))
