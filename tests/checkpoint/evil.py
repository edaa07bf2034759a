"""What a hostile checkpoint holds, for the tests beside it."""

from __future__ import annotations

import os


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran",)
