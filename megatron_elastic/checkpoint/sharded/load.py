"""Load a checkpoint into a model and its optimizer, strictly, at any parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_elastic.checkpoint.files import CheckpointKind, check_shape
from megatron_elastic.checkpoint.named import NamedTensors
from megatron_elastic.checkpoint.sharded.optimizer import restore
from megatron_elastic.checkpoint.sharded.state import MODEL, OPTIMIZER, RUN, build_state, drop_extra_states, unwrap
from megatron_elastic.errors import CheckpointError
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import load_sharded
from megatron_elastic.shape import ModelShape


def load_checkpoint(
    directory: Path,
    *,
    model: torch.nn.Module,
    shape: ModelShape,
    parallel: ParallelContext,
    optimizer: MegatronOptimizer | None = None,
) -> dict[str, Any]:
    """Load `directory` into a model, and into `optimizer` unless it is None. A collective: every rank calls it.

    model: this rank's part, wrapped or not. Returns the `state` it was saved with, {} when there is none.
    Raises CheckpointError on every rank, before anything is changed, when it is missing, half-written, of another model, or has
    no optimizer state although one is asked for.
    """
    error = None
    try:
        _check(directory, shape, wants_optimizer=optimizer is not None)
    except CheckpointError as found:
        error = found
    parallel.raise_together(error)
    state = drop_extra_states(build_state(model, optimizer, None, parallel, is_loading=True))
    loaded = load_sharded(state, directory)
    result = unwrap(model).load_state_dict(loaded[MODEL], strict=False)
    missing = [key for key in result.missing_keys if not key.endswith("_extra_state")]
    assert not missing and not result.unexpected_keys, (missing, result.unexpected_keys)  # names were checked above
    if optimizer is not None:
        restore(optimizer, loaded[OPTIMIZER])
    return loaded.get(RUN, {})


def _check(directory: Path, shape: ModelShape, *, wants_optimizer: bool) -> None:
    info = NamedTensors(directory).info
    check_shape(info, shape)
    if wants_optimizer and info.kind is not CheckpointKind.TRAINING:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} holds a model alone, no optimizer to resume from; load it as a parent instead"
        )
