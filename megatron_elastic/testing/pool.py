"""A pool of gloo ranks that is started once and then runs one function after another.

Starting ranks costs many seconds (each imports torch and megatron-core), running a tiny model on them milliseconds. Tasks and results travel
pickled through a pipe for each rank; a task that fails or hangs costs its own test, and a hung pool is replaced by a fresh one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

START_SECONDS = 180.0
TASK_SECONDS = 120.0
GRACE_SECONDS = 5.0
"""How long the other ranks may go on after one has failed; they may wait for it in a collective."""


class RankError(RuntimeError):
    """A task failed or hung; the message holds the failing rank's traceback."""


@dataclass(frozen=True, slots=True)
class _Task:
    path: list[str]
    """The sender's import path: test modules are found only through it."""
    function: bytes
    """The pickled (function, arguments), unpickled after the path is set."""


@dataclass(frozen=True, slots=True)
class _Reply:
    result: Any
    error: str | None


class RankPool:
    """`world_size` gloo ranks on this machine, started on first use.

    A task is a function defined at the top of an importable module, called as function(rank, world_size, *args) on every rank with
    torch.distributed running; it makes and destroys its own ParallelContext.
    """

    def __init__(self, world_size: int) -> None:
        """Starts nothing yet."""
        self.world_size = world_size
        self._ranks: list[tuple[Any, Connection]] = []
        self._store = ""

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TASK_SECONDS) -> list[Any]:
        """Run a task on every rank and return its results in rank order.

        timeout: seconds, the ranks' start not counted. Raises RankError with the first failing rank's traceback, or when the task hangs.
        """
        if not self._ranks:
            self._start()
        task = pickle.dumps(_Task(list(sys.path), pickle.dumps((function, args))))
        for _, pipe in self._ranks:
            pipe.send_bytes(task)
        replies = self._collect(timeout, function.__name__)
        failed = [(rank, reply.error) for rank, reply in enumerate(replies) if reply is not None and reply.error is not None]
        if failed:
            if None in replies:
                self.close()
            raise RankError("\n".join(f"rank {rank} of {self.world_size} in {function.__name__}:\n{error}" for rank, error in failed))
        return [reply.result for reply in replies if reply is not None]

    def close(self) -> None:
        """End the ranks and whatever they started; the next task starts fresh ones."""
        for _, pipe in self._ranks:
            pipe.close()  # a rank that waits for a task ends by itself
        deadline = time.monotonic() + GRACE_SECONDS
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
        self._ranks = []
        shutil.rmtree(self._store, ignore_errors=True)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = tempfile.mkdtemp(prefix="ranks-")
        store = os.path.join(self._store, "store")
        for rank in range(self.world_size):
            here, there = context.Pipe()
            # Not daemonic: dist_checkpointing starts processes of its own to write.
            process = context.Process(target=_serve, args=(rank, self.world_size, store, there), daemon=False)
            process.start()
            there.close()
            self._ranks.append((process, here))
        replies = self._collect(START_SECONDS, "the ranks' start")
        failed = [reply.error for reply in replies if reply is not None and reply.error is not None]
        if failed:
            self.close()
            raise RankError(failed[0])

    def _collect(self, timeout: float, what: str) -> list[_Reply | None]:
        """One reply a rank, None for those still busy a while after another has failed. Raises RankError, pool closed, on a hang or a death."""
        replies: list[_Reply | None] = [None] * self.world_size
        deadline = time.monotonic() + timeout
        while None in replies and time.monotonic() < deadline:
            for rank, (process, pipe) in enumerate(self._ranks):
                if replies[rank] is None and pipe.poll(0.002):
                    try:
                        replies[rank] = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        process.join()
                        self.close()
                        raise RankError(f"rank {rank} died in {what}, exit code {process.exitcode}") from None
                    if replies[rank].error is not None:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if None in replies and all(reply is None or reply.error is None for reply in replies):
            self.close()
            raise RankError(f"{what} did not end in {timeout:g} s; ranks {[r for r, reply in enumerate(replies) if reply is None]} hang")
        return replies


def run_distributed(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = TASK_SECONDS) -> list[Any]:
    """Run function(rank, world_size, *args) on a pool of `world_size` ranks that this process keeps; results in rank order.

    Raises RankError with the failing rank's traceback, or when the task takes longer than `timeout` seconds.
    """
    return shared_pool(world_size).run(function, *args, timeout=timeout)


@functools.cache
def shared_pool(world_size: int) -> RankPool:
    """This process' pool of that size; it ends with the process."""
    pool = RankPool(world_size)
    atexit.register(pool.close)
    return pool


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    """Body of a rank: import once, then run tasks until the pipe closes."""
    os.setsid()  # a group of its own, so that a hung rank ends together with the processes it started
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        dist = _join(rank, world_size, store)
    except Exception:  # noqa: BLE001 - whatever stops a rank is told to the parent
        pipe.send_bytes(pickle.dumps(_Reply(None, traceback.format_exc())))
        return
    pipe.send_bytes(pickle.dumps(_Reply(None, None)))
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        pipe.send_bytes(_perform(task, rank, world_size))
    dist.destroy_process_group()


def _end_with_parent(parent: int) -> None:
    """A rank that hangs does not outlive a killed test run."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def _join(rank: int, world_size: int, store: str) -> Any:
    """Import megatron-core, start torch.distributed and return its module."""
    from megatron_elastic.platform import prepare_platform

    prepare_platform()
    import torch
    import torch.distributed as dist

    import megatron_elastic.models.build  # noqa: F401 - the import is what a task need not wait for

    gc.freeze()  # collections after tasks need not look at all that was imported
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    return dist


def _perform(task: _Task, rank: int, world_size: int) -> bytes:
    """Run one task and pickle its reply; a left-over parallel layout is dissolved, and what refers to itself is freed."""
    try:
        sys.path[:] = task.path
        function, args = pickle.loads(task.function)
        reply = pickle.dumps(_Reply(function(rank, world_size, *args), None))
    except Exception:  # noqa: BLE001 - the parent raises it
        reply = pickle.dumps(_Reply(None, traceback.format_exc()))
    from megatron_elastic.parallel import dissolve_groups

    dissolve_groups()
    # Optimizers and models in DDP refer to themselves, and would keep their process groups and those their threads. Twice, because an fp32
    # optimizer's shards hold the model by an autograd graph, which Python's collector does not see through until they are gone.
    gc.collect()
    gc.collect()
    return reply
