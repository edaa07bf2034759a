"""Make, once per machine, an environment with llama.cpp (llama-cpp-python), and print its interpreter's path.

It lies beside the project's environments (scripts/bootstrap.py). llama.cpp is compiled from its source package, which takes about six
minutes on one core and needs a C++ compiler; the wheel stays in `${MEGATRON_ELASTIC_CACHE:-~/.cache/megatron-elastic}/llama-cpp/wheels`,
so that other interpreters, and machines that are given the folder, take it from there.

Standard library only. Run: python scripts/llama_cpp.py
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from bootstrap import ROOT, SetupError, cache_root, environment_key, heartbeat, is_complete, run_step

PINS = ROOT / "requirements" / "llama_cpp.txt"
# For any x86-64 machine with AVX2 rather than for the one it is built on, as the folder may be copied; without the image models.
CMAKE_ARGS = "-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF"


def build(folder: Path, wheels: Path) -> None:
    """Make `folder`/venv, building the wheel in `wheels` first where it is missing.

    Raises:
        SetupError: a step failed.
    """
    log, python = folder / "setup.log", str(folder / "venv" / "bin" / "python")
    log.write_text("")
    pip = [python, "-I", "-m", "pip"]
    pin = next(line for line in PINS.read_text().splitlines() if line.startswith("llama-cpp-python=="))
    options = ["--disable-pip-version-check", "--no-input", "--no-deps"]
    run_step("1/3 an environment for llama.cpp", [sys.executable, "-I", "-m", "venv", "--clear", str(folder / "venv")], log)
    if not list(wheels.glob(f"llama_cpp_python-{pin.partition('==')[2]}-*.whl")):
        make = [
            "env",
            f"CMAKE_ARGS={CMAKE_ARGS}",
            *pip,
            "wheel",
            *options,
            "--no-binary",
            "llama-cpp-python",
            "--wheel-dir",
            str(wheels),
            pin,
        ]
        run_step(f"2/3 compiling {pin} (about six minutes)", make, log)
    run_step("3/3 installing it", [*pip, "install", *options, "--find-links", str(wheels), "-r", str(PINS)], log)


def ensure() -> Path:
    """Return the interpreter of the finished environment, building it if need be."""
    root = cache_root(os.environ) / "llama-cpp"
    folder, wheels = root / environment_key(PINS), root / "wheels"
    for path in (folder, wheels):
        path.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock, heartbeat("llama.cpp: its environment"):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete(folder):
            (folder / "complete").unlink(missing_ok=True)
            build(folder, wheels)
            (folder / "complete").touch()
    return folder / "venv" / "bin" / "python"


def main() -> int:
    """Print the interpreter's path; return the exit code."""
    try:
        print(ensure())
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
