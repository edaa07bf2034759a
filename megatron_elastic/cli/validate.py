"""`megatron-elastic validate`: everything about a recipe that can be checked without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_elastic.cli.plan import axis_text
from megatron_elastic.config import load_recipe
from megatron_elastic.cost import active_params, total_params, widths_of
from megatron_elastic.errors import ConfigError, raise_all
from megatron_elastic.recipe import Recipe
from megatron_elastic.space import parent_plan


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, such as recipes/demo_hybrid.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace the recipe's.")] = None,
) -> None:
    """Check a recipe: its keys, shapes, choices, layout, budgets and batches.

    Needs no torch. Prints a summary, or every problem and exits with code 2.

    \b
    Examples:
      megatron-elastic validate recipes/demo_hybrid.yaml
      megatron-elastic validate recipes/demo_hybrid.yaml stages.long.sequence_length=2048
    """
    from megatron_elastic.preflight import recipe_notes, recipe_problems

    loaded = load_recipe(recipe, overrides or ())
    raise_all(ConfigError, recipe_problems(loaded), str(recipe))
    typer.echo("\n".join([*summary(loaded, str(recipe)), *(f"note: {line}" for line in recipe_notes(loaded))]))


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
