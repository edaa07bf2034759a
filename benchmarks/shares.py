"""Shares of work on the ranks of a layout, from a shape, a plan and routed tokens alone: how even they are, and what a plain prefix would give.

A plain prefix keeps the first n components of a whole axis, of which contiguous shards stand on the ranks. No torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.cost import Widths, flops_per_token, widths_of
from megatron_elastic.layout import axis_groups, dims_of, kept_widths
from megatron_elastic.polynomials import multiplied, parameters, value_at
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import width_at

BAR = 1.1
"""Largest max/mean that counts as balanced."""
SCHEMES = ("grouped", "prefix")

Work = Sequence[Sequence[float]]
"""[layers][ranks]: how much each rank has to do in each layer."""


@dataclass(frozen=True, slots=True)
class Balance:
    """One quantity of one budget on one layout.

    layout: "EP" or "TP"; quantity: "live experts", "drawn tokens", "text tokens", "drawn FLOPs", "text FLOPs" or "FLOPs"; per_rank: summed over
    layers; imbalance: see `imbalance`; idle: ranks without work in at least one layer.
    """

    budget: str
    layout: str
    ranks: int
    quantity: str
    scheme: str
    per_rank: tuple[float, ...]
    imbalance: float
    idle: int

    @classmethod
    def of(cls, budget: str, layout: str, quantity: str, scheme: str, work: Work) -> Balance:
        """From the work of every layer and rank."""
        per_rank = tuple(sum(layer) for layer in zip(*work, strict=True))
        idle = sum(not all(layers) for layers in zip(*work, strict=True))
        return cls(budget, layout, len(per_rank), quantity, scheme, per_rank, imbalance(work), idle)

    @property
    def is_miss(self) -> bool:
        """Whether the package's own scheme is above the bar."""
        return self.scheme == "grouped" and self.imbalance > BAR


def imbalance(work: Work) -> float:
    """Sum over layers of the busiest rank's work over the sum of the mean rank's: what waiting for the busiest rank costs; at least 1."""
    return sum(max(layer) for layer in work) / sum(statistics.fmean(layer) for layer in work)


def kept_on_rank(kept: int, whole: int, ranks: int, rank: int) -> int:
    """How many of the first `kept` of `whole` components are in contiguous shard number `rank` of `ranks` equal ones."""
    size = whole // ranks
    return min(max(kept - rank * size, 0), size)


def per_rank(values: Sequence[float], ranks: int) -> list[float]:
    """Sums of contiguous shares, one a rank: experts stand on ranks in their order."""
    size = len(values) // ranks
    return [sum(values[rank * size : (rank + 1) * size]) for rank in range(ranks)]


def spaces_of(space: ElasticSpace, shape: ModelShape) -> dict[str, ElasticSpace]:
    """Scheme -> the space whose expert prefixes it takes: the family's own, and one group (or one in each routing group, which routing asks for)."""
    whole = (shape.moe.routing_groups or 1) if shape.moe else 1
    axes = tuple(replace(spec, groups=whole) if spec.axis is ElasticAxis.EXPERTS else spec for spec in space.axes)
    return {"grouped": space, "prefix": replace(space, axes=axes)}


def live_experts(shape: ModelShape, space: ElasticSpace, plan: SubmodelPlan, ranks: int) -> Work:
    """Live experts of every layer that has experts and is kept, and every rank."""
    work = []
    for layer in expert_layers(shape, plan):
        (dim, _) = dims_of(f"decoder.layers.{layer}.mlp.router.weight", shape, axis_groups(space))
        alive = [0] * dim.size
        for start, length in dim.runs(kept_widths(space, plan, layer)):
            alive[start : start + length] = [1] * length
        work.append(per_rank(alive, ranks))
    return work


def expert_flops(
    shape: ModelShape, plan: SubmodelPlan, counts: Mapping[int, Sequence[int]], tokens: int, sequence: int, ranks: int
) -> Work:
    """FLOPs of every rank: its routed experts' in each layer, then one entry for all the rest, of which each rank computes its own tokens' share.

    counts: layer -> tokens of each expert.
    """
    work, rest = [], float(tokens * flops_per_token(shape, widths_of(plan, shape.num_layers), sequence))
    for layer, routed in counts.items():
        each = _flops_of_assignment(shape, plan, layer)
        work.append([each * n for n in per_rank(routed, ranks)])
        rest -= each * sum(routed)
    return [*work, [rest / ranks] * ranks]


def prefix_flops(shape: ModelShape, space: ElasticSpace, plan: SubmodelPlan, sequence: int, ranks: int) -> list[float]:
    """FLOPs of one sequence on every tensor-parallel rank when the first components of a whole axis are kept.

    Every term of the cost has one factor that the ranks divide. So a rank's FLOPs are 1/ranks of those of a model whose axes are all as
    wide as `ranks` times what this rank keeps; what is no such axis (vocabulary, keys and values) is divided evenly.
    """
    found = []
    for rank in range(ranks):
        widths = widths_of(plan, shape.num_layers)
        axes = dict(widths.axes)
        for spec in space.axes:
            if spec.sharded == "tensor":
                own = axes[spec.axis]
                here = [ranks * kept_on_rank(n, spec.parent, ranks, rank) for n in (own if isinstance(own, tuple) else (own,))]
                axes[spec.axis] = tuple(here) if isinstance(own, tuple) else here[0]
        found.append(float(sequence * flops_per_token(shape, Widths(axes, widths.survival), sequence)) / ranks)
    return found


def expert_layers(shape: ModelShape, plan: SubmodelPlan) -> list[int]:
    """Layers with experts that the plan keeps."""
    return [layer for layer in shape.layers_with("moe") if plan.keeps_layer(layer)]


def _flops_of_assignment(shape: ModelShape, plan: SubmodelPlan, layer: int) -> float:
    """Of one token in one of its experts: a multiply-add for every number of the expert."""
    widths = {axis: width_at(shape, axis, width, layer if isinstance(width, tuple) else None) for axis, width in plan.widths}
    return sum(2 * value_at(multiplied(*p.dims[1:]), widths) for p in parameters(shape) if p.is_routed)
