"""A model card says in words and in its header what a model is, whatever its names are made of.

Run: pytest tests/hf/test_card.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_elastic.hf.card import Card, model_card, read_license

CARD = Card(
    name="small",
    parent="Mine-1B",
    license="mit",
    parameters=1_234_567,
    active=234_567,
    parent_parameters=7_654_321,
    budget="small",
    plan={"hidden": ("32", "40"), "layers dropped": ("3, 5", "none")},
    data="books (stage: 1,000 tokens)",
)


def header(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


def test_a_member() -> None:
    text = model_card(CARD)
    assert header(text) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "mit",
        "base_model": "Mine-1B",
        "tags": ["megatron-elastic", "elastic", "nested"],
    }
    assert (
        "# small\n\n1,234,567 parameters (234,567 active), cut from a family that was trained from `Mine-1B` (7,654,321 parameters)."
        in text
    )
    untrained = model_card(replace(CARD, data=None))
    assert "cut without further training from `Mine-1B`" in untrained and "- Trained on: nothing since" in untrained
    for line in (
        "- Parent: `Mine-1B`",
        "- Licence of the parent: mit",
        "- Budget: `small`",
        "- Trained on: books (stage: 1,000 tokens)",
        "| hidden | 32 | 40 |",
        "| layers dropped | 3, 5 | none |",
    ):
        assert f"\n{line}\n" in text
    assert "## Members" not in text and text.endswith("\n") and not text.endswith("\n\n")


def test_a_family_and_a_model_of_ones_own() -> None:
    family = model_card(replace(CARD, parameters=7_654_321, budget=None, plan={}, members={"full": 7_654_321, "small": 1_234_567}))
    assert "trained from `Mine-1B`" in family and "| small | 1,234,567 |" in family and "`elastic.json`" in family
    assert "the whole of `Mine-1B`" in model_card(replace(CARD, parameters=7_654_321, data=None))
    assert "## Plan" not in family and "- Budget: none of its own" in family
    own = model_card(replace(CARD, parent=None, license=None, data=None, parameters=7_654_321))
    assert "a model of its own" in own and "base_model" not in header(own) and "license" not in header(own)
    assert "- Licence of the parent: not stated by its files" in own and "- Trained on: nothing since" in own


@pytest.mark.parametrize(
    ("license", "keys"),
    [
        ("other", {"license": "other"}),
        ("other (llama3.1)", {"license": "other", "license_name": "llama3.1"}),
        ("other (a: b, https://x.org/a(b))", {"license": "other", "license_name": "a: b", "license_link": "https://x.org/a(b)"}),
        ("other (unnamed, LICENSE)", {"license": "other", "license_link": "LICENSE"}),
        ("another (x)", {"license": "another (x)"}),
    ],
)
def test_a_licence_of_its_own(license: str, keys: dict[str, str], tmp_path: Path) -> None:
    text = model_card(replace(CARD, license=license))
    assert {key: value for key, value in header(text).items() if key.startswith("license")} == keys
    assert f"\n- Licence of the parent: {license}\n" in text
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert read_license(tmp_path / "README.md") == license


@pytest.mark.parametrize("name", ["a: b", "---", "- x", "'\"", "nul: {", "ünï"])
def test_names_that_yaml_could_misread(name: str) -> None:
    assert header(model_card(replace(CARD, parent=name, license=name)))["base_model"] == name
