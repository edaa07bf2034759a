"""A real SLURM of two nodes on this machine, in a directory of its own: a controller and two node daemons, ended with the block.

Debian's package is enough (slurm-wlm); where it is not installed and this is root, it is installed first. Where that cannot be, a test is skipped,
or fails if NEED_SLURM=1, which `.ci/run` sets. Nothing outside the directory is changed, and another SLURM on the machine is not touched.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    directory: Path
    """Its configuration, state and logs."""
    environment: Mapping[str, str]
    """What its commands need."""

    def command(self, *words: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """What a command prints; fails with what it says when it does not end well."""
        done = subprocess.run(
            words, env={**self.environment, **(environment or {})}, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """What the controller says of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "show", "job", str(number))))

    def wait(self, number: int, seconds: float, *, for_state: str | None = None) -> str:
        """The state of a job once it has ended, or is in `for_state`. Fails when that takes longer."""
        end = time.monotonic() + seconds
        while (state := self.job(number)["JobState"]) not in ENDED and state != for_state:
            assert time.monotonic() < end, f"job {number} is {state} after {seconds:g} s: {self.job(number)}"
            time.sleep(0.2)
        return state


@contextmanager
def two_nodes(directory: Path) -> Iterator[Slurm]:
    """Start it, and stop it and whatever it runs at the end."""
    if (reason := _missing()) is not None:
        (pytest.fail if os.environ.get("NEED_SLURM") == "1" else pytest.skip)(reason)
    nodes = (socket.gethostname(), f"{socket.gethostname()}-b")  # ranks meet at the first, so that its name must be one that resolves
    (directory / "slurm.conf").write_text(_configuration(directory, nodes), encoding="utf-8")
    environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    slurm = Slurm(directory, environment)
    with ExitStack() as stack:
        daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in nodes)]
        for number, words in enumerate(daemons):
            log = stack.enter_context((directory / f"daemon{number}.log").open("wb"))
            process = subprocess.Popen([str(_find(words[0])), *words[1:]], env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)
        _wait_until_idle(slurm, len(nodes))
        stack.callback(_cancel_all, slurm)
        yield slurm


def _wait_until_idle(slurm: Slurm, number: int) -> None:
    end, found = time.monotonic() + 30, None
    while time.monotonic() < end:
        found = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"], env=dict(slurm.environment), capture_output=True, text=True
        )
        if found.stdout.split() == ["idle"] * number:
            return
        time.sleep(0.1)
    logs = "\n".join(path.read_text(encoding="utf-8", errors="replace")[-2000:] for path in sorted(slurm.directory.glob("*.log")))
    raise AssertionError(f"SLURM did not start: {found}\n{logs}")


def _cancel_all(slurm: Slurm) -> None:
    subprocess.run(["scancel", "--user", getpass.getuser()], env=dict(slurm.environment), check=False)
    end = time.monotonic() + 20
    while time.monotonic() < end and slurm.command("squeue", "--noheader").strip():
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _missing() -> str | None:
    """Install SLURM where it is missing and this is root; why there is none, None once there is one."""
    if all(map(_find, PROGRAMS)):
        return None
    if os.geteuid() != 0:
        return "SLURM is not installed, and only root can: apt-get install slurm-wlm"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["apt-get", "update", "-qq"], ["apt-get", "install", "-qq", "--no-install-recommends", "slurm-wlm"]):
        try:
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"SLURM is not installed (slurm-wlm of Debian and Ubuntu): {error}"
        if done.returncode != 0:
            return f"SLURM is not installed, and {' '.join(words)} fails: {' '.join(done.stderr.split())[-300:]}"
    lacking = [program for program in PROGRAMS if _find(program) is None]
    return f"slurm-wlm is installed, and lacks {', '.join(lacking)}" if lacking else None


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _configuration(directory: Path, nodes: tuple[str, ...]) -> str:
    controller, *ports = _free_ports(1 + len(nodes))
    user = getpass.getuser()
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/none",
        "CredType=cred/none",
        "AuthInfo=cred_expire=5",  # a requeued job waits for so long
        f"StateSaveLocation={directory}/state",
        f"SlurmctldPidFile={directory}/slurmctld.pid",
        f"SlurmctldLogFile={directory}/slurmctld.log",
        f"SlurmdSpoolDir={directory}/spool-%n",
        f"SlurmdPidFile={directory}/slurmd-%n.pid",
        f"SlurmdLogFile={directory}/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "MpiDefault=none",
        "ReturnToService=2",
        "MinJobAge=3600",
        "SchedulerParameters=sched_interval=1,bf_interval=1",  # a job that may start again is looked for every minute by default
        "SlurmdParameters=config_overrides",  # two nodes have more processors than the machine they are on
        *(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000"
            for name, port in zip(nodes, ports, strict=True)
        ),
        "PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    return "\n".join(lines) + "\n"
