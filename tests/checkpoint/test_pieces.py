"""Pieces are read where they lie, without a copy where that is possible; what else a file may hold is not run but refused."""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import random
import threading
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from evil import Evil
from torch._utils import _rebuild_tensor_v2

from megatron_elastic.checkpoint import streams as streams_module
from megatron_elastic.checkpoint.pieces import PIECE_ALIGNMENT, read_piece, save_piece
from megatron_elastic.checkpoint.streams import CarefulFile, written_early
from megatron_elastic.errors import CheckpointError

TENSORS = {
    "matrix": torch.randn(5, 7),
    "bf16": torch.randn(3, 4, 5).bfloat16(),
    "fp16": torch.randn(9).half(),
    "fp64": torch.randn(2, 3).double(),
    "number": torch.tensor(-2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(6, 4).T,
    "view": torch.randn(50, 10)[3:5, ::2],
}


def append(file: Path, tensor: torch.Tensor, *, before: int, by_torch: bool) -> tuple[int, int]:
    """Write a piece after so many other bytes, and more behind it; returns its place."""
    with file.open("wb") as stream:
        stream.write(b"x" * before)
        torch.save(tensor, stream) if by_torch else save_piece(tensor, stream)
        length = stream.tell() - before
        stream.write(b"what follows")
    return before, length


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("before", [0, 1, 2, PIECE_ALIGNMENT, 2 * mmap.ALLOCATIONGRANULARITY + PIECE_ALIGNMENT])
@pytest.mark.parametrize("name", TENSORS)
def test_a_piece_is_read_bit_for_bit_wherever_it_lies(tmp_path, name, before, by_torch):
    tensor, file = TENSORS[name], tmp_path / "file"
    found = read_piece(file, *append(file, tensor, before=before, by_torch=by_torch))
    assert found.dtype == tensor.dtype and torch.equal(found, tensor)


@pytest.mark.parametrize("before", [0, 1])
def test_writing_to_it_does_not_change_the_file(tmp_path, before):
    file = tmp_path / "file"
    place = append(file, TENSORS["matrix"], before=before, by_torch=False)
    data = file.read_bytes()
    read_piece(file, *place).zero_()
    assert file.read_bytes() == data


def test_torch_reads_what_is_written_and_nothing_else_is(tmp_path):
    file = tmp_path / "file"
    with file.open("wb") as stream:
        save_piece(torch.ones(1000, 8)[2:4], stream)
    assert torch.equal(torch.load(file, weights_only=True), torch.ones(2, 8)) and file.stat().st_size < 2000


def test_the_checksums_of_other_writers_stay(monkeypatch):
    seen = []

    def save(*_: object) -> None:
        seen.append(torch.serialization.get_crc32_options())
        raise ValueError

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(ValueError):
        save_piece(torch.ones(2), None)
    assert seen == [False] and torch.serialization.get_crc32_options()


@pytest.mark.parametrize("what", [{"a": torch.ones(2)}, Evil(), torch.ones(2).to(torch.complex64)], ids=["dictionary", "code", "complex"])
def test_other_content_is_refused_and_not_run(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    torch.save(what, tmp_path / "file")
    with pytest.raises(CheckpointError, match="holds no plain tensor at byte 0"):
        read_piece(tmp_path / "file", 0, (tmp_path / "file").stat().st_size)
    assert not Path("ran").exists()


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"some bytes" * 50)
    with pytest.raises(CheckpointError, match="holds no plain tensor at byte 7"):
        read_piece(tmp_path / "file", 7, 400)


def archive(file: Path, tensor: torch.Tensor, **changes: object) -> int:
    """A piece whose description says something else than what is stored; returns its length."""
    described = {
        "numel": tensor.numel(),
        "offset": 0,
        "size": tuple(tensor.shape),
        "stride": tensor.stride(),
        "dtype": "FloatStorage",
    } | changes

    class Storage:
        def __init__(self, pid: object) -> None:
            self.pid = pid

    class Pickler(pickle._Pickler):
        def persistent_id(self, obj: object) -> object:
            return obj.pid if isinstance(obj, Storage) else None

    class Described:
        def __reduce__(self) -> tuple[object, ...]:
            storage = Storage(("storage", getattr(torch, str(described["dtype"])), "0", "cpu", described["numel"]))
            return _rebuild_tensor_v2, (
                storage,
                described["offset"],
                described["size"],
                described["stride"],
                False,
                OrderedDict(),
            )

    stream = io.BytesIO()
    Pickler(stream, 2).dump(Described())
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("archive/data.pkl", stream.getvalue())
        out.writestr("archive/data/0", tensor.numpy().tobytes())
    return file.stat().st_size


@pytest.mark.parametrize(
    "changes",
    [
        {"numel": 7},
        {"numel": 5},
        {"numel": 2**40},
        {"numel": -6},
        {"numel": "6"},
        {"dtype": "DoubleStorage"},
        {"dtype": "HalfStorage"},
        {"offset": 1},
        {"offset": -1},
        {"size": (2, 4)},
        {"size": (3, 3)},
        {"size": (-1, 3)},
        {"size": (2**40, 3), "stride": (3, 1)},
        {"size": (0, 2**62, 2**62), "stride": (1, 1, 1)},
        {"size": (6,)},
        {"size": 6},
        {"stride": (4, 1)},
        {"stride": (-3, 1)},
        {"stride": (2.0, 1)},
        {"stride": None},
    ],
    ids=str,
)
def test_sizes_are_not_believed(tmp_path, changes):
    tensor = torch.arange(6.0).view(2, 3)
    length = archive(tmp_path / "file", tensor)
    assert torch.equal(read_piece(tmp_path / "file", 0, length), tensor)
    length = archive(tmp_path / "file", tensor, **changes)
    with pytest.raises(CheckpointError, match="holds no plain tensor at byte 0: "):
        read_piece(tmp_path / "file", 0, length)


@pytest.mark.parametrize("before", [0, 1])
def test_a_file_that_ends_early_is_refused(tmp_path, before):
    file = tmp_path / "file"
    start, length = append(file, TENSORS["matrix"], before=before, by_torch=False)
    with pytest.raises(CheckpointError, match=f"holds no plain tensor at byte {start}"):
        read_piece(file, start, length // 2)
    os.truncate(file, start + length - 1)
    with pytest.raises(CheckpointError, match=f"holds no plain tensor at byte {start}"):
        read_piece(file, start, length)
    with pytest.raises(CheckpointError, match="nothing' cannot be read: No such file"):
        read_piece(tmp_path / "nothing", 0, 10)


def test_whatever_a_piece_says_is_refused_in_one_line_or_read(tmp_path):
    file, generator = tmp_path / "file", random.Random(5)
    _, length = append(file, torch.arange(6.0), before=0, by_torch=True)
    data = file.read_bytes()[:length]
    for _ in range(1500):
        position, number = generator.randrange(length), generator.randrange(1, 5)
        file.write_bytes(data[:position] + generator.randbytes(number) + data[position + number :])
        try:
            read_piece(file, 0, file.stat().st_size)
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_the_checksum_is_that_of_everything_written(tmp_path):
    data = os.urandom(5 * 2**19)
    with (tmp_path / "file").open("wb") as file:
        stream = CarefulFile(file)
        for part in (data[:3], memoryview(data)[3:], bytearray(b"end"), b""):
            assert stream.write(part) == len(part)
    assert (tmp_path / "file").read_bytes() == data + b"end" and stream.checksum == zlib.crc32(data + b"end")


def test_a_disk_that_refuses_early_is_noticed(tmp_path, monkeypatch):
    asked = threading.Event()

    def full(_: int) -> None:
        asked.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(streams_module, "_FLUSH_SECONDS", 0.001)
    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="Input/output error"), (tmp_path / "file").open("wb") as file, written_early(file):
        assert asked.wait(10)
