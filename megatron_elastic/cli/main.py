"""Entry point of `megatron-elastic`: collects the commands and turns a user's error into one message.

A command is a module of this package with a function `command`, whose signature is its command line and whose docstring is its
help. Such a module imports torch and megatron-core only inside that function, so that `--help` and the offline commands start at once.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, NoReturn

import typer

from megatron_elastic import __version__
from megatron_elastic.errors import EXIT_RANK_LOST, EXIT_REQUEUE, EXIT_USER_ERROR, ElasticError, RankLostError, StoppedError

PROGRAM = "megatron-elastic"
COMMANDS = (
    "import",
    "data",
    "train",
    "plan",
    "validate",
    "doctor",
    "submit",
    "rank",
    "sort",
    "reap",
    "extract",
    "verify",
    "eval",
    "generate",
    "report",
)
"""Modules of this package, in the order in which `--help` lists them."""

SECONDS_FOR_THE_FIRST = 3.0
"""How long the other processes of a run wait before they end on a user's error."""


def describe_versions() -> str:
    """Return one line per package that decides what a run does, read from metadata without importing it."""
    lines = [f"{PROGRAM} {__version__}"]
    for package in ("torch", "megatron-core"):
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return "\n".join(lines)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(describe_versions())
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Train one model that holds a family of nested sub-models, and cut the members out."""


def build_app() -> typer.Typer:
    """Return the command line with every command of `COMMANDS`."""
    # Unknown exceptions keep Python's own traceback: the pretty one hides frames and prints local tensors.
    app = typer.Typer(name=PROGRAM, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    for name in COMMANDS:
        app.command(name)(importlib.import_module(f"megatron_elastic.cli.{name}").command)
    return app


def _requeue_code(rank: int) -> int:
    return EXIT_REQUEUE


def run(app: typer.Typer, arguments: Sequence[str] | None = None, *, when_stopped: Callable[[int], int] = _requeue_code) -> None:
    """Run `app` on `arguments` (default: the process's) and exit.

    An `ElasticError` becomes one message on stderr and exit code 2; any other exception keeps its traceback. Of several processes
    (RANK, as torchrun sets it) the first prints the message: what stops one rank is raised on all. The loss of a rank (exit code 75, "try
    again") is what each of the others says by itself, and ends it at once. Being told to stop (85, "start again") ends all at once;
    `when_stopped` gives a rank's code then, for a launcher that would not pass 85 on.

    Raises:
        SystemExit: always, unless an unknown exception propagates.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name=PROGRAM)
    except RankLostError as error:
        typer.echo(f"error: {error}", err=True)
        _leave(EXIT_RANK_LOST)  # the interpreter's own end would wait for transfers to ranks that wait for this one
    except StoppedError as stop:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"stopped: {stop}", err=True)
        _leave(
            when_stopped(int(os.environ.get("RANK", "0")))
        )  # the interpreter's own end takes unequal time, and gives up the handlers of signals before it is over
    except ElasticError as error:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"error: {error}", err=True)
        else:
            time.sleep(SECONDS_FOR_THE_FIRST)  # a launcher ends all processes when one does; the first must have spoken by then
        sys.exit(EXIT_USER_ERROR)


def _leave(code: int) -> NoReturn:
    """End the process at once with an exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run the command line; the console script and `python -m megatron_elastic.cli.main` both end here."""
    run(build_app())


if __name__ == "__main__":
    main()
