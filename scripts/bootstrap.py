"""Make, once per machine, the environment that this project runs in, and print its path.

The environment lies outside the clone, in `${MEGATRON_ELASTIC_CACHE:-~/.cache/megatron-elastic}/<key>/venv`. The key is a hash of
the interpreter, the pin file and this script, so a change of any of them gives a new environment, and clones that agree share
one. A lock lets one process build while others wait; a stamp written last marks it complete, so that an interrupted build is
started over. The package itself is not installed: it is imported from the clone.

Standard library only: this runs before anything is installed. Progress goes to stderr, the path alone to stdout.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIN_FILES = {(3, 11): "py311.txt", (3, 12): "py312.txt"}
HEARTBEAT_SECONDS = 15.0


class SetupError(Exception):
    """A reason why the environment cannot be made, with the remedy."""


def pin_file(version: tuple[int, int]) -> Path:
    """Return the pin file of a Python version (major, minor).

    Raises:
        SetupError: there is none for this version.
    """
    if version not in PIN_FILES:
        known = " or ".join(f"{major}.{minor}" for major, minor in PIN_FILES)
        raise SetupError(
            f"Python {version[0]}.{version[1]} ({sys.executable}) is not supported; install Python {known}, "
            "or name one: PYTHON=/path/to/python3.11"
        )
    return ROOT / "requirements" / PIN_FILES[version]


def torch_pin(pins: str) -> str:
    """Return the requirement on torch alone, from the text of a pin file."""
    return next(line for line in pins.splitlines() if line.startswith("torch=="))


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the folder that holds all environments."""
    named = environ.get("MEGATRON_ELASTIC_CACHE")
    return Path(named).expanduser().resolve() if named else Path.home() / ".cache" / "megatron-elastic"


def environment_key(pins: Path) -> str:
    """Return a short hash of everything the environment is made from."""
    digest = hashlib.sha256()
    for part in (sys.version, sys.base_prefix, platform.machine()):
        digest.update(part.encode() + b"\0")
    for path in (pins, Path(__file__)):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def heartbeat(text: str) -> Iterator[None]:
    """Say `text` now and, while the block runs, that it is still going on."""
    say(text)
    started, done = time.monotonic(), threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            say(f"  ... {time.monotonic() - started:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run_step(text: str, command: Sequence[str], log: Path) -> None:
    """Run one step of the build, its output in `log`.

    Raises:
        SetupError: the command failed; the message ends with the last lines of its output.
    """
    with heartbeat(text), log.open("a") as output:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        tail = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-15:])
        raise SetupError(f"{text}: exit code {code}; mend the cause and run the same command again. All output: {log}\n{tail}")


def build(folder: Path, pins: Path) -> None:
    """Make `folder`/venv from nothing and install what `pins` lists."""
    venv, log = folder / "venv", folder / "setup.log"
    shutil.rmtree(venv, ignore_errors=True)
    log.write_text("")
    python = str(venv / "bin" / "python")
    pip = [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    torch = torch_pin(pins.read_text())
    run_step(f"1/3 a virtual environment in {venv}", [sys.executable, "-I", "-m", "venv", str(venv)], log)
    # torch first and alone: it is by far the largest, and a resolver that meets it together with packages that accept any
    # release may fetch several builds of it before it settles on the pinned one.
    run_step(f"2/3 installing {torch} (from a few seconds to a few minutes)", [*pip, torch], log)
    # The pin file lists every other package, so nothing is resolved, and a package may be pinned without what it asks for.
    run_step("3/3 installing the other packages (about a minute)", [*pip, "--no-deps", "-r", str(pins)], log)


def is_complete(folder: Path) -> bool:
    """Tell whether `folder` holds a finished environment whose interpreter still runs."""
    if not (folder / "complete").exists():
        return False
    probe = [str(folder / "venv" / "bin" / "python"), "-I", "-c", ""]
    try:
        return subprocess.run(probe, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def ensure_environment() -> Path:
    """Return the path of the finished environment of this interpreter and clone, building it if need be."""
    pins = pin_file(sys.version_info[:2])
    folder = cache_root(os.environ) / environment_key(pins)
    if is_complete(folder):
        return folder / "venv"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with heartbeat("waiting for another process that is making the same environment"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete(folder):
            started = time.monotonic()
            (folder / "complete").unlink(missing_ok=True)
            build(folder, pins)
            (folder / "complete").touch()
            say(f"done in {time.monotonic() - started:.0f} s")
    return folder / "venv"


def main() -> int:
    """Print the environment's path; return the exit code."""
    try:
        print(ensure_environment())
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: set-up interrupted; the next run starts it over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
