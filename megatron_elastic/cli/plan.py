"""`megatron-elastic plan`: what the sub-models of a recipe cost, from numbers alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.config import load_recipe
from megatron_elastic.cost import active_params, flops_per_token, total_params, weight_bytes, widths_of
from megatron_elastic.recipe import Recipe
from megatron_elastic.shape import parent_plan

if TYPE_CHECKING:
    from rich.table import Table


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, such as recipes/demo_hybrid.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace the recipe's.")] = None,
    weight_format: Annotated[str, typer.Option("--format", help="Weight format: bf16, fp32, fp8 or nvfp4.")] = "bf16",
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence, for FLOPs. Default: the last stage's, else the longest of the model.")
    ] = None,
) -> None:
    """Print the size and the widths of every budget of a recipe.

    Needs no weights and no torch. A budget that pins a plan shows that plan;
    any other the plan nearest to its target that shrinks all axes most alike.

    \b
    Examples:
      megatron-elastic plan recipes/nemotron_3_nano_30b.yaml
      megatron-elastic plan recipes/nemotron_3_nano_30b.yaml --format nvfp4
      megatron-elastic plan recipes/demo_hybrid.yaml --sequence-length 512 elastic.budgets.small=0.5
    """
    from megatron_elastic.preflight import check_sequence_length, cost_sequence_length

    loaded = load_recipe(recipe, overrides or ())
    length = sequence_length if sequence_length is not None else cost_sequence_length(loaded)
    check_sequence_length(loaded.model, length, "sequence length")
    rows = budget_rows(loaded, weight_format, length)
    _print_aligned(_table(rows))
    space = loaded.space
    if space is not None:
        typer.echo("")
        _print_aligned(_table(_axis_rows(space)))
        typer.echo("\n" + _reach(loaded, space))
    typer.echo(f"\nFLOPs: one forward pass, {length:,}-token sequences. Weights: {weight_format}.")


def budget_rows(recipe: Recipe, weight_format: str, sequence_length: int) -> list[dict[str, str]]:
    """One row a budget, column -> text: its sizes, then the width of every axis the model has."""
    from megatron_elastic.planning import plan_cost
    from megatron_elastic.preflight import budget_plans, budget_targets, recipe_cost

    cost, model = recipe_cost(recipe), recipe.model
    targets = budget_targets(recipe, cost)
    plans: Mapping[str, SubmodelPlan] = budget_plans(recipe, cost) or {"parent": parent_plan(model)}
    rows = []
    for name, plan in plans.items():
        widths = widths_of(plan, model.num_layers)
        row = {
            "budget": name,
            "total": _count(total_params(model, widths)),
            "active": _count(active_params(model, widths)),
        }
        if recipe.elastic is not None:
            row |= {
                "target": _amount(targets[name], recipe.elastic.cost),
                "cost/target": f"{plan_cost(model, plan, cost) / targets[name]:.3f}",
            }
        row |= {
            "GFLOPs/token": _significant(flops_per_token(model, widths, sequence_length) / 1e9),
            "weight GiB": _significant(weight_bytes(model, widths, weight_format) / 2**30),
        }
        row |= {axis.value: str(width) for axis, width in plan.widths}
        row[ElasticAxis.LAYERS.value] = str(model.num_layers - len(plan.dropped_layers))
        rows.append(row)
    return rows


def _axis_rows(space: ElasticSpace) -> list[dict[str, str]]:
    return [{"axis": spec.axis.value, "groups": str(spec.groups), "choices": " ".join(map(str, spec.choices))} for spec in space.axes]


def _reach(recipe: Recipe, space: ElasticSpace) -> str:
    from megatron_elastic.planning import num_plans, reachable
    from megatron_elastic.preflight import recipe_cost

    assert recipe.elastic is not None
    kind = recipe.elastic.cost
    smallest, largest = reachable(space, recipe.model, recipe_cost(recipe))
    return f"{num_plans(space):,} plans; {kind} from {_amount(smallest, kind)} to {_amount(largest, kind)}."


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return f"{number:.0f}"


def _significant(number: float) -> str:
    """Two decimals, or three significant digits of a small number."""
    return f"{number:.2f}" if number >= 1 else f"{number:.3g}"


def _amount(number: float, kind: str) -> str:
    """A cost with the unit of its kind (`cost.COSTS`)."""
    if kind == "flops":
        return f"{_significant(number / 1e9)} GFLOPs"
    return f"{_significant(number / 2**30)} GiB" if kind == "memory" else _count(number)


def _table(rows: list[dict[str, str]]) -> Table:
    """A table of equal rows whose first column and `choices` stand left and whose numbers stand right."""
    from rich import box
    from rich.table import Table

    # Lines are drawn for people only; a pipe gets words and spaces.
    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False, header_style="bold")
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="left" if number == 0 or column == "choices" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def _print_aligned(table: Table) -> None:
    """Print at the table's own width, whatever the terminal's: a cut number is worse than a long line."""
    from rich.console import Console
    from rich.measure import Measurement

    wide = Console(width=10_000)
    console = Console(width=Measurement.get(wide, wide.options, table).maximum)
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
