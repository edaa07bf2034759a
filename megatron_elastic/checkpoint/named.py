"""Full tensors of a checkpoint by name, read and written one at a time: no model, no GPU, no process group.

Names are those of `layout.full_shapes`. megatron-core saves some parameters in parts, so that every part can be cut over ranks
by itself; here a name is always the whole parameter.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo  # the entry its own reader expects in a file's index
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from megatron_elastic.axes import ElasticSpace, SubmodelPlan
from megatron_elastic.checkpoint.files import ASSETS, CheckpointKind, Description, new_checkpoint, open_checkpoint
from megatron_elastic.checkpoint.index import problems, read_index
from megatron_elastic.checkpoint.pieces import PIECE_ALIGNMENT, read_piece, save_piece
from megatron_elastic.checkpoint.streams import CarefulFile, written_early
from megatron_elastic.errors import CheckpointError, raise_all
from megatron_elastic.layout import full_shapes, layer_of
from megatron_elastic.shape import ModelShape

_NOT_WEIGHTS = ("optimizer.", "common_state/")
_FILE = "__0_0.distcp"
"""The one file of tensors that is written, named as that of rank 0."""
_MEGATRON_METADATA = (
    '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}'
)


def parts_of(name: str, shape: ModelShape) -> dict[str, int]:
    """The keys a checkpoint stores parameter `name` under, each with its size along dim 0, in order; {name: 0} when it is stored whole.

    megatron-core's MambaMixer splits in_proj into z, x, B, C, dt and the convolution into x, B, C.
    """
    if ".mixer.in_proj.weight" not in name and ".mixer.conv1d." not in name:
        return {name: 0}
    layer = layer_of(name)
    assert layer is not None
    mamba: Any = shape.at(layer).mamba
    inner, states = mamba.heads * mamba.head_dim, mamba.groups * mamba.state
    parts = {"x": inner, "B": states, "C": states}
    if ".mixer.in_proj." in name:
        parts = {"z": inner, **parts, "dt": mamba.heads}
    return {f"{name}.{part}": size for part, size in parts.items()}


class NamedTensors(Mapping[str, Tensor]):
    """The weights of a checkpoint: a mapping from name to full tensor that reads one tensor each time it is asked.

    path: a checkpoint of any parallel layout. `info` says what it is. Iteration follows `layout.full_shapes`.
    Raises CheckpointError when the checkpoint is missing, half-written, its tensors are not those of its own shape, or a piece of anything in
    it (optimizer state included) lies outside its files. Reading a tensor raises CheckpointError when the file holds another than the index says.
    """

    def __init__(self, path: Path) -> None:
        self.info = open_checkpoint(path)
        """The description of the checkpoint."""
        index = read_index(path)
        self._places: dict[MetadataIndex, _StorageInfo] = index.storage_data
        self._stored = {
            key: entry
            for key, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(_NOT_WEIGHTS)
        }
        self._shapes = full_shapes(self.info.shape)
        raise_all(CheckpointError, problems(index, self.info.files), f"checkpoint {str(path)!r} has a broken index")
        raise_all(CheckpointError, self._problems(), f"checkpoint {str(path)!r} is not of the model it describes")

    def _problems(self) -> list[str]:
        wanted = dict(entry for name, shape in self._shapes.items() for entry in _part_shapes(name, shape, self.info.shape))
        found = [f"{key} is missing" for key in wanted if key not in self._stored]
        found += [f"{key} is not one of the model's tensors" for key in self._stored if key not in wanted]
        for key, entry in self._stored.items():
            if key in wanted and tuple(entry.size) != wanted[key]:
                found.append(f"{key} has shape {list(entry.size)}, not {list(wanted[key])}")
            elif sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
                found.append(f"{key} has pieces that are missing")
        if not found:
            parts = {name: [self._stored[key].properties.dtype for key in parts_of(name, self.info.shape)] for name in self._shapes}
            found += [f"{name} has parts of several types" for name, dtypes in parts.items() if len(set(dtypes)) > 1]
        return found

    def __getitem__(self, name: str) -> Tensor:
        """The full tensor `name`, on the CPU; one that is stored in one piece is mapped, and writing to it does not change the file.

        Raises KeyError for a name the model has not.
        """
        if name not in self._shapes:
            raise KeyError(name)
        parts = [self._read(key) for key in parts_of(name, self.info.shape)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _read(self, key: str) -> Tensor:
        entry = self._stored[key]
        if len(entry.chunks) == 1:
            return self._piece(key, entry.chunks[0])
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            target = whole
            for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(self._piece(key, chunk))
        return whole

    def _piece(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A piece of a stored tensor, which is what the index says. Raises CheckpointError."""
        place, dtype = self._places[MetadataIndex(key, chunk.offsets)], self._stored[key].properties.dtype
        file = self.info.path / place.relative_path
        tensor = read_piece(file, place.offset, place.length)
        if tensor.shape != chunk.sizes or tensor.dtype != dtype:
            there, said = f"{tensor.dtype} {list(tensor.shape)}", f"{dtype} {list(chunk.sizes)}"
            raise CheckpointError(f"{str(file)!r} holds {there} at byte {place.offset}, where the index has {said} of {key}")
        return tensor

    def __contains__(self, name: object) -> bool:
        """Whether the model has a parameter of that name, without reading it."""
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        """Names, without reading anything."""
        return iter(self._shapes)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._shapes)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a full tensor, without reading it."""
        return self._shapes[name]

    def dtype_of(self, name: str) -> torch.dtype:
        """The type of a tensor, without reading it."""
        return self._stored[next(iter(parts_of(name, self.info.shape)))].properties.dtype


def _part_shapes(name: str, shape: tuple[int, ...], model: ModelShape) -> list[tuple[str, tuple[int, ...]]]:
    return [(key, (size or shape[0], *shape[1:])) for key, size in parts_of(name, model).items()]


@dataclass(slots=True)
class _Index:
    """The index of a checkpoint while its tensors are written."""

    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)

    def add(self, key: str, tensor: Tensor, place: _StorageInfo) -> None:
        """Enter a tensor that was written in one piece."""
        origin = torch.Size([0] * tensor.dim())
        self.tensors[key] = TensorStorageMetadata(
            TensorProperties.create_from_tensor(tensor), tensor.size(), [ChunkStorageMetadata(origin, tensor.size())]
        )
        self.places[MetadataIndex(key, origin, 0)] = place

    def metadata(self) -> Metadata:
        """What torch.distributed.checkpoint keeps in `.metadata`."""
        return Metadata(state_dict_metadata=dict(self.tensors), planner_data=None, storage_data=self.places)


def _write_parts(parts: Mapping[str, int], tensor: Tensor, stream: CarefulFile, index: _Index) -> None:
    sizes = [size or tensor.shape[0] for size in parts.values()]
    for key, part in zip(parts, tensor.split(sizes) if len(parts) > 1 else (tensor,), strict=True):
        stream.write(b"\0" * (-stream.tell() % PIECE_ALIGNMENT))
        start = stream.tell()
        save_piece(part, stream)
        index.add(key, part, _StorageInfo(_FILE, start, stream.tell() - start))


def write_named(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    *,
    space: ElasticSpace | None = None,
    plans: Mapping[str, SubmodelPlan] | None = None,
    provenance: Mapping[str, Any] | None = None,
    assets: Callable[[Path], object] | None = None,
) -> None:
    """Write a checkpoint of the model alone from full tensors, holding one of them at a time.

    tensors: (name, tensor) for every name of `layout.full_shapes(shape)`, in any order. space, plans: the family, when the model is one.
    assets: makes the directory it is given, the checkpoint's own `assets`, of what goes with the weights.
    Any layout loads it strictly. Raises CheckpointError when `directory` exists, a tensor is missing, unknown, twice there or of another
    shape, or the disk is full; nothing is left under the final name then.
    """
    description = Description(kind=CheckpointKind.MODEL, shape=shape, space=space, plans=plans or {}, provenance=provenance or {})
    waiting = full_shapes(shape)
    index = _Index()
    with new_checkpoint(directory, description) as (temporary, checksums):
        with (temporary / _FILE).open("wb") as file, written_early(file):
            stream = CarefulFile(file)
            for name, tensor in tensors:
                wanted = waiting.pop(name, None)
                if wanted is None:
                    raise CheckpointError(f"{name} was given twice or is not one of the model's tensors")
                if tuple(tensor.shape) != wanted:
                    raise CheckpointError(f"{name} has shape {list(tensor.shape)}, not {list(wanted)}")
                _write_parts(parts_of(name, shape), tensor.detach(), stream, index)
                del tensor  # it would be held while the next one is made
            checksums[_FILE] = stream.checksum
        raise_all(CheckpointError, [f"{name} was not given" for name in waiting], f"checkpoint {str(directory)!r}")
        (temporary / ".metadata").write_bytes(pickle.dumps(index.metadata()))
        torch.save({}, temporary / "common.pt")
        (temporary / "metadata.json").write_text(_MEGATRON_METADATA, encoding="utf-8")
        if assets is not None:
            assets(temporary / ASSETS)
