"""The state of 8-bit training: never on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class FP8GlobalStateManager:
    """Says that 8-bit training is off."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Never."""
        return False


@contextlib.contextmanager
def fp8_autocast(*, enabled: bool = True) -> Iterator[None]:
    """Full precision inside too."""
    assert not enabled, "the stand-in has no 8-bit training"
    yield


fp8_model_init = fp8_autocast
