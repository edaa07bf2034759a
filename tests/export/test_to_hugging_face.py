"""A family goes out as Hugging Face directories that are ordinary models: transformers, in a process without this project and without remote code,
computes the masked family's logits from every member; the many-in-one directory is the parent to it, and to `extract` the family.

Run: pytest tests/export/test_to_hugging_face.py
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_elastic.checkpoint import NamedTensors, open_checkpoint
from megatron_elastic.hf.families import family_of_shape
from megatron_elastic.space import resize
from tests.export.pretrained import VOCABULARY, contents, family_shapes, same, weights_of
from tests.export.random_family import write_family
from tests.export.read_back import family_logits, logits_in_a_fresh_process
from tests.train.harness import command, in_new_process

KINDS = ["nemotron_h", "qwen2", "qwen3_moe"]
BUDGETS = ["full", "medium", "small"]
TEXT = torch.randint(0, VOCABULARY, (2, 22), generator=torch.Generator().manual_seed(3))


def run(*arguments: object) -> str:
    """What a command prints."""
    code, out, err = command(*map(str, arguments))
    assert code == 0, err
    return out


@pytest.fixture(scope="module")
def families(tmp_path_factory: Any) -> dict[str, Path]:
    """model_type -> a family with random weights, and everything that is written of it."""
    roots = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, root in roots.items():
        write_family(root / "family", family_shapes()[kind])
        run("extract", root / "family", "--format", "hf", "--out", root / "members")
        run("extract", root / "family", "--format", "hf", "--nested", "--out", root / "nested")
    return roots


@pytest.fixture(scope="module")
def read_back(families: dict[str, Path]) -> dict[Path, Tensor]:
    """Directory -> transformers' logits, of the members and the many-in-one directory of every kind, by one process."""
    directories = [root / "members" / name for root in families.values() for name in BUDGETS]
    directories += [root / "nested" for root in families.values()]
    return dict(zip(directories, logits_in_a_fresh_process(dict.fromkeys(directories, TEXT)), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_member_is_an_ordinary_model_of_its_size(kind: str, families: dict[str, Path]) -> None:
    family = families[kind]
    info = open_checkpoint(family / "family")
    for name in BUDGETS:
        config = json.loads((family / "members" / name / "config.json").read_text(encoding="utf-8"))
        small = resize(info.shape, info.plans[name])
        assert config["model_type"] == kind and family_of_shape(small, kind).read(config).hidden_size == small.hidden_size
        assert config["torch_dtype"] == "float32" and config["vocab_size"] == VOCABULARY
        assert sorted(file.name for file in (family / "members" / name).iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert len({sum(t.numel() for t in weights_of(family / "members" / name).values()) for name in BUDGETS}) == 3
    assert info.plans["small"].dropped_layers


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_family_goes_out_and_comes_back(kind: str, families: dict[str, Path], tmp_path: Path) -> None:
    family = families[kind]
    assert same(weights_of(family / "nested"), weights_of(family / "members" / "full"))
    run("extract", family / "nested", "--format", "hf", "--out", tmp_path / "again")
    for name in BUDGETS:
        assert contents(tmp_path / "again" / name) == contents(family / "members" / name), "the run is still needed"
    before, after = open_checkpoint(family / "family"), tmp_path / "megatron"
    run("extract", family / "nested", "--nested", "--out", after)
    back = open_checkpoint(after)
    assert (back.shape, back.space, dict(back.plans)) == (before.shape, before.space, dict(before.plans))
    assert same(dict(NamedTensors(after)), dict(NamedTensors(family / "family")))
    run("extract", after, "--budget", "small", "--format", "hf", "--out", tmp_path / "small")
    assert same(weights_of(tmp_path / "small"), weights_of(family / "members" / "small"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra hf")
def test_transformers_computes_the_masked_logits(kind: str, families: dict[str, Path], read_back: dict[Path, Tensor]) -> None:
    family = families[kind]
    wanted = dict(zip(BUDGETS, in_new_process(family_logits, family / "family", BUDGETS, TEXT), strict=True))
    for name, logits in wanted.items():
        theirs = read_back[family / "members" / name]
        assert theirs.shape == (2, 22, VOCABULARY) and float((theirs - logits).abs().max()) < 1e-4, name
        assert float(theirs.std()) > 0.1
    assert torch.equal(read_back[family / "nested"], read_back[family / "members" / "full"])
    assert min(float((wanted[a] - wanted[b]).abs().max()) for a, b in (("full", "medium"), ("medium", "small"))) > 0.1
