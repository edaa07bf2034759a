"""A rank whose command and variables arrive as one word, for launchers that would let a remote shell read them (launchers/hostfile.py)."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn


def pack(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """A command and its environment variables as one word of letters, digits, - and _ (padded with =)."""
    text = json.dumps([list(command), dict(variables)])
    return base64.urlsafe_b64encode(text.encode()).decode("ascii")


def unpack(word: str) -> tuple[list[str], dict[str, str]]:
    """What `pack` was given."""
    command, variables = json.loads(base64.urlsafe_b64decode(word))
    return command, variables


def main() -> NoReturn:
    """Become the command: variables such as PYTHONFAULTHANDLER are read when an interpreter starts."""
    command, variables = unpack(sys.argv[-1])
    os.execve(sys.executable, [sys.executable, "-m", "megatron_elastic.cli.main", *command], {**os.environ, **variables})


if __name__ == "__main__":
    main()
