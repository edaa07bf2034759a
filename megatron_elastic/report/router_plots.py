"""The plots of what the router says. Each function writes one PNG file, or none where there is nothing to show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_elastic.axes import AxisSpec
from megatron_elastic.report.record import Row, RunRecord
from megatron_elastic.report.style import colours, drawing, heat_map, plain
from megatron_elastic.report.widths import by_place, expected_shares, mean_over_places
from megatron_elastic.space import layers_of_axis


def plot_router(record: RunRecord, path: Path) -> bool:
    """Probability of every choice over the elastic steps: a row an axis, a column a budget. False, and no file, without a learned router.

    Of a per-layer axis the mean over its layers; `plot_layers` shows them one by one.
    """
    rows = _routed(record)
    space = record.recipe.space
    if not rows or space is None:
        return False
    budgets = [name for name in record.budgets if name in rows[-1].values["router"]]
    steps, palette = [record.elastic_step(row) for row in rows], colours(record.budgets)
    with drawing(path, 1.6 + 2.3 * len(budgets), 0.9 + 0.95 * len(space.axes)) as figure:
        grid = figure.subplots(len(space.axes), len(budgets), sharex=True, sharey=True, squeeze=False)
        for spec, panels in zip(space.axes, grid, strict=True):
            for name, axes in zip(budgets, panels, strict=True):
                shares = [mean_over_places(row.values["router"][name][spec.axis.value]) for row in rows]
                _draw_shares(axes, steps, shares, _shades(len(spec.choices)))
                _mark_boundaries(axes, record)
            panels[0].set_ylabel(spec.axis.value, rotation=0, ha="right", va="center", fontweight="bold")
            _label_choices(panels[-1], spec.choices)
        for name, axes, bottom in zip(budgets, grid[0], grid[-1], strict=True):
            axes.set_title(plain(name), color=palette[name])
            bottom.set_xlabel("elastic steps")
    return True


def _shades(number: int) -> list[Any]:
    """Colours from wide (dark) to narrow (light)."""
    from matplotlib import colormaps

    shades = colormaps["YlGnBu_r"]
    return [shades(0.08 + 0.82 * place / max(number - 1, 1)) for place in range(number)]


def _draw_shares(axes: Any, steps: Sequence[int], shares: Sequence[Sequence[float]], shades: Sequence[Any]) -> None:
    axes.stackplot(steps, list(zip(*shares, strict=True)), colors=shades, linewidth=0)
    axes.set(ylim=(0, 1), yticks=(0, 1), yticklabels=("0", "1"))
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    axes.grid(visible=False)
    axes.tick_params(labelsize=7)


def _mark_boundaries(axes: Any, record: RunRecord) -> None:
    for number in range(1, len(record.stages)):
        axes.axvline(record.first_step(number), color="#999999", linewidth=1.2, linestyle=(0, (1, 1.5)))


def _label_choices(axes: Any, choices: Sequence[int]) -> None:
    """The choices of a row beside its last panel, in the order in which the areas stand on each other."""
    from matplotlib.patches import Patch

    handles = [Patch(color=shade, label=f"{choice:,}") for choice, shade in zip(choices, _shades(len(choices)), strict=True)]
    axes.legend(
        handles=handles[::-1],
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        fontsize=7,
        handlelength=0.9,
        handleheight=0.7,
        labelspacing=0.15,
        columnspacing=0.8,
        ncols=math.ceil(len(choices) / 5),
        borderaxespad=0.2,
    )


def plot_layers(record: RunRecord, path: Path) -> bool:
    """Expected width of every layer over the elastic steps, for the axes that have one a layer: a row an axis, a column a budget.

    False, and no file, when no axis of a learned router is per layer.
    """
    rows, space = _routed(record), record.recipe.space
    if not rows or space is None:
        return False
    first = next(iter(rows[-1].values["router"].values()))
    specs = [spec for spec in space.axes if len(by_place(first[spec.axis.value])) > 1]
    if not specs:
        return False
    budgets = [name for name in record.budgets if name in rows[-1].values["router"]]
    palette, edges = colours(record.budgets), _edges([record.elastic_step(row) for row in rows])
    heights = [max(0.8, 0.14 * len(layers_of_axis(record.recipe.model, spec.axis))) for spec in specs]
    with drawing(path, 2.4 + 2.1 * len(budgets), 0.9 + sum(heights) + 0.2 * len(specs)) as figure:
        grid = figure.subplots(len(specs), len(budgets), sharex=True, squeeze=False, height_ratios=heights)
        meshes = [
            _draw_layers(
                axes, record, [expected_shares(row.values["router"][name][spec.axis.value], spec.choices) for row in rows], edges, spec
            )
            for spec, panels in zip(specs, grid, strict=True)
            for name, axes in zip(budgets, panels, strict=True)
        ]
        for spec, panels in zip(specs, grid, strict=True):
            panels[0].set_ylabel(f"{spec.axis.value}\nlayer", rotation=0, ha="right", va="center", fontweight="bold")
        for name, axes, bottom in zip(budgets, grid[0], grid[-1], strict=True):
            axes.set_title(plain(name), color=palette[name])
            bottom.set_xlabel("elastic steps")
        figure.colorbar(meshes[0], ax=grid, label="expected width / parent's", shrink=min(1.0, 2.5 / sum(heights)))
    return True


def _routed(record: RunRecord) -> list[Row]:
    """The evaluations that say what a learned router holds, in order."""
    return [row for stage in record.stages for row in record.rows_of("eval", stage) if "router" in row.values]


def _edges(steps: Sequence[int]) -> list[float]:
    """Borders of cells around the steps: half-way between neighbours, the first and the last step at the ends."""
    if steps[0] == steps[-1]:
        return [steps[0] + place / len(steps) for place in range(len(steps) + 1)]
    return [steps[0], *((a + b) / 2 for a, b in itertools.pairwise(steps)), steps[-1]]


def _draw_layers(axes: Any, record: RunRecord, shares: Sequence[Sequence[float]], edges: Sequence[float], spec: AxisSpec) -> Any:
    """A heat map of shares [steps][layers], the first layer at the top; returns its mesh."""
    mesh = heat_map(axes, edges, list(zip(*shares, strict=True)), layers_of_axis(record.recipe.model, spec.axis))
    _mark_boundaries(axes, record)
    return mesh
