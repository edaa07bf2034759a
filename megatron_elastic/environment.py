"""What a machine has for a run: interpreter, packages, GPUs, communication, processors, memory, disk. torch is imported to ask it, if it is there."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_elastic import __version__
from megatron_elastic.errors import UnsupportedError
from megatron_elastic.packages import COSTS, installed_versions, version_of
from megatron_elastic.platform.versions import generation_of

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of what a machine has."""

    name: str
    """What was looked at."""
    found: str
    """What is there; "-" for nothing."""
    note: str = ""
    """What its absence costs, or what is wrong with it."""


def environment() -> list[Fact]:
    """Everything that decides what runs on this machine."""
    return [*_software(), *_packages(), *_torch(), *_machine()]


def _software() -> Iterator[Fact]:
    yield Fact("megatron-elastic", __version__)
    yield Fact("python", platform.python_version())
    yield Fact("system", f"{platform.system()} {platform.machine()}")
    for tool, cost in (("sbatch", "no SLURM: nothing can be submitted from here"), ("srun", "no SLURM: jobs cannot start here")):
        path = shutil.which(tool)
        yield Fact(tool, path or "-", "" if path else cost)


def _packages() -> Iterator[Fact]:
    for name, installed in installed_versions().items():
        yield Fact(name, installed or "-", COSTS[name] if installed is None else _unsupported(name, installed))


def _unsupported(name: str, installed: str) -> str:
    if name != "megatron-core":
        return ""
    try:
        generation_of(installed)
    except UnsupportedError as error:
        return str(error)
    return ""


def _torch() -> Iterator[Fact]:
    installed = version_of("torch")
    if installed is None:
        yield Fact("torch", "-", "nothing trains, ranks or extracts")
        return
    import torch
    import torch.distributed as dist

    yield Fact("torch", installed)
    built, cuda = torch.version.cuda, torch.cuda.is_available()
    yield Fact("CUDA", built or "-", "" if cuda else "torch sees no GPU" if built else "this torch is built for CPUs")
    yield Fact("NCCL", _nccl(torch, dist), "" if dist.is_nccl_available() else "processes cannot talk over GPUs")
    yield Fact("gloo", "yes" if dist.is_available() and dist.is_gloo_available() else "-")
    for number in range(torch.cuda.device_count() if cuda else 0):
        properties = torch.cuda.get_device_properties(number)
        yield Fact(f"GPU {number}", f"{properties.name}, {properties.total_memory / GIB:.1f} GiB")


def _nccl(torch: Any, dist: Any) -> str:
    if not dist.is_nccl_available():
        return "-"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _machine() -> Iterator[Fact]:
    usable = len(os.sched_getaffinity(0))
    yield Fact("CPUs", f"{usable} of {os.cpu_count()} usable")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Fact("memory", f"{memory / GIB:.1f} GiB")
    for name, path, least in (("disk here", Path.cwd(), 0), ("shared memory", Path("/dev/shm"), GIB)):  # noqa: S108 - a size is read, nothing written
        if path.exists():
            usage = shutil.disk_usage(path)
            low = "processes of a node exchange through it; start containers with more (--shm-size)" if usage.total < least else ""
            yield Fact(name, f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free at {path}", low)
