"""`megatron-elastic extract`: write members of a family as checkpoints of their own, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[Path, typer.Argument(help="A run, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option(help="Directory to write; with every budget, each goes to a directory of its own name inside.")],
    budget: Annotated[str | None, typer.Option(help="Budget to extract; default: every one.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan of the space as JSON, instead of a budget.")] = None,
) -> None:
    """Cut sub-models out of a family: ordinary checkpoints in the parent's format.

    Examples: megatron-elastic extract runs/demo --out runs/demo/members    megatron-elastic extract runs/demo --budget small --out small
    """
    from megatron_elastic.axes import SubmodelPlan
    from megatron_elastic.checkpoint import find_model_checkpoint, open_checkpoint
    from megatron_elastic.cost import total_params, widths_of
    from megatron_elastic.errors import CheckpointError, PlanError, raise_all
    from megatron_elastic.shape import parent_plan

    checkpoint = find_model_checkpoint(source)
    if plan is not None and budget is not None:
        raise PlanError("--plan and --budget exclude each other; give one")
    if plan is not None:
        try:
            content = json.loads(plan.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise PlanError(f"--plan {str(plan)!r} cannot be read: a plan is a JSON object, not {type(content).__name__}")
            wanted = {"": SubmodelPlan.from_dict(content)}
        except (OSError, ValueError, TypeError) as error:
            raise PlanError(f"--plan {str(plan)!r} cannot be read: {error}") from None
    else:
        from megatron_elastic.export.verify import choose_plans

        wanted = choose_plans(open_checkpoint(checkpoint).plans, budget, source)
    from megatron_elastic.export.verify import write_submodel

    directories = {name: out / name if budget is None and plan is None else out for name in wanted}
    taken = [f"{str(directory)!r} exists; choose another path or delete it" for directory in directories.values() if directory.exists()]
    raise_all(CheckpointError, taken, "--out")
    for name, chosen in wanted.items():
        directory = directories[name]
        shape = write_submodel(checkpoint, chosen, directory)
        size = total_params(shape, widths_of(parent_plan(shape), shape.num_layers))
        typer.echo(f"{directory}: {name or 'plan'}, {size:,} parameters, layers {shape.layer_pattern}, hidden {shape.hidden_size}")
