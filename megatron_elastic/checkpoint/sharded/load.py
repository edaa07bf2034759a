"""Load a checkpoint into a model and its optimizer, strictly, at any parallel layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_elastic.checkpoint.files import CheckpointKind, candidates, check_shape, damage
from megatron_elastic.checkpoint.named import NamedTensors
from megatron_elastic.checkpoint.plain import RUN, read_plain
from megatron_elastic.checkpoint.sharded.optimizer import restore
from megatron_elastic.checkpoint.sharded.state import MODEL, OPTIMIZER, build_state, drop_extra_states, parts_of_model
from megatron_elastic.errors import CheckpointError
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import load_sharded
from megatron_elastic.shape import ModelShape

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from.

    path: the checkpoint. state: the plain data it was saved with. notes: a line for each better one that had to be skipped.
    """

    path: Path
    state: dict[str, Any]
    notes: list[str]


def load_checkpoint(
    directory: Path,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    shape: ModelShape,
    parallel: ParallelContext,
    optimizer: MegatronOptimizer | None = None,
) -> dict[str, Any]:
    """Load `directory` into a model, and into `optimizer` unless it is None. A collective: every rank calls it.

    model: this rank's part or parts, wrapped or not. Returns the `state` it was saved with, {} when there is none.
    Raises CheckpointError on every rank, before anything is changed, when it is missing, half-written, changed since it was written, of
    another model, has no optimizer state although one is asked for, or holds more than plain data beside its tensors: nothing of it is run.
    """
    _together(lambda: _check(directory, shape, wants_optimizer=optimizer is not None), parallel)
    problems = _damage(directory, parallel)
    if problems:
        raise CheckpointError(f"checkpoint {str(directory)!r} is damaged: {', '.join(problems)}; use an earlier one")
    return _load(directory, model, parallel, optimizer)


def load_latest(
    run_dir: Path,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    shape: ModelShape,
    parallel: ParallelContext,
    optimizer: MegatronOptimizer,
) -> Resumed | None:
    """Load the best whole checkpoint among those of a run, None when there is none of any kind. A collective: every rank calls it.

    The one that `latest` names comes first, then the newest; what is half-written or was changed since is skipped, with a note.
    Raises CheckpointError on every rank when the one chosen is of another model, `latest` names no checkpoint of the run, or there are only
    damaged ones: to begin afresh then would be a decision of the user's.
    """
    listed: list[Any] = [_together(lambda: candidates(run_dir) if parallel.is_main else None, parallel)]
    dist.broadcast_object_list(listed, src=0)
    skipped: list[str] = []
    for path in listed[0]:
        problems = _damage(path, parallel)
        if not problems:
            _together(lambda path=path: _check(path, shape, wants_optimizer=True), parallel)
            notes = [f"skipped {text}; using {path.name}" for text in skipped]
            return Resumed(path, _load(path, model, parallel, optimizer), notes)
        skipped.append(f"{path.name}: {', '.join(problems)}")
    if skipped:
        raise CheckpointError(
            f"no checkpoint in {str(run_dir)!r} is whole ({'; '.join(skipped)}); restore one, or delete the directory to start again"
        )
    return None


def _damage(directory: Path, parallel: ParallelContext) -> list[str]:
    """What is wrong with the files of a checkpoint, the same on every rank. They share the reading."""
    found: list[list[str]] = [[]] * parallel.world_size
    dist.all_gather_object(found, damage(directory, reader=parallel.rank, readers=parallel.world_size))
    return list(dict.fromkeys(problem for problems in found for problem in problems))


def _together(work: Callable[[], T], parallel: ParallelContext) -> T:
    """The result of `work`, which every rank does for itself; a CheckpointError of one is raised on all."""
    result, error = None, None
    try:
        result = work()
    except CheckpointError as found:
        error = found
    parallel.raise_together(error)
    return cast(T, result)


def _check(directory: Path, shape: ModelShape, *, wants_optimizer: bool) -> None:
    info = NamedTensors(directory).info
    check_shape(info, shape)
    if wants_optimizer and info.kind is not CheckpointKind.TRAINING:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} holds a model alone, no optimizer to resume from; load it as a parent instead"
        )


def _load(
    directory: Path,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    parallel: ParallelContext,
    optimizer: MegatronOptimizer | None,
) -> dict[str, Any]:
    state = drop_extra_states(build_state(model, optimizer, None, parallel, is_loading=True))
    plain = _together(lambda: read_plain(directory), parallel)
    loaded = load_sharded(state, directory, plain)
    for number, part in enumerate(parts_of_model(model)):
        result = part.load_state_dict(loaded[MODEL][number], strict=False)
        missing = [key for key in result.missing_keys if not key.endswith("_extra_state")]
        assert not missing and not result.unexpected_keys, (missing, result.unexpected_keys)  # names were checked above
    if optimizer is not None:
        restore(optimizer, loaded[OPTIMIZER])
    return loaded.get(RUN, {})
