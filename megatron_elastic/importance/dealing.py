"""From scores to orders: the best components are dealt over the groups of their axis, like cards.

A plan keeps the first n/G components of each of an axis' G groups. Dealing gives rank r (0: the best) to group r mod G, at position r div G, so
that these are the n best for every n, and every group gets its share of the good ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.errors import ConfigError, raise_all
from megatron_elastic.importance.ranking import Ranking
from megatron_elastic.shape import ModelShape

Permutations = Mapping[ElasticAxis, Mapping[int | None, Tensor]]
"""Axis -> global layer number (None: of the whole model) -> int64, of the sizes of the scores; along the last dim new position -> old one.

Rows are independent of each other: each expert (by its old number) has an order of its neurons, each SSM group one of its state.
"""


def deal(scores: Tensor, groups: int) -> Tensor:
    """New position -> old one for scores [n] dealt over `groups` equal groups, which must divide n; equal scores keep their order."""
    return torch.argsort(scores, descending=True, stable=True).reshape(-1, groups).T.reshape(-1)


def fixed_groups(shape: ModelShape, axis: ElasticAxis) -> int:
    """Equal groups that no component of `axis` may leave, because the model computes with them.

    Query heads belong to their keys and values, Mamba heads to their group's B and C, experts to their group of a group-limited router.
    """
    if axis is ElasticAxis.HEADS and shape.attention is not None:
        return shape.attention.kv_groups
    if axis is ElasticAxis.MAMBA_HEADS and shape.mamba is not None:
        return shape.mamba.groups
    if axis is ElasticAxis.EXPERTS and shape.moe is not None:
        return shape.moe.routing_groups or 1
    return 1


def permutations(ranking: Ranking, space: ElasticSpace) -> Permutations:
    """The new order of every component on the elastic axes of `space`, whose groups they are dealt over.

    `layers` has none (see `drop_order`), nor has `topk`, which has no components.
    Raises ConfigError naming every elastic axis that the ranking does not score.
    """
    missing = [spec.axis for spec in space.axes if spec.axis is not ElasticAxis.TOPK and spec.axis not in ranking.scores]
    raise_all(
        ConfigError,
        [f"axis {axis.value!r} is elastic, but the ranking does not score it; rank it, too, or remove the axis" for axis in missing],
        "ranking",
    )
    return {
        spec.axis: {
            layer: _order(scores, fixed_groups(ranking.shape, spec.axis), spec.groups)
            for layer, scores in ranking.scores[spec.axis].items()
        }
        for spec in space.axes
        if spec.axis not in (ElasticAxis.TOPK, ElasticAxis.LAYERS)
    }


def _order(scores: Tensor, fixed: int, groups: int) -> Tensor:
    """Each row of scores [..., n] dealt over the groups of an axis inside `fixed` blocks."""
    rows = scores.reshape(-1, fixed, scores.shape[-1] // fixed)
    block = rows.shape[-1]
    return torch.stack([torch.cat([deal(part, groups // fixed) + n * block for n, part in enumerate(row)]) for row in rows]).reshape(
        scores.shape
    )


def drop_order(ranking: Ranking) -> tuple[int, ...]:
    """Global layer numbers in the order in which they are dropped, the least important first; empty when layers are not ranked."""
    if ElasticAxis.LAYERS not in ranking.scores:
        return ()
    return tuple(torch.argsort(ranking.scores[ElasticAxis.LAYERS][None], stable=True).tolist())
