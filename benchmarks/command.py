"""How a benchmark ends: with its report, or with one line about what its user can mend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from megatron_elastic.errors import ElasticError

Result = TypeVar("Result")


def outcome(measure: Callable[[], Result], print_report: Callable[[Result], None]) -> int:
    """Measure and print; returns the exit code, 2 for a user's error."""
    try:
        result = measure()
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_report(result)
    return 0
