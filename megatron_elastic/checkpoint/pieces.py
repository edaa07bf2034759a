"""The pieces of tensors in the files of a `torch_dist` checkpoint. Runs nothing that a file names, and believes no size that it says.

Pieces lie one behind the other in a file, each what torch.save wrote of one tensor, a zip archive. torch.load would copy all of it, and
torch.distributed.checkpoint once more; here it is mapped where it can be, so that what is used is read when it is used and no memory holds it twice.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from megatron_elastic.checkpoint.index import BROKEN
from megatron_elastic.errors import CheckpointError

PIECE_ALIGNMENT = 64
"""Pieces that begin at a multiple of this can be mapped: torch.save places the elements at a multiple of it in the archive."""
_LOCAL_HEADER = 30
"""Bytes of a zip entry's own header before its name (APPNOTE.TXT 4.3.7); the two lengths that follow it are its last four bytes."""


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
}
"""What torch.save calls the elements of a tensor of weights."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """Where a tensor's elements are: the archive's entry, their type and their number."""

    entry: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor without its elements; offset and stride are counted in elements."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Describer(pickle.Unpickler):
    """Reads the description of one plain tensor, and runs nothing that the file names."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """What the description of a plain tensor uses. Raises UnpicklingError for anything else."""
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module_name == "torch" and global_name in _STORAGES:
            return _STORAGES[global_name]
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not part of a tensor of weights")

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a tensor refers to."""
        _, dtype, key, _, numel = pid
        return _Storage(f"data/{key}", dtype, numel)


def _described(storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> _Described:
    return _Described(storage, offset, size, stride)


class _Part(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place in the part."""
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read up to the end of the part; returns the number of bytes."""
        self._file.seek(self._start + self._place)
        data = self._file.read(max(0, min(len(buffer), self._length - self._place)))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def read_piece(path: Path, start: int, length: int) -> Tensor:
    """The tensor in `length` bytes of a file from byte `start` on, on the CPU.

    It keeps its part of the file mapped while it lives, where its elements are aligned, and is a copy otherwise; writing to it does not change
    the file. Raises CheckpointError when there is no plain tensor, or less of one than it says.
    """
    try:
        with path.open("rb") as file:
            with zipfile.ZipFile(io.BufferedReader(_Part(file, start, length))) as archive:
                entries = {entry.filename.split("/", 1)[1]: entry for entry in archive.infolist()}
            description = entries["data.pkl"]
            file.seek(_start_of(description, file, start, length))
            described = _Describer(io.BytesIO(file.read(description.file_size))).load()
            storage = entries[described.storage.entry]
            _check(described, storage.file_size)
            return _elements(file, _start_of(storage, file, start, length), described)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, *BROKEN) as error:
        raise CheckpointError(f"{str(path)!r} holds no plain tensor at byte {start}: {' '.join(str(error).split())}") from error


def _start_of(entry: zipfile.ZipInfo, file: io.BufferedReader, start: int, length: int) -> int:
    """Where the bytes of an entry begin in the file whose archive has `length` bytes from byte `start` on; all of them lie in it.

    zipfile itself insists on the entries' checksums.
    """
    if entry.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{entry.filename} is compressed")
    lengths = start + entry.header_offset + _LOCAL_HEADER - 4
    file.seek(lengths)
    name, extra = file.read(2), file.read(2)
    found = lengths + 4 + int.from_bytes(name, "little") + int.from_bytes(extra, "little")
    if found + entry.file_size > start + length:
        raise zipfile.BadZipFile(f"{entry.filename} is longer than its archive")
    return found


def _check(described: _Described, stored: int) -> None:
    """Raise ValueError or TypeError unless the tensor lies in its storage, of which `stored` bytes are in the archive."""
    storage, size, stride = described.storage, described.size, described.stride
    numbers = (storage.numel, described.offset, *size, *stride)
    if len(size) != len(stride) or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError("its sizes are not numbers of elements")
    if storage.nbytes != stored:
        raise ValueError(f"{storage.numel} elements of {storage.dtype} are not the {stored} bytes that are stored")
    last = described.offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if math.prod(size) and last >= storage.numel:
        raise ValueError(f"it needs {last + 1} elements, of which {storage.numel} are stored")


def save_piece(tensor: Tensor, stream: Any) -> None:
    """torch.save of a tensor by itself, without the rest of the storage that it may be a view of, and without a copy where it is contiguous.

    stream: has a write method. The archive's own checksums are left out: they take longer than the writing, and a checkpoint lists those
    of its files. torch.load does not look at them.
    """
    data = tensor.detach().cpu().contiguous()
    numbers = data.reshape(-1).view(torch.uint8).numpy()  # NumPy has no bf16; what is made of its array has a storage of just these bytes
    alone = torch.from_numpy(numbers).view(data.dtype).view(data.shape) if data.numel() else data
    checked = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(alone, stream)
    finally:
        set_crc32_options(checked)


def _elements(file: io.BufferedReader, start: int, described: _Described) -> Tensor:
    storage = described.storage
    if math.prod(described.size) == 0:
        return torch.empty(described.size, dtype=storage.dtype)
    if start % storage.dtype.itemsize:  # not every processor computes with numbers that lie across their places
        elements = torch.empty(storage.numel, dtype=storage.dtype)
        file.seek(start)
        if file.readinto(elements.view(torch.uint8).numpy().data) != storage.nbytes:
            raise EOFError("the file ends before the tensor does")
    else:
        before = start % mmap.ALLOCATIONGRANULARITY
        size = before + storage.nbytes
        memory = mmap.mmap(file.fileno(), size, offset=start - before, access=mmap.ACCESS_COPY)
        memory.madvise(mmap.MADV_WILLNEED)
        elements = torch.frombuffer(memory, dtype=storage.dtype, count=storage.numel, offset=before)
    return elements.as_strided(described.size, described.stride, described.offset)
