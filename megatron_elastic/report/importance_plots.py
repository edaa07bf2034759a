"""The plots of the ranking that a run's parent was sorted by. Each function writes one PNG file, or none where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.report.importance import COLUMNS, Importance, over_best, over_mean, spread_by_layer
from megatron_elastic.report.record import RunRecord
from megatron_elastic.report.style import drawing, heat_map

ERROR_COLOUR, INFLUENCE_COLOUR = "#D55E00", "#0072B2"
MOST_TICKS = 14
"""Layers that are named below a plot."""


def plot_spread(record: RunRecord, path: Path) -> bool:
    """Importance from the best component to the worst: a panel an axis, a row a layer. False, and no file, without a ranking of widths.

    Experts are left out; `plot_experts` shows them one by one.
    """
    importance = record.importance
    axes_shown = [] if importance is None else [axis for axis in importance.scores if axis is not ElasticAxis.EXPERTS]
    if importance is None or not axes_shown:
        return False
    heights = [min(max(0.4, 0.14 * len(importance.scores[axis])), 3.0) for axis in axes_shown]
    with drawing(path, 7.2, 0.9 + sum(heights) + 0.15 * len(heights)) as figure:
        panels = figure.subplots(len(axes_shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        edges = np.linspace(0, 100, COLUMNS + 1).tolist()
        meshes = []
        for axis, panel in zip(axes_shown, panels, strict=True):
            by_layer = importance.scores[axis]
            meshes.append(heat_map(panel, edges, spread_by_layer(by_layer), _numbers(by_layer)))
            unit = "" if None in by_layer else ", layer"
            panel.set_ylabel(f"{axis.value}\n{importance.criteria[axis]}{unit}", rotation=0, ha="right", va="center", fontweight="bold")
        panels[-1].set_xlabel("components of the axis, the most important first (%)")
        figure.colorbar(meshes[0], ax=panels.tolist(), label="importance / the best's", shrink=min(1.0, 2.5 / sum(heights)))
    return True


def _numbers(by_layer: Iterable[int | None]) -> list[int]:
    """The numbers of layers; none for an axis of the whole model."""
    return [layer for layer in by_layer if layer is not None]


def plot_depth(record: RunRecord, path: Path) -> bool:
    """The divergence as layers are dropped one after the other, and beside it the influence of each. False, and no file, where layers were not ranked."""
    importance = record.importance
    if importance is None or not importance.errors:
        return False
    pattern = record.recipe.model.layer_pattern
    with drawing(path, 7.6, 3.6) as figure:
        curve, bars = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_curve(curve, importance, pattern)
        bars.bar(range(len(importance.influence)), importance.influence, color=INFLUENCE_COLOUR)
        _name_layers(bars, list(range(len(pattern))), pattern, start=0)
        bars.set(xlabel="layer", ylabel="block influence (1 - cosine)")
        bars.grid(visible=False, axis="x")
    return True


def _draw_curve(axes: Any, importance: Importance, pattern: str) -> None:
    errors = importance.errors
    axes.plot(range(1, len(errors) + 1), errors, color=ERROR_COLOUR, marker="o")
    if min(errors) > 0:
        axes.set_yscale("log")
    _name_layers(axes, importance.drop_order[: len(errors)], pattern, start=1)
    axes.set(xlabel="layer dropped, after those to its left", ylabel="KL from the whole model (nats per token)")


def _name_layers(axes: Any, layers: Sequence[int], pattern: str, *, start: int) -> None:
    """Below whole places from `start` on stand the numbers of layers and their letters, as many as there is room for."""
    shown = range(0, len(layers), math.ceil(len(layers) / MOST_TICKS))
    axes.set_xticks([start + place for place in shown], [f"{layers[place]}\n{pattern[layers[place]]}" for place in shown])
    axes.tick_params(axis="x", labelsize=7)


def plot_experts(record: RunRecord, path: Path) -> bool:
    """The score of every expert of every layer and, where it was counted, how many tokens it had. False, and no file, without ranked experts."""
    importance = record.importance
    if importance is None or ElasticAxis.EXPERTS not in importance.scores:
        return False
    scores = importance.scores[ElasticAxis.EXPERTS]
    drawn = [
        (over_best(scores), _numbers(scores), 1.0, f"importance ({importance.criteria[ElasticAxis.EXPERTS]})", "score / the layer's best")
    ]
    if importance.routed:
        tokens = over_mean(importance.routed)
        drawn.append((tokens, _numbers(importance.routed), max(float(tokens.max()), 1.0), "coverage", "tokens / the layer's mean"))
    with drawing(path, 0.6 + 3.5 * len(drawn), 1.3 + min(max(1.2, 0.16 * len(scores)), 6.0)) as figure:
        panels = figure.subplots(1, len(drawn), squeeze=False)[0]
        for panel, (values, layers, most, title, label) in zip(panels, drawn, strict=True):
            edges = [place - 0.5 for place in range(values.shape[1] + 1)]
            mesh = heat_map(panel, edges, values, layers, most)
            panel.locator_params(axis="x", integer=True)
            panel.set(title=title, xlabel="expert", ylabel="layer")
            figure.colorbar(mesh, ax=panel, label=label)
    return True
