"""How the plots look: one colour a budget everywhere, legends outside the axes, stages marked. matplotlib is imported where it draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_elastic.recipe import StageConfig

DPI = 150
MOST_LAYER_LABELS = 8
"""Layers that are numbered beside a heat map."""
PARENT_COLOUR = "#333333"
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1")
"""Okabe and Ito's colours, which stay apart for colour-blind eyes (and one purple)."""

_SETTINGS: Mapping[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


@contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Any]:
    """A matplotlib Figure of width x height inches in the report's style, written to `path` (PNG) at the end.

    The figure belongs to no window and no global state: it is drawn by Agg whatever backend the process uses.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(dict(_SETTINGS)):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, dpi=DPI, format="png")


def colours(budgets: Sequence[str]) -> dict[str, str]:
    """Budget -> colour, by its place in the recipe (from the eighth on colours repeat)."""
    return {name: _PALETTE[number % len(_PALETTE)] for number, name in enumerate(budgets)}


def plain(text: str) -> str:
    """A name for matplotlib, which would read what stands between two dollars as mathematics."""
    return text.replace("$", r"\$")


def mark_stages(axes: Any, spans: Sequence[tuple[StageConfig, float, float]], *, titles: bool) -> None:
    """Mark the boundaries of stages given as (stage, first x, last x) and, above the axes, their names and sequence lengths."""
    for number, (stage, first, last) in enumerate(spans):
        if number:
            axes.axvline(first, color="#999999", linewidth=1, linestyle=(0, (1, 1.5)), zorder=1)
        if titles:
            text = f"{plain(stage.name)}\n{stage.sequence_length:,} tokens"
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}  # x in data, y in parts of the axes
            axes.text((first + last) / 2, 1.02, text, fontsize=8, color="#666666", **place)


def heat_map(axes: Any, edges: Sequence[float], rows: Any, layers: Sequence[int], most: float = 1.0) -> Any:
    """A heat map of values [layers][columns] from 0 to `most`, columns between `edges`, the first layer at the top; returns its mesh.

    layers: the numbers of the rows; empty for one row without a number.
    """
    borders = [place - 0.5 for place in range(max(len(layers), 1) + 1)]
    mesh = axes.pcolormesh(edges, borders, rows, cmap="YlGnBu", vmin=0, vmax=most)
    shown = range(0, len(layers), math.ceil(max(len(layers), 1) / MOST_LAYER_LABELS))
    axes.set(ylim=(borders[-1], borders[0]), yticks=list(shown), yticklabels=[str(layers[place]) for place in shown])
    axes.grid(visible=False)
    axes.tick_params(labelsize=7)
    return mesh


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Means over `window` values around each (fewer at the ends); as long as `values`."""
    reach = window // 2
    parts = [values[max(0, at - reach) : at + reach + 1] for at in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def legend_above(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """One legend for a figure, above its axes, in as few rows as leave every entry its room."""
    widths = [len(label) + 8 for label in labels]  # in characters; a handle and the gap after it take the room of eight
    room = 14 * figure.get_figwidth()
    most = len(labels) if sum(widths) <= room else max(1, int(room / max(widths)))
    rows = math.ceil(len(labels) / most)
    figure.legend(handles, [plain(label) for label in labels], loc="outside upper center", ncols=math.ceil(len(labels) / rows))
