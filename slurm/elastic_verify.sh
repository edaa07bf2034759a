#!/usr/bin/env bash
# After extract: every member against the family that it was cut out of, in logits and on held-out text.
#
# sbatch slurm/elastic_verify.sh [RECIPE] [key=value ...]
# Options: slurm/clusters/h100.yaml (another cluster: docs/cluster.md), one process in the memory of a node.
#SBATCH --job-name=elastic-verify
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

on_ranks verify "$run_dir" --members "$run_dir/members" --data "$data"
