"""What the tests of whole runs share: a tiny recipe and its text, new processes to run them in, and a reader of what they leave.

A run makes its own parallel layout and may be killed, so each has a process of its own. Starting one would import torch and megatron-core
for many seconds; here a process that has imported both is forked instead (multiprocessing's forkserver).
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megatron_elastic.config import decode_recipe
from megatron_elastic.recipe import Recipe
from megatron_elastic.recipe_files import read_yaml

RECIPE = Path(__file__).parent / "recipes" / "tiny.yaml"
SECONDS = 120.0


def write_data(directory: Path) -> Path:
    """A data directory of 60 short texts, written by `megatron-elastic data`'s own function."""
    from megatron_elastic.corpus.write import CorpusOptions
    from megatron_elastic.corpus.write import write_data as write

    (directory / "texts").mkdir(parents=True)
    for number in range(60):
        text = f"text number {number} says {number * number} " * (3 + number % 7)
        (directory / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    write(CorpusOptions(sources=(str(directory / "texts"),), holdout=0.3), directory / "data")
    return directory / "data"


def plain_recipe(run_dir: Path, data: Path | None, **changes: Any) -> dict[str, Any]:
    """The tiny recipe as plain data. changes: whole entries of its top level."""
    return read_yaml(RECIPE) | {"run_dir": str(run_dir), "data": None if data is None else {"path": str(data)}} | changes


def tiny_recipe(run_dir: Path, data: Path, **changes: Any) -> Recipe:
    """The tiny recipe, decoded."""
    return decode_recipe(plain_recipe(run_dir, data, **changes), "tiny.yaml")


class Died(Exception):
    """The process ended without an answer; the argument is its exit code (minus the signal's number)."""


def in_new_process(function: Callable[..., Any], *args: Any, environment: Mapping[str, str] | None = None) -> Any:
    """The result of function(*args), a function at the top of a module, in a process of its own.

    Raises AssertionError with its traceback when it raises, Died when it is killed, TimeoutError when it hangs.
    """
    return in_new_processes(function, [args], environment=[environment or {}])[0]


def in_new_processes(function: Callable[..., Any], calls: list[tuple[Any, ...]], *, environment: list[Mapping[str, str]]) -> list[Any]:
    """The same for several processes at once, each with its own arguments and environment variables."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.harness", "megatron_elastic.train.loop", "megatron_elastic.export.verify"])
    started = []
    for args, variables in zip(calls, environment, strict=True):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(there, function, args, dict(variables)), daemon=False)
        process.start()
        there.close()
        started.append((process, here))
    try:
        return [_result(process, here) for process, here in started]
    finally:
        for process, here in started:
            process.kill()
            process.join()
            here.close()


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        answer = (function(*args), None)
    except BaseException:  # noqa: BLE001 - the test raises it
        answer = (None, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))


def _result(process: Any, pipe: Connection) -> Any:
    if not pipe.poll(SECONDS):
        raise TimeoutError(f"no answer in {SECONDS:g} s")
    try:
        result, error = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        raise Died(process.exitcode) from None
    assert error is None, error
    return result


def die() -> None:
    """What `kill -9` does to this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def train(recipe: Recipe, **options: Any) -> str:
    """`megatron_elastic.train.loop.train`, returning what it printed."""
    from megatron_elastic.train import loop

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        loop.train(recipe, **options)
    return output.getvalue()


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `megatron-elastic ARGUMENTS`, run by the command line's own entry point."""
    from megatron_elastic.cli.main import build_app, run

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(build_app(), list(arguments))
        except SystemExit as end:
            return int(end.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("the command line always exits")


def rows(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of one kind, without what depends on the clock."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in found if row["kind"] == kind]


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor and number of a checkpoint: weights, moments, steps, the router and its optimizer, the position of the run."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint)
    found: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            found[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        elif key.startswith("common_state/"):
            found[key] = None  # megatron-core 0.19 keeps plain data here, 0.16.1 in a file
    dcp.load(found, storage_reader=reader, no_dist=True)
    plain = [found.pop(key) for key in list(found) if key.startswith("common_state/")]
    common = plain[0][0] if plain else torch.load(checkpoint / "common.pt", weights_only=False)
    return found | _flat(common, "common")


def _flat(value: Any, path: str) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, Mapping):
        return {key: tensor for name, item in value.items() for key, tensor in _flat(item, f"{path}.{name}").items()}
    if isinstance(value, list | tuple):
        return {key: tensor for n, item in enumerate(value) for key, tensor in _flat(item, f"{path}.{n}").items()}
    return {path: torch.tensor(value)} if isinstance(value, bool | int | float) else {}


def different(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that one of two states lacks or whose tensors differ in any bit."""
    return [name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])]
