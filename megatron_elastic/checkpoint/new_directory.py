"""How a directory appears whole or not at all: written under a temporary name, forced to the disk, renamed. No torch."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_elastic.errors import CheckpointError


def temporary_name(directory: Path) -> Path:
    """The name that a checkpoint of a run has while all ranks write it; the same in every process."""
    return directory.parent / f".tmp-{directory.name}"


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """An empty temporary directory for one process to write in; it becomes `final` when the block ends well.

    Raises CheckpointError as `scratch_beside` and `publish_new` do. After an error nothing is left.
    """
    with scratch_beside(final) as scratch:
        directory = scratch / final.name
        directory.mkdir()
        yield directory
        publish_new(directory, final)


@contextmanager
def scratch_beside(final: Path) -> Iterator[Path]:
    """A directory of this block alone, beside where `final` will be; it is deleted with what is in it when the block ends.

    A killed process leaves it behind under a name that begins with ".tmp-"; nobody else can know that it is not in use.
    Raises CheckpointError when `final` exists, or for any OSError of the block, a full disk above all.
    """
    _refuse(final)
    scratch: Path | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".tmp-{final.name}-", dir=final.parent))
        yield scratch
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{str(final)!r} cannot be written: {reason}; free space there or choose another path") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _refuse(final: Path) -> None:
    if os.path.lexists(final):
        raise CheckpointError(f"{str(final)!r} exists; choose another path or delete it")


def publish_new(directory: Path, final: Path) -> None:
    """Force a finished directory to the disk and give it a name that nothing has.

    Raises CheckpointError when something has it: another process may have been faster. Only an empty directory made in the last instant is
    replaced, as rename(2) does; nothing is lost by that.
    """
    _force_whole(directory)
    _refuse(final)
    try:
        directory.rename(final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            _refuse(final)
        raise
    force_to_disk(final.parent)


def publish(temporary: Path, directory: Path) -> None:
    """Force a finished checkpoint of a run to the disk and give it its name; one that has it already is replaced, and is whole until then."""
    _force_whole(temporary)
    old = directory.parent / f".old-{directory.name}"
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    temporary.rename(directory)
    force_to_disk(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _force_whole(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        force_to_disk(path)


def force_to_disk(path: Path) -> None:
    """Have the system write what it holds of a file, or of a directory's own entries. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
