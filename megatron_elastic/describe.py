"""What is printed about models: one line for a shape, a table of a family. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan, Width
from megatron_elastic.cost import active_params, total_params, widths_of
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import parent_plan, resize

if TYPE_CHECKING:
    from rich.table import Table


def sizes(shape: ModelShape) -> tuple[int, int]:
    """Parameters of a model, and how many of them a token uses."""
    widths = widths_of(parent_plan(shape), shape.num_layers)
    return int(total_params(shape, widths)), int(active_params(shape, widths))


def summary(shape: ModelShape) -> str:
    """One line: what a model is."""
    total, active = sizes(shape)
    used = f" ({active:,} active)" if active != total else ""
    return f"{total:,} parameters{used}, layers {short_pattern(shape.layer_pattern)}, hidden {shape.hidden_size}, vocabulary {shape.vocab_size}"


def short_pattern(pattern: str) -> str:
    """A layer pattern with runs of a letter counted, as recipes may write it: TTTT is T4."""
    runs = [(letter, len(list(run))) for letter, run in groupby(pattern)]
    return "".join(letter + str(length) if length > 2 else letter * length for letter, length in runs)


def family_table(shape: ModelShape, space: ElasticSpace, plans: Mapping[str, SubmodelPlan]) -> Table:
    """A row for each budget: parameters, active ones, and its width on every elastic axis."""
    from rich.table import Table

    table = Table("budget", box=None, pad_edge=False)
    axes = [spec.axis for spec in space.axes]
    for title in ("parameters", "active", *(axis.value for axis in axes)):
        table.add_column(title, justify="right", no_wrap=True)
    for name, plan in plans.items():
        small = resize(shape, plan)
        widths = [_width(small.num_layers if axis is ElasticAxis.LAYERS else plan.width(axis)) for axis in axes]
        table.add_row(name, *(f"{count:,}" for count in sizes(small)), *widths)
    return table


def _width(width: Width) -> str:
    return str(width) if isinstance(width, int) else f"{min(width)}-{max(width)}"
