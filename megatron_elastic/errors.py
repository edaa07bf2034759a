"""Errors meant for users: one line with the value, the key and the remedy; the command line prints them without a traceback.

And the exit codes that the command line makes of them.
"""

from __future__ import annotations

import os

EXIT_USER_ERROR = 2
"""Something a user can mend; the message says what."""
EXIT_RANK_LOST = os.EX_TEMPFAIL
"""75: another process of the run is gone, or this one hung. The same command goes on from the last checkpoint."""
EXIT_REQUEUE = 85
"""Told to stop, and everything is saved: start the same command again. HTCondor's number for jobs that save themselves; no signal's."""


class ElasticError(Exception):
    """Base of every error a user can cause and mend. The message is one line per problem; `problems` holds them apart."""

    def __init__(self, message: str, problems: list[str] | None = None) -> None:
        super().__init__(message)
        self.problems = problems if problems is not None else [message]


class ConfigError(ElasticError):
    """A recipe, an option or a space of choices that cannot be used as written."""


class PlanError(ElasticError):
    """A sub-model plan that does not fit its model or its space."""


class DataError(ElasticError):
    """Missing, empty or unusable training data."""


class CheckpointError(ElasticError):
    """A checkpoint that is missing, half-written, or of another model."""


class RankLostError(ElasticError):
    """Another process of the run is gone or hangs. Raised by each rank by itself; the process must end, and not dissolve its groups before."""


class StoppedError(ElasticError):
    """A scheduler told a process to stop, and it did so in good order. Raised by all ranks at the same point; like a lost rank's, the process
    must end at once: all ranks leave together, before a launcher ends those that are late with another code."""


class UnsupportedError(ElasticError):
    """Something that is not supported here, refused by name with what to do instead."""


def raise_all(kind: type[ElasticError], problems: list[str], heading: str) -> None:
    """Raise one `kind` that lists every problem; do nothing when there is none."""
    if len(problems) == 1:
        raise kind(f"{heading}: {problems[0]}", problems)
    if problems:
        raise kind("\n  - ".join([f"{heading}:", *problems]), problems)
