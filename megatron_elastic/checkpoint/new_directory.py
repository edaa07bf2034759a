"""How a directory appears whole or not at all: written under a temporary name, forced to the disk, renamed. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_elastic.errors import CheckpointError


def temporary_name(directory: Path) -> Path:
    """The name a directory has while it is written; the same in every process."""
    return directory.parent / f".tmp-{directory.name}"


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """An empty temporary directory for one process to write in; it becomes `final` when the block ends well.

    Raises CheckpointError when `final` exists, or for any OSError of the block, a full disk above all. After an error nothing is left, neither
    under the final name nor under the temporary one.
    """
    if final.exists():
        raise CheckpointError(f"{str(final)!r} exists; choose another path or delete it")
    temporary = temporary_name(final)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        publish(temporary, final)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{str(final)!r} cannot be written: {reason}; free space there or choose another path") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, directory: Path) -> None:
    """Force a finished directory to the disk and give it its name; one that has it already is replaced, and is whole until then."""
    for path in (*temporary.rglob("*"), temporary):
        force_to_disk(path)
    old = directory.parent / f".old-{directory.name}"
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    temporary.rename(directory)
    force_to_disk(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def force_to_disk(path: Path) -> None:
    """Have the system write what it holds of a file, or of a directory's own entries. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
