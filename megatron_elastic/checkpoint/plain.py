"""The plain data of a checkpoint: numbers, names and tensors that are not sharded. Read without running anything that the file names.

megatron-core 0.16.1 keeps it in a file of its own, 0.19 as an object among the shards; either is what torch.save wrote of a dictionary.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_elastic.checkpoint.files import open_checkpoint
from megatron_elastic.checkpoint.index import BROKEN, problems, read_index
from megatron_elastic.errors import CheckpointError, raise_all

RUN = "run"
"""The entry of the plain data that `save_checkpoint` was given as `state`."""
_FILE = "common.pt"
"""Where 0.16.1 keeps it."""
_OBJECT = MetadataIndex("common_state/shard_0_1")
"""Where 0.19 keeps it: the only piece of an object."""


def read_plain(directory: Path) -> dict[str, Any]:
    """The plain data of the checkpoint `directory`, as either release has written it; tensors are on the CPU.

    Raises CheckpointError when there is none, it cannot be read, or it holds anything but plain data and tensors.
    """
    file = directory / _FILE
    data = _file(file) if file.is_file() else _object(directory)
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        found = found if file.is_file() else found[0]
    except BROKEN as error:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} holds more than plain data and tensors, which is not run; use another one"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"checkpoint {str(directory)!r} has a {type(found).__name__} for its plain data; use another one")
    return found


def _file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error.strerror}") from None


def _object(directory: Path) -> bytes:
    info, index = open_checkpoint(directory), read_index(directory)
    raise_all(CheckpointError, problems(index, info.files), f"checkpoint {str(directory)!r} has a broken index")
    place = index.storage_data.get(_OBJECT)
    if place is None:
        raise CheckpointError(f"checkpoint {str(directory)!r} has no plain data: neither {_FILE} nor {_OBJECT.fqn}; use another one")
    try:
        with (directory / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return file.read(place.length)
    except OSError as error:
        raise CheckpointError(f"{str(directory / place.relative_path)!r} cannot be read: {error.strerror}") from None
