"""`megatron-elastic plan`: what the sub-models of a recipe cost, from numbers alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.config import load_recipe
from megatron_elastic.cost import active_params, flops_per_token, total_params, weight_bytes, widths_of
from megatron_elastic.recipe import Recipe
from megatron_elastic.shape import LAYER_KINDS, ModelShape
from megatron_elastic.space import layers_of_axis, parent_plan, width_at

if TYPE_CHECKING:
    from rich.table import Table

READABLE_PLANS = 10**12
"""From this many plans on only the order of magnitude is printed."""


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, such as recipes/demo_hybrid.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE | @FILE]...", help="Values over the recipe's, such as stages.short.steps=10, or a YAML file of them."
        ),
    ] = None,
    weight_format: Annotated[str, typer.Option("--format", help="Weight format: bf16, fp32, fp8 or nvfp4.")] = "bf16",
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence, for FLOPs. Default: the last stage's, else the longest of the model.")
    ] = None,
    target: Annotated[
        list[float] | None,
        typer.Option(help="Also a plan at this cost, between those of the budgets: up to 1 a fraction of the parent's, above 1 absolute."),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also the widths of every layer.")] = False,
) -> None:
    """Print the size and the widths of every budget of a recipe.

    Needs no weights and no torch. A budget that pins a plan shows that plan;
    any other the plan nearest to its target that shrinks all axes most alike.

    \b
    Examples:
      megatron-elastic plan recipes/nemotron_3_nano_30b.yaml
      megatron-elastic plan recipes/nemotron_3_nano_30b.yaml --format nvfp4
      megatron-elastic plan recipes/demo_hybrid.yaml --target 0.5 --layers
      megatron-elastic plan recipes/demo_hybrid.yaml --sequence-length 512 elastic.budgets.small=0.5
    """
    from megatron_elastic.preflight import check_sequence_length, cost_sequence_length

    loaded = load_recipe(recipe, overrides or ())
    length = sequence_length if sequence_length is not None else cost_sequence_length(loaded)
    check_sequence_length(loaded.model, length, "sequence length")
    plans = planned(loaded, target or ())
    _print_aligned(_table(budget_rows(loaded, plans, weight_format, length)))
    space = loaded.space
    if space is not None:
        typer.echo("")
        _print_aligned(_table(_axis_rows(space)))
        typer.echo("\n" + _reach(loaded, space))
    for name, (plan, _) in plans.items() if layers else ():
        typer.echo(f"\n{name}, layer by layer:")
        _print_aligned(_table(layer_rows(loaded.model, plan)))
    typer.echo(f"\nFLOPs: one forward pass, {length:,}-token sequences. Weights: {weight_format}.")


def planned(recipe: Recipe, targets: Sequence[float]) -> dict[str, tuple[SubmodelPlan, float]]:
    """Name -> (plan, target cost): of every budget, then of every further target; of the parent alone without an elastic block.

    Raises PlanError for a target that no plan reaches.
    """
    from megatron_elastic.planning import plan_cost
    from megatron_elastic.preflight import absolute_target, budget_plans, budget_targets, plan_of_target, recipe_cost

    cost, parent = recipe_cost(recipe), parent_plan(recipe.model)
    whole, wanted = plan_cost(recipe.model, parent, cost), budget_targets(recipe, cost)
    plans = {name: (plan, wanted[name]) for name, plan in budget_plans(recipe, cost).items()} or {"parent": (parent, whole)}
    for target in targets:
        absolute = absolute_target(target, whole)
        plans[f"target {target:g}"] = (plan_of_target(recipe, absolute, cost), absolute)
    return plans


def budget_rows(
    recipe: Recipe, plans: Mapping[str, tuple[SubmodelPlan, float]], weight_format: str, sequence_length: int
) -> list[dict[str, str]]:
    """One row a plan, column -> text: its sizes, then the width of every axis the model has. plans: as `planned` gives them."""
    from megatron_elastic.planning import plan_cost
    from megatron_elastic.preflight import recipe_cost

    cost, model = recipe_cost(recipe), recipe.model
    rows = []
    for name, (plan, target) in plans.items():
        widths = widths_of(plan, model.num_layers)
        row = {
            "budget": name,
            "total": _count(total_params(model, widths)),
            "active": _count(active_params(model, widths)),
        }
        if recipe.elastic is not None:
            row |= {
                "target": _amount(target, recipe.elastic.cost),
                "cost/target": f"{plan_cost(model, plan, cost) / target:.3f}",
            }
        row |= {
            "GFLOPs/token": _significant(flops_per_token(model, widths, sequence_length) / 1e9),
            "weight GiB": _significant(weight_bytes(model, widths, weight_format) / 2**30),
        }
        row |= {axis.value: width_text(model, plan, axis) for axis, _ in plan.widths}
        row[ElasticAxis.LAYERS.value] = str(model.num_layers - len(plan.dropped_layers))
        rows.append(row)
    return rows


def width_text(model: ModelShape, plan: SubmodelPlan, axis: ElasticAxis) -> str:
    """The width of an axis; the range over the layers that the plan keeps where they differ; "-" when it keeps none that has the axis."""
    of_axis, width = layers_of_axis(model, axis), plan.width(axis)
    kept = [width_at(model, axis, width, layer) for layer in of_axis if plan.keeps_layer(layer)] if of_axis else [width]
    if not kept:
        return "-"
    return str(kept[0]) if len(set(kept)) == 1 else f"{min(kept)}..{max(kept)} ({len(kept)} layers)"


def layer_rows(model: ModelShape, plan: SubmodelPlan) -> list[dict[str, str]]:
    """One row a layer of the parent, column -> text: its number, its sublayers and the width of each axis it has ("-" for none)."""
    axes = [axis for axis, _ in plan.widths if layers_of_axis(model, axis)]
    rows = []
    for layer, letter in enumerate(model.layer_pattern):
        kept = plan.keeps_layer(layer)
        row = {"layer": str(layer), "sublayers": "+".join(LAYER_KINDS[letter]) if kept else "dropped"}
        for axis in axes:
            has = kept and layer in layers_of_axis(model, axis)
            row[axis.value] = str(width_at(model, axis, plan.width(axis), layer)) if has else "-"
        rows.append(row)
    return rows


def _axis_rows(space: ElasticSpace) -> list[dict[str, str]]:
    return [{"axis": axis_text(spec), "groups": str(spec.groups), "choices": " ".join(map(str, spec.choices))} for spec in space.axes]


def axis_text(spec: AxisSpec) -> str:
    """The name of an axis, with the number of its widths when each layer has one."""
    return f"{spec.axis.value} ({spec.places} layers)" if spec.per_layer else spec.axis.value


def _reach(recipe: Recipe, space: ElasticSpace) -> str:
    from megatron_elastic.planning import num_plans, reachable
    from megatron_elastic.preflight import recipe_cost

    assert recipe.elastic is not None
    kind, count = recipe.elastic.cost, num_plans(space)
    smallest, largest = reachable(space, recipe.model, recipe_cost(recipe))
    many = f"{count:,}" if count < READABLE_PLANS else f"about 10^{len(str(count)) - 1}"
    return f"{many} plans; {kind} from {_amount(smallest, kind)} to {_amount(largest, kind)}."


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
    """A table of equal rows whose words stand left and whose numbers stand right."""
    from rich import box
    from rich.table import Table

    # Lines are drawn for people only; a pipe gets words and spaces.
    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False, header_style="bold")
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="left" if number == 0 or column in ("choices", "sublayers") else "right", no_wrap=True)
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
