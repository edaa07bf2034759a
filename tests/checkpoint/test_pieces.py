"""Pieces are read where they lie, without a copy where that is possible; what else a file may hold is not run but refused."""

from __future__ import annotations

import errno
import json
import mmap
import os
import pickle
import threading
import zlib
from pathlib import Path

import pytest
import tiny_run
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megatron_elastic.checkpoint import NamedTensors, write_named
from megatron_elastic.checkpoint import streams as streams_module
from megatron_elastic.checkpoint.files import DESCRIPTION
from megatron_elastic.checkpoint.pieces import PIECE_ALIGNMENT, read_index, read_piece, save_piece
from megatron_elastic.checkpoint.streams import CarefulFile, written_early
from megatron_elastic.errors import CheckpointError
from megatron_elastic.layout import full_shapes
from megatron_elastic.testing.tiny import random_tensor

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


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran",)


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


@pytest.mark.parametrize("data", [pickle.dumps(Evil()), pickle.dumps({"a": 1}), b"", b"text"], ids=["code", "dictionary", "empty", "text"])
def test_an_index_that_is_none_is_refused_and_not_run(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match="metadata' is not the index of a checkpoint"):
        read_index(tmp_path)
    assert not Path("ran").exists()
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="metadata' cannot be read: No such file"):
        read_index(tmp_path)


def written(directory: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator()
    tensors = {name: random_tensor(name, size, generator).bfloat16() for name, size in full_shapes(tiny_run.SHAPE).items()}
    write_named(directory, tensors.items(), tiny_run.SHAPE)
    return tensors


def test_what_is_written_lies_so_that_it_is_mapped_and_torch_reads_it(tmp_path):
    tensors = written(tmp_path / "a")
    index = read_index(tmp_path / "a")
    assert all(place.offset % PIECE_ALIGNMENT == 0 for place in index.storage_data.values())
    name = "decoder.final_norm.weight"
    found = {name: torch.empty_like(tensors[name])}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "a"), no_dist=True)
    assert torch.equal(found[name], tensors[name])


def write_index(directory: Path, index: Metadata) -> None:
    """Replace the index of a checkpoint, which then no longer knows how long it was."""
    (directory / ".metadata").write_bytes(pickle.dumps(index))
    description = directory / DESCRIPTION
    description.write_text(json.dumps({**json.loads(description.read_text()), "files": {}}))


def test_a_tensor_of_several_pieces_is_put_together_and_one_that_lacks_some_is_refused(tmp_path):
    tensors = written(tmp_path / "a")
    name = "output_layer.weight"
    file, whole = tmp_path / "a" / "pieces", tensors[name]
    rows, columns = whole.shape[0] // 2 + 1, whole.shape[1] // 3
    index = read_index(tmp_path / "a")
    entry, place = index.state_dict_metadata[name], next(place for key, place in index.storage_data.items() if key.fqn == name)
    chunk, key = type(entry.chunks[0]), type(next(iter(index.storage_data)))
    entry.chunks.clear()
    with file.open("wb") as stream:
        for top, height in ((0, rows), (rows, whole.shape[0] - rows)):
            for left, width in ((0, columns), (columns, whole.shape[1] - columns)):
                start, offsets = stream.tell(), torch.Size([top, left])
                torch.save(whole[top : top + height, left : left + width].clone(), stream)
                entry.chunks.append(chunk(offsets, torch.Size([height, width])))
                index.storage_data[key(name, offsets)] = type(place)(file.name, start, stream.tell() - start)
    write_index(tmp_path / "a", index)
    named = NamedTensors(tmp_path / "a")
    assert torch.equal(named[name], whole)
    entry.chunks.pop()
    write_index(tmp_path / "a", index)
    with pytest.raises(CheckpointError, match=f"{name} has pieces that are missing"):
        NamedTensors(tmp_path / "a")


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
