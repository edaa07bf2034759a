"""`megatron-elastic report`: a run as one HTML page, and a table of its family beside a baseline's on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_elastic.errors import ConfigError

if TYPE_CHECKING:
    from megatron_elastic.report.figures import Plot
    from megatron_elastic.report.page import Report
    from megatron_elastic.report.record import RunRecord
    from megatron_elastic.report.summary import BudgetRow

REPORT_DIRECTORY = "report"
PAGE_FILE = "report.html"
NUMBERS_FILE = "report.json"
PLOTS_DIRECTORY = "plots"


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run_dir of a recipe that has been trained.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Another run of the same family, such as one with router.choice=uniform.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the report is written; default: RUN/report.")] = None,
) -> None:
    """Write a run's report as one HTML page and print the sizes and losses of its family.

    report.html holds everything and needs no other file; beside it the plots stand as PNG in plots/ and the numbers in report.json.
    Needs torch only where the parent was sorted, to read the ranking that is shown; a run can be reported while it trains.

    \b
    Examples:
      megatron-elastic report runs/demo
      megatron-elastic report runs/demo --baseline runs/demo_uniform
    """
    from megatron_elastic.report.page import Report
    from megatron_elastic.report.record import read_run
    from megatron_elastic.report.summary import budget_rows, check_comparable, facts

    record = read_run(run)
    rows, other = budget_rows(record), None if baseline is None else read_run(baseline)
    baseline_rows: list[BudgetRow] = []
    notes = list(record.notes)
    if other is not None:
        check_comparable(record, other)
        baseline_rows = budget_rows(other)
        notes += other.notes
    directory = run / REPORT_DIRECTORY if out is None else out
    plots = _draw(record, rows, baseline_rows, directory)
    if all(plot.file != "router.png" for plot in plots):
        notes.append("there is no plot of the router: the run has no learned router")
    beside = [row for name in (row.budget for row in rows) for row in (*rows, *baseline_rows) if row.budget == name]
    report = Report(record, other, beside, facts(record, rows, baseline_rows), notes, plots, datetime.now(UTC))
    _write(report, directory)
    written = [PAGE_FILE, NUMBERS_FILE, *(f"{PLOTS_DIRECTORY}/{plot.file}" for plot in plots)]
    typer.echo("\n".join([*(f"wrote {directory / name}" for name in written), *(f"note: {line}" for line in notes), ""]))
    _print_table(record, beside, several=other is not None)
    typer.echo("\n" + "\n".join(map(str, report.facts)))


def _draw(record: RunRecord, rows: Sequence[BudgetRow], baseline_rows: Sequence[BudgetRow], directory: Path) -> list[Plot]:
    """Make the report's directory and write its plots."""
    from megatron_elastic.report.figures import draw_plots

    try:
        (directory / PLOTS_DIRECTORY).mkdir(parents=True, exist_ok=True)
        return draw_plots(record, rows, baseline_rows, directory / PLOTS_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{directory}: no report can be written there: {error.strerror}; name another directory with --out") from error


def _write(report: Report, directory: Path) -> None:
    """Write the page and the numbers, each whole or not at all."""
    from megatron_elastic.report.page import render_page, write_whole
    from megatron_elastic.report.summary import report_data

    names = [f"{PLOTS_DIRECTORY}/{plot.file}" for plot in report.plots]
    content = report_data(report.record, report.rows, report.facts, report.notes, names)
    write_whole(directory / NUMBERS_FILE, json.dumps(content, indent=2) + "\n")
    write_whole(directory / PAGE_FILE, render_page(report, directory / PLOTS_DIRECTORY))


def _print_table(record: RunRecord, rows: Sequence[BudgetRow], *, several: bool) -> None:
    """Print the rows at the table's own width, whatever the terminal's: a cut number is worse than a long line."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    from megatron_elastic.report.tables import WORDS, family_cells

    assert record.recipe.elastic is not None
    cells = [family_cells(row, record.recipe.elastic.cost, several=several) for row in rows]
    table = Table(box=None, pad_edge=False)
    for column in cells[0]:
        table.add_column(column, justify="left" if column in WORDS else "right", no_wrap=True)
    for row in cells:
        table.add_row(*row.values())
    wide = Console(width=10_000)
    console = Console(width=Measurement.get(wide, wide.options, table).maximum)
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
