"""`megatron-elastic validate`: everything about a recipe, and about a run on a cluster, that can be checked without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from megatron_elastic.cli.plan import axis_text
from megatron_elastic.config import load_recipe
from megatron_elastic.cost import active_params, total_params, widths_of
from megatron_elastic.errors import ConfigError, raise_all
from megatron_elastic.recipe import Recipe
from megatron_elastic.space import parent_plan


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, such as recipes/demo_hybrid.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace the recipe's; @FILE reads them from a file.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Also check a run on this cluster: a name in slurm/clusters/, or a YAML file.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of the cluster.")] = None,
) -> None:
    """Check a recipe: its keys, shapes, choices, layout, budgets and batches.

    With --cluster also whether it fits there, how long it will take, and whether data, parent and disk space are there: one table.
    Needs no torch. Prints every problem at once and exits with code 2 when there is one.

    \b
    Examples:
      megatron-elastic validate recipes/demo_hybrid.yaml
      megatron-elastic validate recipes/demo_hybrid.yaml stages.long.sequence_length=2048
      megatron-elastic validate recipes/nemotron_nano_v2_12b.yaml --cluster h100 --nodes 8
    """
    from megatron_elastic.preflight import recipe_notes, recipe_problems

    if (cluster is None) != (nodes is None):
        raise ConfigError("--cluster and --nodes belong together; give both, or neither to check the recipe alone")
    loaded = load_recipe(recipe, overrides or ())
    if cluster is not None and nodes is not None:
        _on_cluster(loaded, str(recipe), cluster, nodes)
        return
    raise_all(ConfigError, recipe_problems(loaded), str(recipe))
    typer.echo("\n".join([*summary(loaded, str(recipe)), *(f"note: {line}" for line in recipe_notes(loaded))]))


def _on_cluster(recipe: Recipe, source: str, cluster: str, nodes: int) -> None:
    """Print every check as a table; raise ConfigError with those that refuse the run."""
    from rich.table import Table

    from megatron_elastic.cli.show import print_table
    from megatron_elastic.cluster import load_cluster
    from megatron_elastic.cluster_checks import check_run, refusals

    where = f"{source} --cluster {cluster} --nodes {nodes}"
    checks = check_run(recipe, load_cluster(cluster), nodes)
    table = Table("check", "result", "what was found", box=None, pad_edge=False)
    for check in checks:
        table.add_row(escape(check.subject), check.outcome.value, escape(check.finding))
    print_table(table)
    raise_all(ConfigError, refusals(checks), where)
    typer.echo(f"\nok: {where}")


def summary(recipe: Recipe, source: str) -> list[str]:
    """What the recipe holds, one line for the parent, the family and each stage."""
    model, widths = recipe.model, widths_of(parent_plan(recipe.model), recipe.model.num_layers)
    lines = [
        f"ok: {source}",
        f"parent: {total_params(model, widths):,} parameters, {active_params(model, widths):,} active, {model.num_layers} layers",
    ]
    if recipe.elastic is not None:
        space = recipe.space
        axes = ", ".join(axis_text(spec) for spec in space.axes) if space else ""
        lines.append(f"budgets: {', '.join(recipe.elastic.budgets)}; elastic axes: {axes}; cost: {recipe.elastic.cost}")
    for stage in recipe.stages:
        tokens = stage.total_steps * stage.global_batch_size * stage.sequence_length
        kind = "elastic" if stage.elastic else "parent"
        lines.append(
            f"stage {stage.name} ({kind}): {stage.total_steps:,} steps of {stage.global_batch_size} x {stage.sequence_length:,}, {tokens:,} tokens"
        )
    return lines
