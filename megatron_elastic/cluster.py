"""Clusters: one YAML file says what a job asks the scheduler for and what its nodes are. Plain Python, no torch.

`--cluster NAME` means slurm/clusters/NAME.yaml of this project, `--cluster PATH.yaml` a file of one's own. Decoding is as strict as that of
recipes, and what would end up in a script is refused where the scheduler could not take it or it is a secret.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_elastic.config import decode
from megatron_elastic.errors import ConfigError, raise_all
from megatron_elastic.formats import CLUSTER
from megatron_elastic.hardware import GPUS, Gpu
from megatron_elastic.recipe_files import read_yaml

CLUSTERS = Path(__file__).resolve().parents[1] / "slurm" / "clusters"
"""Where the clusters with a name are: in the checkout; an installed package has none and takes paths."""

_WORD = re.compile(r"[\w.,:@+%=/-]+", re.ASCII)
"""What a value of an sbatch option may be here: nothing that needs quotes, which its comment lines do not know."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})")
_MEMORY = re.compile(r"(?P<number>\d+)(?P<unit>[KMGT]?)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.IGNORECASE)
_OF_THE_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables that say which process is which: one place sets them, for every job anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """The image that a job's processes run in (pyxis and enroot)."""

    image: str
    """A squashfs file or an enroot URI."""
    mounts: tuple[str, ...] = ()
    """SOURCE:DESTINATION of each directory that is seen inside."""
    workdir: str | None = None
    """Where processes start inside; null: the directory that the job is submitted from."""
    mount_home: bool = False
    """Whether the home directory is seen inside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes that are alike, and how a job gets some of them."""

    format_version: int
    """Version of this format."""
    device: Literal["cuda", "cpu"]
    """What processes compute on."""
    gpu: str | None = None
    """The kind of GPU, a name of `hardware.GPUS`; null: memory and time are not estimated."""
    gpus_per_node: int
    """Processes of a node: one a GPU, or as many as wanted without GPUs."""
    partition: str | None = None
    """SLURM partition; null: the site's default, as for the next three."""
    account: str | None = None
    """SLURM account."""
    qos: str | None = None
    """SLURM quality of service."""
    reservation: str | None = None
    """SLURM reservation."""
    time: str
    """Longest time of one job as SLURM writes it: MINUTES, HH:MM:SS, D-HH:MM:SS."""
    memory: str | None = None
    """Memory of a node as SLURM writes it: 512G; "0" for all of it; null: the site's default."""
    exclusive: bool = False
    """Whether a job shares its nodes with nobody."""
    signal_lead: int = 300
    """Seconds before the time limit at which the processes are told to save and end."""
    container: Container | None = None
    """What the processes run in; null: the environment that the job is submitted from."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every process."""

    @property
    def hardware(self) -> Gpu | None:
        """The GPU; None without one, or when the file does not name it."""
        return None if self.gpu is None else GPUS[self.gpu]

    @property
    def time_seconds(self) -> int:
        """Longest time of one job in seconds."""
        seconds = _seconds(self.time)
        assert seconds is not None
        return seconds

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a node; None where the file does not say."""
        found = _MEMORY.fullmatch(self.memory or "")
        if found is None or int(found["number"]) == 0:
            return None
        return int(found["number"]) * 1024 ** " KMGT".index(found["unit"] or "M")

    def problems(self) -> list[str]:
        """Everything wrong with these values, one line each."""
        found = self._hardware_problems()
        for key in ("partition", "account", "qos", "reservation"):
            value = getattr(self, key)
            if value is not None and not _WORD.fullmatch(value):
                found.append(f"{key} {value!r} must be one word of letters, digits and .,:@+%=/_-; it goes into a script's header as it is")
        seconds = _seconds(self.time)
        if seconds is None or seconds == 0:
            found.append(f'time {self.time!r} is no time of SLURM\'s; write HH:MM:SS or D-HH:MM:SS in quotes, as in time: "04:00:00"')
        elif self.signal_lead >= seconds:
            found.append(f"signal_lead {self.signal_lead} must be below the {seconds} seconds of time {self.time!r}; lower it")
        if self.signal_lead < 1:
            found.append(f"signal_lead {self.signal_lead} must be at least 1")
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            found.append(f'memory {self.memory!r} is no amount of SLURM\'s; write it as in memory: 512G, or "0" for all of a node')
        return found + _container_problems(self.container) + _environment_problems(self.environment)

    def _hardware_problems(self) -> list[str]:
        found = []
        if self.gpus_per_node < 1:
            found.append(f"gpus_per_node {self.gpus_per_node} must be at least 1")
        if self.gpu is not None and self.device == "cpu":
            found.append(f"gpu {self.gpu!r} needs device cuda; remove it, or set device to cuda")
        elif self.gpu is not None and self.gpu not in GPUS:
            near = difflib.get_close_matches(self.gpu, GPUS, 1)
            found.append(
                f"gpu {self.gpu!r} is not known; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(GPUS)}, or null")
            )
        return found


def load_cluster(name_or_path: str) -> Cluster:
    """The cluster of that name (`cluster_names`), or in the YAML file of that path, checked.

    Raises ConfigError with every problem at once, each with its key.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if name_or_path not in cluster_names():
            raise ConfigError(f"--cluster {name_or_path!r} is not a cluster; {_remedy(name_or_path)}")
        path = CLUSTERS / f"{name_or_path}.yaml"
    data = read_yaml(path, what="cluster", remedy=_remedy(path.stem))
    CLUSTER.check(data, str(path))
    cluster = decode(Cluster, data, str(path))
    raise_all(ConfigError, cluster.problems(), str(path))
    return cluster


def cluster_names() -> list[str]:
    """The clusters that have a name."""
    return sorted(path.stem for path in CLUSTERS.glob("*.yaml"))


def _remedy(name: str) -> str:
    """What to write instead of the name, or the name of a file, of a cluster that is not there."""
    names = cluster_names()
    near = difflib.get_close_matches(name, names, 1)
    known = f"did you mean {near[0]}?" if near else f"clusters: {', '.join(names)}" if names else "an installed package has none"
    return f"{known}; or give the path of a YAML file"


def _seconds(text: str) -> int | None:
    """Seconds of a time as sbatch --time reads it; None when it cannot."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    numbers = [int(number) for number in found["fields"].split(":")]
    if found["days"] is None and len(numbers) < 3:  # MINUTES, MINUTES:SECONDS
        return numbers[0] * 60 + sum(numbers[1:])
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _container_problems(container: Container | None) -> list[str]:
    if container is None:
        return []
    found = []
    for key, value in (("image", container.image), ("workdir", container.workdir)):
        if value is not None and (not value or not value.isprintable()):
            found.append(f"container.{key} {value!r} must be a line of text; change it")
    for number, mount in enumerate(container.mounts):
        parts = mount.split(":")
        if not mount.isprintable() or "," in mount or len(parts) not in (2, 3) or not all(parts):
            found.append(
                f"container.mounts[{number}] {mount!r} must be SOURCE:DESTINATION without commas, as in /shared:/shared (and :ro, to read only)"
            )
    return found


def _environment_problems(environment: Mapping[str, str]) -> list[str]:
    found = []
    for name, value in environment.items():
        if not _NAME.fullmatch(name):
            found.append(f"environment.{name} is not the name of a variable; use letters, digits and _")
        elif name in _OF_THE_LAUNCHER:
            found.append(f"environment.{name} is set for every job by its launcher; remove it")
        elif _SECRET.search(name):
            found.append(
                f"environment.{name}: a secret would stand in scripts and logs; export it in the shell that submits, and remove it here"
            )
        elif not value.isprintable():
            found.append(f"environment.{name} {value!r} must be one line of text")
    return found
