#!/usr/bin/env bash
# From a parent to checked members: rank, sort, stage 1, stage 2, extract, verify, as jobs of which each waits for the one before.
#
# slurm/elastic_pipeline.sh [RECIPE] [key=value ...]
# On the machine that you submit from, in the project's environment. SBATCH_* and ELASTIC_CLUSTER are the jobs', see elastic_stage1.sh.
set -euo pipefail

home=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export ELASTIC_HOME=$home PYTHONPATH="$home${PYTHONPATH:+:$PYTHONPATH}"
[ "$#" -gt 0 ] || set -- "$home/recipes/nemotron_nano_v2_12b.yaml"
from_sorted=$(python3 -m megatron_elastic.launch pipeline -- "$@" | tr -d '\0')

before=""
submit() { # NAME ARGUMENT...: a job that starts when the one before has ended well, and not at all if that fails
  before=$(sbatch --parsable ${before:+"--dependency=afterok:$before" --kill-on-invalid-dep=yes} "$home/slurm/elastic_$1.sh" "${@:2}")
  echo "$1: $before"
}

submit rank "$@"
submit sort "$@"
for name in stage1 stage2 extract verify; do
  submit "$name" "$@" "$from_sorted"
done
