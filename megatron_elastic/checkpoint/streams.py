"""A file that torch can write to although the disk may be full, and that knows the checksum of what was written."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import IO, Any

_BLOCK = 2**20


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
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
            else:
                self.checksum = zlib.crc32(data, self.checksum)
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


def checksum_of(file: Path) -> int:
    """CRC-32 of a file's content, read once in blocks. Raises OSError."""
    found = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found
