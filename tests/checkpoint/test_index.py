"""What an index says is what a checkpoint holds and lies in it; anything else is refused in one line, and nothing in it is run."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import torch.distributed.checkpoint as dcp
from evil import Evil
from torch.distributed.checkpoint.metadata import Metadata

from megatron_elastic.checkpoint import NamedTensors, write_named
from megatron_elastic.checkpoint.files import DESCRIPTION
from megatron_elastic.checkpoint.index import read_index
from megatron_elastic.checkpoint.pieces import PIECE_ALIGNMENT
from megatron_elastic.errors import CheckpointError
from megatron_elastic.layout import full_shapes
from megatron_elastic.testing.tiny import random_tensor

NAME = "decoder.final_norm.weight"


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


def write_index(directory: Path, index: Metadata | bytes) -> None:
    """Replace the index of a checkpoint, and describe its files anew, as somebody who writes a hostile one would."""
    (directory / ".metadata").write_bytes(index if isinstance(index, bytes) else pickle.dumps(index))
    description = directory / DESCRIPTION
    files = {file.name: file.stat().st_size for file in directory.iterdir() if file.is_file() and file != description}
    description.write_text(json.dumps({**json.loads(description.read_text()), "files": files}))


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


def place_of(index: Metadata, name: str = NAME) -> Any:
    return next(place for key, place in index.storage_data.items() if key.fqn == name)


def move(index: Metadata, directory: Path, to: str) -> None:
    """Have the pieces of a tensor lie in another file, which is there."""
    for name in ("other", "a/assets/inside"):
        (directory.parent / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(directory / "__0_0.distcp", directory.parent / name)
    place_of(index).relative_path = to.format(directory.parent)


def refusal(directory: Path) -> str:
    """Why a checkpoint is refused, when it is opened or read."""
    with pytest.raises(CheckpointError) as caught:
        list(NamedTensors(directory).values())
    return str(caught.value)


@pytest.mark.parametrize("to", ["{}/other", "../other", "assets/inside", "../a/__0_0.distcp", "nothing"])
def test_pieces_lie_in_the_files_of_the_checkpoint(tmp_path, to):
    written(tmp_path / "a")
    index = read_index(tmp_path / "a")
    move(index, tmp_path / "a", to)
    write_index(tmp_path / "a", index)
    message = refusal(tmp_path / "a")
    assert f"{NAME} lies in " in message and "is not one of the checkpoint's files" in message and "\n" not in message


def test_so_do_those_that_only_a_run_reads(tmp_path):
    written(tmp_path / "a")
    index = read_index(tmp_path / "a")
    key, place = next(iter(index.storage_data)), place_of(index)
    index.storage_data[type(key)("optimizer.state.exp_avg.x", torch.Size([0]))] = type(place)("../other", 0, 10)
    write_index(tmp_path / "a", index)
    assert "optimizer.state.exp_avg.x lies in '../other'" in refusal(tmp_path / "a")


def _swap_norm(index: Metadata) -> None:
    other = place_of(index, "decoder.layers.0.mixer.A_log")  # smaller
    place_of(index).offset, place_of(index).length = other.offset, other.length


def _no_place(index: Metadata) -> None:
    del index.storage_data[next(key for key in index.storage_data if key.fqn == NAME)]


def _beyond(index: Metadata) -> None:
    place_of(index).length = 10**9


def _other_type(index: Metadata) -> None:
    index.state_dict_metadata[NAME].properties.dtype = torch.float16  # type: ignore[union-attr]


def _several_types(index: Metadata) -> None:
    key = next(key for key in index.state_dict_metadata if key.endswith("in_proj.weight.x"))
    index.state_dict_metadata[key].properties.dtype = torch.float16  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_no_place, f"{NAME} has a piece without a place"),
        (_beyond, f"{NAME} lies beyond the end of __0_0.distcp"),
        (_other_type, rf"holds torch.bfloat16 \[40\] at byte \d+, where the index has torch.float16 \[40\] of {NAME}"),
        (_several_types, "in_proj.weight has parts of several types"),
        (_swap_norm, f"where the index has torch.bfloat16 \\[40\\] of {NAME}"),
    ],
)
def test_what_the_index_says_is_what_the_file_holds(tmp_path, change: Callable[[Metadata], None], message: str):
    written(tmp_path / "a")
    index = read_index(tmp_path / "a")
    change(index)
    write_index(tmp_path / "a", index)
    found = refusal(tmp_path / "a")
    assert re.search(message, found) and "\n" not in found


def test_a_piece_is_long_enough_before_memory_is_taken_for_it(tmp_path):
    written(tmp_path / "a")
    index = read_index(tmp_path / "a")
    place_of(index).length = 10
    write_index(tmp_path / "a", index)
    assert refusal(tmp_path / "a").endswith(f"{NAME} has a piece of 10 bytes, too few for its 40 elements")


def test_whatever_an_index_says_is_refused_or_read(tmp_path):
    written(tmp_path / "a")
    data, generator = (tmp_path / "a" / ".metadata").read_bytes(), random.Random(7)
    refused = 0
    for _ in range(1500):
        position, number = generator.randrange(len(data)), generator.randrange(1, 4)
        write_index(tmp_path / "a", data[:position] + generator.randbytes(number) + data[position + number :])
        try:
            list(NamedTensors(tmp_path / "a").values())
        except CheckpointError:
            refused += 1
    assert 500 < refused < 1500
