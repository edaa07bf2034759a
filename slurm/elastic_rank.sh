#!/usr/bin/env bash
# Before stage 1: how important every component of the recipe's parent is, into RUN/parent.ranking.
#
# sbatch slurm/elastic_rank.sh [RECIPE] [key=value ...]
# Options: slurm/clusters/h100.yaml (another cluster: docs/cluster.md), 8 nodes.
#SBATCH --job-name=elastic-rank
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
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

if [ ! -e "$run_dir/parent.ranking" ]; then
  on_ranks rank "$recipe" --out "$run_dir/parent.ranking"
fi
