"""Writes a Hugging Face directory of a Llama-like model as a GGUF file, as llama.cpp's own converter lays it out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFReader, GGUFWriter, get_tensor_name_map, quantize
from safetensors.numpy import load_file

KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
# transformers 5 writes num_experts under this name.
MOE_KEYS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def tokenizer_keys(file: Path) -> dict[str, Any]:
    """The keys of a GGUF file that describe its tokenizer, to give to another file."""
    fields = GGUFReader(file).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix with the two halves of each head interleaved: llama.cpp rotates neighbours, transformers halves."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    directory: Path,
    file: Path,
    *,
    kind: GGMLQuantizationType,
    tokenizer: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    add: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write `file` from config.json and the safetensors of `directory`.

    kind: of the matrices; vectors are fp32. extra: more keys, or other values. leave_out: GGUF names of keys and tensors to omit. add: more tensors.
    """
    config = json.loads((directory / "config.json").read_text())
    name = config["model_type"].replace("_", "")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    keys: dict[str, Any] = {f"{name}.{key}": config[setting] for key, setting in {**KEYS, **MOE_KEYS}.items() if setting in config}
    keys[f"{name}.rope.freq_base"] = config["rope_parameters"]["rope_theta"]
    keys[f"{name}.rope.dimension_count"] = keys[f"{name}.attention.key_length"] = keys[f"{name}.attention.value_length"] = config[
        "head_dim"
    ]
    writer = GGUFWriter(file, name)
    for key, value in {**keys, **tokenizer, **(extra or {})}.items():
        if key not in leave_out:
            _add_key(writer, key, value)
    architecture = next(number for number, known in MODEL_ARCH_NAMES.items() if known == name)
    names = get_tensor_name_map(architecture, config["num_hidden_layers"])
    for theirs, tensor in _tensors(directory).items():
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert ours is not None, theirs
        if name == "llama" and ".attn_q." in ours:
            tensor = permuted(tensor, heads)
        if name == "llama" and ".attn_k." in ours:
            tensor = permuted(tensor, groups)
        if ours not in leave_out:
            _add_tensor(writer, ours, tensor, kind)
    for ours, tensor in (add or {}).items():
        _add_tensor(writer, ours, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory by their names, the experts of a layer stacked under one name without their number."""
    tensors = {name: tensor for shard in directory.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        start, number, end = re.split(r"\.experts\.(\d+)", name)
        experts.setdefault(f"{start}.experts{end}", {})[int(number)] = tensors.pop(name)
    return tensors | {name: np.stack([their[number] for number in sorted(their)]) for name, their in experts.items()}


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    (writer.add_int32 if isinstance(value, int) and value < 0 else add[type(value)])(key, value)


def _add_tensor(writer: GGUFWriter, name: str, tensor: np.ndarray, kind: GGMLQuantizationType) -> None:
    kind = GGMLQuantizationType.F32 if tensor.ndim == 1 else kind
    writer.add_tensor(name, quantize(np.asarray(tensor, dtype=np.float32), kind), raw_dtype=kind)
