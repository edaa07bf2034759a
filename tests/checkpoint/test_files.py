"""Descriptions say what a checkpoint is; names, pointer and pruning survive a crash at any point."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.checkpoint.files import (
    DESCRIPTION,
    CheckpointKind,
    Description,
    candidates,
    damage,
    find_model_checkpoint,
    move_latest,
    new_checkpoint,
    open_checkpoint,
    prune,
)
from megatron_elastic.errors import CheckpointError
from megatron_elastic.space import build_space
from megatron_elastic.testing.tiny import tiny_shape

SHAPE = tiny_shape()
SPACE = build_space(
    SHAPE, {ElasticAxis.FFN: (72, 48), ElasticAxis.EXPERTS: (8, 4), ElasticAxis.LAYERS: (6, 5)}, shard_groups=2, drop_order=(3,)
)


def write(directory: Path, age: int = 0) -> Path:
    plans = {"small": SPACE.plan({ElasticAxis.FFN: 48, ElasticAxis.LAYERS: 5})}
    description = Description(kind=CheckpointKind.MODEL, shape=SHAPE, space=SPACE, plans=plans, provenance={"from": "a test"})
    with new_checkpoint(directory, description) as (temporary, _):
        (temporary / "__0_0.distcp").write_bytes(b"weights")
    stamp = (directory / DESCRIPTION).stat().st_mtime - 10 * age
    os.utime(directory / DESCRIPTION, (stamp, stamp))
    return directory


def test_a_description_is_read_back(tmp_path):
    info = open_checkpoint(write(tmp_path / "a"))
    assert (info.shape, info.space, info.kind, info.provenance) == (SHAPE, SPACE, CheckpointKind.MODEL, {"from": "a test"})
    assert info.plans["small"].dropped_layers == (3,) and info.plans["small"].width(ElasticAxis.FFN) == 48


def test_messages(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "a")
    (tmp_path / "foreign").mkdir()
    with pytest.raises(CheckpointError, match="is not a checkpoint: it has no megatron_elastic.json"):
        open_checkpoint(tmp_path / "foreign")
    (tmp_path / "foreign" / "__0_0.distcp").touch()
    with pytest.raises(CheckpointError, match="half-written: megatron_elastic.json is missing"):
        open_checkpoint(tmp_path / "foreign")
    file = write(tmp_path / "a") / DESCRIPTION
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": 7}))
    with pytest.raises(CheckpointError, match="format_version 7 is not 1"):
        open_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="exists; choose another path"):
        write(tmp_path / "a")


def test_an_error_while_writing_leaves_nothing(tmp_path):
    description = Description(kind=CheckpointKind.MODEL, shape=SHAPE)
    with pytest.raises(CheckpointError, match="cannot be written: No space left"), new_checkpoint(tmp_path / "a", description):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_candidates_begin_with_the_pointer_then_the_newest(tmp_path):
    assert candidates(tmp_path) == []
    old, new = write(tmp_path / "old", age=1), write(tmp_path / "new")
    assert candidates(tmp_path) == [new, old]  # killed before the first pointer
    move_latest(old)
    assert candidates(tmp_path) == [old, new]
    (tmp_path / ".tmp-later").mkdir()
    (tmp_path / ".tmp-later" / "__0_0.distcp").touch()
    assert candidates(tmp_path) == [old, new]
    shutil.rmtree(old)
    assert candidates(tmp_path) == [old, new] and damage(old) == ["it is gone"]


def test_damage_names_what_is_wrong(tmp_path):
    path = write(tmp_path / "a")
    shards, description = path / "__0_0.distcp", path / DESCRIPTION
    assert damage(path) == []
    shards.write_bytes(b"weighty")
    assert damage(path) == ["__0_0.distcp was changed after it was written (its checksum differs)"]
    assert damage(path, reader=1, readers=2) == []  # the other reader's file
    shards.write_bytes(b"half")
    assert damage(path) == ["__0_0.distcp has 4 bytes, not 7"]
    shards.unlink()
    assert damage(path) == ["__0_0.distcp is missing"]
    data = json.loads(description.read_text())
    description.write_text(json.dumps({key: value for key, value in data.items() if key != "files"}))
    assert damage(path) == [f"{DESCRIPTION} does not list the files"]
    description.write_text("{")
    assert damage(path) == [f"{DESCRIPTION} is not JSON"]
    description.unlink()
    assert damage(path) == [f"{DESCRIPTION} is missing"]


def test_a_checkpoint_without_checksums_is_checked_by_its_sizes(tmp_path):
    path = write(tmp_path / "a")
    data = json.loads((path / DESCRIPTION).read_text())
    assert data.pop("checksums") == {"__0_0.distcp": zlib.crc32(b"weights")}
    (path / DESCRIPTION).write_text(json.dumps(data))
    (path / "__0_0.distcp").write_bytes(b"weighty")
    assert damage(path) == [] and open_checkpoint(path).shape == SHAPE
    (path / "__0_0.distcp").write_bytes(b"half")
    assert damage(path) == ["__0_0.distcp has 4 bytes, not 7"]


def test_prune_spares_the_newest_the_protected_and_the_latest(tmp_path):
    for age, name in enumerate(["e", "d", "c", "b", "a"]):
        write(tmp_path / name, age)
    move_latest(tmp_path / "b")
    for name in (".tmp-f", ".tmp-a", ".old-g"):
        (tmp_path / name).mkdir()
    assert prune(tmp_path, 1, {"a"}) == ["d", "c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-a", "a", "b", "e", "latest"]


@pytest.mark.parametrize("keep_last", [0, 1])
def test_prune_spares_the_newest_whole_one(tmp_path, keep_last):
    for age, name in enumerate(["d", "c", "b", "a"]):
        write(tmp_path / name, age)
    move_latest(tmp_path / "d")
    for name in "dc":
        (tmp_path / name / "__0_0.distcp").unlink()
    assert prune(tmp_path, keep_last) == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c", "d", "latest"]


def test_a_run_stands_for_its_latest_checkpoint(tmp_path):
    checkpoint = write(tmp_path / "checkpoints" / "a")
    assert find_model_checkpoint(tmp_path) == find_model_checkpoint(checkpoint) == checkpoint
    (checkpoint / "__0_0.distcp").unlink()
    write(tmp_path / "checkpoints" / "older", age=1)
    with pytest.raises(CheckpointError, match="half-written: __0_0.distcp is missing"):
        find_model_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="neither a checkpoint .* nor a run"):
        find_model_checkpoint(Path(__file__).parent)


ELSEWHERE = ["../other/a", "/etc", "..", ".", "", "a/b", "a\nb"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_pointer_leads_nowhere_else(tmp_path, name):
    write(tmp_path / "other" / "a")
    write(tmp_path / "run" / "checkpoints" / "a")
    pointer = tmp_path / "run" / "checkpoints" / "latest"
    pointer.write_text(name)
    for use in (lambda: candidates(pointer.parent), lambda: find_model_checkpoint(tmp_path / "run"), lambda: prune(pointer.parent, 1)):
        with pytest.raises(CheckpointError, match="latest' says .*, which is not the name of a checkpoint beside it") as caught:
            use()
        assert "\n" not in str(caught.value)
    pointer.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="latest' cannot be read"):
        find_model_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("key", ["files", "checksums"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_listed_files_lie_in_the_checkpoint(tmp_path, name, key):
    write(tmp_path / "other" / "a")
    file = write(tmp_path / "a") / DESCRIPTION
    data = json.loads(file.read_text())
    data[key][name] = 7
    file.write_text(json.dumps(data))
    if key == "files":
        with pytest.raises(CheckpointError, match="is half-written: .* lists .*, which is not the name of a file beside it"):
            open_checkpoint(tmp_path / "a")
    assert damage(tmp_path / "a") == [f"{DESCRIPTION} lists {name!r}, which is not the name of a file beside it"]


def breakages(data: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The way to every value inside plain data, the data itself included."""
    yield path
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield from breakages(value, (*path, key))


def broken(data: object, path: tuple[object, ...], value: object) -> object:
    """A copy of plain data with another value at one place; `...`: with nothing there."""
    if not path:
        return None if value is ... else value
    copy = dict(data) if isinstance(data, dict) else list(data)  # type: ignore[call-overload]
    if len(path) == 1 and value is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = broken(copy[path[0]], path[1:], value)
    return copy


def outcome(path: Path) -> str | None:
    """The message of a refusal, which is one line; None where the checkpoint was opened."""
    try:
        open_checkpoint(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def test_whatever_a_description_says_is_refused_in_one_line_or_understood(tmp_path):
    file = write(tmp_path / "a") / DESCRIPTION
    text = file.read_text()
    data = json.loads(text)
    for path in breakages(data):
        for value in (..., None, [], {}, "x", -1, 0, 2.5, True, [None], {"x": {}}, [[1]]):
            file.write_text(json.dumps(broken(data, path, value)))
            assert outcome(tmp_path / "a") or path, (path, value)
            assert isinstance(damage(tmp_path / "a"), list)
    generator = random.Random(3)
    for _ in range(500):
        position, length = generator.randrange(len(text)), generator.randrange(4)
        file.write_bytes(text[:position].encode() + generator.randbytes(length) + text[position + length :].encode())
        outcome(tmp_path / "a")
        damage(tmp_path / "a")
    for nonsense, message in (
        ("[" * 100_000, "is not JSON"),
        ('{"format_version": 1}', "does not list the files"),
        ("7", "format_version None"),
    ):
        file.write_text(nonsense)
        assert message in (outcome(tmp_path / "a") or "")
