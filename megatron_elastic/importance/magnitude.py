"""The weights that read each component, for ranking without any text, and to weigh what text shows: large ones for what is made much use of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.importance.criteria import CRITERIA, CriterionName, Statistics
from megatron_elastic.importance.mamba import local_slices
from megatron_elastic.importance.places import READ, Place, places_of
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import LAYER_KINDS, ModelShape

Weight = tuple[Place, Tensor, int, bool]
"""(place, weight [outputs, entries], rank of the shard that its entries are, whether this is the copy that counts)."""


def weight_norms(parts: Sequence[Any], shape: ModelShape, parallel: ParallelContext) -> tuple[dict[Place, Tensor], set[Place]]:
    """Place -> norms [entries] of the weights that read its entries, and the places of this rank's parts. A collective of all processes."""
    device = next(parts[0].parameters()).device
    statistics = Statistics(places_of(shape, "weights"), CRITERIA[CriterionName.MAGNITUDE], device=device)
    seen = set[Place]().union(*(_observe(statistics, part, shape, parallel) for part in parts))
    statistics.reduce(parallel.world, torch.zeros(1))
    return statistics.scores(), seen


def times_weights(scores: Mapping[Place, Tensor], norms: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    """Scores of what linears read times the norms of their columns (`weight_norms`); those of other places as they are."""
    return {place: values * norms[place] if place.axis in READ else values for place, values in scores.items()}


@torch.no_grad()
def _observe(statistics: Statistics[Place], part: Any, shape: ModelShape, parallel: ParallelContext) -> set[Place]:
    seen = set()
    for place, weight, rank, counts in _weights(part, shape, parallel):
        seen.add(place)
        if counts:
            statistics.add(place, weight, torch.zeros(len(weight), dtype=torch.int64, device=weight.device), first=rank * weight.shape[1])
    return seen


def _weights(part: Any, shape: ModelShape, parallel: ParallelContext) -> Iterator[Weight]:
    mine = parallel.data_rank == 0 and parallel.context_rank == 0
    for layer in part.decoder.layers:
        number = layer.layer_number - 1
        for kind in LAYER_KINDS[shape.layer_pattern[number]]:
            yield from _SUBLAYERS[kind](layer, number, parallel, mine)


def _attention(layer: Any, number: int, parallel: ParallelContext, mine: bool) -> Iterator[Weight]:  # noqa: FBT001 - four of one signature
    attention = layer.self_attention
    yield Place(ElasticAxis.HIDDEN, number, "attention"), _behind_norm(attention.linear_qkv), 0, mine
    yield Place(ElasticAxis.HEADS, number), attention.linear_proj.weight, parallel.tensor_rank, mine


def _mlp(layer: Any, number: int, parallel: ParallelContext, mine: bool) -> Iterator[Weight]:  # noqa: FBT001
    yield Place(ElasticAxis.HIDDEN, number, "mlp"), _behind_norm(layer.mlp.linear_fc1), 0, mine
    yield Place(ElasticAxis.FFN, number), layer.mlp.linear_fc2.weight, parallel.tensor_rank, mine


def _moe(layer: Any, number: int, parallel: ParallelContext, mine: bool) -> Iterator[Weight]:  # noqa: FBT001
    moe, norm, hidden = layer.mlp, layer.pre_mlp_layernorm.weight, Place(ElasticAxis.HIDDEN, number, "moe")
    yield hidden, moe.router.weight * norm, 0, mine and parallel.tensor_rank == 0
    if moe.shared_experts is not None:
        yield hidden, moe.shared_experts.linear_fc1.weight * norm, 0, mine
        yield Place(ElasticAxis.SHARED_FFN, number), moe.shared_experts.linear_fc2.weight, parallel.tensor_rank, mine
    experts = moe.experts.local_experts
    copy = parallel.groups.expt_dp.rank() == 0
    for local, expert in enumerate(experts):
        yield hidden, expert.linear_fc1.weight * norm, 0, copy
        part = str(parallel.expert_rank * len(experts) + local)
        yield Place(ElasticAxis.MOE_FFN, number, part), expert.linear_fc2.weight, parallel.expert_tensor_rank, copy


def _mamba(layer: Any, number: int, parallel: ParallelContext, mine: bool) -> Iterator[Weight]:  # noqa: FBT001
    mixer = layer.mixer
    whole = _behind_norm(mixer.in_proj)
    yield Place(ElasticAxis.HIDDEN, number, "mamba"), whole, 0, mine
    yield Place(ElasticAxis.MAMBA_HEADS, number), mixer.out_proj.weight, parallel.tensor_rank, mine
    for place, rows in local_slices(mixer, number):
        if place.axis is ElasticAxis.MAMBA_STATE:  # nothing reads the state but the scan: the weights that make B and C
            yield place, whole[rows].T, parallel.tensor_rank, mine


_SUBLAYERS = {"attention": _attention, "mlp": _mlp, "moe": _moe, "mamba": _mamba}


def _behind_norm(linear: Any) -> Tensor:
    """The weight [outputs, hidden] of a linear behind its norm, times the norm's weight."""
    return linear.weight * linear.layer_norm_weight
