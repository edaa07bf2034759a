"""`megatron-elastic extract`: write members of a family as models of their own, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from megatron_elastic.axes import SubmodelPlan
    from megatron_elastic.export.sources import Source
    from megatron_elastic.export.write import Options
    from megatron_elastic.recipe import Recipe


def command(  # noqa: PLR0913 - one argument an option
    source: Annotated[Path, typer.Argument(metavar="PATH", help="A run, a megatron checkpoint, or a Hugging Face directory.")],
    out: Annotated[
        Path | None, typer.Option(help="Directory to write; with every budget, each goes to a directory of its own name inside.")
    ] = None,
    format: Annotated[
        Literal["megatron", "hf"], typer.Option(help="megatron: torch_dist checkpoint; hf: Hugging Face directory.")
    ] = "megatron",  # noqa: A002
    budget: Annotated[str | None, typer.Option(help="Budget to extract; default: every one.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan of the space as JSON, instead of a budget.")] = None,
    target: Annotated[
        float | None,
        typer.Option(help="A cost between two budgets instead of a budget: up to 1 a fraction of the parent's, above 1 absolute (8.0e9)."),
    ] = None,
    nested: Annotated[
        bool, typer.Option("--nested", help="The parent with all members inside, from which they can be extracted later.")
    ] = False,
    recipe: Annotated[
        Path | None,
        typer.Option(help="The axes and budgets of a model that holds no family, or what a target counts in one without its run."),
    ] = None,
    homogenise: Annotated[
        bool, typer.Option("--homogenise", help="Give per-layer widths one width: that of the widest layer. Prints what it costs.")
    ] = False,
    family: Annotated[
        str | None, typer.Option(help="Hugging Face model_type to write; default: the one it came from, or the first that can.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Type of the weights; default: as stored.")
    ] = None,
    shard_gigabytes: Annotated[float | None, typer.Option(help="Largest safetensors file; default: 5.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Print what PATH holds and write nothing.")] = False,
) -> None:
    """Cut sub-models out of a family, or write a whole model in another format.

    Without a family (and without --recipe) the model itself is written. Weights are read and written one tensor at a time.

    \b
    Examples:
      megatron-elastic extract runs/demo --list
      megatron-elastic extract runs/demo --out runs/demo/members
      megatron-elastic extract runs/demo --budget small --format hf --out small
      megatron-elastic extract runs/demo --target 0.5 --out half
      megatron-elastic extract runs/demo --nested --format hf --out family
    """
    from megatron_elastic.cli.show import counted
    from megatron_elastic.export.sources import open_source
    from megatron_elastic.export.write import Options, with_recipe

    options = Options(
        hugging_face=format == "hf",
        family=family,
        dtype=dtype,
        homogenise=homogenise,
        nested=nested,
        shard_gigabytes=shard_gigabytes,
        watch=lambda member: counted(member, f"writing {out}"),
    )
    choice = Choice(budget=budget, plan=plan, target=target, nested=nested)
    _check_options(choice, out, options, show=show)
    model, known = with_recipe(open_source(source), recipe)
    if show or out is None:
        _list(model)
    else:
        _write(model, out, choice.plans(model, source, known), options, budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The options that choose what is extracted, of which one can be given; none: every budget, or a model without a family as it is."""

    budget: str | None
    plan: Path | None
    target: float | None
    nested: bool

    @property
    def given(self) -> list[str]:
        """Those that are given, as the user writes them."""
        values = {"--plan": self.plan, "--budget": self.budget, "--target": self.target, "--nested": self.nested or None}
        return [name for name, value in values.items() if value is not None]

    def plans(self, model: Source, path: Path, recipe: Recipe | None) -> Mapping[str, SubmodelPlan | None]:
        """Name -> plan (None: the whole model); the name is empty where `--out` itself is its directory. path: of the model, as it was given."""
        if self.nested or (model.space is None and not self.given):
            return {"": None}
        if self.plan is not None:
            return {"": read_plan(self.plan) if model.space is None else model.space.completed(read_plan(self.plan))}
        if self.target is not None:
            from megatron_elastic.export.interpolate import plan_at_target, recipe_of_run

            return {"": plan_at_target(model, self.target, recipe_of_run(model) if recipe is None else recipe)}
        from megatron_elastic.export.sources import choose_plans

        plans = choose_plans(model.plans, self.budget, path)
        return plans if self.budget is None else {"": plans[self.budget]}


def _check_options(choice: Choice, out: Path | None, options: Options, *, show: bool) -> None:
    """Raise ConfigError for options that contradict each other. show: whether PATH is only listed, which looks at none of them."""
    from megatron_elastic.errors import ConfigError

    of_hugging_face = {"--family": options.family, "--shard-gigabytes": options.shard_gigabytes}
    if show:
        of_writing = {"--out": out, "--format": options.hugging_face, "--homogenise": options.homogenise, "--dtype": options.dtype}
        unused = [name for name, value in (of_writing | of_hugging_face).items() if value not in (None, False)]
        if given := choice.given + unused:
            raise ConfigError(f"{' and '.join(given)}: --list writes nothing and shows every budget; leave out one or the other")
        return
    if len(choice.given) > 1:
        raise ConfigError(f"{' and '.join(choice.given)} exclude each other; give one")
    only_hf = [name for name, value in of_hugging_face.items() if value is not None]
    if only_hf and not options.hugging_face:
        raise ConfigError(f"{' and '.join(only_hf)}: only a Hugging Face directory has that; add --format hf, or leave it out")
    if out is None:
        raise ConfigError("--out is missing; name a directory to write, or add --list to look")


def _write(model: Source, out: Path, plans: Mapping[str, SubmodelPlan | None], options: Options, budget: str | None) -> None:
    """Write each plan to its directory in `out`, and print a line about it. budget: the name of the only one, where it was asked for by it."""
    from megatron_elastic.export.write import write_member

    directories = _directories(out, list(plans))
    _check_members(model, plans, options)
    for name, directory in directories.items():
        for line in write_member(model, plans[name], directory, options, budget=budget or name or None):
            typer.echo(line)


def _check_members(model: Source, plans: Mapping[str, SubmodelPlan | None], options: Options) -> None:
    """Raise, before the first member is written, what writing any of them would raise for its plan or its sizes."""
    from megatron_elastic.errors import ConfigError
    from megatron_elastic.export.member import homogenise
    from megatron_elastic.export.sources import describe, family_to_write
    from megatron_elastic.space import resize

    for plan in plans.values():
        shape = model.shape
        if plan is not None and model.space is not None:
            model.space.check(plan)
            shape = resize(model.shape, homogenise(model.space, plan) if options.homogenise else plan)
        elif options.homogenise:
            raise ConfigError(f"--homogenise: {describe(model)} is written whole, without a plan; leave it out")
        if options.hugging_face:
            family_to_write(model, shape, options.family)


def _list(model: Source) -> None:
    from megatron_elastic.cli.show import print_table
    from megatron_elastic.describe import family_table, summary

    typer.echo(f"{model.path}: {summary(model.shape)}")
    if model.space is not None:
        print_table(family_table(model.shape, model.space, model.plans))


def _directories(out: Path, names: list[str]) -> dict[str, Path]:
    """Name -> where it goes: `out` itself for what has no name or was asked for by it. Raises CheckpointError when one is there already."""
    from megatron_elastic.errors import CheckpointError, raise_all

    directories = {name: out / name for name in names}
    taken = [f"{str(directory)!r} exists; choose another path or delete it" for directory in directories.values() if directory.exists()]
    raise_all(CheckpointError, taken, "--out")
    return directories


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
