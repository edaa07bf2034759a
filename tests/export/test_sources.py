"""What offline commands start from is recognised by what is in it, and gives its tensors, their types and its files without reading a weight.

Run: pytest tests/export/test_sources.py
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_elastic.errors import CheckpointError, PlanError, UnsupportedError
from megatron_elastic.export.sources import choose_plans, describe, family_to_write, open_source
from megatron_elastic.hf.weights import HfWeights
from megatron_elastic.layout import full_shapes
from tests.export.pretrained import family_shapes, write_pretrained
from tests.export.random_family import write_family


@pytest.fixture(scope="module")
def places(tmp_path_factory: Any) -> Path:
    """A run with assets, and a Hugging Face directory in half precision."""
    root = tmp_path_factory.mktemp("places")
    shape = family_shapes()["nemotron_h"]
    write_pretrained(root / "theirs", shape, dtype=torch.bfloat16)
    write_family(root / "run" / "checkpoints" / "stage-long", shape)
    (root / "run" / "assets").mkdir()
    for file in (root / "theirs").glob("*.json"):
        shutil.copy(file, root / "run" / "assets")
    return root


def test_a_run_is_its_latest_checkpoint(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = places / "run" / "checkpoints" / "stage-long"
    for path in (places / "run", checkpoint):
        source = open_source(path)
        assert source.path == checkpoint and source.assets == places / "run" / "assets"
        assert list(source.plans) == ["full", "medium", "small"] and source.space is not None
        assert describe(source) == f"checkpoint '{checkpoint}'"
    monkeypatch.chdir(checkpoint.parent)
    assert open_source(Path("stage-long")).assets == places / "run" / "assets", "a relative path leads elsewhere"


def test_assets_belong_to_a_run(places: Path, tmp_path: Path) -> None:
    """A directory of that name two steps above a checkpoint is somebody else's."""
    shutil.copytree(places / "run" / "checkpoints" / "stage-long", tmp_path / "models" / "mine")
    (tmp_path / "assets").mkdir()
    assert open_source(tmp_path / "models" / "mine").assets is None


def test_no_weight_is_read_before_it_is_asked_for(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    read = HfWeights.__getitem__
    monkeypatch.setattr(HfWeights, "__getitem__", lambda self, name: (asked.append(name), read(self, name))[1])
    source = open_source(places / "theirs")
    assert asked == [] and source.assets == places / "theirs" and source.space is None
    assert set(source.dtypes) == set(full_shapes(source.shape)) == set(source.tensors)
    name = "decoder.layers.2.self_attention.linear_qkv.weight"
    assert source.tensors[name].dtype == source.dtypes[name] == torch.bfloat16
    assert asked == [f"backbone.layers.2.mixer.{part}_proj.weight" for part in "qkv"]
    bias = [kind for name, kind in source.dtypes.items() if name.endswith("expert_bias")]
    assert set(bias) == {torch.float32}


def test_the_other_spelling_of_a_name(places: Path, tmp_path: Path) -> None:
    """transformers 5 writes one name of NemotronH otherwise than NVIDIA does."""
    shutil.copytree(places / "theirs", tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, file)
    before, after = open_source(places / "theirs"), open_source(tmp_path / "theirs")
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)


def test_a_tied_output_layer_may_be_stored_twice(tmp_path: Path) -> None:
    shape = replace(family_shapes()["qwen2"], tied_embeddings=True)
    theirs = write_pretrained(tmp_path / "theirs", shape)
    file = theirs / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    once = dict(open_source(theirs).tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)  # as older releases of transformers wrote it
    save_file(tensors, file)
    twice = dict(open_source(theirs).tensors)
    assert once.keys() == twice.keys() and all(torch.equal(once[name], twice[name]) for name in once)
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, file)
    with pytest.raises(
        CheckpointError, match=r"ties the output layer .* but lm_head.weight is not model.embed_tokens.weight; set it to false"
    ):
        open_source(theirs)


def test_the_family_to_write(places: Path) -> None:
    shapes, run = family_shapes(), open_source(places / "run")
    own, reasons = family_to_write(run, run.shape)
    assert own.model_type == "nemotron_h" and reasons == []
    other, reasons = family_to_write(run, shapes["qwen2"])
    assert other.model_type == "qwen2" and len(reasons) == 1 and reasons[0].startswith("a nemotron_h config cannot say model.layer_pattern")
    with pytest.raises(UnsupportedError, match="a mixtral config cannot say"):
        family_to_write(run, run.shape, "mixtral")
    assert family_to_write(replace(run, assets=None), shapes["qwen3_moe"])[0].model_type == "qwen3_moe"


def test_budgets_by_name(places: Path) -> None:
    source = open_source(places / "run")
    assert list(choose_plans(source.plans, None, places)) == ["full", "medium", "small"]
    assert choose_plans(source.plans, "small", places) == {"small": source.plans["small"]}
    with pytest.raises(PlanError, match="budget 'smal' is not one of the family's: full, medium, small"):
        choose_plans(source.plans, "smal", places)
    with pytest.raises(PlanError, match="holds no plans"):
        choose_plans({}, None, places)
