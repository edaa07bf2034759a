"""`megatron-elastic extract`: write members of a family as checkpoints of their own, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_elastic.axes import SubmodelPlan


def command(
    source: Annotated[Path, typer.Argument(help="A run, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option(help="Directory to write; with every budget, each goes to a directory of its own name inside.")],
    budget: Annotated[str | None, typer.Option(help="Budget to extract; default: every one.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan of the space as JSON, instead of a budget.")] = None,
    target: Annotated[
        float | None,
        typer.Option(help="A cost between two budgets instead of a budget: up to 1 a fraction of the parent's, above 1 absolute."),
    ] = None,
) -> None:
    """Cut sub-models out of a family: ordinary checkpoints in the parent's format.

    Examples: megatron-elastic extract runs/demo --out runs/demo/members    megatron-elastic extract runs/demo --budget small --out small
    megatron-elastic extract runs/demo --target 0.5 --out half
    """
    from megatron_elastic.checkpoint import find_model_checkpoint, open_checkpoint
    from megatron_elastic.cost import total_params, widths_of
    from megatron_elastic.errors import CheckpointError, PlanError, raise_all
    from megatron_elastic.space import parent_plan

    checkpoint = find_model_checkpoint(source)
    given = [f"--{name}" for name, value in (("plan", plan), ("budget", budget), ("target", target)) if value is not None]
    if len(given) > 1:
        raise PlanError(f"{' and '.join(given)} exclude each other; give one")
    if plan is not None:
        space = open_checkpoint(checkpoint).space
        wanted = {"": read_plan(plan) if space is None else space.completed(read_plan(plan))}
    elif target is not None:
        from megatron_elastic.export.interpolate import plan_at_target

        wanted = {"": plan_at_target(open_checkpoint(checkpoint), target)}
    else:
        from megatron_elastic.export.verify import choose_plans

        wanted = choose_plans(open_checkpoint(checkpoint).plans, budget, source)
    from megatron_elastic.export.verify import write_submodel

    directories = {name: out if given else out / name for name in wanted}
    taken = [f"{str(directory)!r} exists; choose another path or delete it" for directory in directories.values() if directory.exists()]
    raise_all(CheckpointError, taken, "--out")
    for name, chosen in wanted.items():
        directory = directories[name]
        shape = write_submodel(checkpoint, chosen, directory)
        size = total_params(shape, widths_of(parent_plan(shape), shape.num_layers))
        typer.echo(f"{directory}: {name or 'plan'}, {size:,} parameters, layers {shape.layer_pattern}, hidden {shape.hidden_size}")


def read_plan(path: Path) -> SubmodelPlan:
    """The plan in the JSON file of `--plan`. Raises PlanError when it cannot be read or is none."""
    from megatron_elastic.axes import SubmodelPlan
    from megatron_elastic.errors import PlanError

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise PlanError(f"--plan {str(path)!r} cannot be read: a plan is a JSON object, not {type(content).__name__}")
        return SubmodelPlan.from_dict(content)
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(f"--plan {str(path)!r} cannot be read: {error}") from None
