"""elastic.json comes back as it was written, and whatever else is in one is refused with the file's name, never cut.

Run: pytest tests/export/test_nested.py
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import CheckpointError
from megatron_elastic.export.nested import Nested, read_nested, write_nested
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape
from tests.elastic.family import layer_axes, narrowed, staggered, tiny_space

SHAPES = {"hybrid": tiny_shape(), "dense": tiny_dense(), "moe": tiny_moe()}
PROVENANCE = {"parent": "Mine-1B", "license": "mit", "data": None}


def family_of(kind: str, *, per_layer: bool) -> Nested:
    shape = SHAPES[kind]
    space = tiny_space(shape, layer_axes(shape) if per_layer else ())
    return Nested(space, {"full": space.parent, "uneven": staggered(space, None, 1), "small": narrowed(space, None)}, PROVENANCE)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("per_layer", [False, True])
def test_it_comes_back(kind: str, per_layer: bool, tmp_path: Path) -> None:
    assert read_nested(tmp_path, SHAPES[kind]) is None
    family = family_of(kind, per_layer=per_layer)
    write_nested(tmp_path, family)
    assert read_nested(tmp_path, SHAPES[kind]) == family


def test_the_family_of_another_model(tmp_path: Path) -> None:
    write_nested(tmp_path, family_of("hybrid", per_layer=False))
    for other in (
        SHAPES["dense"],
        SHAPES["moe"],
        replace(SHAPES["hybrid"], hidden_size=48),
        replace(SHAPES["hybrid"], layer_pattern="ME*-MEM"),
    ):
        with pytest.raises(CheckpointError, match=r"elastic.json' is not of the model beside it: "):
            read_nested(tmp_path, other)


def test_groups_decide_which_weights_are_kept(tmp_path: Path) -> None:
    """Other groups would cut without a word, and wrongly."""
    write_nested(tmp_path, family_of("hybrid", per_layer=False))
    data = json.loads((tmp_path / "elastic.json").read_text(encoding="utf-8"))
    for axis in data["space"]["axes"]:
        if axis["axis"] not in (ElasticAxis.EXPERTS, ElasticAxis.LAYERS):
            changed = copy.deepcopy(data)
            entry = next(each for each in changed["space"]["axes"] if each["axis"] == axis["axis"])
            entry["groups"] = 1 if axis["groups"] != 1 else 2
            (tmp_path / "elastic.json").write_text(json.dumps(changed), encoding="utf-8")
            with pytest.raises(CheckpointError, match="is not of the model beside it"):
                read_nested(tmp_path, SHAPES["hybrid"])


JUNK: list[Any] = [None, 0, -1, 3, 10**9, 0.5, "", "hidden", [], [0], ["x"], {}, {"a": 1}, True, [[1]], float("nan")]


@pytest.mark.parametrize("seed", range(4))
def test_nonsense_is_a_checkpoint_error(seed: int, tmp_path: Path) -> None:
    """Any entry replaced by anything: what is read is a family of this model, or refused by one line that names the file."""
    generator = random.Random(seed)
    write_nested(tmp_path, family_of("hybrid", per_layer=bool(seed % 2)))
    data = json.loads((tmp_path / "elastic.json").read_text(encoding="utf-8"))
    refused = 0
    for _ in range(300):
        changed = copy.deepcopy(data)
        place: Any = {"": changed}
        key: Any = ""
        while generator.random() < 0.85 and isinstance(place[key], dict | list) and place[key]:
            place = place[key]
            key = generator.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place[key] = generator.choice(JUNK)
        (tmp_path / "elastic.json").write_text(json.dumps(changed if key != "" else place[key]), encoding="utf-8")
        try:
            read_nested(tmp_path, SHAPES["hybrid"])
        except CheckpointError as error:
            assert "elastic.json" in str(error)
            refused += 1
    assert refused > 150
    for text in ("", "{", "[]", '"x"', "null", "\ufeff{}", "\x00"):
        (tmp_path / "elastic.json").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match="elastic.json"):
            read_nested(tmp_path, SHAPES["hybrid"])
