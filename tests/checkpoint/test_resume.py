"""A run that is saved, built afresh, loaded and continued is the uninterrupted one bit for bit: losses, weights, moments, step numbers.
What is damaged is refused, or skipped for the next best with a note."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_run
import torch

from megatron_elastic.checkpoint import PendingSave, load_checkpoint, load_latest, open_checkpoint, save_checkpoint
from megatron_elastic.checkpoint.files import candidates
from megatron_elastic.checkpoint.new_directory import temporary_name
from megatron_elastic.errors import CheckpointError
from megatron_elastic.parallel import ParallelContext

STATE = {"step": 3, "router": {"weight": torch.arange(3.0)}, "name": "stage-a", "nothing": None}


def save(run: tiny_run.Run, directory: Path, **changes: Any) -> PendingSave:
    options = {"model": run.chunks, "optimizer": run.optimizer, "state": STATE, "shape": tiny_run.SHAPE, "parallel": run.parallel}
    return save_checkpoint(directory, **(options | changes))


def load(run: tiny_run.Run, directory: Path, **changes: Any) -> dict[str, Any]:
    options = {"model": run.chunks, "optimizer": run.optimizer, "shape": tiny_run.SHAPE, "parallel": run.parallel}
    return load_checkpoint(directory, **(options | changes))


def differences(one: tiny_run.Run, other: tiny_run.Run) -> list[str]:
    first, second = one.state(), other.state()
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def resume(parallel: ParallelContext, directory: Path) -> None:
    """Assert that 3 steps, a save, fresh objects, a load and 2 steps are 5 steps."""
    whole = tiny_run.start(parallel)
    tiny_run.train(whole, 0, 3)
    save(whole, directory)
    tiny_run.train(whole, 3, 2)
    resumed = tiny_run.start(parallel, seed=8)
    assert not torch.equal(*(next(run.model.parameters()) for run in (whole, resumed)))
    state = load(resumed, directory)
    assert state.keys() == STATE.keys() and state["step"] == 3 and torch.equal(state["router"]["weight"], STATE["router"]["weight"])
    tiny_run.train(resumed, 3, 2)
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert differences(whole, resumed) == []
    steps = {float(value) for name, value in resumed.state().items() if name.endswith(".step")}
    assert steps == {5.0}


def resume_on_ranks(rank: int, world_size: int, expert: int, directory: str) -> None:
    parallel = ParallelContext.initialize(expert=expert)
    resume(parallel, Path(directory) / "a")
    parallel.destroy()


def save_on_ranks(rank: int, world_size: int, directory: str, *layout: int) -> list[float]:
    parallel = ParallelContext.initialize(*layout)
    run = tiny_run.start(parallel)
    tiny_run.train(run, 0, 2)
    save(run, Path(directory))
    parallel.destroy()
    return run.losses


def test_one_process_resumes_bitwise(parallel, tmp_path):
    resume(parallel, tmp_path / "a")


@pytest.mark.dist
@pytest.mark.parametrize("expert", [1, 2])
def test_two_ranks_resume_bitwise(ranks, tmp_path, expert):
    ranks(resume_on_ranks, 2, expert, str(tmp_path))


@pytest.mark.dist
def test_optimizer_moves_from_two_ranks_to_one(ranks, parallel, tmp_path):
    """Two replicas with expert parallelism, continued by one process, are one process that saw both texts, to rounding."""
    losses = ranks(save_on_ranks, 2, str(tmp_path / "a"), 1, 1, 2)
    whole, moved = tiny_run.start(parallel), tiny_run.start(parallel, seed=8)
    tiny_run.train(whole, 0, 2)
    load(moved, tmp_path / "a")
    assert whole.losses == pytest.approx([loss for step in zip(*losses, strict=True) for loss in step], rel=1e-4)
    first, second = whole.state(), moved.state()
    moments = [name for name in first if ".exp_avg" in name]
    assert moments and first.keys() == second.keys()
    for name in moments:
        torch.testing.assert_close(second[name], first[name], rtol=1e-2, atol=1e-3 * float(first[name].abs().max()))
    for run in (whole, moved):
        tiny_run.train(run, 2, 1)
    assert moved.losses == pytest.approx(whole.losses[-2:], rel=1e-3)
    assert {float(value) for name, value in moved.state().items() if name.endswith(".step")} == {3.0}


def test_saving_before_the_first_step(parallel, tmp_path):
    run = tiny_run.start(parallel)
    save(run, tmp_path / "a")
    other = tiny_run.start(parallel, seed=8)
    load(other, tmp_path / "a")
    tiny_run.train(run, 0, 2)
    tiny_run.train(other, 0, 2)
    assert other.losses == run.losses and differences(run, other) == []


def test_saving_changes_nothing(parallel, tmp_path):
    saved, plain = tiny_run.start(parallel), tiny_run.start(parallel)
    for run in (saved, plain):
        tiny_run.train(run, 0, 2)
    save(saved, tmp_path / "a")
    for run in (saved, plain):
        tiny_run.train(run, 2, 2)
    assert saved.losses == plain.losses and differences(saved, plain) == []


def test_a_checkpoint_of_another_model_is_refused(parallel, tmp_path):
    run = tiny_run.start(parallel)
    save(run, tmp_path / "a")
    before = run.state()
    wider = tiny_run.tiny_shape(hidden_size=48)
    with pytest.raises(CheckpointError, match="of another model: model.hidden_size is 40 there and 48 here"):
        load(run, tmp_path / "a", shape=wider)
    assert all(torch.equal(before[name], value) for name, value in run.state().items())


def test_a_model_alone_has_no_optimizer_to_resume(parallel, tmp_path):
    run = tiny_run.start(parallel)
    save(run, tmp_path / "a", optimizer=None, state=None)
    assert load(run, tmp_path / "a", optimizer=None) == {}
    with pytest.raises(CheckpointError, match="no optimizer to resume from"):
        load(run, tmp_path / "a")


def test_a_half_written_checkpoint_is_refused(parallel, tmp_path):
    run = tiny_run.start(parallel)
    save(run, tmp_path / "a")
    (shards,) = (tmp_path / "a").glob("*.distcp")
    os.truncate(shards, 1000)
    with pytest.raises(CheckpointError, match=f"half-written: {shards.name} has 1000 bytes, not"):
        load(run, tmp_path / "a")
    shards.unlink()
    with pytest.raises(CheckpointError, match=f"half-written: {shards.name} is missing"):
        load(run, tmp_path / "a")


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def resume_latest(run: tiny_run.Run, directory: Path) -> Any:
    return load_latest(directory, model=run.chunks, optimizer=run.optimizer, shape=tiny_run.SHAPE, parallel=run.parallel)


def test_damaged_checkpoints_are_skipped_with_a_note(parallel, tmp_path):
    run, resumed = tiny_run.start(parallel), tiny_run.start(parallel, seed=8)
    assert resume_latest(resumed, tmp_path) is None
    for step, name in enumerate("abcd"):
        save(run, tmp_path / name, state={"step": step})
    found = resume_latest(resumed, tmp_path)
    assert (found.path.name, found.state, found.notes) == ("d", {"step": 3}, [])
    (shards,) = (tmp_path / "d").glob("*.distcp")
    flip(shards)
    (tmp_path / "c" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=f"d' is damaged: {shards.name} was changed after it was written"):
        load(resumed, tmp_path / "d")
    found = resume_latest(resumed, tmp_path)
    assert found.path.name == "b" and found.state == {"step": 1}
    changed = f"d: {shards.name} was changed after it was written (its checksum differs)"
    assert found.notes == [f"skipped {changed}; using b", "skipped c: .metadata is missing; using b"]
    assert differences(run, resumed) == []
    for name in "ab":
        (tmp_path / name / "megatron_elastic.json").write_text("{")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole .*a: megatron_elastic.json is not JSON.*start again"):
        resume_latest(resumed, tmp_path)


def flip_on_ranks(rank: int, world_size: int, directory: str) -> list[str]:
    parallel = ParallelContext.initialize(expert=2)
    run = tiny_run.start(parallel)
    for name in "ab":
        save(run, Path(directory) / name)
    if rank == 0:
        flip(Path(directory) / "b" / "__1_0.distcp")
    torch.distributed.barrier()
    found = resume_latest(run, Path(directory))
    parallel.destroy()
    return found.notes


@pytest.mark.dist
def test_what_one_rank_reads_damaged_all_skip(ranks, tmp_path):
    note = "skipped b: __1_0.distcp was changed after it was written (its checksum differs); using a"
    assert ranks(flip_on_ranks, 2, str(tmp_path)) == [[note], [note]]


def test_what_a_killed_save_left_is_ignored_and_replaced(parallel, tmp_path):
    run = tiny_run.start(parallel)
    left = temporary_name(tmp_path / "b")
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    assert candidates(tmp_path) == []
    save(run, tmp_path / "a")
    assert candidates(tmp_path) == [tmp_path / "a"]
    save(run, tmp_path / "b")
    assert candidates(tmp_path)[0] == tmp_path / "b" and not left.exists()


def test_a_full_disk_is_refused_before_anything_is_written(parallel, tmp_path, monkeypatch):
    run = tiny_run.start(parallel)
    save(run, tmp_path / "a")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"b' cannot be written: No space left on device \(.* MB needed, 0 MB free\)"):
        save(run, tmp_path / "b")
    assert candidates(tmp_path) == [tmp_path / "a"] and sorted(p.name for p in tmp_path.iterdir()) == ["a", "latest"]


class FullFile:
    """A file on a disk that fills up while it is written."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        if self._file.tell() > 50_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(parallel, tmp_path, monkeypatch):
    from contextlib import contextmanager

    from torch.distributed.checkpoint.filesystem import FileSystem

    run = tiny_run.start(parallel)
    save(run, tmp_path / "a")
    create = FileSystem.create_stream

    @contextmanager
    def full(self: Any, path: Any, mode: str) -> Any:
        with create(self, path, mode) as stream:
            yield FullFile(stream) if mode == "wb" else stream

    monkeypatch.setattr(FileSystem, "create_stream", full)
    for name in ("a", "b"):
        with pytest.raises(CheckpointError, match=f"{name}' cannot be written: No space left on device"):
            save(run, tmp_path / name)
    assert candidates(tmp_path) == [tmp_path / "a"] and sorted(p.name for p in tmp_path.iterdir()) == ["a", "latest"]
    assert open_checkpoint(tmp_path / "a").kind == "training"
