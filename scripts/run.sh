#!/usr/bin/env bash
# Run a command in the project's environment, which is made first where it is missing: scripts/run.sh COMMAND [ARGUMENT...]
# The package is imported from this clone, so clones share one environment. PYTHON=... picks the interpreter to build on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$("$root/scripts/find_python.sh" || command -v python3 || true)}
if [ -z "$python" ]; then
  echo "error: no python3 on PATH; install Python 3.11 or 3.12, or name one: PYTHON=/path/to/python3.11" >&2
  exit 2
fi
if ! "$python" -c "" 2>/dev/null; then
  echo "error: $python cannot be run; install Python 3.11 or 3.12, or name one: PYTHON=/path/to/python3.11" >&2
  exit 2
fi
# bootstrap.py refuses every other version by name, but cannot even be read by these.
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))'; then
  echo "error: $("$python" --version 2>&1) ($python) is not supported; install Python 3.11 or 3.12, or name one: PYTHON=/path/to/python3.11" >&2
  exit 2
fi

venv=$("$python" "$root/scripts/bootstrap.py")
export PATH="$venv/bin:$root/bin:$PATH"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Without a GPU, torch's compiler still asks for the properties of a CUDA device and fails.
[ -e /dev/nvidiactl ] || export TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}"
exec "$@"
