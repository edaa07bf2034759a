"""`megatron-elastic train`: run the stages of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE | @FILE]...", help="Values over the recipe's, such as stages.short.steps=10, or a YAML file of them."
        ),
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    steps: Annotated[int | None, typer.Option(help="Cut every stage to this many steps, to try a recipe out.")] = None,
) -> None:
    """Train the stages of a recipe in order; a run that was killed continues where its last checkpoint stands.

    SIGTERM or SIGUSR1 to any of its processes saves the run and ends all of them with exit code 85; the same command goes on from there.

    On several processes: torchrun --nproc-per-node 2 -m megatron_elastic.cli.main train recipes/demo_hybrid.yaml
    """
    from megatron_elastic.config import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    from megatron_elastic.preemption import listening

    with listening() as stop:
        from megatron_elastic.platform import prepare_platform

        prepare_platform()
        from megatron_elastic.train.loop import train

        train(loaded, stage=stage, steps=steps, stop=stop)
