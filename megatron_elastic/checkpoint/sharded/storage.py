"""How sharded tensors reach the disk: in the calling process, through torch's own writer.

megatron-core's writer starts a manager process with `spawn` and writer processes with `fork` even for a synchronous save: a script
without a `__main__` guard hangs, and a fork beside running threads may. The files are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
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

from megatron_elastic.checkpoint.streams import DeferredErrors


class _CarefulFiles(FileSystem):
    """Files whose write errors are raised in Python."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield DeferredErrors(stream) if mode == "wb" else stream


class DirectSaveStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's `torch_dist` format, written without other processes; an error on one rank is raised on all."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path | str) -> None:
        """Write this rank's main replicas into one file. Collective over all ranks."""
        writer = dcp.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True)
        writer.fs = _CarefulFiles()
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(flat, False, torch.device("cpu")),
            storage_writer=writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
