#!/usr/bin/env bash
# The demo: a tiny hybrid parent becomes a family of three. Called by `make demo`, which provides the environment.
# Usage: launchers/demo.sh [RUN_DIR]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
recipe=recipes/demo_hybrid.yaml
run=${1:-runs/demo}

step() { printf '\n== %s\n' "$*"; }

step "data: the standard library's text as tokens"
megatron-elastic data "$recipe"

step "train: the parent, then two elastic stages"
megatron-elastic train "$recipe" "run_dir=$run"

for budget in full medium small; do
  step "extract: $budget"
  megatron-elastic extract "$run" --budget "$budget" --output "$run/extracted/$budget"
done

step "verify: masked = sliced = extracted"
megatron-elastic verify "$run"

step "report"
megatron-elastic report "$run"
