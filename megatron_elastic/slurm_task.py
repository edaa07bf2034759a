"""A rank as srun starts it: SLURM's variables become those of a rank, then the command line runs in this process.

srun --ntasks-per-node=8 ... python3 -m megatron_elastic.slurm_task train RECIPE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import MutableMapping

from megatron_elastic.cli.main import build_app, run
from megatron_elastic.errors import EXIT_REQUEUE, EXIT_USER_ERROR, ConfigError

_FROM_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}
"""A rank's variable -> the one that srun sets in each task."""
SECONDS_FOR_THE_OTHERS = 5.0
"""How long rank 0 stays when all stop together."""


def become_rank(environment: MutableMapping[str, str]) -> None:
    """Set the variables that say which rank this is. Raises ConfigError outside a task of srun, or when nobody said where ranks meet."""
    missing = [name for name in (*_FROM_SLURM.values(), "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} is not set: this starts a rank of a job; submit one (megatron-elastic submit, or slurm/*.sh)"
        )
    environment.update({name: environment[source] for name, source in _FROM_SLURM.items()})


def code_when_stopped(rank: int) -> int:
    """The exit code of a rank when all were told to stop.

    srun ends every task that is still there when one ends with another code than 0, and then reports the signal that it ended them by. So all but
    rank 0 end with 0, and rank 0 a little later with the code that the job's script waits for.
    """
    if rank != 0:
        return 0
    time.sleep(SECONDS_FOR_THE_OTHERS)
    return EXIT_REQUEUE


def main() -> None:
    """Run the command line as a rank."""
    try:
        become_rank(os.environ)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_USER_ERROR)
    run(build_app(), when_stopped=code_when_stopped)


if __name__ == "__main__":
    main()
