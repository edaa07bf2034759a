"""`megatron-elastic report`: plots of a run, and a table of its family beside a baseline's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_elastic.report.record import RunRecord
    from megatron_elastic.report.summary import BudgetRow

REPORT_DIRECTORY = "report"
REPORT_FILE = "report.json"


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run_dir of a recipe that has been trained.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Another run of the same family, such as one with router.choice=uniform.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the plots are written; default: RUN/report.")] = None,
) -> None:
    """Plot a run and print the sizes and losses of its family.

    Writes loss_per_budget.png, router.png, cost_vs_target.png, quality_vs_cost.png and the table's numbers as report.json.
    Needs no torch; a run can be reported while it trains.

    \b
    Examples:
      megatron-elastic report runs/demo
      megatron-elastic report runs/demo --baseline runs/demo_uniform
    """
    from megatron_elastic.report.record import read_run
    from megatron_elastic.report.summary import budget_rows, check_comparable, facts, report_data

    record = read_run(run)
    rows, other = budget_rows(record), None if baseline is None else read_run(baseline)
    baseline_rows: list[BudgetRow] = []
    notes = list(record.notes)
    if other is not None:
        check_comparable(record, other)
        baseline_rows = budget_rows(other)
        notes += other.notes
    directory = run / REPORT_DIRECTORY if out is None else out
    directory.mkdir(parents=True, exist_ok=True)
    plots = _draw(record, rows, baseline_rows, directory)
    found = facts(record, rows, baseline_rows)
    beside = [row for name in (row.budget for row in rows) for row in (*rows, *baseline_rows) if row.budget == name]
    content = report_data(record, beside, found, notes, plots)
    (directory / REPORT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    typer.echo("\n".join([*(f"wrote {directory / name}" for name in (*plots, REPORT_FILE)), *(f"note: {line}" for line in notes), ""]))
    _print_table(record, beside, several=other is not None)
    typer.echo("\n" + "\n".join(map(str, found)))


def _draw(record: RunRecord, rows: Sequence[BudgetRow], baseline_rows: Sequence[BudgetRow], directory: Path) -> list[str]:
    """Write the plots; returns their file names."""
    from megatron_elastic.report.plots import plot_costs, plot_losses, plot_quality, plot_router

    plot_losses(record, directory / "loss_per_budget.png")
    plot_costs(record, directory / "cost_vs_target.png")
    plot_quality(record, rows, baseline_rows, directory / "quality_vs_cost.png")
    plots = ["loss_per_budget.png", "cost_vs_target.png", "quality_vs_cost.png"]
    if plot_router(record, directory / "router.png"):
        return [*plots, "router.png"]
    (directory / "router.png").unlink(missing_ok=True)  # of an earlier report on other settings
    typer.echo("router.png is left out: the run has no learned router")
    return plots


def _cells(row: BudgetRow, kind: str, *, several: bool) -> dict[str, str]:
    """Column -> text of a row of the table."""
    from megatron_elastic.report.units import amount, count

    def loss(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    cells = {"budget": row.budget, "run": row.run, "plan": row.plan_source}
    if not several:
        del cells["run"]
    return cells | {
        "total": count(row.total_params),
        "active": count(row.active_params),
        "cost": amount(row.cost, kind),
        "target": amount(row.target, kind),
        "cost/target": f"{row.cost_ratio:.3f}",
        "loss before": loss(row.loss_before),
        **{f"after {stage}": loss(value) for stage, value in row.loss_after.items()},
        "extracted": loss(row.extracted_loss),
        "max diff": "-" if row.masked_extracted is None else f"{row.masked_extracted:.1e}",
    }


def _print_table(record: RunRecord, rows: Sequence[BudgetRow], *, several: bool) -> None:
    """Print the rows at the table's own width, whatever the terminal's: a cut number is worse than a long line."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    assert record.recipe.elastic is not None
    cells = [_cells(row, record.recipe.elastic.cost, several=several) for row in rows]
    table = Table(box=None, pad_edge=False)
    for column in cells[0]:
        table.add_column(column, justify="left" if column in ("budget", "run", "plan") else "right", no_wrap=True)
    for row in cells:
        table.add_row(*row.values())
    wide = Console(width=10_000)
    console = Console(width=Measurement.get(wide, wide.options, table).maximum)
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
