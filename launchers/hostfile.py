"""Run a megatron-elastic command on the machines of a hostfile, where there is no SLURM: through DeepSpeed's launcher, which uses pdsh and ssh.

python launchers/hostfile.py [--cluster NAME|FILE] [--ssh-port 22] HOSTFILE train RECIPE [...]
HOSTFILE: a line a machine, NAME slots=PROCESSES. Every machine has this clone, its environment and the run's directory under the same paths.
DeepSpeed puts words and variables into a remote shell unquoted, so they travel as one word without anything a shell would read.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_elastic.errors import EXIT_USER_ERROR, ConfigError, ElasticError, UnsupportedError
from megatron_elastic.launch import variables_of_command
from megatron_elastic.packed_task import pack


def deepspeed_words(hostfile: Path, cluster: str | None, ssh_port: int, command: Sequence[str]) -> list[str]:
    """The arguments of DeepSpeed's launcher. Raises ConfigError for a hostfile that is not there, and what a recipe or a cluster raises."""
    if not hostfile.is_file():
        raise ConfigError(f"{str(hostfile)!r} is not a file; write a line a machine: NAME slots=PROCESSES")
    packed = pack(command, {one.name: one.value for one in variables_of_command(cluster, command)})
    where = ["--hostfile", str(hostfile), "--force_multi", "--ssh_port", str(ssh_port)]
    return [*where, "--no_local_rank", "--module", "megatron_elastic.packed_task", packed]


def main(argv: Sequence[str] | None = None) -> None:
    """Start the command everywhere and wait for it. Exits with code 2 for what its user can mend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hostfile", type=Path)
    parser.add_argument("--cluster", metavar="NAME|FILE")
    parser.add_argument("--ssh-port", type=int, default=22)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    try:
        words = deepspeed_words(asked.hostfile, asked.cluster, asked.ssh_port, asked.command)
        runner = _runner()
    except ElasticError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_USER_ERROR)
    runner.main(words)


def _runner():  # noqa: ANN202 - a module of an optional package
    """DeepSpeed's launcher. Raises UnsupportedError where it is not installed."""
    try:
        return importlib.import_module("deepspeed.launcher.runner")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"launchers/hostfile.py needs DeepSpeed's launcher, and {error.name} is not installed; pip install deepspeed"
        ) from None


if __name__ == "__main__":
    main()
