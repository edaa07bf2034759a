"""The files around a checkpoint: its description, how it gets its name, which one is the latest. No torch.

A checkpoint is written under a temporary name and renamed when it is whole; then the pointer file `latest` beside it moves. A
directory with a final name is therefore whole, unless a part of it was copied, deleted or changed later, and that is found by its list of
files with their sizes and checksums. Sizes are looked at whenever one is opened, checksums when one is loaded to train on.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import dacite

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.checkpoint.new_directory import force_to_disk, new_directory
from megatron_elastic.checkpoint.streams import checksum_of
from megatron_elastic.config import to_plain
from megatron_elastic.errors import CheckpointError, ElasticError
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
RECIPE_FILE = "recipe.yaml"
"""Name of the resolved recipe in a run."""
ASSETS = "assets"
"""Name of the directory of what goes with a model's weights (tokenizer, config.json and so on), in a checkpoint or in a run."""
RANKING_FILE = "importance.ranking"
"""Name of the ranking that a model was sorted by, in the sorted checkpoint and in a run that starts from it."""
_IRRELEVANT = {"max_sequence_length", "init_std", "mamba.chunk", "moe.aux_loss", "moe.z_loss"}
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
    files: Mapping[str, int]
    """Name -> bytes of every file it lists; all are there, in the directory itself."""


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
    data = _read_description(path)
    CHECKPOINT.check(data, f"checkpoint {str(path)!r}")
    if damage := _wrong_sizes(path, data):
        raise CheckpointError(f"checkpoint {str(path)!r} is half-written: {', '.join(damage)}; use an earlier one")
    try:
        return _decode(path, data)
    except (ElasticError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, dacite.DaciteError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{path / DESCRIPTION} cannot be understood: {reason}; use another checkpoint") from None


def _decode(path: Path, data: Mapping[str, Any]) -> CheckpointInfo:
    """A description whose list of files was checked. Raises all sorts of errors for what no writer of ours has written."""
    shape = dacite.from_dict(ModelShape, data["shape"], dacite.Config(strict=True, cast=[tuple]))
    if problems := shape.problems():
        raise ValueError(problems[0])
    space = None if data["space"] is None else decode_space(data["space"], shape)
    plans = {name: SubmodelPlan.from_dict(plan) for name, plan in data["plans"].items()}
    return CheckpointInfo(
        path=path,
        kind=CheckpointKind(data["kind"]),
        shape=shape,
        space=space,
        plans={name: plan if space is None else space.completed(plan) for name, plan in plans.items()},
        provenance=dict(data["provenance"]),
        files=data["files"],
    )


def _read_description(path: Path) -> dict[str, Any]:
    file = path / DESCRIPTION
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {str(path)!r} does not exist")
    if not file.is_file():
        if any(path.glob("*.distcp")):
            raise CheckpointError(f"checkpoint {str(path)!r} is half-written: {DESCRIPTION} is missing; use an earlier one")
        raise CheckpointError(f"{str(path)!r} is not a checkpoint: it has no {DESCRIPTION}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise CheckpointError(f"checkpoint {str(path)!r} is half-written: {DESCRIPTION} is not JSON; use an earlier one") from None
    except OSError as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    return data if isinstance(data, dict) else {}


def _is_bare(name: str) -> bool:
    """Whether a name out of a file names an entry of a directory itself, and leads nowhere else."""
    return Path(name).name == name and name not in ("", "..") and name.isprintable()


def _list_problem(data: Mapping[str, Any], key: str) -> str | None:
    """What is wrong with a list of files in a description (name -> number); None when nothing is."""
    listed = data.get(key)
    if not isinstance(listed, dict):
        return f"{DESCRIPTION} does not list the {key}"
    foreign = [name for name in listed if not _is_bare(name)]
    if foreign:
        return f"{DESCRIPTION} lists {foreign[0]!r}, which is not the name of a file beside it"
    wrong = [name for name, number in listed.items() if not isinstance(number, int)]
    return f"{DESCRIPTION} lists {wrong[0]} with no number" if wrong else None


def _wrong_sizes(path: Path, data: Mapping[str, Any]) -> list[str]:
    """What is wrong with the sizes of the listed files, or with the list itself."""
    if problem := _list_problem(data, "files"):
        return [problem]
    return [problem for name, size in data["files"].items() if (problem := _wrong_size(path / name, size)) is not None]


def _wrong_size(file: Path, size: int) -> str | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"{file.name} is not a file"
    return None if found.st_size == size else f"{file.name} has {found.st_size} bytes, not {size}"


def damage(path: Path, *, reader: int = 0, readers: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, [] when nothing is: its description, sizes, and contents against their checksums.

    reader, readers: of so many processes, this one reads every `readers`-th file, from number `reader` on; together they read each once.
    A checkpoint from before there were checksums is checked by its sizes alone.
    """
    if not path.is_dir():
        return ["it is gone"]
    if not (path / DESCRIPTION).is_file():
        return [f"{DESCRIPTION} is missing"]
    try:
        data = _read_description(path)
    except CheckpointError:
        return [f"{DESCRIPTION} is not JSON"]
    if problems := _wrong_sizes(path, data):
        return problems
    if "checksums" in data and (problem := _list_problem(data, "checksums")):
        return [problem]
    mine = sorted(data.get("checksums", {}).items())[reader::readers]
    return [problem for name, wanted in mine if (problem := _changed(path / name, wanted)) is not None]


def _changed(file: Path, checksum: int) -> str | None:
    try:
        return None if checksum_of(file) == checksum else f"{file.name} was changed after it was written (its checksum differs)"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"


def _decode_axis(data: Mapping[str, Any], shape: ModelShape) -> AxisSpec:
    """An axis; what follows from the shape is not read, so that checkpoints from before axes could be per layer stay readable."""
    axis = ElasticAxis(data["axis"])
    layers, sharded = layers_of_axis(shape, axis), AXES[axis].sharded
    return AxisSpec(axis, tuple(data["choices"]), data["groups"], layers, data.get("per_layer", False), sharded)


def plain_space(space: ElasticSpace) -> dict[str, Any]:
    """Plain data of a space, for JSON; `decode_space` reads it."""
    return {**to_plain(space), "parent": space.parent.to_dict()}


def decode_space(data: Mapping[str, Any], shape: ModelShape) -> ElasticSpace:
    """The space that `plain_space` wrote, for a model of `shape`. Raises KeyError, ValueError or TypeError for anything else."""
    return ElasticSpace(
        axes=tuple(_decode_axis(spec, shape) for spec in data["axes"]),
        parent=parent_plan(shape),
        drop_order=tuple(data["drop_order"]),
        shard_groups=data["shard_groups"],
    )


def check_shape(info: CheckpointInfo, shape: ModelShape) -> None:
    """Raise CheckpointError when the checkpoint is of another model than `shape`, naming every difference."""
    if differences := shape_differences(info.shape, shape):
        raise CheckpointError(f"checkpoint {str(info.path)!r} is of another model: {', '.join(differences)}")


def shape_differences(stored: ModelShape, wanted: ModelShape) -> list[str]:
    """Where two shapes differ in a way that matters to weights, one line each."""
    there, here = flatten(to_plain(stored)), flatten(to_plain(wanted))
    keys = [key for key in {**there, **here} if key not in _IRRELEVANT and there.get(key) != here.get(key)]
    return [f"model.{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in keys]


def write_description(temporary: Path, description: Description, checksums: Mapping[str, int]) -> None:
    """Describe the finished files of `temporary`.

    checksums: of files whose writer took it on the way; the others are read for it.
    """
    files = sorted(file for file in temporary.iterdir() if file.is_file())
    data = {
        **CHECKPOINT.stamp,
        "kind": description.kind,
        "shape": to_plain(description.shape),
        "space": None if description.space is None else plain_space(description.space),
        "plans": {name: plan.to_dict() for name, plan in description.plans.items()},
        "provenance": to_plain(description.provenance),
        "files": {file.name: file.stat().st_size for file in files},
        "checksums": {file.name: checksums[file.name] if file.name in checksums else checksum_of(file) for file in files},
    }
    (temporary / DESCRIPTION).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_checkpoint(directory: Path, description: Description) -> Iterator[tuple[Path, dict[str, int]]]:
    """A temporary directory for one process to write a checkpoint in; it becomes `directory` when the block ends well.

    With it comes a dictionary for the checksums of files, as far as the block knows them.
    Raises CheckpointError as `new_directory` does.
    """
    checksums: dict[str, int] = {}
    with new_directory(directory) as temporary:
        yield temporary, checksums
        write_description(temporary, description, checksums)


def cannot_write(directory: Path, reason: str | None) -> str:
    """The message for a checkpoint of a run that could not be written."""
    return f"checkpoint {str(directory)!r} cannot be written: {reason}; free space there and start again from the previous checkpoint"


def move_latest(directory: Path) -> None:
    """Point `latest` at a checkpoint, in one step that survives a crash."""
    pointer = directory.parent / LATEST
    temporary = directory.parent / f".tmp-{LATEST}"
    temporary.write_text(directory.name + "\n", encoding="utf-8")
    force_to_disk(temporary)
    temporary.replace(pointer)
    force_to_disk(directory.parent)


def candidates(run_dir: Path) -> list[Path]:
    """What a run may go on from, whole or not, best first: the checkpoint that `latest` names, then the newest first.

    A save that has not finished is not among them. Raises CheckpointError when `latest` names no checkpoint beside it.
    """
    latest = _latest(run_dir)
    named = [] if latest is None else [run_dir / latest]
    return named + [path for path in _newest_first(run_dir) if path not in named]


def _latest(run_dir: Path) -> str | None:
    """The name in the pointer file; None without one. Raises CheckpointError for anything but a bare name: it may come from anywhere."""
    pointer = run_dir / LATEST
    if not pointer.is_file():
        return None
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{str(pointer)!r} cannot be read: {error}; delete it to use the newest checkpoint") from None
    if not _is_bare(name):
        raise CheckpointError(
            f"{str(pointer)!r} says {name[:100]!r}, which is not the name of a checkpoint beside it; write one there, or delete it to use the newest"
        )
    return name


def find_model_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the latest one of a run directory.

    Raises CheckpointError when there is none, or when the latest is half-written: which other one is meant is for the user to say.
    """
    if (path / DESCRIPTION).is_file():
        return path
    for run_dir in (path / CHECKPOINTS, path):
        found = candidates(run_dir)
        if found:
            return open_checkpoint(found[0]).path
    if path.is_dir() and not any(path.glob("*.distcp")):
        raise CheckpointError(f"{str(path)!r} is neither a checkpoint (no {DESCRIPTION}) nor a run that has saved one")
    return open_checkpoint(path).path


def find_assets(checkpoint: Path) -> Path | None:
    """The assets of a checkpoint: its own, or those of the run (or the import) it is in; None when there are none."""
    return kept_with(checkpoint, ASSETS)


def kept_with(checkpoint: Path, name: str) -> Path | None:
    """What is called `name` in a checkpoint, else in the run (or the import) it is in; None when neither has it."""
    own = checkpoint / name
    return own if own.exists() else in_run_of(checkpoint, name)


def in_run_of(checkpoint: Path, name: str) -> Path | None:
    """What is called `name` in the run (or the import) that a checkpoint is in; None when it is in none, or there is no such thing."""
    holder = checkpoint.resolve().parent
    found = holder.parent / name
    return found if holder.name == CHECKPOINTS and found.exists() else None


def _newest_first(run_dir: Path) -> list[Path]:
    """Directories that hold a checkpoint or a part of one, by the time of their description, else their own."""
    found = {file.parent for pattern in (DESCRIPTION, "*.distcp") for file in run_dir.glob(f"*/{pattern}")}
    return sorted((path for path in found if not path.name.startswith(".")), key=_written_at, reverse=True)


def _written_at(path: Path) -> tuple[int, str]:
    description = path / DESCRIPTION
    return (description if description.is_file() else path).stat().st_mtime_ns, path.name


def _has_its_files(path: Path) -> bool:
    try:
        return not _wrong_sizes(path, _read_description(path))
    except CheckpointError:
        return False


def prune(run_dir: Path, keep_last: int, protected: Collection[str] = ()) -> list[str]:
    """Delete the oldest checkpoints of a run and what a killed save left behind; returns the names deleted.

    keep_last: how many of the newest whole ones stay, besides the newest whole one of all, the one `latest` names, and `protected`: names
    that stay and may be in the middle of being written. Raises CheckpointError when `latest` names no checkpoint beside it.
    """
    found = _newest_first(run_dir)
    whole = [path.name for path in found if _has_its_files(path)]
    spared = {*protected, *whole[:1], _latest(run_dir)}
    kept, doomed = 0, []
    for path in found:
        if path.name in whole and path.name not in protected:
            kept += 1
        if kept > keep_last and path.name not in spared:
            doomed.append(path)
    for path in doomed:
        hidden = path.parent / f".old-{path.name}"
        path.rename(hidden)  # half-deleted, it would look like a checkpoint
        shutil.rmtree(hidden)
    for left in (*run_dir.glob(".tmp-*/"), *run_dir.glob(".old-*/")):
        if left.name.split("-", 1)[1] not in protected:
            shutil.rmtree(left, ignore_errors=True)
    return [path.name for path in doomed]
