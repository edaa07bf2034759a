#!/usr/bin/env bash
# The demo: a tiny hybrid parent becomes a family of three. Called by `make demo`, which provides the environment.
# Usage: [DEMO_STEPS=N] launchers/demo.sh [RUN_DIR]    DEMO_STEPS cuts every stage to N steps, to try the whole path in a minute.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
recipe=recipes/demo_hybrid.yaml
run=${1:-runs/demo}
data=runs/demo_data

step() { printf '\n== %s\n' "$*"; }
train() { launchers/local.sh 2 train "$recipe" ${DEMO_STEPS:+--steps "$DEMO_STEPS"} "data.path=$data" "$@"; }

step "plan: the budgets"
megatron-elastic plan "$recipe"

if [ ! -f "$data/data.json" ]; then
  step "data: the standard library's text as tokens"
  megatron-elastic data stdlib --out "$data"
fi

step "train: the parent, then two elastic stages, on two processes"
train "run_dir=$run"

step "train: the same family with frozen uniform sizes, from the same parent, to compare"
train "run_dir=${run}_uniform" "parent=$run/checkpoints/stage-parent" router.choice=uniform stages.parent=null

step "extract: every member"
rm -rf "$run/members" "${run}_uniform/members" # what an earlier demo wrote
megatron-elastic extract "$run" --out "$run/members"
megatron-elastic extract "${run}_uniform" --out "${run}_uniform/members"

step "verify: masked = sliced = extracted"
megatron-elastic verify "$run" --members "$run/members" --data "$data" --sequence-length 1024
megatron-elastic verify "${run}_uniform" --members "${run}_uniform/members" --data "$data" --sequence-length 1024

step "report"
megatron-elastic report "$run" --baseline "${run}_uniform"
