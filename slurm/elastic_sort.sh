#!/usr/bin/env bash
# After rank: the same parent with its most important components first, in RUN/sorted.
#
# sbatch slurm/elastic_sort.sh [RECIPE] [key=value ...]
# Options: slurm/clusters/h100.yaml (another cluster: docs/cluster.md), one process in the memory of a node.
#SBATCH --job-name=elastic-sort
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

[ -n "$parent" ] || refuse "$recipe has no parent to sort; set parent=PATH"
if [ ! -e "$run_dir/sorted" ]; then
  on_ranks sort "$parent" --ranking "$run_dir/parent.ranking" --recipe "$recipe" --out "$run_dir/sorted"
fi
