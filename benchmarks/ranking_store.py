"""What a benchmark of rankings has found already, on the disk: rankings by name, losses by what was kept and of which text."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from megatron_elastic.errors import CheckpointError
from megatron_elastic.importance.ranking import Ranking, read_ranking, write_ranking

Origin = tuple[str, str]
"""Fingerprints of the model and of the texts."""


def stored_ranking(directory: Path, name: str, origin: Origin, make: Callable[[], Ranking]) -> Ranking:
    """The ranking kept under a name for this model and these texts; made and kept where there is none."""
    file = directory / f"{name}-{'-'.join(origin)}.ranking"
    if not file.is_file():
        write_ranking(file, make())
    return read_ranking(file)


class Points:
    """Losses in one JSON file, written after each."""

    def __init__(self, file: Path, origin: Origin) -> None:
        self._file, self._origin = file, origin
        try:
            self._known: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError as error:
            raise CheckpointError(f"{str(file)!r} is not what this benchmark writes ({error}); remove it") from None

    def get(self, kept: str, text: str) -> float | None:
        """The loss of what was kept on a text, None when it is not known."""
        return self._known.get(self._key(kept, text))

    def put(self, kept: str, text: str, loss: float) -> float:
        """Keep a loss and return it."""
        self._known[self._key(kept, text)] = loss
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._known, indent=0), encoding="utf-8")
        os.replace(temporary, self._file)
        return loss

    def _key(self, kept: str, text: str) -> str:
        return hashlib.sha256("\0".join((*self._origin, kept, text)).encode()).hexdigest()
