"""The files around a checkpoint: its description, how it gets its name, which one is the latest. No torch.

A checkpoint is written under a temporary name and renamed when it is whole; then the pointer file `latest` beside it moves. A
directory with a final name is therefore whole, unless somebody copied or deleted a part of it, and that is found by its list of files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import dacite

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.config import to_plain
from megatron_elastic.errors import CheckpointError
from megatron_elastic.formats import CHECKPOINT
from megatron_elastic.recipe_files import flatten
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import AXES, layers_of_axis, parent_plan

DESCRIPTION = "megatron_elastic.json"
"""Name of the description inside a checkpoint."""
LATEST = "latest"
"""Name of the pointer file beside the checkpoints of a run."""
CHECKPOINTS = "checkpoints"
"""Name of the directory of checkpoints inside a run."""
_IRRELEVANT = {"max_sequence_length", "init_std", "mamba.chunk"}
"""Entries of a shape that change no weight."""


class CheckpointKind(StrEnum):
    """What a checkpoint holds."""

    TRAINING = "training"
    """Model, optimizer and the state of a run."""
    MODEL = "model"
    """The model alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that was opened and found whole."""

    path: Path
    """The directory."""
    kind: CheckpointKind
    """What it holds."""
    shape: ModelShape
    """The model."""
    space: ElasticSpace | None
    """The family it was trained for, with the groups of its axes; None for an ordinary model."""
    plans: Mapping[str, SubmodelPlan]
    """Budget -> plan of the family, as far as they were known."""
    provenance: Mapping[str, Any]
    """Where it comes from, as its writer said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a writer says about a checkpoint."""

    kind: CheckpointKind
    """What it holds."""
    shape: ModelShape
    """The model."""
    space: ElasticSpace | None = None
    """The family, None for an ordinary model."""
    plans: Mapping[str, SubmodelPlan] = field(default_factory=dict)
    """Budget -> plan of the family."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Plain data: where it comes from."""


def open_checkpoint(path: Path) -> CheckpointInfo:
    """The checkpoint at `path`, checked: every file is there with its size.

    Raises CheckpointError when it is missing, half-written (saying what is missing), not ours, or of another format version.
    """
    file = path / DESCRIPTION
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {str(path)!r} does not exist")
    if not file.is_file():
        if any(path.glob("*.distcp")):
            raise CheckpointError(f"checkpoint {str(path)!r} is half-written: {DESCRIPTION} is missing; use an earlier one")
        raise CheckpointError(f"{str(path)!r} is not a checkpoint: it has no {DESCRIPTION}")
    data = _read_description(file)
    CHECKPOINT.check(data, f"checkpoint {str(path)!r}")
    missing = _missing_files(path, data)
    if missing:
        raise CheckpointError(f"checkpoint {str(path)!r} is half-written: {', '.join(missing)}; use an earlier one")
    try:
        shape = dacite.from_dict(ModelShape, data["shape"], dacite.Config(strict=True, cast=[tuple]))
        space = None if data["space"] is None else _decode_space(data["space"], shape)
        plans = {name: SubmodelPlan.from_dict(plan) for name, plan in data["plans"].items()}
        return CheckpointInfo(
            path=path,
            kind=CheckpointKind(data["kind"]),
            shape=shape,
            space=space,
            plans={name: plan if space is None else space.completed(plan) for name, plan in plans.items()},
            provenance=data["provenance"],
        )
    except (KeyError, ValueError, TypeError, dacite.DaciteError) as error:
        raise CheckpointError(f"{file} cannot be understood: {error}") from None


def _read_description(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise CheckpointError(f"checkpoint {str(file.parent)!r} is half-written: {DESCRIPTION} is not JSON; use an earlier one") from None
    return data if isinstance(data, dict) else {}


def _missing_files(path: Path, data: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, size in data["files"].items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes, not {size}")
    return problems


def _decode_axis(data: Mapping[str, Any], shape: ModelShape) -> AxisSpec:
    """An axis; what follows from the shape is not read, so that checkpoints from before axes could be per layer stay readable."""
    axis = ElasticAxis(data["axis"])
    layers, sharded = layers_of_axis(shape, axis), AXES[axis].sharded
    return AxisSpec(axis, tuple(data["choices"]), data["groups"], layers, data.get("per_layer", False), sharded)


def _decode_space(data: Mapping[str, Any], shape: ModelShape) -> ElasticSpace:
    return ElasticSpace(
        axes=tuple(_decode_axis(spec, shape) for spec in data["axes"]),
        parent=parent_plan(shape),
        drop_order=tuple(data["drop_order"]),
        shard_groups=data["shard_groups"],
    )


def check_shape(info: CheckpointInfo, shape: ModelShape) -> None:
    """Raise CheckpointError when the checkpoint is of another model than `shape`, naming every difference."""
    stored, wanted = flatten(to_plain(info.shape)), flatten(to_plain(shape))
    keys = [key for key in {**stored, **wanted} if key not in _IRRELEVANT and stored.get(key) != wanted.get(key)]
    if keys:
        differences = ", ".join(f"model.{key} is {stored.get(key)!r} there and {wanted.get(key)!r} here" for key in keys)
        raise CheckpointError(f"checkpoint {str(info.path)!r} is of another model: {differences}")


def temporary_name(directory: Path) -> Path:
    """The name a checkpoint has while it is written; the same in every process."""
    return directory.parent / f".tmp-{directory.name}"


def write_description(temporary: Path, description: Description) -> None:
    """Describe the finished files of `temporary` and force everything to the disk."""
    files = sorted(file for file in temporary.iterdir() if file.is_file())
    data = {
        **CHECKPOINT.stamp,
        "kind": description.kind,
        "shape": to_plain(description.shape),
        "space": None if description.space is None else {**to_plain(description.space), "parent": description.space.parent.to_dict()},
        "plans": {name: plan.to_dict() for name, plan in description.plans.items()},
        "provenance": to_plain(description.provenance),
        "files": {file.name: file.stat().st_size for file in files},
    }
    (temporary / DESCRIPTION).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    for path in (*files, temporary / DESCRIPTION, temporary):
        _force_to_disk(path)


def publish(temporary: Path, directory: Path) -> None:
    """Give a finished checkpoint its name; one that has it already is replaced, and is whole until then."""
    old = directory.parent / f".old-{directory.name}"
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    temporary.rename(directory)
    _force_to_disk(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_checkpoint(directory: Path, description: Description) -> Iterator[Path]:
    """A temporary directory for one process to write a checkpoint in; it becomes `directory` when the block ends well.

    Raises CheckpointError when `directory` exists or the disk is full; nothing is left under the final name then.
    """
    if directory.exists():
        raise CheckpointError(f"{str(directory)!r} exists; choose another path or delete it")
    temporary = temporary_name(directory)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        write_description(temporary, description)
        publish(temporary, directory)
    except OSError as error:
        raise CheckpointError(cannot_write(directory, error.strerror)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def cannot_write(directory: Path, reason: str | None) -> str:
    """The message for a checkpoint that could not be written."""
    return f"checkpoint {str(directory)!r} cannot be written: {reason}; free space there and start again from the previous checkpoint"


def move_latest(directory: Path) -> None:
    """Point `latest` at a checkpoint, in one step that survives a crash."""
    pointer = directory.parent / LATEST
    temporary = directory.parent / f".tmp-{LATEST}"
    temporary.write_text(directory.name + "\n", encoding="utf-8")
    _force_to_disk(temporary)
    temporary.replace(pointer)
    _force_to_disk(directory.parent)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint `latest` points at; the newest whole one when that is missing or half-written; None when there is none."""
    pointer = run_dir / LATEST
    named = [run_dir / pointer.read_text(encoding="utf-8").strip()] if pointer.is_file() else []
    return next((path for path in named + _newest_first(run_dir) if _is_whole(path)), None)


def find_model_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the latest one of a run directory.

    Raises CheckpointError when there is none.
    """
    if (path / DESCRIPTION).is_file():
        return path
    for run_dir in (path / CHECKPOINTS, path):
        found = latest_checkpoint(run_dir)
        if found is not None:
            return found
    if path.is_dir() and not any(path.glob("*.distcp")):
        raise CheckpointError(f"{str(path)!r} is neither a checkpoint (no {DESCRIPTION}) nor a run that has saved one")
    return open_checkpoint(path).path


def _newest_first(run_dir: Path) -> list[Path]:
    found = [file.parent for file in run_dir.glob(f"*/{DESCRIPTION}") if not file.parent.name.startswith(".")]
    return sorted(found, key=lambda path: (path / DESCRIPTION).stat().st_mtime_ns, reverse=True)


def _is_whole(path: Path) -> bool:
    try:
        return not _missing_files(path, _read_description(path / DESCRIPTION))
    except (CheckpointError, FileNotFoundError, KeyError):
        return False


def prune(run_dir: Path, keep: int, protected: Collection[str] = ()) -> list[str]:
    """Delete the oldest checkpoints of a run and what a killed save left behind; returns the names deleted.

    keep: how many of the newest stay, besides the names in `protected` and the one `latest` points at.
    """
    pointer = run_dir / LATEST
    spared = {*protected, pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else ""}
    candidates = [path for path in _newest_first(run_dir) if path.name not in set(protected)]
    doomed = [path for path in candidates[keep:] if path.name not in spared]
    for path in doomed:
        hidden = path.parent / f".old-{path.name}"
        path.rename(hidden)  # half-deleted, it would look like a checkpoint
        shutil.rmtree(hidden)
    for left in (*run_dir.glob(".tmp-*/"), *run_dir.glob(".old-*/")):
        shutil.rmtree(left, ignore_errors=True)
    return [path.name for path in doomed]


def _force_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
