"""From what was observed at places (channels of heads, one norm after another) to the scores of components, as a ranking holds them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.importance.places import Place
from megatron_elastic.shape import ModelShape

BEST_CHANNELS = 0.5
"""Share of the channels of Mamba heads, the best ones, that heads are compared by (Nemotron Elastic, arXiv 2511.16664, ranks heads by the
channels that are kept, and how many that will be is not known here)."""

ScoresByLayer = dict[ElasticAxis, dict[int | None, Tensor]]


def fold(observed: Mapping[Place, Tensor], shape: ModelShape) -> ScoresByLayer:
    """Axis -> layer -> scores, from place -> scores of its entries, one for every place of the model.

    hidden: the sum over all sublayers' norms (or all writes). Heads: L2 norm over their channels. Mamba channels: L2 norm over the heads of the
    layer, one order for all; Mamba heads: L2 norm over their best channels. Mamba state: the geometric mean of B and C, see `mamba.py`.
    """
    scores: ScoresByLayer = {}
    experts: dict[int | None, list[Tensor]] = {}
    for place, values in observed.items():
        layer, local = place.layer, shape if place.layer is None else shape.at(place.layer)
        if place.axis is ElasticAxis.HIDDEN:
            hidden = scores.setdefault(place.axis, {})
            hidden[None] = hidden.get(None, torch.zeros_like(values)) + values
        elif place.axis is ElasticAxis.HEADS:
            assert local.attention is not None
            scores.setdefault(place.axis, {})[layer] = values.view(-1, local.attention.head_dim).norm(dim=1)
        elif place.axis is ElasticAxis.MAMBA_HEADS:
            heads, channels = _mamba(values, local)
            scores.setdefault(place.axis, {})[layer] = heads
            scores.setdefault(ElasticAxis.MAMBA_HEAD_DIM, {})[layer] = channels
        elif place.axis is ElasticAxis.MAMBA_STATE:
            if place.part == "B":
                assert local.mamba is not None
                both = values * observed[place._replace(part="C")]
                scores.setdefault(place.axis, {})[layer] = both.sqrt().view(local.mamba.groups, -1)
        elif place.axis is ElasticAxis.MOE_FFN:
            experts.setdefault(layer, []).append(values)
        else:
            scores.setdefault(place.axis, {})[layer] = values
    if experts:
        scores[ElasticAxis.MOE_FFN] = {layer: torch.stack(values) for layer, values in experts.items()}
    return scores


def _mamba(values: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Scores of heads and of channels from those of every channel of every head [heads x head_dim]: channels first, then heads by the best."""
    assert shape.mamba is not None and isinstance(shape.mamba.head_dim, int)
    by_head = values.view(-1, shape.mamba.head_dim)
    channels = by_head.norm(dim=0)
    best = channels.argsort(descending=True, stable=True)[: max(1, round(BEST_CHANNELS * len(channels)))]
    return by_head[:, best].norm(dim=1), channels
