"""The exact expectation of a peak over a soft decision's choices.

A peak is the largest of many moments; its expectation is not the peak of expected widths, so it is taken from distribution
functions. Given the width of the residual stream, the depth and the homogeneous axes, layers are independent: the probability that
none of them is above x is the product of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch

from megatron_elastic.axes import AxisSpec, ElasticAxis
from megatron_elastic.polynomials import Polynomial, SoftChoices, value_at
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import AXES, parent_plan

Moments = Mapping[str, Sequence[Polynomial]]
"""Sublayer ("" for between the layers) -> its moments; the peak is the largest of those that are computed."""


def expected_peak(shape: ModelShape, soft: SoftChoices, moments: Moments) -> torch.Tensor:
    """The expectation [] of the largest moment, in the moments' unit; differentiable in the probabilities."""
    total: Any = 0
    for width, chance in _choices(shape, soft, ElasticAxis.HIDDEN):
        between = float(value_at(moments[""][0], {ElasticAxis.HIDDEN: width}))
        parts = [_PartPeak.of(shape, soft, part, moments[part], width) for part in moments if part]
        steps = np.unique(np.concatenate([[between], *(part.values.ravel() for part in parts)]))
        steps = steps[steps >= between]  # a model without layers still has what is between them
        for kept, survives in _depths(shape, soft):
            below = reduce(torch.mul, [part.at_most(steps, shape, kept) for part in parts], chance.new_ones(len(steps)))
            exactly = torch.cat([below[:1], below.diff()])
            total = total + chance * survives * (exactly * torch.as_tensor(steps).to(below)).sum()
    return total


def _choices(shape: ModelShape, soft: SoftChoices, axis: ElasticAxis) -> Iterator[tuple[int, torch.Tensor]]:
    """(width, probability []) of a homogeneous axis, elastic or not."""
    spec = soft.space.spec(axis)
    if spec is None:
        width = parent_plan(shape).width(axis)
        assert isinstance(width, int)
        yield width, next(iter(soft.probabilities.values())).new_ones(())
    else:
        yield from zip(spec.choices, soft.probabilities[axis][0], strict=True)


def _depths(shape: ModelShape, soft: SoftChoices) -> Iterator[tuple[frozenset[int], torch.Tensor | float]]:
    """(the layers that are computed, probability) for every depth."""
    layers, everything = soft.space.spec(ElasticAxis.LAYERS), frozenset(range(shape.num_layers))
    if layers is None:
        yield everything, 1.0
        return
    for depth, chance in zip(layers.choices, soft.probabilities[ElasticAxis.LAYERS][0], strict=True):
        yield everything - set(soft.space.drop_order[: layers.parent - depth]), chance


@dataclass(frozen=True, slots=True)
class _PartPeak:
    """The distribution of the largest moment of the layers that have one sublayer, for one width of the residual stream.

    values: [shared, own] the largest moment for every combination of the choices of its homogeneous axes and of its per-layer ones.
    shared: [shared] probabilities. own: [own, layers] probabilities in each layer that has the sublayer; one column stands for all layers
    when no axis is per layer (then they are alike).
    """

    part: str
    values: np.ndarray
    shared: torch.Tensor
    own: torch.Tensor

    @classmethod
    def of(cls, shape: ModelShape, soft: SoftChoices, part: str, moments: Sequence[Polynomial], hidden: int) -> _PartPeak:
        specs = [spec for spec in soft.space.axes if AXES[spec.axis].part == part]
        specs.sort(key=lambda spec: spec.per_layer)  # shared axes first: the rows of `values`
        widths: dict[ElasticAxis, Any] = dict(parent_plan(shape).widths) | {ElasticAxis.HIDDEN: hidden}
        grid = np.ix_(*(np.array(spec.choices, dtype=np.float64) for spec in specs))
        widths |= dict(zip((spec.axis for spec in specs), grid, strict=True))
        dims = [len(spec.choices) for spec in specs]
        values = np.maximum.reduce([np.broadcast_to(value_at(moment, widths), dims) for moment in moments])
        shared, own = (_joint(soft, [spec for spec in specs if spec.per_layer is per_layer]) for per_layer in (False, True))
        return cls(part, values.reshape(shared.shape[1], own.shape[1]), shared[0], own.T)

    def at_most(self, steps: np.ndarray, shape: ModelShape, kept: frozenset[int]) -> torch.Tensor:
        """Probability [steps] that no layer of `kept` is above a step."""
        layers = [place for place, layer in enumerate(shape.layers_with(self.part)) if layer in kept]
        if not layers:
            return self.shared.new_ones(len(steps))
        below = torch.as_tensor(self.values[None] <= steps[:, None, None]).to(self.shared)  # [steps, shared, own]
        by_layer = below @ self.own[:, layers if self.own.shape[1] > 1 else [0]]
        return by_layer.prod(-1) @ self.shared


def _joint(soft: SoftChoices, specs: Sequence[AxisSpec]) -> torch.Tensor:
    """Joint probabilities [places, combinations] of axes that are drawn independently, the last axis running fastest."""
    joint = next(iter(soft.probabilities.values())).new_ones(1, 1)
    for spec in specs:
        joint = (joint[:, :, None] * soft.probabilities[spec.axis][:, None, :]).flatten(1)
    return joint
