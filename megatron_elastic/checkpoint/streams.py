"""A file that torch can write to although the disk may be full."""

from __future__ import annotations

from typing import IO, Any


class DeferredErrors:
    """A binary file whose write errors are raised by the next call that is not a write.

    torch.save calls `write` from C++; an exception there becomes a RuntimeError without its cause, and was seen to end the process with
    a segmentation fault at the next garbage collection.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write `data`, or nothing once a write has failed; says that all was written."""
        if self._error is None:
            try:
                self._file.write(data)
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
