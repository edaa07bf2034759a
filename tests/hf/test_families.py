"""Proves that a model of every family comes in and goes out bit for bit, that ours computes its logits, and that what we write is the same model
to transformers, in a process that cannot import this project.

Run: pytest tests/hf/test_families.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_elastic.hf.config import read_config
from megatron_elastic.hf.families import FAMILIES, Family, family_of_config, family_of_shape
from megatron_elastic.hf.rules import NameMap, OurTensors, to_theirs
from megatron_elastic.hf.weights import HfWeights
from megatron_elastic.hf.write import write_weights
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.experts import unstack_experts

pytest.importorskip("transformers")
from tests.hf.tiny_models import LONG, MODELS, tiny_model, tokens_of  # noqa: E402

READER = Path(__file__).parent / "reader.py"


@dataclass(frozen=True)
class Imported:
    """A directory that transformers wrote, and what we read in it."""

    directory: Path
    family: Family
    names: NameMap
    shape: ModelShape
    ours: dict[str, Tensor]


def read(directory: Path) -> Imported:
    """A directory as ours."""
    config = read_config(directory)
    family, weights = family_of_config(config), HfWeights(directory)
    shape, names = family.read(config), family.names.spelled(weights)
    stored = {name: weights.shape_of(name) for name in weights}
    return Imported(directory, family, names, shape, dict(OurTensors(names, shape, weights, stored, lambda name: False)))


def in_the_files(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a directory, read by safetensors alone."""
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write(directory: Path, family: Family, shape: ModelShape, ours: Mapping[str, Tensor]) -> None:
    """A directory of ours, without anything that is not needed."""
    directory.mkdir(parents=True)
    entries = {theirs: (tensor.dtype, tuple(tensor.shape)) for theirs, tensor in to_theirs(family.names, shape, ours.items())}
    write_weights(directory, to_theirs(family.names, shape, ours.items()), entries, shard_bytes=50_000)
    (directory / "config.json").write_text(json.dumps(family.write(shape)), encoding="utf-8")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Callable[[str], Path]:
    """Name of a tiny model -> a directory of transformers' with it, in several shards."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("theirs")
            tiny_model(name).save_pretrained(made[name], max_shard_size="60KB")
        return made[name]

    return directory


def our_logits(shape: ModelShape, ours: Mapping[str, Tensor], tokens: Tensor, parallel: Any) -> tuple[Tensor, Any]:
    """Logits of our model, and the model."""
    from megatron_elastic.models.build import build_model
    from megatron_elastic.models.weights import scatter_tensors

    model = build_model(shape, parallel)
    scatter_tensors(model, unstack_experts(ours))
    with torch.no_grad():
        return model.eval()(tokens, torch.arange(tokens.shape[1])[None].expand_as(tokens), None), model


def their_logits(name: str) -> Tensor:
    """Logits of transformers' model."""
    with torch.no_grad():
        return tiny_model(name)(tokens_of(name), use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_in_and_out_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(name).to(dtype)
    for own, buffer in model.named_buffers():
        if own.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()  # as the published models have it
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    imported, stored = read(tmp_path), in_the_files(tmp_path)
    back = dict(to_theirs(imported.names, imported.shape, imported.ours.items()))
    assert back.keys() == stored.keys()
    assert all(back[own].dtype == tensor.dtype and torch.equal(back[own], tensor) for own, tensor in stored.items())
    assert {tensor.dtype for own, tensor in stored.items() if "bias" not in own} == {dtype}


@pytest.mark.parametrize("name", MODELS)
def test_ours_computes_their_logits(name: str, saved: Any, parallel: Any) -> None:
    imported, theirs = read(saved(name)), their_logits(name)
    logits, _ = our_logits(imported.shape, imported.ours, tokens_of(name), parallel)
    assert float((logits - theirs).abs().max()) < 1e-4
    assert float(theirs.std()) > 0.1


def test_scaled_rotations_are_transformers(saved: Any, parallel: Any) -> None:
    imported, name = read(saved("llama, scaled")), "llama, scaled"
    assert imported.shape.attention is not None and imported.shape.attention.rope_scaling == 8
    plain = replace(imported.shape, attention=replace(imported.shape.attention, rope_scaling=None))
    scaled, model = our_logits(imported.shape, imported.ours, tokens_of(name), parallel)
    unscaled, other = our_logits(plain, imported.ours, tokens_of(name), parallel)
    assert float((scaled - unscaled)[:, LONG // 2 :].abs().max()) > 1e-2, "the scaling does not matter: the tests prove nothing"
    frequencies = tiny_model(name).model.rotary_emb.inv_freq
    torch.testing.assert_close(model.rotary_pos_emb.inv_freq, frequencies, rtol=1e-6, atol=0)
    ratios = other.rotary_pos_emb.inv_freq / frequencies
    assert ratios[0] == 1 and 1.01 < ratios[3] < 7.9 and ratios[4] == 8  # kept, in between, slowed by the factor


def test_what_is_written_is_the_same_model_to_transformers(saved: Any, tmp_path: Path) -> None:
    texts = {}
    for number, name in enumerate(MODELS):
        imported, out = read(saved(name)), tmp_path / str(number)
        write(out, imported.family, imported.shape, imported.ours)
        assert read_config(out)["model_type"] == imported.family.model_type == name.split(",")[0]
        again = read(out)
        assert again.shape == imported.shape and all(torch.equal(again.ours[own], tensor) for own, tensor in imported.ours.items())
        texts[str(out)] = tokens_of(name)
    torch.save(texts, tmp_path / "in.pt")
    ran = subprocess.run(
        [sys.executable, "-I", str(READER), str(tmp_path / "in.pt"), str(tmp_path / "out.pt")],
        capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "newly initialized" not in ran.stderr and "unexpected" not in ran.stderr.lower(), ran.stderr
    found = torch.load(tmp_path / "out.pt")
    for number, name in enumerate(MODELS):
        assert float((found[str(tmp_path / str(number))] - their_logits(name)).abs().max()) < 1e-5, name


@pytest.mark.parametrize("name", ["llama, biases, tied", "nemotron_h"])
def test_a_padded_vocabulary_is_zeros_in_ours_and_nothing_in_theirs(name: str, saved: Any, parallel: Any) -> None:
    config, weights = read_config(saved(name)), HfWeights(saved(name))
    family = family_of_config(config)
    names, shape = family.names.spelled(weights), replace(family.read(config), padded_vocab_size=72)
    stored = {own: weights.shape_of(own) for own in weights}
    ours = dict(OurTensors(names, shape, weights, stored, lambda own: False))
    embedding = ours["embedding.word_embeddings.weight"]
    assert embedding.shape[0] == 72 and not embedding[61:].any() and embedding[:61].any(1).all()
    back, files = dict(to_theirs(names, shape, ours.items())), in_the_files(saved(name))
    assert back.keys() == files.keys() and all(torch.equal(back[own], tensor) for own, tensor in files.items())
    logits, _ = our_logits(shape, ours, tokens_of(name), parallel)
    assert float((logits[..., :61] - their_logits(name)).abs().max()) < 1e-4
    assert family_of_shape(shape, family.model_type) is family and family.write(shape)["vocab_size"] == 61


def test_every_family_is_tested() -> None:
    assert {name.split(",")[0] for name in MODELS} == {family.model_type for family in FAMILIES}
