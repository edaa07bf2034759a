"""Weights as Hugging Face has them: safetensors files, with an index where there are several, written while the tensors come in.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: tensor -> dtype, shape, place in bytes after the header) and
the tensors' bytes: https://huggingface.co/docs/safetensors. Types and shapes are known before the tensors, so is every place, and no
file has to be held in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_elastic.checkpoint.streams import write_blocks, written_early
from megatron_elastic.errors import CheckpointError
from megatron_elastic.hf.weights import DTYPES, INDEX, SINGLE

Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensor -> (type, shape), in the order in which the tensors come."""
SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one file; those of one that transformers writes."""
_ALIGNMENT = 8
"""The header is padded to a multiple of this, so that every tensor lies where its type may."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_weights(directory: Path, tensors: Iterable[tuple[str, Tensor]], entries: Entries, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors`, or several shards and their index, into an existing directory, holding one tensor at a time.

    tensors: (name, tensor) in the order of `entries`, on any device. shard_bytes: most bytes of tensors in one file; a larger tensor has one by
    itself. Write into a directory of `checkpoint.new_directory`, which makes what has been written vanish after an error.

    Raises CheckpointError when a type is neither fp32, bf16 nor fp16, or a tensor is missing, unknown, out of order, or of another
    type or shape than its entry says; OSError when the disk does not take it.
    """
    if others := [f"{name} is {dtype}" for name, (dtype, _) in entries.items() if dtype not in _NAMES]:
        raise CheckpointError(f"{others[0]}, which a Hugging Face directory does not get; only {', '.join(map(str, _NAMES))}")
    shards = _shards_of(entries, shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    stream = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write_shard(directory / name, stream, shard)
    if extra := next(stream, None):
        raise CheckpointError(f"tensor {extra[0]} is not one of those to be written, or came twice")
    if len(shards) > 1:
        total = sum(_bytes_of(entry) for entry in entries.values())
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes_of(entry: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = entry
    return torch.Size(shape).numel() * dtype.itemsize


def _shards_of(entries: Entries, shard_bytes: int) -> list[Entries]:
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    used = 0
    for name, entry in entries.items():
        size = _bytes_of(entry)
        if shards[-1] and used + size > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = entry
        used += size
    return [*shards]


def _places(entries: Entries) -> dict[str, tuple[int, int]]:
    """Tensor -> (start, end) in bytes after the header; wider types first, so that every tensor begins at a multiple of its type's size."""
    places, end = {}, 0
    for name in sorted(entries, key=lambda name: -entries[name][0].itemsize):
        start, end = end, end + _bytes_of(entries[name])
        places[name] = (start, end)
    return places


def _header(entries: Entries, places: Mapping[str, tuple[int, int]]) -> bytes:
    tensors = {
        name: {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": list(places[name])} for name, (dtype, shape) in entries.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_shard(file: Path, tensors: Iterator[tuple[str, Tensor]], entries: Entries) -> None:
    places = _places(entries)
    header = _header(entries, places)
    with file.open("xb") as stream, written_early(stream):
        stream.write(header)
        for wanted, (dtype, shape) in entries.items():
            name, tensor = next(tensors, ("", None))
            if tensor is None:
                raise CheckpointError(f"tensor {wanted} was not given, nor what follows it")
            if name != wanted:
                raise CheckpointError(f"tensor {name} came where {wanted} was due")
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(shape)):
                raise CheckpointError(f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
            stream.seek(len(header) + places[name][0])
            # NumPy has no bf16; a tensor of no dims has no view of its bytes.
            write_blocks(stream, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # it would be held while the next one is made
