#!/usr/bin/env bash
# Run a megatron-elastic command on several processes of this machine: launchers/local.sh PROCESSES train RECIPE [...]
set -euo pipefail

processes=$1
shift
exec python -m torch.distributed.run --standalone --nproc-per-node "$processes" -m megatron_elastic.cli.main "$@"
