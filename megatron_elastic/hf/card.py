"""The model card of what is written as a Hugging Face directory: what it is, what it was cut from, under which licence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from megatron_elastic import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a model card says.

    name: the model's. parent: the model it was cut from or is; None: it is a model of its own. license: the parent's, None: unknown.
    parameters, active: counts of this model; parent_parameters: of the parent. budget: its name in the family, None for another plan.
    plan: axis -> width here and in the parent, as text. data: what the family was trained on, None: nothing (cut without training).
    members: budget -> parameters of every member inside a many-in-one checkpoint.
    """

    name: str
    parent: str | None
    license: str | None
    parameters: int
    active: int
    parent_parameters: int
    budget: str | None = None
    plan: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    data: str | None = None
    members: Mapping[str, int] = field(default_factory=dict)


def model_card(card: Card) -> str:
    """The text of README.md: a YAML header as the Hub reads it, then a page."""
    header = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **({"license": card.license} if card.license else {}),
        **({"base_model": card.parent} if card.parent else {}),
        "tags": ["megatron-elastic", "elastic", "nested"],
    }
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False).rstrip(),
        "---",
        "",
        f"# {card.name}",
        "",
        f"{_count(card.parameters)} parameters ({_count(card.active)} active), {_origin(card)}. Written by megatron-elastic {__version__}.",
        "",
        f"- Parent: {f'`{card.parent}`' if card.parent else 'none named'}",
        f"- Licence of the parent: {card.license or 'not stated by its files; ask its owner before you share this model'}",
        f"- Budget: {f'`{card.budget}`' if card.budget else 'none of its own'}",
        f"- Trained on: {card.data or 'nothing since; its weights are those of the parent'}",
    ]
    if card.plan:
        lines += ["", "## Plan", "", "| axis | here | parent |", "|---|---|---|"]
        lines += [f"| {axis} | {here} | {parent} |" for axis, (here, parent) in card.plan.items()]
    if card.members:
        lines += ["", "## Members", "", "These weights hold every member; `megatron-elastic extract` cuts one out (`elastic.json`).", ""]
        lines += ["| budget | parameters |", "|---|---|", *(f"| {name} | {_count(size)} |" for name, size in card.members.items())]
    return "\n".join(lines) + "\n"


def _origin(card: Card) -> str:
    parent = f"`{card.parent}`" if card.parent else "a parent without a name"
    if card.parameters < card.parent_parameters:
        return f"cut without further training from {parent} ({_count(card.parent_parameters)} parameters)"
    return f"the whole of {parent}" if card.parent else "a model of its own"


def _count(number: int) -> str:
    return f"{number:,}"
