# shellcheck shell=bash
# What the jobs of a run share. Sourced by the scripts beside it, in a job, with their arguments: [RECIPE] [key=value ...]
# It leaves: $run_dir and $recipe (resolved, a copy of the job's own), $first_stage, $parent, $data, and the function on_ranks.

refuse() { # MESSAGE
  echo "error: $1" >&2
  exit 2
}

words() { # ARRAY ARGUMENT...: what megatron_elastic.launch prints, a word an entry; nothing of it is read as shell code
  local -n into=$1
  # shellcheck disable=SC2034 # it is the caller's array
  mapfile -d '' -t into < <(python3 -m megatron_elastic.launch "${@:2}")
  wait "$!" ||
    refuse "python3 -m megatron_elastic.launch $2: see above; sbatch must be called with the project's environment activated"
}

on_ranks() { # COMMAND ARGUMENT...: megatron-elastic on every task of the job, the log of each in the run directory
  local logs="$run_dir/logs/$SLURM_JOB_NAME-$SLURM_JOB_ID" code=0
  mkdir -p "$run_dir/logs"
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_NTASKS" --ntasks-per-node="$SLURM_NTASKS_PER_NODE" --distribution=block --cpu-bind=none \
    --kill-on-bad-exit=1 --output="${logs//%/%%}-rank%t.log" --open-mode=append "${container[@]}" \
    env "PYTHONPATH=$PYTHONPATH" "${environment[@]}" python3 -m megatron_elastic.slurm_task "$@" || code=$?
  case $code in
    0) ;;
    85) # the ranks were told to stop, and everything is saved
      if [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        echo "stopped and saved; job $SLURM_JOB_ID goes back to the queue"
        scontrol requeue "$SLURM_JOB_ID"
      else # by scancel, or at the time limit in spite of the signal before it
        echo "stopped and saved; job $SLURM_JOB_ID has ended, the same command goes on from here"
      fi
      exit "$code"
      ;;
    *)
      last_words "$logs"
      exit "$code"
      ;;
  esac
}

last_words() { # LOGS: what the logs of ranks say from their first error on, a few logs at most; ranks that only lost another one know less
  local errors='^(error: |Traceback |Fatal Python error)' failed own=() log
  mapfile -t failed < <(grep -lE "$errors" -- "$1"-rank*.log)
  if [ "${#failed[@]}" -gt 0 ]; then
    mapfile -t own < <(grep -L 'lost contact with another rank' -- "${failed[@]}")
    [ "${#own[@]}" = 0 ] || failed=("${own[@]}")
  fi
  for log in "${failed[@]:0:3}"; do
    printf '==> %s <==\n' "$log" >&2
    grep -E -m 1 -A 100 "$errors" -- "$log" >&2
  done
  echo "error: $SLURM_JOB_NAME failed; the log of every rank: $1-rank*.log" >&2
}

[ -n "${SLURM_JOB_ID:-}" ] || refuse "not in a job; start the script with sbatch"
export PYTHONPATH="${ELASTIC_HOME:-$SLURM_SUBMIT_DIR}${PYTHONPATH:+:$PYTHONPATH}"
[ "$#" -gt 0 ] || set -- "${ELASTIC_HOME:-$SLURM_SUBMIT_DIR}/recipes/nemotron_nano_v2_12b.yaml"

# The scheduler tells the ranks, which save and end; this shell stays to send the job back to the queue.
trap : TERM USR1

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") && [ -n "$hosts" ] || refuse "scontrol cannot say which hosts are $SLURM_JOB_NODELIST"
address=$(head -n 1 <<<"$hosts")

job=() container=() environment=()
words job recipe --job "$SLURM_JOB_ID" --restarts "${SLURM_RESTART_COUNT:-0}" -- "$@"
# shellcheck disable=SC2034 # for the scripts that source this
run_dir=${job[0]} recipe=${job[1]} first_stage=${job[2]} parent=${job[3]} data=${job[4]}
words container container --cluster "${ELASTIC_CLUSTER:-h100}"
words environment environment --cluster "${ELASTIC_CLUSTER:-h100}" --job "$SLURM_JOB_ID" --address "$address" -- "$recipe"
echo "$SLURM_JOB_NAME $SLURM_JOB_ID on $SLURM_JOB_NUM_NODES nodes, $SLURM_NTASKS ranks from $address on; $run_dir"
