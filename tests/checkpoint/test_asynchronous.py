"""A save in the background holds what was there when it began, is published when every rank has written and not before, and fails on all."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from megatron_elastic.checkpoint import PendingSave, open_checkpoint, save_checkpoint
from megatron_elastic.checkpoint.files import candidates
from megatron_elastic.checkpoint.new_directory import temporary_name
from megatron_elastic.checkpoint.sharded.storage import Shards
from megatron_elastic.errors import CheckpointError
from megatron_elastic.parallel import ParallelContext
from tests.train.harness import different, stored


def save(run: tiny_run.Run, directory: Path, **changes: Any) -> PendingSave:
    options: dict[str, Any] = {
        "model": run.chunks,
        "optimizer": run.optimizer,
        "state": {"step": 1},
        "shape": tiny_run.SHAPE,
        "parallel": run.parallel,
    }
    return save_checkpoint(directory, **{**options, "asynchronous": True, **changes})


@contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """No file is written before the event is set."""
    go, write = threading.Event(), Shards.write

    def wait(self: Shards) -> Any:
        assert go.wait(60)
        return write(self)

    Shards.write = wait
    try:
        yield go
    finally:
        go.set()
        Shards.write = write


def test_it_holds_what_was_there_when_it_began(parallel, tmp_path):
    run = tiny_run.start(parallel)
    tiny_run.train(run, 0, 2)
    save(run, tmp_path / "a", asynchronous=False)
    with slow_disk() as go:
        pending = save(run, tmp_path / "b")
        tiny_run.train(run, 2, 1)
        assert not pending.finish(block=False)
        assert candidates(tmp_path) == [tmp_path / "a"] and not (tmp_path / "b").exists()
        go.set()
        assert pending.finish(block=True) and pending.finish(block=False)
    assert candidates(tmp_path)[0] == tmp_path / "b" and not temporary_name(tmp_path / "b").exists()
    assert different(stored(tmp_path / "a"), stored(tmp_path / "b")) == []
    (one,), (other,) = ((tmp_path / name).glob("*.distcp") for name in "ab")
    assert one.read_bytes() == other.read_bytes()
    save(run, tmp_path / "c", asynchronous=False)
    assert len(different(stored(tmp_path / "b"), stored(tmp_path / "c"))) > 10


def one_rank_is_late(rank: int, world_size: int, directory: str) -> list[bool]:
    """Whether the save was published: at once; when this rank alone was asked to wait for its own file; when both have written."""
    parallel = ParallelContext.initialize()
    run, answers = tiny_run.start(parallel), []
    with slow_disk() as go:
        pending = save(run, Path(directory) / "a")
        answers.append(pending.finish(block=False))
        if rank == 0:
            go.set()
            while pending._thread.is_alive():
                time.sleep(0.01)
        torch.distributed.barrier()
        answers += [pending.finish(block=False), (Path(directory) / "a").exists()]
        if rank == 1:
            threading.Timer(0.3, go.set).start()
        answers += [pending.finish(block=True), (Path(directory) / "a").exists()]
    parallel.destroy()
    return answers


@pytest.mark.dist
def test_it_waits_for_every_rank(ranks, tmp_path):
    assert ranks(one_rank_is_late, 2, str(tmp_path)) == [[False, False, False, True, True]] * 2
    open_checkpoint(tmp_path / "a")


def one_disk_is_full(rank: int, world_size: int, directory: str) -> str:
    parallel = ParallelContext.initialize()
    run, write = tiny_run.start(parallel), Shards.write
    save(run, Path(directory) / "a").finish(block=True)

    def full(self: Shards) -> Any:
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self)

    Shards.write = full
    try:
        pending = save(run, Path(directory) / "b")
        with pytest.raises(CheckpointError) as caught:
            pending.finish(block=True)
    finally:
        Shards.write = write
        parallel.destroy()
    return str(caught.value)


@pytest.mark.dist
def test_a_failure_on_one_rank_stops_all_and_leaves_the_previous(ranks, tmp_path):
    for message in ranks(one_disk_is_full, 2, str(tmp_path)):
        assert "b' cannot be written: No space left on device; free space there" in message
    assert candidates(tmp_path) == [tmp_path / "a"] and sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]
    open_checkpoint(tmp_path / "a")


def test_a_defect_keeps_its_own_error(parallel, tmp_path, monkeypatch):
    def broken(self: Shards) -> Any:
        raise ValueError("a defect")

    monkeypatch.setattr(Shards, "write", broken)
    pending = save(tiny_run.start(parallel), tmp_path / "a")
    with pytest.raises(ValueError, match="a defect"):
        pending.finish(block=True)
    assert list(tmp_path.iterdir()) == []
