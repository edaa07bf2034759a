"""A member is written as it was asked for, keeps what belongs to its parent in both formats, and weights that are damaged, or would be, are not written.

Run: pytest tests/export/test_write.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.checkpoint import NamedTensors, open_checkpoint, write_named
from megatron_elastic.errors import CheckpointError, PlanError
from megatron_elastic.export.sources import open_source
from megatron_elastic.export.write import Options, write_member, write_submodel
from megatron_elastic.hf.assets import Origin, read_origin
from megatron_elastic.space import resize
from tests.export.pretrained import contents, family_shapes, same, weights_of, write_pretrained
from tests.export.random_family import write_family

NAME = "decoder.layers.1.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: Any) -> Path:
    return write_pretrained(tmp_path_factory.mktemp("hub") / "Dense-1B", family_shapes()["qwen2"])


def test_what_belongs_to_a_model_goes_through_both_formats(theirs: Path, tmp_path: Path) -> None:
    """There and back, and there again: the same directory but for the card, which names another parent."""
    lines = write_member(open_source(theirs), None, tmp_path / "ours", Options())
    assert lines == [f"{tmp_path / 'ours'}: model, 181,040 parameters, layers T4, hidden 80, vocabulary 131"]
    ours = open_source(tmp_path / "ours")
    assert ours.assets == tmp_path / "ours" / "assets" and read_origin(tmp_path / "ours" / "assets") == Origin("Dense-1B", "apache-2.0")
    write_member(ours, None, tmp_path / "back", Options(hugging_face=True))
    assert same(weights_of(tmp_path / "back"), weights_of(theirs))
    assert contents(tmp_path / "back").items() >= {
        (name, text) for name, text in contents(theirs).items() if name.startswith(("tokenizer", "generation", "LICENSE"))
    }
    write_member(ours, None, tmp_path / "copy", Options())
    assert contents(tmp_path / "copy" / "assets") == contents(tmp_path / "ours" / "assets")
    config = json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))
    assert config["eos_token_id"] == [128, 126] and config["pad_token_id"] == 129 and "auto_map" not in config


def test_the_public_function(tmp_path: Path) -> None:
    shape = family_shapes()["nemotron_h"]
    plans = write_family(tmp_path / "family", shape)
    assert write_submodel(tmp_path / "family", plans["small"], tmp_path / "small") == resize(shape, plans["small"])
    assert open_checkpoint(tmp_path / "small").shape == resize(shape, plans["small"])
    with pytest.raises(CheckpointError, match="small' exists"):
        write_submodel(tmp_path / "family", plans["small"], tmp_path / "small")
    with pytest.raises(CheckpointError, match="holds no family"):
        write_submodel(tmp_path / "small", plans["small"], tmp_path / "other")
    space = open_source(tmp_path / "family").space
    assert space is not None
    with pytest.raises(PlanError, match="hidden 79 is not one of its choices"):
        write_submodel(
            tmp_path / "family", plans["small"].__class__.of(dict(space.parent.widths) | {ElasticAxis.HIDDEN: 79}), tmp_path / "o"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["family", "small"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("hugging_face", [False, True])
def test_a_checkpoint_that_is_not_finite(value: float, hugging_face: bool, theirs: Path, tmp_path: Path) -> None:
    source = open_source(theirs)
    tensors = dict(source.tensors)
    tensors[NAME] = tensors[NAME].clone()
    tensors[NAME][5, 6] = value
    write_named(tmp_path / "ours", tensors.items(), source.shape)
    with pytest.raises(CheckpointError, match=f"^{NAME}: 1 of 11520 weights are NaN or infinite; get the checkpoint again$"):
        write_member(open_source(tmp_path / "ours"), None, tmp_path / "out", Options(hugging_face=hugging_face))
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_type_that_does_not_hold_a_weight(theirs: Path, tmp_path: Path) -> None:
    source = open_source(theirs)
    tensors = dict(source.tensors)
    tensors[NAME] = tensors[NAME].clone()
    tensors[NAME][5, 6] = 7e4
    write_named(tmp_path / "ours", tensors.items(), source.shape)
    ours = open_source(tmp_path / "ours")
    with pytest.raises(CheckpointError, match=f"^{NAME}: a weight of 7e.04 does not fit into torch.float16; choose --dtype bfloat16$"):
        write_member(ours, None, tmp_path / "half", Options(dtype="float16"))
    write_member(ours, None, tmp_path / "bf16", Options(dtype="bfloat16"))
    assert NamedTensors(tmp_path / "bf16")[NAME].dtype == torch.bfloat16 and sorted(p.name for p in tmp_path.iterdir()) == ["bf16", "ours"]
