#!/usr/bin/env bash
# Run a command in the project's environment, which is made first where it is missing: scripts/run.sh COMMAND [ARGUMENT...]
# The package is imported from this clone, so clones share one environment. PYTHON=... picks the interpreter to build on.
set -euo pipefail

remedy="install Python 3.11 or 3.12, or name one: PYTHON=/path/to/python3.11"

refuse() { # MESSAGE
  echo "error: $1; $remedy" >&2
  exit 2
}

main() { # a function is read whole before it runs: set-up takes minutes, and the file may change under it
  local root python venv
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  python=${PYTHON:-$("$root/scripts/find_python.sh" || command -v python3 || echo python3)}
  "$python" -c "" 2>/dev/null || refuse "$python cannot be run"
  # bootstrap.py refuses every other version by name, but cannot even be read by these.
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' || refuse "$("$python" --version 2>&1) ($python) is not supported"

  venv=$("$python" "$root/scripts/bootstrap.py")
  export PATH="$venv/bin:$root/bin:$PATH"
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  # Without a GPU, torch's compiler still asks for the properties of a CUDA device and fails.
  [ -e /dev/nvidiactl ] || export TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}"
  exec "$@"
}

main "$@"
