"""Costs as polynomials in widths, read off the layout table. Plain arithmetic, no torch.

A parameter has the product of its dims, a dim the sum of its segments, a segment its unit times the widths of its axes: one layer
costs a polynomial in the widths it has there. No axis stands twice in a term, so every term is multilinear, and the expectation of
a cost over independent choices is the cost of the expected widths: exact for axes that differ and for layers that differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.layout import BUFFERS, TABLE, Segment, axis_groups, dims_of
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import parent_width

Number = Any
"""int, float, 0-d tensor, or a numpy array that broadcasts with the others (a grid of plans at once)."""

Polynomial = Mapping[tuple[ElasticAxis, ...], float]
"""Axes of a term -> its coefficient; the constant term has no axes. Coefficients of counts are integers."""

ByPart = Mapping[str, Polynomial]
"""Sublayer ("" for what stands outside the layers) -> polynomial of one of them."""


@dataclass(frozen=True, slots=True)
class SoftChoices:
    """Where expected widths come from, for costs that need more than them (`memory.activation_bytes`).

    probabilities: torch tensors [places, choices], one for each elastic axis of the space.
    """

    space: ElasticSpace
    probabilities: Mapping[ElasticAxis, Any]


@dataclass(frozen=True, slots=True)
class Widths:
    """What a cost is counted for: a plan, a grid of plans, or the expectation of a router's decision.

    axes: width of every axis of the model; a tuple has one for each layer of the parent that has the axis, dropped layers included.
    survival: for each layer the probability (1 or 0 for a plan) that it is computed.
    soft: the decision whose expectation this is; None for plans.
    """

    axes: Mapping[ElasticAxis, Number | tuple[Number, ...]]
    survival: Sequence[Number]
    soft: SoftChoices | None = None


def widths_of(plan: SubmodelPlan, num_layers: int) -> Widths:
    """The widths of a hard plan."""
    return Widths(dict(plan.widths), [int(plan.keeps_layer(layer)) for layer in range(num_layers)])


def term(coefficient: float, *axes: ElasticAxis) -> Polynomial:
    """One term."""
    return {axes: coefficient}


def added(*polynomials: Polynomial) -> Polynomial:
    """Their sum."""
    total: dict[tuple[ElasticAxis, ...], float] = {}
    for polynomial in polynomials:
        for axes, coefficient in polynomial.items():
            key = tuple(sorted(axes))
            total[key] = total.get(key, 0) + coefficient
    return total


def multiplied(*polynomials: Polynomial) -> Polynomial:
    """Their product."""
    product: Polynomial = {(): 1}
    for polynomial in polynomials:
        product = added(*({a + b: p * q} for a, p in product.items() for b, q in polynomial.items()))
    assert all(len(set(axes)) == len(axes) for axes in product), "an axis in two factors: the cost is not multilinear"
    return product


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that every sublayer `part` has, and the polynomial of each of its dims."""

    part: str
    name: str
    dims: tuple[Polynomial, ...]

    @property
    def is_routed(self) -> bool:
        """Whether it belongs to the routed experts; its first dim counts them."""
        return ".experts.experts." in self.name

    @property
    def is_linear(self) -> bool:
        """Whether tokens are multiplied by it: a matrix that is neither looked up nor convolved with."""
        return len(self.dims) > 1 and not self.name.startswith("embedding.") and ".conv1d." not in self.name

    @property
    def size(self) -> Polynomial:
        """Its numbers."""
        return multiplied(*self.dims)

    @property
    def active(self) -> Polynomial:
        """Its numbers that one token meets: `topk` of the routed experts."""
        return multiplied(term(1, ElasticAxis.TOPK), *self.dims[1:]) if self.is_routed else self.size


@lru_cache(maxsize=64)
def parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """The parameters outside the layers and those of one sublayer of each kind the model has (saved buffers are none)."""
    groups, found = axis_groups(None), []
    for row in TABLE:
        layer = next(iter(shape.layers_with(row.part)), None) if row.part else None
        if row.part and layer is None:
            continue
        own = shape if layer is None else shape.at(layer)
        if row.when(own):
            dims = tuple(added(*(_of_segment(part, own) for part in rule(own, groups).segments)) for rule in row.dims)
            found += [Parameter(row.part, name, dims) for name in row.names if not name.endswith(BUFFERS)]
    return tuple(found)


def _of_segment(segment: Segment, shape: ModelShape) -> Polynomial:
    """A segment's unit is what is left of its size without the widths; so it is the same in every layer."""
    return term(segment.size // _whole(shape, segment.axes), *segment.axes)


@lru_cache(maxsize=256)
def lengths(shape: ModelShape, part: str, name: str, dim: int = 0) -> tuple[Polynomial, ...]:
    """The segments of one dim of parameter `name` (after the layer prefix) of sublayer `part`, which the model has.

    This is how costs that are no parameters (work between activations, caches) read their sizes off the layout table: an activation is as
    long as the rows of the linear that makes it, or the columns of the one that reads it.
    """
    layer = shape.layers_with(part)[0]
    dims = dims_of(f"decoder.layers.{layer}.{name}", shape, axis_groups(None))
    return tuple(_of_segment(segment, shape.at(layer)) for segment in dims[dim].segments)


def scan_lengths(shape: ModelShape) -> tuple[Polynomial, Polynomial]:
    """(channels of all Mamba heads, state channels of one SSM group)."""
    assert shape.mamba is not None
    inner, _, states = lengths(shape, "mamba", "mixer.conv1d.bias")
    return inner, {axes: coefficient // shape.mamba.groups for axes, coefficient in states.items()}


def _whole(shape: ModelShape, axes: tuple[ElasticAxis, ...]) -> int:
    widths = [parent_width(shape, axis) for axis in axes]
    return math.prod(width for width in widths if isinstance(width, int))


def by_part(shape: ModelShape, count: Callable[[Parameter], Polynomial]) -> dict[str, Polynomial]:
    """The sum of `count` over the parameters of each sublayer."""
    found: dict[str, Polynomial] = {}
    for parameter in parameters(shape):
        found[parameter.part] = added(found.get(parameter.part, {}), count(parameter))
    return found


def evaluate(shape: ModelShape, widths: Widths, costs: ByPart) -> Number:
    """The sum of a cost over what stands outside the layers and every layer that is computed, at these widths.

    Layers are gone through once for each set of per-layer axes that stand together in a term; without per-layer axes only to count them.
    """
    total: Number = 0
    for part, polynomial in costs.items():
        sums: dict[tuple[ElasticAxis, ...], Number] = {}
        for axes, coefficient in polynomial.items():
            own = tuple(axis for axis in axes if isinstance(widths.axes[axis], tuple))
            if own not in sums:
                sums[own] = _sum_over_layers(shape, widths, part, own) if part else 1
            value = coefficient * sums[own]
            for axis in axes:
                if axis not in own:
                    value = value * widths.axes[axis]
            total = total + value
    return total


def _sum_over_layers(shape: ModelShape, widths: Widths, part: str, axes: tuple[ElasticAxis, ...]) -> Number:
    layers = [widths.survival[layer] for layer in shape.layers_with(part)]
    for axis in axes:
        layers = [value * width for value, width in zip(layers, widths.axes[axis], strict=True)]
    return sum(layers)


def value_at(polynomial: Polynomial, widths: Mapping[ElasticAxis, Number]) -> Number:
    """The polynomial at widths of one layer."""
    total: Number = 0
    for axes, coefficient in polynomial.items():
        value: Number = coefficient
        for axis in axes:
            value = value * widths[axis]
        total = total + value
    return total
