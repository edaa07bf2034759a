"""report.html: one page that needs nothing beside it. Every text is escaped by the template; images are part of the page."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

from megatron_elastic import __version__
from megatron_elastic.config import to_plain
from megatron_elastic.errors import ConfigError
from megatron_elastic.report.figures import Plot
from megatron_elastic.report.record import RunRecord
from megatron_elastic.report.style import colours
from megatron_elastic.report.summary import COST_TOLERANCE, BudgetRow, Fact
from megatron_elastic.report.tables import WORDS, about, family_cells, recipe_differences, stage_cells

TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a report tells.

    rows: the members of the run, and of the baseline where there is one, budget after budget; notes: one line each.
    plots: files in the directory of plots; written: when, in UTC.
    """

    record: RunRecord
    baseline: RunRecord | None
    rows: Sequence[BudgetRow]
    facts: Sequence[Fact]
    notes: Sequence[str]
    plots: Sequence[Plot]
    written: datetime


def render_page(report: Report, plots: Path) -> str:
    """The page as HTML; plots: the directory of the PNG files, which become part of it."""
    from jinja2 import Environment, StrictUndefined

    record, recipe, several = report.record, report.record.recipe, report.baseline is not None
    assert recipe.elastic is not None
    kind = recipe.elastic.cost
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        record=record,
        baseline=report.baseline,
        about=about(record, report.rows[0]),
        facts=report.facts,
        notes=report.notes,
        words=WORDS,
        family=[
            {"row": row, "cells": family_cells(row, kind, several=several), "missed": abs(row.cost_ratio - 1) > COST_TOLERANCE}
            for row in report.rows
        ],
        cost_tolerance=f"{COST_TOLERANCE:.0%}",
        several=several,
        colours=colours(record.budgets),
        parent_losses=[(stage, loss) for stage in record.stages if (loss := record.parent_loss(stage)) is not None],
        stages=[stage_cells(record, stage) for stage in recipe.stages],
        plots=[(plot, base64.b64encode((plots / plot.file).read_bytes()).decode("ascii")) for plot in report.plots],
        differences=recipe_differences(recipe, report.baseline.recipe) if report.baseline else [],
        recipe=yaml.safe_dump(to_plain(recipe), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120),
        written=report.written.strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all; an older one stays until then. Raises ConfigError where nothing can be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; free space there or name another place with --out") from error
    finally:
        temporary.unlink(missing_ok=True)
