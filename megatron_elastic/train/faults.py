"""What a rank does when another one is gone: killed, out of memory, or on a node that went down.

Nothing tells a rank so. It waits in a collective for the one that is gone, and its connection breaks; or it waits for a rank that is alive
and itself waits, until that one ends. So the first to notice must end at once: its own connections break then, and the rest follow.
A rank that is alive but hangs is found by the time limit of collectives (`parallel.COLLECTIVE_MINUTES`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_elastic.errors import RankLostError, StoppedError
from megatron_elastic.parallel import ParallelContext

_BROKEN = re.compile(
    # gloo and the store; then NCCL. Other errors of theirs, as of tensors that do not match, are defects and stay what they are.
    "Connection (?:closed|reset) by peer|Connection (?:refused|timed out)|Broken pipe|No route to host|Network is unreachable"
    "|Timed out (?:waiting|after) \\d+ ?(?:ms|seconds)|remote process exited or there was a network error|communicator was aborted"
)


def sign_of_loss(error: BaseException) -> str | None:
    """What in an error of torch.distributed says that another rank is gone or hangs; None when it says something else."""
    found = _BROKEN.search(str(error)) if isinstance(error, RuntimeError) else None
    return found.group() if found else None


@contextmanager
def during(activity: str) -> Iterator[None]:
    """Turn the loss of another rank inside the block into an error that says so in one line.

    activity: what was being done, for the message. Raises RankLostError, or what the block raises for any other reason.
    """
    try:
        yield
    except RuntimeError as error:
        sign = sign_of_loss(error)
        if sign is None or "RANK" not in os.environ:  # without other ranks none is lost
            raise
        rank = dist.get_rank() if dist.is_initialized() else os.environ["RANK"]
        raise RankLostError(
            f"rank {rank} lost contact with another rank during {activity} ({sign}): that process died or hangs, and its own output says "
            "why; start again to go on from the last whole checkpoint"
        ) from error


@contextmanager
def ending(parallel: ParallelContext) -> Iterator[None]:
    """Dissolve a layout after the block, however it ends, unless its processes must end at once.

    When a rank is lost, taking leave would wait for it; when all stop, it would take each another time, and a launcher that ends all as soon
    as one has ended would give the others another exit code.
    """
    try:
        yield
    except (RankLostError, StoppedError):
        raise
    except BaseException:
        parallel.destroy()
        raise
    parallel.destroy()
