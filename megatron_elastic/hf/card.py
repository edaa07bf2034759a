"""The model card of what is written as a Hugging Face directory: what it is, what it was cut from, under which licence.

A licence is one text here: the Hub's word for it, or "other (NAME, LINK)" for `license: other` with `license_name` and `license_link`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_elastic import __version__

_OTHER = re.compile(r"other \((?P<name>.+?)(?:, (?P<link>\S+))?\)")
_UNNAMED = "unnamed"
"""Stands for the name of a licence that has a link only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a model card says.

    name: the model's. parent: the model it was cut from or is; None: it is a model of its own. license: the parent's, None: unknown.
    parameters, active: counts of this model; parent_parameters: of the parent. budget: its name in the family, None for another plan.
    plan: axis -> width here and in the parent, as text. data: what the family was trained on, None: nothing (cut without training).
    members: budget -> parameters of every member inside a many-in-one checkpoint. experts: which were kept, None: all.
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
    experts: str | None = None
    members: Mapping[str, int] = field(default_factory=dict)


def model_card(card: Card) -> str:
    """The text of README.md: a YAML header as the Hub reads it, then a page."""
    header = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **(_license_keys(card.license) if card.license else {}),
        **({"base_model": card.parent} if card.parent else {}),
        "tags": ["megatron-elastic", "elastic", "nested"],
    }
    lines = [
        card_header(header),
        f"# {card.name}",
        "",
        f"{_count(card.parameters)} parameters ({_count(card.active)} active), {_origin(card)}. Written by megatron-elastic {__version__}.",
        "",
        f"- Parent: {f'`{card.parent}`' if card.parent else 'none named'}",
        f"- Licence of the parent: {card.license or 'not stated by its files; ask its owner before you share this model'}",
        f"- Budget: {f'`{card.budget}`' if card.budget else 'none of its own'}",
        f"- Trained on: {card.data or 'nothing since; its weights are those of the parent'}",
    ]
    if card.experts:
        lines.append(f"- Experts: {card.experts}")
    if card.plan:
        lines += ["", "## Plan", "", "| axis | here | parent |", "|---|---|---|"]
        lines += [f"| {axis} | {here} | {parent} |" for axis, (here, parent) in card.plan.items()]
    if card.members:
        lines += ["", "## Members", "", "These weights hold every member; `megatron-elastic extract` cuts one out (`elastic.json`).", ""]
        lines += ["| budget | parameters |", "|---|---|", *(f"| {name} | {_count(size)} |" for name, size in card.members.items())]
    return "\n".join(lines) + "\n"


def card_header(keys: Mapping[str, Any]) -> str:
    """The YAML header that a model card (README.md) begins with, between its two lines of hyphens, whatever the values are made of."""
    return f"---\n{yaml.safe_dump(dict(keys), sort_keys=False)}---\n"


def read_license(card: Path) -> str | None:
    """The licence in the YAML header of a model card (README.md). None when there is no card, no such header, or no single licence in it."""
    try:
        text = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not text.startswith("---"):
        return None
    try:
        header = yaml.safe_load(text.split("---", 2)[1])
    except yaml.YAMLError:
        return None
    found = header.get("license") if isinstance(header, dict) else None
    if not isinstance(found, str):
        return None
    name, link = (_word(header.get(key)) for key in ("license_name", "license_link"))
    if found != "other" or not (name or link):
        return found
    return f"other ({name or _UNNAMED}, {link})" if link else f"other ({name})"


def _word(value: Any) -> str:
    """A value of a YAML header as one line; numbers, as a version without quotes is one, are words."""
    return " ".join(str(value).split()) if isinstance(value, str | int | float) else ""


def _license_keys(text: str) -> dict[str, str]:
    """The keys of a header from which `read_license` has the same text."""
    if (other := _OTHER.fullmatch(text)) is None:
        return {"license": text}
    keys = {"license": "other", "license_name": other["name"], "license_link": other["link"]}
    return {key: value for key, value in keys.items() if value is not None and value != _UNNAMED}


def _origin(card: Card) -> str:
    parent = f"`{card.parent}`" if card.parent else "a parent without a name"
    if card.parameters < card.parent_parameters:
        how = "cut from a family that was trained from" if card.data else "cut without further training from"
        return f"{how} {parent} ({_count(card.parent_parameters)} parameters)"
    if card.parent is None:
        return "a model of its own"
    return f"trained from {parent}" if card.data else f"the whole of {parent}"


def _count(number: int) -> str:
    return f"{number:,}"
