"""Fewer experts without training: the best of every layer stay as they are, in their order; the others go with their router rows and selection biases.

What REAP does once experts are scored (Lasby et al., arXiv 2510.13999). Nothing is rescaled: the smaller model computes what its parent does when
the others cannot be chosen. Every layer keeps the same number, and every routing group of a group-limited router its share of it, so the result is an
ordinary model. Shared experts see every token and are not among those that are chosen from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import ConfigError
from megatron_elastic.importance.criteria import ExpertCriterion
from megatron_elastic.importance.dealing import fixed_groups
from megatron_elastic.importance.ranking import Ranking
from megatron_elastic.importance.sort import SORTED
from megatron_elastic.layout import axis_groups, dims_of, layer_of
from megatron_elastic.shape import ModelShape

REAPED = "reaped"
"""The entry of a checkpoint's provenance that says which experts it kept (`reaped_record`)."""

Kept = Mapping[int, Tensor]
"""Global layer number -> the experts that stay, int64, ascending."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """What one layer loses. kept: of `experts`; saliency, tokens: shares (0 to 1) of what all its experts have that go with the dropped ones.

    saliency: what the criterion measures, summed over tokens (for `reap` gate x norm of the output); None where the ranking does not tell.
    tokens: choices of an expert by a token of the text; None where they were not counted.
    """

    layer: int
    kept: int
    experts: int
    saliency: float | None
    tokens: float | None


def number_to_keep(shape: ModelShape, share: float | None, number: int | None) -> int:
    """How many experts every layer keeps: `number`, or the nearest to `share` (above 0, up to 1) of all that gives each routing group as many.

    shape: of a model with experts. Raises ConfigError for a number that is above what a layer has, that does not divide into the routing groups,
    or that leaves a token fewer experts to choose from than it takes.
    """
    groups, layers = fixed_groups(shape, ElasticAxis.EXPERTS), shape.layers_with("moe")
    sizes = [_experts(shape, layer) for layer in layers]
    if (share is None) == (number is None):
        raise ConfigError("give one of --keep and --keep-experts: a share of the experts, or how many of them stay in every layer")
    if number is not None:
        asked = f"--keep-experts {number}"
    else:
        assert share is not None
        if not 0 < share <= 1:
            raise ConfigError(f"--keep {share:g} must be above 0 and at most 1; it is the share of the experts that stays")
        if len(set(sizes)) > 1:
            raise ConfigError(f"--keep {share:g}: layers have from {min(sizes)} to {max(sizes)} experts; give --keep-experts")
        number = int(share * sizes[0] / groups + 0.5) * groups
        asked = f"--keep {share:g} ({number} of {sizes[0]} experts)"
    for layer, experts in zip(layers, sizes, strict=True):
        if number > experts:
            raise ConfigError(f"{asked} is above the {experts} experts of layer {layer}; keep fewer")
        _check_choice(shape, layer, number, asked)
    return number


def _experts(shape: ModelShape, layer: int) -> int:
    moe = shape.at(layer).moe
    assert moe is not None and isinstance(moe.experts, int)
    return moe.experts


def _check_choice(shape: ModelShape, layer: int, number: int, asked: str) -> None:
    """Raise ConfigError when a token would not find its experts among `number` of them."""
    moe = shape.at(layer).moe
    assert moe is not None and isinstance(moe.topk, int)
    if moe.routing_groups is None or moe.groups_per_token is None:
        if number < moe.topk:
            raise ConfigError(f"{asked} is below the {moe.topk} that a token of layer {layer} chooses (topk); keep at least {moe.topk}")
        return
    groups, chosen = moe.routing_groups, moe.groups_per_token
    least = -(-moe.topk // chosen) * groups
    if number % groups:
        raise ConfigError(
            f"{asked} is not a multiple of the {groups} groups that layer {layer} routes in; keep {max(least, number // groups * groups)}"
        )
    if number < least:
        raise ConfigError(
            f"{asked} leaves {number // groups} in each of the {groups} groups of layer {layer}, of which a token uses {chosen}: {number // groups * chosen} "
            f"to choose {moe.topk} from (topk); keep at least {least}"
        )


def best_experts(ranking: Ranking, number: int) -> Kept:
    """The `number` best experts of every layer, as many in each routing group. Of equal scores the first stay. `number_to_keep` says which are possible."""
    groups = fixed_groups(ranking.shape, ElasticAxis.EXPERTS)
    kept = {}
    for layer, scores in ranking.scores[ElasticAxis.EXPERTS].items():
        assert layer is not None
        rows = scores.reshape(groups, -1)
        best = torch.argsort(rows, dim=-1, descending=True, stable=True)[:, : number // groups]
        kept[layer] = (best + torch.arange(groups)[:, None] * rows.shape[-1]).reshape(-1).sort().values
    return kept


def reaped_shape(shape: ModelShape, number: int) -> ModelShape:
    """The shape of a model with `number` experts in every layer that has them."""
    assert shape.moe is not None
    return replace(shape, moe=replace(shape.moe, experts=number))


def select_experts(tensors: Mapping[str, Tensor], shape: ModelShape, kept: Kept) -> Mapping[str, Tensor]:
    """The model without the other experts: a mapping that reads and cuts a tensor each time it is asked.

    tensors: our name -> full tensor of a model of `shape`. A tensor that has no experts is handed on as it is.
    """
    return _Selected(tensors, shape, kept)


class _Selected(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], shape: ModelShape, kept: Kept) -> None:
        self._tensors, self._shape, self._kept = tensors, shape, kept

    def __getitem__(self, name: str) -> Tensor:
        tensor, layer = self._tensors[name], layer_of(name)
        if layer is None or layer not in self._kept:
            return tensor
        for number, dim in enumerate(dims_of(name, self._shape, axis_groups(None))):
            if ElasticAxis.EXPERTS in dim.axes:
                tensor = tensor.index_select(number, self._kept[layer])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def expert_tokens(ranking: Ranking) -> dict[int, Tensor]:
    """Layer -> how many tokens of the text chose each expert, int64 [experts]; empty when they were not counted."""
    counted = ranking.provenance.get("expert_tokens", {})
    return {int(layer): torch.tensor(counts) for layer, counts in counted.items()}


def layer_cuts(ranking: Ranking, kept: Kept) -> list[LayerCut]:
    """What every layer with experts loses when only `kept` stay."""
    criterion, tokens = ExpertCriterion(ranking.criteria[ElasticAxis.EXPERTS]), expert_tokens(ranking)
    found = []
    for layer, stay in kept.items():
        scores, counts = ranking.scores[ElasticAxis.EXPERTS][layer].double(), tokens.get(layer)
        saliency: Tensor | None = scores
        if criterion is ExpertCriterion.RANDOM:
            saliency = None
        elif criterion is ExpertCriterion.REAP:  # a mean over the expert's tokens
            saliency = None if counts is None else scores * counts
        found.append(LayerCut(layer, len(stay), len(scores), _share_lost(saliency, stay), _share_lost(counts, stay)))
    return found


def _share_lost(values: Tensor | None, kept: Tensor) -> float | None:
    """The share of the sum of values [experts] that is not in `kept`; None without values."""
    if values is None:
        return None
    dropped = torch.ones(len(values), dtype=torch.bool)
    dropped[kept] = False
    total = float(values.double().sum())
    return float(values[dropped].double().sum()) / total if total else 0.0


def reaped_record(ranking: Ranking, kept: Kept) -> dict[str, Any]:
    """What a model says about the experts it kept: their numbers in the model it was cut from, how many that had, and what chose them."""
    said = ranking.provenance
    return {
        "criterion": ranking.criteria[ElasticAxis.EXPERTS],
        "ranking": ranking.fingerprint,
        "data": said.get("data"),
        "tokens": said.get("tokens"),
        "experts": {str(layer): len(ranking.scores[ElasticAxis.EXPERTS][layer]) for layer in kept},
        "kept": {str(layer): stay.tolist() for layer, stay in kept.items()},
    }


def reaped_provenance(provenance: Mapping[str, Any], record: Mapping[str, Any], parent_parameters: int) -> dict[str, Any]:
    """The provenance of what `record` cuts from a model of this provenance. parent_parameters: of that model, where it does not name its parent's.

    Experts that were dealt over groups by `sort` are not any more: that is taken back. What keeps all of them is the model it was.
    """
    if all(len(record["kept"][layer]) == experts for layer, experts in record["experts"].items()):
        return dict(provenance)
    found = {**provenance, "parent_parameters": provenance.get("parent_parameters") or parent_parameters, REAPED: dict(record)}
    if SORTED in provenance:
        groups = {axis: number for axis, number in provenance[SORTED]["groups"].items() if axis != ElasticAxis.EXPERTS.value}
        found[SORTED] = {**provenance[SORTED], "groups": groups}
    return found


def reaped_text(record: Mapping[str, Any]) -> str:
    """One sentence for a person: how many experts were kept, of how many, by what."""
    counts = dict.fromkeys((len(record["kept"][layer]), experts) for layer, experts in record["experts"].items())
    numbers = ", ".join(f"{kept} of {experts}" for kept, experts in counts)
    where = f", on {record['tokens']:,} tokens of {record['data']}" if record["data"] is not None else ""
    return (
        f"{numbers} in every layer that has them, the best by {record['criterion']}{where}; the others were removed, nothing was rescaled"
    )
