"""Submit a run to SLURM: python launchers/slurm.py RECIPE --cluster NAME|FILE --nodes N [...] is `megatron-elastic submit`."""

from __future__ import annotations

import sys

from megatron_elastic.cli.main import build_app, run

if __name__ == "__main__":
    run(build_app(), ["submit", *sys.argv[1:]])
