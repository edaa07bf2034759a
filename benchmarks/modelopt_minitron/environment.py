"""Make, once per machine, an environment with NVIDIA Model-Optimizer.

It lies beside the project's (scripts/bootstrap.py), in `${MEGATRON_ELASTIC_CACHE:-~/.cache/megatron-elastic}/modelopt`, and is one of its own for
release 0.40.0: later ones that the project's extra asks for do not prune without Transformer Engine.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from scripts.bootstrap import build, cache_root, environment_key, heartbeat, is_complete

PINS = Path(__file__).resolve().parent / "requirements.txt"


def modelopt_python() -> Path:
    """The interpreter of the finished environment, which is built if need be; a process that finds another one building it waits.

    Raises scripts.bootstrap.SetupError when a step of the build fails, with the end of its output.
    """
    root = cache_root(os.environ) / "modelopt"
    folder = root / environment_key(PINS)
    python = folder / "venv" / "bin" / "python"
    if is_complete(folder):
        return python
    folder.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        with heartbeat("the environment of NVIDIA Model-Optimizer (2 GB, about two minutes)"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete(folder):
            (folder / "complete").unlink(missing_ok=True)
            build(folder, PINS)
            (folder / "complete").touch()
    return python
