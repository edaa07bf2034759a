"""Hugging Face directories as somebody else leaves them: weights of a random tiny model, a tokenizer, habits in config.json, a licence, and code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_elastic.hf.families import family_of_shape
from megatron_elastic.hf.rules import to_theirs
from megatron_elastic.hf.write import write_weights
from megatron_elastic.layout import full_shapes
from megatron_elastic.models.weights import generator_of
from megatron_elastic.shape import AttentionShape, ModelShape, MoeShape
from megatron_elastic.testing.tiny import random_tensor, tiny_dense, tiny_moe, tiny_shape

VOCABULARY = 131
CODE = "raise SystemExit('code that came with a model was run')\n"
"""What no command may import."""
_WORDS = {f"w{number}": number for number in range(128)} | {"<end>": 128, "<pad>": 129}
_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": _WORDS, "unk_token": "<pad>"},
}


def family_shapes() -> dict[str, ModelShape]:
    """model_type -> an awkward shape of it: all sizes different, grouped queries, hidden other than heads x head_dim."""
    no_bias = AttentionShape(heads=12, kv_groups=2, head_dim=10, qk_norm=True, rope_base=500.0)
    experts = MoeShape(experts=8, topk=3, ffn=56, score="softmax", expert_bias=False, scaling_factor=None)
    sizes: dict[str, Any] = {"padded_vocab_size": None, "hidden_size": 80}  # of which every share is one that torch's grouped product takes
    mamba = tiny_shape().mamba
    assert mamba is not None
    attention = AttentionShape(heads=12, kv_groups=2, head_dim=10)
    return {
        # One chunk: transformers' plain-PyTorch scan sums over the wrong axis when there are several.
        "nemotron_h": tiny_shape(**sizes, attention=attention, mamba=replace(mamba, chunk=64)),
        "qwen2": tiny_dense(**sizes, attention=AttentionShape(heads=12, kv_groups=2, head_dim=10, qkv_bias=True, rope_base=500.0)),
        "qwen3_moe": tiny_moe(
            **sizes, score="softmax", normalization="RMSNorm", activation="silu", gated=True, attention=no_bias, moe=experts
        ),
    }


def write_pretrained(
    directory: Path, shape: ModelShape, *, dtype: torch.dtype = torch.float32, shard_bytes: int = 10**9, seed: int = 0
) -> Path:
    """A directory of a model with random weights, as its owner would publish it."""
    directory.mkdir(parents=True)
    family = family_of_shape(shape)
    ours = {name: random_tensor(name, size, generator_of(seed, name)) for name, size in full_shapes(shape).items()}
    ours = {name: tensor if name.endswith("expert_bias") else tensor.to(dtype) for name, tensor in ours.items()}
    tensors = dict(to_theirs(family.names, shape, ours.items()))
    write_weights(directory, tensors.items(), {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, shard_bytes=shard_bytes)
    habits = {"bos_token_id": 127, "eos_token_id": [128, 126], "pad_token_id": 129, "torch_dtype": str(dtype).removeprefix("torch.")}
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}, "_name_or_path": "/somebody/else"}
    write_json(directory / "config.json", {**habits, **code, **family.write(shape)})
    write_json(directory / "tokenizer.json", _TOKENIZER)
    write_json(directory / "tokenizer_config.json", {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(directory / "generation_config.json", {"eos_token_id": [128, 126], "do_sample": True, "temperature": 0.6})
    (directory / "LICENSE").write_text("You may.\n", encoding="utf-8")
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n", encoding="utf-8")
    for name in ("modeling_evil.py", "configuration_evil.py", "setup.py"):
        (directory / name).write_text(CODE, encoding="utf-8")
    return directory


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    file.write_text(json.dumps(content), encoding="utf-8")


def change_json(file: Path, **changes: Any) -> None:
    """Change entries of a JSON object."""
    write_json(file, json.loads(file.read_text(encoding="utf-8")) | changes)


def weights_of(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face directory, read by safetensors alone."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def contents(directory: Path) -> dict[str, str]:
    """File -> hash of what is in it, of a whole tree."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two models have the same tensors, types included, bit for bit."""
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
