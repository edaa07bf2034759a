#!/usr/bin/env bash
# Install this project into a virtual environment at PREFIX, as both images do: docker/install.sh cpu|gpu PREFIX
#
# cpu: on top of the pinned packages that scripts/bootstrap.py makes for this interpreter, the same as a clone runs on.
# gpu: on top of NVIDIA's PyTorch image, with what requirements/py312.txt and requirements/gpu.txt pin; compiles for half an hour or so.
# At the end docker/check_image.py says what is there, what is missing and what that costs; its exit code is this script's.
# PYTHON names the interpreter (default: python3).
set -euo pipefail

refuse() { # MESSAGE
  echo "error: $1" >&2
  exit 2
}

site_packages() { # PYTHON
  "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

install_package() { # PIP_PYTHON PREFIX
  "$1" -m pip --python "$2/bin/python" install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation "$root"
  rm -rf "$root/build" "$root"/*.egg-info # what the build leaves in the sources would be packed into the next one
}

install_cpu() { # PREFIX
  local below
  below=$("$python" "$root/scripts/bootstrap.py")
  "$below/bin/python" -m venv --without-pip "$1"
  site_packages "$below/bin/python" >"$(site_packages "$1/bin/python")/pinned.pth"
  install_package "$below/bin/python" "$1"
}

python_pins() { # everything that requirements/py312.txt pins for a run, but what stays the image's and what requirements/gpu.txt has
  awk '/^#/ { skipped = /Extra: dev|pretrained model/ } !/^#/ && NF && !skipped' "$root/requirements/py312.txt" |
    grep -vE '^(torch|triton|numpy|megatron-core)=='
}

gpu_pins() { # PREFIX
  if "$1/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("apex") is None)'; then
    grep -v '^apex @' "$root/requirements/gpu.txt"
  else
    cat "$root/requirements/gpu.txt"
  fi
}

install_gpu() { # PREFIX
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || refuse "the GPU image needs Python 3.12; use a newer base image"
  "$python" -c 'import torch' 2>/dev/null || refuse "$python has no torch; start from NVIDIA's PyTorch image"
  "$python" -m venv --system-site-packages "$1"
  local pip=("$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation)
  # The image's constraints name the versions that it has itself; ours replace some of them, inside the virtual environment only.
  export PIP_CONSTRAINT=
  # Compile against the image's torch rather than take a wheel made for another.
  export CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch APEX_CPP_EXT=1 APEX_CUDA_EXT=1
  python_pins >"$1/python-pins.txt"
  gpu_pins "$1" >"$1/gpu-pins.txt"
  "${pip[@]}" -r "$1/python-pins.txt"
  "${pip[@]}" -r "$1/gpu-pins.txt"
  install_package "$1/bin/python" "$1"
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
target=${1:-} prefix=${2:-}
[ -n "$prefix" ] || refuse "usage: docker/install.sh cpu|gpu PREFIX"
[ ! -e "$prefix" ] || refuse "$prefix is there already; remove it or choose another PREFIX"
case $target in
cpu | gpu) "install_$target" "$prefix" ;;
*) refuse "target '$target' is not cpu or gpu" ;;
esac
exec "$prefix/bin/python" "$root/docker/check_image.py" "$target"
