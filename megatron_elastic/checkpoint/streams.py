"""A file that torch can write to although the disk may be full, and that knows the checksum of what was written."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_BLOCK = 2**20
_FLUSH_SECONDS = 0.2
"""How often a file that is being written is handed to the disk: too seldom to cost anything, often enough to leave little for the end."""


def _blocks(data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
    view = memoryview(data).cast("B")
    for start in range(0, view.nbytes, _BLOCK):
        yield view[start : start + _BLOCK]


def write_blocks(file: IO[bytes], data: bytes | bytearray | memoryview) -> None:
    """Write `data` piece by piece, and hold nothing of it afterwards: one write of a large tensor costs the system three times the time of small ones."""
    for block in _blocks(data):
        file.write(block)


class CarefulFile:
    """A binary file, written from front to back, whose write errors are raised by the next call that is not a write.

    torch.save calls `write` from C++; an exception there becomes a RuntimeError without its cause, and was seen to end the process with
    a segmentation fault at the next garbage collection.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: OSError | None = None
        self.checksum = 0
        """CRC-32 of everything written so far."""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write `data`, or nothing once a write has failed; says that all was written."""
        try:
            for block in _blocks(data) if self._error is None else ():
                self._file.write(block)
                self.checksum = zlib.crc32(block, self.checksum)  # still in the processor's cache
        except OSError as error:
            self._error = error
        return memoryview(data).nbytes

    def tell(self) -> int:
        """Position in the file. Raises OSError when a write has failed."""
        return self._checked().tell()

    def flush(self) -> None:
        """Hand everything to the system. Raises OSError when a write has failed."""
        self._checked().flush()

    def fileno(self) -> int:
        """The descriptor, for fsync. Raises OSError when a write has failed."""
        return self._checked().fileno()

    def close(self) -> None:
        """Close the file. Raises OSError when a write has failed."""
        self._file.close()
        self._checked()

    def _checked(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._file


@contextmanager
def written_early(file: IO[bytes]) -> Iterator[None]:
    """Have the disk write a file while the block makes more of it; the system by itself waits until a tenth of the memory is to be written.

    Raises OSError when the disk does not take it.
    """
    finished = threading.Event()

    def keep_writing() -> None:
        while not finished.wait(_FLUSH_SECONDS):
            os.fdatasync(file.fileno())

    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(keep_writing)
        try:
            yield
        finally:
            finished.set()
    writing.result()


def checksum_of(file: Path) -> int:
    """CRC-32 of a file's content, read once in blocks. Raises OSError."""
    found = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found
