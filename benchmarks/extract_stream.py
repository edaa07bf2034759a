"""What extraction costs beside a plain copy: a synthetic bf16 checkpoint, cut to a whole and to a half plan, against `cp -r` of its directory.

Copy and extractions take turns on one disk; every file is forced to it before a clock stops, and the source leaves the page cache before
one starts. Each extraction has a process of its own, whose clock starts when the libraries are loaded; how long that took is
reported beside it. Speed is the bytes of the source over the seconds, for every variant. Memory is the largest resident set of that
process, mapped files included.
The last line of the output is one JSON object.

Run: python benchmarks/extract_stream.py [--gigabytes 4] [--rounds 5] [--directory /a/disk]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.command import outcome
from benchmarks.paired import Spread, paired
from megatron_elastic import __version__
from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.checkpoint.new_directory import force_to_disk
from megatron_elastic.config import to_plain
from megatron_elastic.cost import total_params, widths_of
from megatron_elastic.errors import ConfigError, ElasticError
from megatron_elastic.shape import AttentionShape, MlpShape, ModelShape
from megatron_elastic.space import build_space, parent_plan

FORMAT_VERSION = 1
LARGEST_HIDDEN, LEAST_LAYERS, HEAD_DIM, WORDS_PER_CHANNEL = 2048, 16, 64, 64
"""The model: as wide as leaves it LEAST_LAYERS layers, and a vocabulary that makes its largest tensor about an eighth of 4 GB."""
MOST_BYTES, LEAST_SPEED = 1.5e9, 0.5
"""What is aimed at: peak memory, and speed over that of the copy."""
PLANS, FORMATS = ("whole", "half"), ("megatron", "hf")
COPY = "cp"
VARIANTS = (COPY, *(f"{plan} {format_}" for format_ in FORMATS for plan in PLANS))


@dataclass(frozen=True, slots=True)
class Options:
    """gigabytes: of the source's weights; rounds: in which every variant runs once; directory: on the disk that is measured."""

    gigabytes: float
    rounds: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Run:
    """One variant once. seconds: until everything is on the disk; start: seconds before, for the process; peak and written: bytes."""

    seconds: float
    written: int
    start: float = 0.0
    peak: int = 0


def model_of(gigabytes: float) -> ModelShape:
    """A Llama-like model whose bf16 weights have about that size."""
    hidden = LARGEST_HIDDEN
    while _bytes(shape := _model(hidden, LEAST_LAYERS)) > 1e9 * gigabytes and hidden > 4 * HEAD_DIM:
        hidden //= 2
    each = _bytes(_model(hidden, 2)) - _bytes(_model(hidden, 1))
    rest = _bytes(shape) - LEAST_LAYERS * each
    return _model(hidden, max(1, round((1e9 * gigabytes - rest) / each)))


def _model(hidden: int, layers: int) -> ModelShape:
    heads = hidden // HEAD_DIM
    return ModelShape(
        layer_pattern="T" * layers,
        hidden_size=hidden,
        vocab_size=WORDS_PER_CHANNEL * hidden,
        max_sequence_length=4096,
        activation="silu",
        gated=True,
        attention=AttentionShape(heads=heads, kv_groups=heads // 4, head_dim=HEAD_DIM, rope_base=10000.0),
        mlp=MlpShape(ffn=4 * hidden),
    )


def _bytes(shape: ModelShape) -> int:
    return 2 * total_params(shape, widths_of(parent_plan(shape), shape.num_layers))


def family_of(shape: ModelShape) -> ElasticSpace:
    """The family whose half plan has about half of the weights: three quarters of the channels, half of the neurons."""
    axes = {ElasticAxis.HIDDEN: (1.0, 0.75), ElasticAxis.FFN: (1.0, 0.5)}
    return build_space(shape, axes, shard_groups=1)


def write_source(directory: Path, shape: ModelShape) -> None:
    """A checkpoint of random weights, made while it is written."""
    import torch

    from megatron_elastic.checkpoint import write_named
    from megatron_elastic.layout import full_shapes

    space, generator = family_of(shape), torch.Generator().manual_seed(0)
    half = space.plan({spec.axis: spec.choices[-1] for spec in space.axes})

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, size in full_shapes(shape).items():
            yield name, torch.empty(size, dtype=torch.bfloat16).uniform_(-1, 1, generator=generator)

    write_named(directory, tensors(), shape, space=space, plans=dict(zip(PLANS, (space.parent, half), strict=True)))


def copy(source: Path, target: Path) -> Run:
    """`cp -r`, and everything forced to the disk."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in (*target.rglob("*"), target, target.parent):
        force_to_disk(path)
    return Run(time.perf_counter() - start, bytes_in(target))


def extract_alone(source: Path, target: Path, plan: str, format_: str) -> Run:
    """One extraction in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_extract, args=(source, target, plan, format_, there, time.time()))
    process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        found = "it ended without a word; is there enough memory?"
    process.join()
    if isinstance(found, str):
        raise ConfigError(f"extracting {plan} to {format_}: {found}")
    seconds, start, peak = found
    return Run(seconds, bytes_in(target), start, peak)


def _extract(source: Path, target: Path, plan: str, format_: str, result: Connection, began: float) -> None:
    from megatron_elastic.export.sources import open_source
    from megatron_elastic.export.write import Options as WriteOptions
    from megatron_elastic.export.write import write_member

    try:
        start, clock = time.time() - began, time.perf_counter()
        model = open_source(source)
        write_member(model, model.plans[plan], target, WriteOptions(hugging_face=format_ == "hf"), budget=plan)
        result.send((time.perf_counter() - clock, start, peak_bytes()))
    except ElasticError as error:
        result.send(str(error))


def peak_bytes() -> int:
    """Largest resident set of this process so far, in bytes; unlike getrusage's, it does not begin with that of the process before."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise ConfigError("/proc/self/status has no VmHWM; run on Linux")


def bytes_in(directory: Path) -> int:
    """Bytes of all files in a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def forget(directory: Path) -> None:
    """Have the system drop the files of a directory from its page cache, so that they come from the disk again."""
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def take_turns(source: Path, scratch: Path, rounds: int) -> dict[str, list[Run]]:
    """Every variant's runs; round n starts with variant n, so that none always follows the same one. What they write is deleted at once."""
    runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
    for turn in range(rounds):
        first = turn % len(VARIANTS)
        for name in VARIANTS[first:] + VARIANTS[:first]:
            target = scratch / "out"
            forget(source)
            runs[name].append(copy(source, target) if name == COPY else extract_alone(source, target, *name.split()))
            shutil.rmtree(target)
            print(f"round {turn + 1}/{rounds}, {name}: {runs[name][-1].seconds:.1f} s", file=sys.stderr, flush=True)
    return runs


def measure(options: Options) -> dict[str, Any]:
    """Write the source, take turns, delete everything; the result is plain data, the object that is printed last."""
    shape = model_of(options.gigabytes)
    free, needed = shutil.disk_usage(options.directory).free, int(2.2 * _bytes(shape)) + 10**8
    if free < needed:
        raise ConfigError(
            f"--directory {str(options.directory)!r} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed; lower --gigabytes"
        )
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="extract-stream-") as scratch:
        source = Path(scratch) / "source"
        print(f"writing {_bytes(shape) / 1e9:.2f} GB", file=sys.stderr, flush=True)
        write_source(source, shape)
        size = bytes_in(source)
        runs = take_turns(source, Path(scratch), options.rounds)
    copies = [run.seconds for run in runs[COPY]]
    return {
        "benchmark": "extract_stream",
        "format_version": FORMAT_VERSION,
        "shape": to_plain(shape),
        "source_bytes": size,
        "rounds": options.rounds,
        "versions": {"python": platform.python_version(), "megatron-elastic": __version__, "torch": version("torch")},
        "variants": {
            name: {
                "bytes_per_second": asdict(Spread.of([size / run.seconds for run in each])),
                "speed_over_cp": asdict(paired(copies, [run.seconds for run in each])),
                "start_seconds": Spread.of([run.start for run in each]).median,
                "peak_bytes": max(run.peak for run in each),
                "written_bytes": each[0].written,
            }
            for name, each in runs.items()
        },
        "aims": {"peak_bytes": MOST_BYTES, "speed_over_cp": LEAST_SPEED},
    }


def misses(result: dict[str, Any]) -> list[str]:
    """The variants that do not reach an aim, each with its number."""
    found = []
    for name, each in result["variants"].items():
        if each["peak_bytes"] > MOST_BYTES:
            found.append(f"{name}: {each['peak_bytes'] / 1e9:.2f} GB is above {MOST_BYTES / 1e9:.1f} GB")
        if each["speed_over_cp"]["median"] < LEAST_SPEED:
            found.append(f"{name}: {each['speed_over_cp']['median']:.2f} of the copy's speed is below {LEAST_SPEED}")
    return found


def print_report(result: dict[str, Any]) -> None:
    """A table with one row a variant and what is missed, for people; then one line of JSON with everything."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("variant", no_wrap=True)
    for title in ("MB/s of the source", "speed / cp (quartiles)", "peak GB", "written GB", "start s"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, each in result["variants"].items():
        peak, start = ("", "") if name == COPY else (f"{each['peak_bytes'] / 1e9:.2f}", f"{each['start_seconds']:.1f}")
        speed = f"{each['bytes_per_second']['median'] / 1e6:.0f}"
        table.add_row(name, speed, str(Spread(**each["speed_over_cp"])), peak, f"{each['written_bytes'] / 1e9:.2f}", start)
    shape = result["shape"]
    print(
        f"{result['source_bytes'] / 1e9:.2f} GB: {len(shape['layer_pattern'])} layers, hidden {shape['hidden_size']}, {result['rounds']} rounds\n"
    )
    Console(width=140).print(table)
    print("\n" + ("\n".join(f"missed: {line}" for line in misses(result)) or "every aim is met") + "\n")
    print(json.dumps(result))


def parse(arguments: Sequence[str] | None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="weights of the source (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, at least 2 (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where to write (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    if parsed.rounds < 2:
        parser.error(f"--rounds {parsed.rounds}: quartiles need at least 2")
    if not (parsed.gigabytes > 0 and math.isfinite(parsed.gigabytes)):
        parser.error(f"--gigabytes {parsed.gigabytes} must be above 0")
    if not parsed.directory.is_dir():
        parser.error(f"--directory {str(parsed.directory)!r} is not a directory")
    return Options(parsed.gigabytes, parsed.rounds, parsed.directory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = parse(arguments)
    return outcome(lambda: measure(options), print_report)


if __name__ == "__main__":
    sys.exit(main())
