#!/usr/bin/env bash
# Print the path of a working Python of the first version named that is found (default: 3.11, then 3.12); exit 1 when there is none.
# "Working" is tried, not assumed: a version manager leaves names on PATH that start nothing, and some systems split venv off.
# Without versions named, plain `python3` wins if it is one of them.
set -euo pipefail

probe() { # COMMAND VERSION
  "$1" -c '
import ensurepip, sys, venv
if "%d.%d" % sys.version_info[:2] != sys.argv[1]:
    sys.exit(1)
print(sys.executable)' "$2" 2>/dev/null
}

if [ $# -eq 0 ]; then
  set -- 3.11 3.12
  for version in "$@"; do
    probe python3 "$version" && exit 0
  done
fi

for version in "$@"; do
  probe "python$version" "$version" && exit 0
  if command -v pyenv >/dev/null; then
    for installed in $(pyenv versions --bare 2>/dev/null | grep -E "^${version//./\\.}\.[0-9]+$" | sort -rV || true); do
      probe "$(pyenv root)/versions/$installed/bin/python" "$version" && exit 0
    done
  fi
done
exit 1
