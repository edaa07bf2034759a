"""Checkpoints in megatron-core's `torch_dist` format, each with a `megatron_elastic.json` that says what it is.

`files` and `named` need no model, no GPU and no process group; `sharded` saves and loads a training run with megatron-core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_elastic.checkpoint.files import CheckpointInfo, find_model_checkpoint, open_checkpoint, prune
    from megatron_elastic.checkpoint.named import NamedTensors, write_named
    from megatron_elastic.checkpoint.sharded.load import Resumed, load_checkpoint, load_latest
    from megatron_elastic.checkpoint.sharded.save import PendingSave, save_checkpoint

__all__ = [
    "CheckpointInfo",
    "NamedTensors",
    "PendingSave",
    "Resumed",
    "find_model_checkpoint",
    "load_checkpoint",
    "load_latest",
    "open_checkpoint",
    "prune",
    "save_checkpoint",
    "write_named",
]

_MODULES = {
    "NamedTensors": "named",
    "write_named": "named",
    "PendingSave": "sharded.save",
    "Resumed": "sharded.load",
    "load_checkpoint": "sharded.load",
    "load_latest": "sharded.load",
    "save_checkpoint": "sharded.save",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: offline tools do not pay for megatron-core, nor `plan` for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'files')}"), name)
