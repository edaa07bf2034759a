"""Run a megatron-elastic command on several processes of this machine, through torchrun.

python launchers/local.py [--cluster NAME|FILE] PROCESSES train RECIPE [...]
--cluster: what this machine is, for the variables that suit its GPUs; without it only those are set that suit every machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_elastic.errors import EXIT_USER_ERROR, ElasticError
from megatron_elastic.launch import variables_of_command


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Become torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", type=int)
    parser.add_argument("--cluster", metavar="NAME|FILE")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    try:
        found = variables_of_command(asked.cluster, asked.command)
    except ElasticError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_USER_ERROR)
    processes = ["--standalone", "--nproc-per-node", str(asked.processes)]
    words = [sys.executable, "-m", "torch.distributed.run", *processes, "-m", "megatron_elastic.cli.main", *asked.command]
    os.execve(sys.executable, words, {**os.environ, **{one.name: one.value for one in found}})


if __name__ == "__main__":
    main()
