"""The widths of a plan axis by axis, whole or one a layer, and probabilities of either kind. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.errors import PlanError
from megatron_elastic.recipe import Recipe
from megatron_elastic.space import layers_of_axis


@dataclass(frozen=True, slots=True)
class AxisWidths:
    """What a plan keeps of one elastic axis.

    parent: the parent's width, in components; widths: one for the whole model, or one for each of `layers`.
    layers: global numbers (from 0) of the layers that the widths belong to, empty for one width for the whole model.
    dropped: the layers that the plan skips: all of them for the axis `layers`, else those among `layers`.
    """

    axis: str
    parent: int
    widths: tuple[int, ...]
    layers: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """The widths that are computed: those of skipped layers are not."""
        if not self.layers:
            return self.widths
        return tuple(width for layer, width in zip(self.layers, self.widths, strict=True) if layer not in self.dropped)

    @property
    def text(self) -> str:
        """The width, or the range of widths of the layers that are computed."""
        if not self.kept:
            return "skipped"
        low, high = min(self.kept), max(self.kept)
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"

    @property
    def share(self) -> float:
        """The mean width over the parent's, of the layers that are computed (0 when none is)."""
        return sum(self.kept) / (len(self.kept) * self.parent) if self.kept else 0.0

    @property
    def bars(self) -> list[tuple[int, int, float]]:
        """(layer, width, share of the parent's width) of every layer, in order, with a width of 0 for a skipped one; empty for one width."""
        if not self.layers:
            return []
        shown = [(layer, 0 if layer in self.dropped else width) for layer, width in zip(self.layers, self.widths, strict=True)]
        return [(layer, width, width / self.parent) for layer, width in shown]


def axis_widths(recipe: Recipe, plan: SubmodelPlan) -> tuple[AxisWidths, ...]:
    """What `plan` keeps of every elastic axis of the recipe. Raises PlanError when its widths are not those of the model's layers."""
    space = recipe.space
    assert space is not None
    found = []
    for spec in space.axes:
        if spec.axis is ElasticAxis.LAYERS:
            found.append(AxisWidths(spec.axis.value, spec.parent, (spec.parent - len(plan.dropped_layers),), (), plan.dropped_layers))
            continue
        width = plan.width(spec.axis)
        if isinstance(width, int):
            found.append(AxisWidths(spec.axis.value, spec.parent, (width,)))
            continue
        layers = layers_of_axis(recipe.model, spec.axis)
        if len(width) != len(layers):
            raise PlanError(
                f"axis {spec.axis.value!r} of a plan has {len(width)} widths for {len(layers)} layers; restore the run's recipe"
            )
        found.append(
            AxisWidths(spec.axis.value, spec.parent, width, layers, tuple(layer for layer in layers if layer in plan.dropped_layers))
        )
    return tuple(found)


def by_place(probabilities: Sequence[Any]) -> list[Sequence[float]]:
    """Probabilities [places][choices] of an axis, from a row of metrics.jsonl: that, or [choices] where there is one place."""
    return list(probabilities) if isinstance(probabilities[0], Sequence) else [probabilities]


def mean_over_places(probabilities: Sequence[Any]) -> list[float]:
    """Probabilities [choices] of an axis: the mean over its places."""
    rows = by_place(probabilities)
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def expected_shares(probabilities: Sequence[Any], choices: Sequence[int]) -> list[float]:
    """Expected width over the parent's at every place; choices: the widths of the axis, the parent's first."""
    return [sum(p * choice for p, choice in zip(row, choices, strict=True)) / choices[0] for row in by_place(probabilities)]
