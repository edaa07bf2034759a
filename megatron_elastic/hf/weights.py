"""The weights of a Hugging Face directory: safetensors files, checked before anything is read, then read one tensor at a time.

Nothing is unpickled, and no name in a file leads out of the directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_elastic.errors import CheckpointError

INDEX = "model.safetensors.index.json"
"""Name of the file that says which shard holds which tensor."""
SINGLE = "model.safetensors"
"""Name of the only file of weights, where there is no index."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of weights that are read and written, by their name in a safetensors header."""
_SHOWN = 3
"""How many names a message lists."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little-endian."""


class HfWeights(Mapping[str, Tensor]):
    """The weights of a Hugging Face directory: a mapping from name to tensor that reads one tensor each time it is asked.

    directory: holds `model.safetensors`, or `model.safetensors.index.json` and the shards it names; other files are not looked at. Shards may be
    symbolic links, as in Hugging Face's cache. Tensors are on the CPU, of the type they are stored in, and keep their part of the file
    mapped while they live; writing to one does not change the file. Iteration follows the shards.

    Raises CheckpointError, before any weight is read, when there are no safetensors, a file is broken or truncated, a shard or a tensor is
    missing, there twice or not in the index, a shard's name leads elsewhere, or a tensor is neither fp32, bf16 nor fp16.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        """Where the files are."""
        index = _read_index(directory)
        self._shard_of: dict[str, str] = {}
        self._entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for shard in [SINGLE] if index is None else sorted(set(index.values())):
            entries = _read_header(directory / shard)
            if twice := [name for name in entries if name in self._entries]:
                raise CheckpointError(
                    f"{str(directory / shard)!r} holds {_listed(twice)}, as {self._shard_of[twice[0]]!r} does; delete one"
                )
            self._entries |= entries
            self._shard_of |= dict.fromkeys(entries, shard)
        if index is not None:
            self._check_index(index)

    def _check_index(self, index: Mapping[str, str]) -> None:
        where = str(self.directory / INDEX)
        if missing := [name for name, shard in index.items() if self._shard_of.get(name) != shard]:
            raise CheckpointError(
                f"{where!r} places {_listed(missing)} in {index[missing[0]]!r}, which does not hold it; download both again"
            )
        if extra := [name for name in self._entries if name not in index]:
            raise CheckpointError(
                f"{self._shard_of[extra[0]]!r} holds {_listed(extra)}, which {where!r} does not name; download both again"
            )

    def __getitem__(self, name: str) -> Tensor:
        """The tensor `name`. Raises KeyError for a name there is not, CheckpointError when the file has changed since it was checked."""
        file = self.directory / self._shard_of[name]
        # Opened each time: pages of a file that stays open count as this process's memory until it is closed.
        try:
            with safe_open(file, framework="pt") as shard:
                return shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{str(file)!r} cannot be read any more: {error}") from None

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name, without reading it."""
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Names, without reading anything."""
        return iter(self._entries)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._entries)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._entries[name][1]

    def dtype_of(self, name: str) -> torch.dtype:
        """The type of a tensor, without reading it."""
        return self._entries[name][0]


def _read_index(directory: Path) -> dict[str, str] | None:
    """Tensor -> shard as the index says; None when one file holds everything."""
    file = directory / INDEX
    if (directory / SINGLE).is_file():
        if file.is_file():
            raise CheckpointError(f"{str(directory)!r} holds both {SINGLE} and {INDEX}; delete the one that is not meant")
        return None
    if not file.is_file():
        raise CheckpointError(_no_weights(directory))
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{str(file)!r} is not JSON ({error}); download it again") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(shard, str) for shard in places.values()):
        raise CheckpointError(f"{str(file)!r} has no weight_map from tensors to files; download it again")
    shards = list(dict.fromkeys(places.values()))
    if outside := [shard for shard in shards if "/" in shard or "\\" in shard or not shard.endswith(".safetensors")]:
        raise CheckpointError(f"{str(file)!r} names {_listed(outside)}, not the name of a .safetensors file beside it")
    if missing := [shard for shard in shards if not (directory / shard).is_file()]:
        raise CheckpointError(f"{str(file)!r} names {_listed(missing)}, which is not there; download it again")
    return places


def _no_weights(directory: Path) -> str:
    where = repr(str(directory))
    if not directory.is_dir():
        return f"{where} is not a directory"
    if pickles := sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)):
        remedy = "load it with transformers and save_pretrained() it again"
        return f"{where} has no safetensors but {_listed(pickles)}; pickle can run code and is not read: {remedy}"
    if shards := sorted(path.name for path in directory.glob("*.safetensors")):
        return f"{where} has {_listed(shards)} but neither {SINGLE} nor {INDEX}; download what is missing"
    return f"{where} holds no weights: neither {SINGLE} nor {INDEX}"


def _read_header(file: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Tensor -> (type, shape) of one shard, which is whole."""
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - it is no dictionary
                part = shard.get_slice(name)
                entries[name] = part.get_dtype(), tuple(part.get_shape())
    except SafetensorError as error:
        raise CheckpointError(f"{str(file)!r} {_what_is_wrong(file, error)}; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error}") from None
    if others := [name for name, (dtype, _) in entries.items() if dtype not in DTYPES]:
        dtype, remedy = entries[others[0]][0], "convert the model to one of them first"
        raise CheckpointError(f"{str(file)!r}: {_listed(others)} is {dtype}, not one of {', '.join(DTYPES)}; {remedy}")
    return {name: (DTYPES[dtype], shape) for name, (dtype, shape) in entries.items()}


def _what_is_wrong(file: Path, error: Exception) -> str:
    """Why safetensors refused a file; a truncated one with the sizes it has and should have."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        needed = _LENGTH_BYTES + length
        if needed <= size:
            needed += _end_of_data(stream.read(length))
    if size < needed:
        return f"is truncated: it has {size:,} bytes and its header asks for {needed:,}"
    return f"is not a safetensors file ({error})"


def _end_of_data(header: bytes) -> int:
    """Where the last tensor ends, in bytes from the end of the header; 0 for a header that cannot be understood."""
    try:
        entries: dict[str, Any] = json.loads(header)
        return max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return 0


def _listed(names: Iterable[str]) -> str:
    """The first of some names, quoted as whoever wrote them may have chosen anything, and how many more there are."""
    names = [repr(name) for name in names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
