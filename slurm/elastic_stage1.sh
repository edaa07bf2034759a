#!/usr/bin/env bash
# Stage 1, the short context; before it the parent, where the recipe trains it. Told to stop, it saves and goes back to the queue.
#
# sbatch slurm/elastic_stage1.sh [RECIPE] [key=value ...]
# Options: slurm/clusters/h100.yaml (another cluster: docs/cluster.md), 8 nodes.
#SBATCH --job-name=elastic-stage1
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

on_ranks train "$recipe" --stage "$first_stage"
