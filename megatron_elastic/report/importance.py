"""What a run knows of the importance of its parent's components: the ranking that the parent was sorted by, as plain arrays for plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.checkpoint.files import shape_differences
from megatron_elastic.errors import CheckpointError
from megatron_elastic.shape import ModelShape

COLUMNS = 96
"""Columns of a heat map of `spread`: every axis is drawn as wide, however many components it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """The scores of a parent before it was sorted: components have the numbers they had then; layers keep theirs.

    criteria: axis -> name of the criterion. scores: axis -> layer (None: of the whole model) -> fp64, best is highest, sizes as in
    `importance.ranking.score_shapes`; without `layers`. text, tokens: what they are from, None: nobody says.
    drop_order: layers, first dropped first; errors: divergence (nats per token) after each removal but the last; influence: of every layer, 1 - cosine
    of its input and output; all three empty when layers were not ranked. routed: layer -> tokens routed to each expert, empty when nobody counted.
    """

    criteria: Mapping[ElasticAxis, str]
    scores: Mapping[ElasticAxis, Mapping[int | None, NDArray[np.float64]]]
    text: str | None
    tokens: int | None
    drop_order: tuple[int, ...]
    errors: tuple[float, ...]
    influence: tuple[float, ...]
    routed: Mapping[int, NDArray[np.float64]]

    def __str__(self) -> str:
        """One sentence: what the parent was ranked by, on what."""
        axes: dict[str, list[str]] = {}
        for axis, name in self.criteria.items():
            axes.setdefault(name, []).append(axis.value)
        by = "; ".join(f"{name} ({', '.join(names)})" for name, names in axes.items())
        tokens = "" if self.tokens is None else f" on {self.tokens:,} tokens" + ("" if self.text is None else f" of {self.text}")
        return f"{by}{tokens}, before it was sorted"


def read_importance(file: Path, shape: ModelShape) -> Importance:
    """The ranking in a file, which must be of a model of `shape`. Imports torch, as nothing else of a report does.

    Raises CheckpointError for a file that is no ranking, or one of another model.
    """
    from megatron_elastic.importance.dealing import drop_order
    from megatron_elastic.importance.ranking import read_ranking

    ranking = read_ranking(file)
    differences = shape_differences(replace(ranking.shape, padded_vocab_size=None), replace(shape, padded_vocab_size=None))
    if differences:
        raise CheckpointError(
            f"ranking {str(file)!r} is not of the run's parent: {', '.join(differences)}; restore it, or remove it to report without importance"
        )
    scores = {
        axis: {layer: ranking.scores[axis][layer].double().numpy() for layer in sorted(ranking.scores[axis], key=lambda one: one or 0)}
        for axis in ElasticAxis
        if axis in ranking.scores and axis is not ElasticAxis.LAYERS
    }
    try:
        errors, influence, routed = _measured(ranking.provenance, shape)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{str(file)!r} cannot be read as a ranking: {error}; restore it, or remove it to report without importance"
        ) from None
    text, tokens = ranking.provenance.get("data"), ranking.provenance.get("tokens")
    order = drop_order(ranking) if errors else ()
    return Importance(
        criteria=ranking.criteria,
        scores=scores,
        text=None if text is None else str(text),
        tokens=tokens if isinstance(tokens, int) else None,
        drop_order=order,
        errors=errors,
        influence=influence,
        routed=routed,
    )


def _measured(
    provenance: Mapping[str, Any], shape: ModelShape
) -> tuple[tuple[float, ...], tuple[float, ...], dict[int, NDArray[np.float64]]]:
    """(errors, influence, routed) that a ranking's maker wrote beside the scores. Raises all sorts of errors for what it would not write."""
    depth, counted = provenance.get("depth"), provenance.get("expert_tokens", {})
    errors = () if depth is None else tuple(float(value) for value in depth["errors"])
    influence = () if depth is None else tuple(float(value) for value in depth["influence"])
    if depth is not None and (len(errors), len(influence)) != (shape.num_layers - 1, shape.num_layers):
        raise ValueError(f"{len(errors)} errors and {len(influence)} influences of {shape.num_layers} layers")
    routed = {int(layer): np.asarray(tokens, dtype=np.float64) for layer, tokens in sorted(counted.items(), key=lambda item: int(item[0]))}
    for layer, tokens in routed.items():
        experts = None if shape.moe is None else shape.moe.experts
        if tokens.shape != (experts,) or layer not in shape.layers_with("moe"):
            raise ValueError(f"tokens of {tokens.size} experts in layer {layer}")
    return errors, influence, routed


def spread(scores: NDArray[np.float64], columns: int = COLUMNS) -> NDArray[np.float64]:
    """[columns] how importance falls from the best component to the worst: scores [..., n] sorted in each row and divided by the row's best.

    Several rows (an order for each expert, for each SSM group) become their mean; rows without a score above 0 are left out, all 0 when
    every one is. A column is the mean over its share of the components, so that each of few components has as many columns as another.
    """
    rows = -np.sort(-scores.reshape(-1, scores.shape[-1]), axis=-1)
    rows = rows[rows[:, 0] > 0]
    if not len(rows):
        return np.zeros(columns)
    falling = (rows / rows[:, :1]).mean(axis=0)
    # The mean over a share of the components is the difference of their running sum at its two ends.
    running, places = np.concatenate([[0.0], np.cumsum(falling)]), np.arange(len(falling) + 1)
    ends = np.linspace(0.0, len(falling), columns + 1)
    return np.diff(np.interp(ends, places, running)) * columns / len(falling)


def spread_by_layer(by_layer: Mapping[int | None, NDArray[np.float64]], columns: int = COLUMNS) -> NDArray[np.float64]:
    """[layers, columns] `spread` of every layer of an axis, in the order of `by_layer`; one row for an axis of the whole model."""
    return np.stack([spread(scores, columns) for scores in by_layer.values()])


def over_best(by_layer: Mapping[int | None, NDArray[np.float64]]) -> NDArray[np.float64]:
    """[layers, n] scores over the best of their layer, each at its component's place; 0 for a layer without a score above 0."""
    scores = np.stack(list(by_layer.values()))
    best = scores.max(axis=1, keepdims=True)
    return np.divide(scores, best, out=np.zeros_like(scores), where=best > 0)


def over_mean(by_layer: Mapping[int, NDArray[np.float64]]) -> NDArray[np.float64]:
    """[layers, experts] tokens routed to each expert over the mean of its layer: 1 for its even share; 0 for a layer that got none."""
    tokens = np.stack(list(by_layer.values()))
    mean = tokens.mean(axis=1, keepdims=True)
    return np.divide(tokens, mean, out=np.zeros_like(tokens), where=mean > 0)
