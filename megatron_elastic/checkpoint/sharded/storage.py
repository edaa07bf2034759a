"""How sharded tensors reach the disk: planned by all ranks together, then written by each alone, through torch's own writer.

megatron-core's writer starts a manager process with `spawn` and writer processes with `fork` even for a synchronous save: a script
without a `__main__` guard hangs, and a fork beside running threads may. The files are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,  # pyright: ignore[reportPrivateUsage] - the inverse of what its loader does
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper  # pyright: ignore[reportPrivateUsage] - what its own `save` plans with

from megatron_elastic.checkpoint.streams import CarefulFile


class _CarefulFiles(FileSystem):
    """Files whose write errors are raised in Python, with the checksum of each by name."""

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """As torch's; what is written goes through a `CarefulFile`, which keeps the checksum."""
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            file = CarefulFile(stream)
            yield file
            self.checksums[Path(path).name] = file.checksum


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written.

    results: where each piece is. checksums: file -> CRC-32.
    """

    results: list[WriteResult]
    checksums: dict[str, int]


class Shards:
    """This rank's pieces of a checkpoint, planned by all ranks and not yet on the disk."""

    def __init__(self, state: dict[str, Any], directory: Path | str) -> None:
        """Agree on who writes what. Collective over all ranks; an error of one is raised on all.

        state: torch's form of a flat sharded state dict. Its tensors are read by `write`, not before.
        """
        self._files = _CarefulFiles()
        self._writer = dcp.FileSystemWriter(directory, thread_count=1, sync_files=True)
        self._writer.fs = self._files
        self._planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._index: Metadata | None = None
        ranks = _DistWrapper(None, use_dist=True, coordinator_rank=0)

        def mine() -> SavePlan:
            self._planner.set_up_planner(state, self._writer.storage_meta(), ranks.is_coordinator)
            self._writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=True)
            return self._writer.prepare_local_plan(self._planner.create_local_plan())

        def of_all(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._index = self._planner.create_global_plan(plans)
            return self._writer.prepare_global_plan(plans)

        self._plan = self._planner.finish_plan(ranks.reduce_scatter("plan", mine, of_all))

    def write(self) -> Written:
        """Write this rank's pieces into one file. Talks to no other rank. Raises OSError when the disk does not take them."""
        done = self._writer.write_data(self._plan, self._planner)
        done.wait()
        return Written(done.value(), dict(self._files.checksums))

    def write_index(self, written: Sequence[Written]) -> None:
        """Write the index of the pieces of all ranks; on rank 0, when every rank has written. Raises OSError."""
        assert self._index is not None
        self._writer.finish(self._index, [one.results for one in written])


class PlanningStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's `torch_dist` format; `dist_checkpointing.save` with it only plans, and leaves the writing to `shards`."""

    shards: Shards
    """Set by `save`."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path | str) -> None:
        """Plan to write this rank's main replicas. Collective over all ranks."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        self.shards = Shards(mcore_to_pyt_state_dict(flat, False, torch.device("cpu")), checkpoint_dir)
