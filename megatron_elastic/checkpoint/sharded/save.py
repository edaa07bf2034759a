"""Save a training run: written under a temporary name, renamed when whole, then the pointer moves."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
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
    publish,
    temporary_name,
    write_description,
)
from megatron_elastic.checkpoint.sharded.state import build_state
from megatron_elastic.checkpoint.sharded.storage import DirectSaveStrategy
from megatron_elastic.errors import CheckpointError
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape

SPARE_BYTES = 16 * 2**20
"""Room for the index and the plain data of a checkpoint."""


def save_checkpoint(
    directory: Path,
    *,
    model: torch.nn.Module,
    shape: ModelShape,
    parallel: ParallelContext,
    optimizer: MegatronOptimizer | None = None,
    state: Mapping[str, Any] | None = None,
    space: ElasticSpace | None = None,
    plans: Mapping[str, SubmodelPlan] | None = None,
) -> Path:
    """Save a run as the checkpoint `directory` and point `latest` beside it at it. A collective: every rank calls it.

    A checkpoint that has this name already is replaced. Returns `directory`.
    model: this rank's part, wrapped or not. optimizer: megatron-core's distributed optimizer, None for the model alone.
    state: plain data and tensors, the same on every rank (step, router...). space, plans: kept in the description.
    Raises CheckpointError on every rank when it cannot be written; the previous checkpoint and `latest` are as they were then.
    """
    sharded = build_state(model, optimizer, state, parallel, is_loading=False)
    _check_space(sharded, directory, parallel)
    temporary = temporary_name(directory)
    try:
        _on_main(lambda: _make_empty(temporary), directory, parallel)
        _write_shards(sharded, temporary, directory, parallel)
        kind = CheckpointKind.MODEL if optimizer is None else CheckpointKind.TRAINING
        description = Description(
            kind=kind, shape=shape, space=space, plans=plans or {}, provenance={name: version(name) for name in ("torch", "megatron-core")}
        )

        def finish() -> None:
            write_description(temporary, description)
            publish(temporary, directory)
            move_latest(directory)

        _on_main(finish, directory, parallel)
    finally:
        if parallel.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
    return directory


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


def _write_shards(state: ShardedStateDict, temporary: Path, directory: Path, parallel: ParallelContext) -> None:
    error = None
    try:
        dist_checkpointing.save(state, str(temporary), DirectSaveStrategy(), content_metadata=None)
    except OSError as cause:
        error = CheckpointError(cannot_write(directory, cause.strerror))
    except CheckpointException as cause:
        causes = [failure[0] for failure in cause.failures.values()]
        full = [one for one in causes if isinstance(one, OSError)]
        if len(full) < len(causes):
            raise  # not the disk: a defect, with its traceback
        error = CheckpointError(cannot_write(directory, full[0].strerror))
    parallel.raise_together(error)


def _on_main(work: Callable[[], None], directory: Path, parallel: ParallelContext) -> None:
    """Do file work on rank 0 while the others wait; an OSError becomes a CheckpointError on every rank."""
    error = None
    if parallel.is_main:
        try:
            work()
        except OSError as cause:
            error = CheckpointError(cannot_write(directory, cause.strerror))
    parallel.raise_together(error)
