"""The index of a `torch_dist` checkpoint: which tensors there are, and where their pieces lie. Runs nothing that a file names, and is checked
before it is believed: it may come from anywhere."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from megatron_elastic.errors import CheckpointError

BROKEN = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the unpicklers raise for bytes that nobody has written on purpose."""
_INDEX_CLASSES = {
    **{(each.__module__, each.__name__): each for each in (Metadata, MetadataIndex, StorageMeta, TensorProperties, _StorageInfo)},
    **{(each.__module__, each.__name__): each for each in (BytesStorageMetadata, ChunkStorageMetadata, TensorStorageMetadata)},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("pathlib", "PosixPath"): PosixPath,
}
"""What an index is made of, besides types of tensors."""


class _IndexReader(pickle.Unpickler):
    """Reads an index, and runs nothing else that the file names."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """A class of an index. Raises UnpicklingError for anything else."""
        found = _INDEX_CLASSES.get((module_name, global_name))
        if found is None and module_name == "torch":
            found = vars(torch).get(global_name)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is not part of an index")
        return found


def read_index(directory: Path) -> Metadata:
    """The index of a checkpoint: what torch.distributed.checkpoint keeps in `.metadata`. Its parts are of their types; see `problems`.

    Raises CheckpointError when there is none, or it is something else.
    """
    file = directory / ".metadata"
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    try:
        index = _IndexReader(io.BytesIO(data)).load()
        _check_types(index)
    except BROKEN as error:
        raise CheckpointError(f"{str(file)!r} is not the index of a checkpoint: {' '.join(str(error).split())}") from None
    return index


def _check_types(index: Any) -> None:
    """Raise TypeError, or AttributeError for what is not there, unless everything that is read of an index is what it should be."""
    if not isinstance(index, Metadata):
        raise TypeError("it holds something else")
    entries, places = index.state_dict_metadata, index.storage_data
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise TypeError("its lists are missing")
    for key, entry in entries.items():
        if not isinstance(key, str) or not (_is_tensor(entry) if isinstance(entry, TensorStorageMetadata) else _is_bytes(entry)):
            raise TypeError(f"{key!r} is not described")
    for key, place in places.items():
        if not isinstance(key, MetadataIndex) or not isinstance(key.fqn, str) or not _is_place(place):
            raise TypeError(f"the place of {key!r} is none")


def _is_tensor(entry: TensorStorageMetadata) -> bool:
    dtype, size, chunks = entry.properties.dtype, entry.size, entry.chunks
    right = isinstance(dtype, torch.dtype) and isinstance(size, torch.Size) and isinstance(chunks, list)
    return right and all(_is_chunk(chunk, size) for chunk in chunks)


def _is_bytes(entry: Any) -> bool:
    return isinstance(entry, BytesStorageMetadata)


def _is_chunk(chunk: Any, whole: torch.Size) -> bool:
    """Whether `chunk` is a part of a tensor of size `whole`."""
    if not isinstance(chunk, ChunkStorageMetadata) or not isinstance(chunk.offsets, torch.Size) or not isinstance(chunk.sizes, torch.Size):
        return False
    if not len(chunk.offsets) == len(chunk.sizes) == len(whole):
        return False
    return all(0 <= start <= start + length <= end for start, length, end in zip(chunk.offsets, chunk.sizes, whole, strict=True))


def _is_place(place: Any) -> bool:
    if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
        return False
    return all(isinstance(number, int) and number >= 0 for number in (place.offset, place.length))


def problems(index: Metadata, files: Mapping[str, int]) -> list[str]:
    """Every piece of an index that is not wholly in one of the files of its checkpoint, or is too short for what it is said to hold.

    files: name -> bytes, names without a directory (`CheckpointInfo.files`). Whoever reads by the index then stays in the checkpoint.
    """
    found: dict[str, None] = {}
    for key, place in index.storage_data.items():
        if place.relative_path not in files:
            found[f"{key.fqn} lies in {place.relative_path!r}, which is not one of the checkpoint's files"] = None
        elif place.offset + place.length > files[place.relative_path]:
            found[f"{key.fqn} lies beyond the end of {place.relative_path}"] = None
    for name, entry in index.state_dict_metadata.items():
        for chunk in entry.chunks if isinstance(entry, TensorStorageMetadata) else ():
            place = index.storage_data.get(MetadataIndex(name, chunk.offsets))
            if place is None:
                found[f"{name} has a piece without a place"] = None
            elif place.length < chunk.sizes.numel() * entry.properties.dtype.itemsize:
                found[f"{name} has a piece of {place.length} bytes, too few for its {chunk.sizes.numel()} elements"] = None
    return list(found)
