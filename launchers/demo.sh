#!/usr/bin/env bash
# The demo: a tiny hybrid parent becomes a family of three. Called by `make demo`, which provides the environment.
# Usage: [DEMO_STEPS=N] launchers/demo.sh [RUN_DIR]    DEMO_STEPS cuts every stage to N steps, to try the whole path in a minute.
# Started again, it goes on where it was.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
recipe=recipes/demo_hybrid.yaml
run=${1:-runs/demo}
parent=${run}_parent
data=runs/demo_data

step() { printf '\n== %s\n' "$*"; }
train() { python launchers/local.py 2 train "$recipe" ${DEMO_STEPS:+--steps "$DEMO_STEPS"} "data.path=$data" "$@"; }

step "plan: the budgets"
megatron-elastic plan "$recipe"

if [ ! -f "$data/data.json" ]; then
  step "data: the standard library's text as tokens"
  megatron-elastic data stdlib --out "$data"
fi

step "train: the parent, on two processes"
train "run_dir=$parent" --stage parent

if [ ! -f "$parent/parent.ranking" ]; then
  step "rank: how important every component of the parent is"
  python launchers/local.py 2 rank "$recipe" "run_dir=$parent" "data.path=$data" --tokens 16384 --out "$parent/parent.ranking"
fi

if [ ! -d "$parent/sorted" ]; then
  step "sort: the same parent with the best components first"
  megatron-elastic sort "$parent" --ranking "$parent/parent.ranking" --out "$parent/sorted"
fi

step "train: the family, in two elastic stages"
train "run_dir=$run" "parent=$parent/sorted" stages.parent=null

step "train: the same family with frozen uniform sizes, from the same parent, to compare"
train "run_dir=${run}_uniform" "parent=$parent/sorted" stages.parent=null router.choice=uniform

step "extract: every member"
rm -rf "$run/members" "${run}_uniform/members" # what an earlier demo wrote
megatron-elastic extract "$run" --out "$run/members"
megatron-elastic extract "${run}_uniform" --out "${run}_uniform/members"

step "verify: masked = sliced = extracted"
megatron-elastic verify "$run" --members "$run/members" --data "$data" --sequence-length 1024
megatron-elastic verify "${run}_uniform" --members "${run}_uniform/members" --data "$data" --sequence-length 1024

step "report"
megatron-elastic report "$run" --baseline "${run}_uniform"
