#!/usr/bin/env bash
# After stage 2: every member as a model of its own, in RUN/members.
#
# sbatch slurm/elastic_extract.sh [RECIPE] [key=value ...]
# Options: slurm/clusters/h100.yaml (another cluster: docs/cluster.md), one process in the memory of a node.
#SBATCH --job-name=elastic-extract
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=batch
#SBATCH --time=04:00:00
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --signal=USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
# shellcheck source=slurm/common.sh
source "${ELASTIC_HOME:-${SLURM_SUBMIT_DIR:?start it with sbatch}}/slurm/common.sh"

if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  rm -rf -- "$run_dir/members" # what this job wrote before it was requeued
fi
on_ranks extract "$run_dir" --out "$run_dir/members"
