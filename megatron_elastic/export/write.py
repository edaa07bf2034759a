"""Write a member of a source in either format, saying in its files where it comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from megatron_elastic.axes import SubmodelPlan, Width
from megatron_elastic.checkpoint.files import shape_differences
from megatron_elastic.checkpoint.named import write_named
from megatron_elastic.config import load_recipe
from megatron_elastic.describe import sizes, summary
from megatron_elastic.errors import CheckpointError, ConfigError
from megatron_elastic.export.member import Member, cut, homogenise
from megatron_elastic.export.nested import Nested
from megatron_elastic.export.sources import Source, describe, family_to_write, open_source
from megatron_elastic.export.to_hugging_face import write_hugging_face
from megatron_elastic.hf.assets import Origin, read_origin, save_assets
from megatron_elastic.hf.card import Card
from megatron_elastic.hf.write import SHARD_BYTES
from megatron_elastic.importance.reap import REAPED, reaped_text
from megatron_elastic.importance.sort import SORTED
from megatron_elastic.preflight import budget_plans, recipe_cost
from megatron_elastic.recipe import Recipe
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import resize

Dtype = Literal["float32", "bfloat16", "float16"]
"""A type that weights are written in."""
DTYPES: Mapping[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How members are written.

    hugging_face: as Hugging Face directories, else as megatron checkpoints. family: the model_type of those, None: the source's, or the first
    that can say the shape. dtype: of the weights, None: as stored. homogenise: give per-layer widths the width of their widest layer.
    nested: the whole model with its family inside. shard_gigabytes: largest safetensors file, None: as transformers has them.
    watch: wraps a member, to show progress.
    """

    hugging_face: bool = False
    family: str | None = None
    dtype: Dtype | None = None
    homogenise: bool = False
    nested: bool = False
    shard_gigabytes: float | None = None
    watch: Callable[[Member], Member] = lambda member: member

    def __post_init__(self) -> None:
        """Raise ConfigError for a size of shards that is no number of bytes."""
        if self.shard_gigabytes is not None and math.isinf(self.shard_gigabytes):
            raise ConfigError(f"--shard-gigabytes {self.shard_gigabytes} must be finite; leave it out, or name more than the model has")
        if self.shard_gigabytes is not None and not self.shard_gigabytes > 0:
            raise ConfigError(f"--shard-gigabytes {self.shard_gigabytes} must be above 0")


def with_recipe(source: Source, recipe: Path | None) -> tuple[Source, Recipe | None]:
    """A source as the family that a recipe's `elastic` block makes of it, and that recipe; without one, the source as it is.

    A source that is a family keeps its plans; its recipe says what a target counts.
    Raises ConfigError for a recipe without that block, of another model or of another family.
    """
    if recipe is None:
        return source, None
    found = load_recipe(recipe)
    if found.space is None:
        raise ConfigError(f"--recipe {str(recipe)!r} has no elastic block, which names axes and budgets; add one")
    if source.space is not None:
        if source.space != found.space:
            raise ConfigError(f"--recipe {str(recipe)!r} has other axes than the family that {describe(source)} holds; leave it out")
        return source, found
    differences = shape_differences(replace(source.shape, padded_vocab_size=None), replace(found.model, padded_vocab_size=None))
    if differences:
        raise ConfigError(f"--recipe {str(recipe)!r} is not of {describe(source)}: {', '.join(differences)}")
    return replace(source, space=found.space, plans=budget_plans(found, recipe_cost(found))), found


def write_submodel(source: Path, plan: SubmodelPlan, directory: Path) -> ModelShape:
    """Extract a plan from a family to a megatron checkpoint `directory`, tensor by tensor; returns the sub-model's shape.

    source: a run, a megatron checkpoint or a Hugging Face directory that holds a family. Raises CheckpointError for one without a family or an
    existing `directory`, PlanError for a plan outside the space.
    """
    model = open_source(source)
    write_member(model, plan, directory, Options())
    return resize(model.shape, plan)


def write_member(source: Source, plan: SubmodelPlan | None, directory: Path, options: Options, *, budget: str | None = None) -> list[str]:
    """Write the member of `plan` (None: the whole model) to `directory`; returns lines that say what was written.

    budget: the plan's name in the family. Raises what `cut`, `write_named` and `write_hugging_face` raise, before anything is written.
    """
    lines = []
    if options.nested and source.space is None:
        raise CheckpointError(f"{describe(source)} holds no family, so there is nothing to nest; leave out --nested or give --recipe")
    if plan is not None and not plan.homogeneous and options.homogenise and source.space is not None:
        before, plan = plan, homogenise(source.space, plan)
        old, new = sizes(resize(source.shape, before))[0], sizes(resize(source.shape, plan))[0]
        lines.append(f"{directory}: one width an axis costs {new - old:,} parameters more ({old:,} to {new:,}, {new / old - 1:+.1%})")
    member = cut(source, plan, dtype=None if options.dtype is None else DTYPES[options.dtype])
    card = _card(source, plan, member, directory, budget, options)
    if options.hugging_face:
        family, reasons = family_to_write(source, member.shape, options.family)
        lines += [f"{directory}: written as {family.model_type}; {reason}" for reason in reasons]
        nested = None
        if options.nested and source.space is not None:
            nested = Nested(source.space, source.plans, {"parent": card.parent, "license": card.license, "data": card.data})
        shard_bytes = SHARD_BYTES if options.shard_gigabytes is None else int(options.shard_gigabytes * 1e9)
        extras = {"assets": source.assets, "nested": nested, "order": source.provenance.get(SORTED)}
        write_hugging_face(directory, options.watch(member), family, card, **extras, shard_bytes=shard_bytes)
    else:
        write_named(
            directory,
            options.watch(member).tensors(),
            member.shape,
            space=source.space if options.nested else None,
            plans=source.plans if options.nested else None,
            provenance=_provenance(source, plan, card),
            assets=None if source.assets is None else partial(save_assets, source.assets, Origin(card.parent, card.license)),
        )
    written = replace(member.shape, padded_vocab_size=None) if options.hugging_face else member.shape
    return [*lines, f"{directory}: {budget or ('plan' if plan is not None else 'model')}, {summary(written)}"]


def _card(source: Source, plan: SubmodelPlan | None, member: Member, directory: Path, budget: str | None, options: Options) -> Card:
    counts = partial(_counts, options)
    origin = None if source.assets is None else read_origin(source.assets)
    said = source.provenance
    total, active = counts(member.shape)
    return Card(
        name=directory.name,
        parent=said.get("parent", origin.name if origin else None),
        license=said.get("license", origin.license if origin else None),
        parameters=total,
        active=active,
        parent_parameters=said.get("parent_parameters") or counts(source.shape)[0],
        budget=budget or said.get("budget"),
        plan={} if plan is None else _plan_rows(source, plan),
        data=said.get("data"),
        experts=reaped_text(said[REAPED]) if REAPED in said else None,
        members={name: counts(resize(source.shape, each))[0] for name, each in source.plans.items()} if options.nested else {},
    )


def _counts(options: Options, shape: ModelShape) -> tuple[int, int]:
    """Total and active parameters of a shape as it is written: a Hugging Face directory has no padding."""
    return sizes(replace(shape, padded_vocab_size=None) if options.hugging_face else shape)


def _plan_rows(source: Source, plan: SubmodelPlan) -> dict[str, tuple[str, str]]:
    space = source.space
    assert space is not None
    rows = {axis.value: (_text(width), _text(dict(space.parent.widths)[axis])) for axis, width in plan.widths}
    if plan.dropped_layers:
        rows["layers dropped"] = (", ".join(map(str, plan.dropped_layers)), "none")
    return rows


def _text(width: Width) -> str:
    return str(width) if isinstance(width, int) else ", ".join(map(str, width))


def _provenance(source: Source, plan: SubmodelPlan | None, card: Card) -> dict[str, object]:
    found: dict[str, object] = {"extracted_from": str(source.path), "parent": card.parent, "license": card.license, "data": card.data}
    found |= {"parent_parameters": card.parent_parameters, "budget": card.budget}
    found |= {key: source.provenance[key] for key in (SORTED, REAPED) if key in source.provenance}
    return found | ({} if plan is None else {"plan": plan.to_dict()})
