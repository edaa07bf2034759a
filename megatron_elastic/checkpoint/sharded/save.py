"""Save a training run: written under a temporary name, renamed when whole, then the pointer moves.

A save has two halves. The first is taken by all ranks together: the state is gathered, and it is agreed who writes what. Then each rank
writes its own file in a thread, while training may go on. The second, again together, waits until every file is on the disk; only then
rank 0 describes the directory, gives it its name and moves `latest`.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, is_main_replica
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megatron_elastic.axes import ElasticSpace, SubmodelPlan
from megatron_elastic.checkpoint.files import (
    CheckpointKind,
    Description,
    cannot_write,
    move_latest,
    write_description,
)
from megatron_elastic.checkpoint.new_directory import publish, temporary_name
from megatron_elastic.checkpoint.sharded.state import build_state, detach_from_model
from megatron_elastic.checkpoint.sharded.storage import PlanningStrategy, Shards, Written
from megatron_elastic.errors import CheckpointError
from megatron_elastic.parallel import ParallelContext, compute_on
from megatron_elastic.shape import ModelShape

SPARE_BYTES = 16 * 2**20
"""Room for the index and the plain data of a checkpoint."""
_POLL_SECONDS = 0.05
"""How long a rank that has written waits before it asks the others again; nobody sits in a collective while another writes."""


def save_checkpoint(  # noqa: PLR0913 - one for each thing that is saved
    directory: Path,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    shape: ModelShape,
    parallel: ParallelContext,
    optimizer: MegatronOptimizer | None = None,
    state: Mapping[str, Any] | None = None,
    family: tuple[ElasticSpace | None, Mapping[str, SubmodelPlan]] = (None, {}),
    provenance: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> PendingSave:
    """Save a run as the checkpoint `directory` and point `latest` beside it at it. A collective: every rank calls it.

    A checkpoint that has this name already is replaced.
    model: this rank's part or parts, wrapped or not. optimizer: megatron-core's distributed optimizer, None for the model alone.
    state: plain data and tensors, the same on every rank (step, router...).
    family: what it is trained to hold, for the description: its space, None for an ordinary model, and the plans known yet by budget.
    provenance: plain data for the description: where the model comes from, beside the versions that wrote it.
    asynchronous: return when the state is copied to host memory, and write while training goes on; nothing is published before the result's
    `finish` says so. Finish it before the next save begins.
    Raises CheckpointError on every rank when it cannot be written; the previous checkpoint and `latest` are as they were then.
    """
    sharded = build_state(model, optimizer, state, parallel, is_loading=False)
    _check_space(sharded, directory, parallel)
    if asynchronous:
        detach_from_model(sharded)
    try:
        _on_main(lambda: _make_empty(temporary_name(directory)), directory, parallel)
        shards = _plan(sharded, directory, parallel)
    except BaseException:
        _clean_up(directory, parallel)
        raise
    description = Description(
        kind=CheckpointKind.MODEL if optimizer is None else CheckpointKind.TRAINING,
        shape=shape,
        space=family[0],
        plans=family[1],
        provenance={**(provenance or {}), **{name: version(name) for name in ("torch", "megatron-core")}},
    )
    pending = PendingSave(directory, shards, description, parallel)
    if not asynchronous:
        pending.finish(block=True)
    return pending


class PendingSave:
    """A checkpoint whose files are being written, each rank's by a thread of its own."""

    def __init__(self, directory: Path, shards: Shards, description: Description, parallel: ParallelContext) -> None:
        """Begin to write."""
        self.directory = directory
        """The name it will have."""
        self._shards, self._description, self._parallel = shards, description, parallel
        self._written: Written | None = None
        self._error: Exception | None = None
        self._published = False
        # Not a daemon: it ends by itself, and a process that exits in the middle of torch.save may crash.
        self._thread = threading.Thread(target=self._write, name=f"save {directory.name}")
        self._thread.start()

    def finish(self, *, block: bool) -> bool:
        """Publish the checkpoint if every rank has written; says whether it is published. A collective: every rank calls it.

        block: wait for the ranks that still write.
        Raises CheckpointError on every rank when one could not write; what was written is deleted then.
        """
        if self._published:
            return True
        while (problems := self._exchange()) is None:
            if not block:
                return False
            self._thread.join()
            time.sleep(_POLL_SECONDS)
        try:
            self._raise(problems)
            everywhere = self._gather()
            _on_main(lambda: self._publish(everywhere), self.directory, self._parallel)
        finally:
            _clean_up(self.directory, self._parallel)
        self._published = True
        return True

    def _write(self) -> None:
        try:
            compute_on(self._parallel.device)  # torch's writer waits for the GPU even where all tensors are on the CPU
            self._written = self._shards.write()
        except Exception as error:  # noqa: BLE001 - raised by `finish`, on every rank
            self._error = error

    def _exchange(self) -> list[str] | None:
        """Why a rank could not write, for each that could not; None while any is still writing."""
        mine = (not self._thread.is_alive(), None if self._error is None else _reason(self._error))
        found: list[tuple[bool, str | None]] = [mine] * self._parallel.world_size
        dist.all_gather_object(found, mine)
        return [reason for _, reason in found if reason is not None] if all(done for done, _ in found) else None

    def _raise(self, problems: list[str]) -> None:
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error  # not the disk: a defect, with its traceback
        if problems:
            raise CheckpointError(cannot_write(self.directory, problems[0])) from self._error

    def _gather(self) -> list[Written]:
        """What every rank has written, on rank 0; [] on the others."""
        assert self._written is not None
        everywhere: list[Any] = [None] * self._parallel.world_size
        dist.gather_object(self._written, everywhere if self._parallel.is_main else None)
        return everywhere if self._parallel.is_main else []

    def _publish(self, everywhere: list[Written]) -> None:
        temporary = temporary_name(self.directory)
        self._shards.write_index(everywhere)
        write_description(temporary, self._description, {name: sum_ for one in everywhere for name, sum_ in one.checksums.items()})
        publish(temporary, self.directory)
        move_latest(self.directory)


def _reason(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _check_space(state: ShardedStateDict, directory: Path, parallel: ParallelContext) -> None:
    """Refuse before anything is written: rank 0 alone writes the first files, and an error there would leave the others waiting."""
    mine = sum(
        shard.data.nbytes
        for shard in nested_values(state)
        if isinstance(shard, ShardedBase) and isinstance(shard.data, torch.Tensor) and is_main_replica(shard.replica_id)
    )
    sizes = [0] * parallel.world_size
    dist.all_gather_object(sizes, mine)

    def check() -> None:
        directory.parent.mkdir(parents=True, exist_ok=True)
        needed, free = sum(sizes) + SPARE_BYTES, shutil.disk_usage(directory.parent).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({needed / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free)")

    _on_main(check, directory, parallel)


def _make_empty(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _clean_up(directory: Path, parallel: ParallelContext) -> None:
    if parallel.is_main:
        shutil.rmtree(temporary_name(directory), ignore_errors=True)


def _plan(state: ShardedStateDict, directory: Path, parallel: ParallelContext) -> Shards:
    """Write the plain data and agree on who writes which shards."""
    strategy, error = PlanningStrategy(), None
    try:
        dist_checkpointing.save(state, str(temporary_name(directory)), strategy, content_metadata=None)
    except OSError as cause:
        error = CheckpointError(cannot_write(directory, cause.strerror))
    except CheckpointException as cause:
        causes = [failure[0] for failure in cause.failures.values()]
        full = [one for one in causes if isinstance(one, OSError)]
        if len(full) < len(causes):
            raise  # not the disk: a defect, with its traceback
        error = CheckpointError(cannot_write(directory, full[0].strerror))
    parallel.raise_together(error)
    return strategy.shards


def _on_main(work: Callable[[], None], directory: Path, parallel: ParallelContext) -> None:
    """Do file work on rank 0 while the others wait; an OSError becomes a CheckpointError on every rank."""
    error = None
    if parallel.is_main:
        try:
            work()
        except OSError as cause:
            error = CheckpointError(cannot_write(directory, cause.strerror))
    parallel.raise_together(error)
