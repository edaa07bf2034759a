"""`megatron-elastic data`: text into the directory that training reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_elastic.corpus.info import DataInfo
    from megatron_elastic.corpus.write import Progress

SECONDS_BEFORE_PROGRESS = 5.0
"""A run shorter than this shows no progress bar."""


def command(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Text files, directories, JSONL files, or 'stdlib': Python's own sources.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    tokenizer: Annotated[str, typer.Option(help="'byte', a tokenizer.json, or a directory with one.")] = "byte",
    eod: Annotated[str | None, typer.Option(help="Word that ends a document; default: the tokenizer's own.")] = None,
    holdout: Annotated[float, typer.Option(help="Fraction of the documents held out, by the hash of their names.")] = 0.05,
    include: Annotated[
        list[str] | None, typer.Option(help="File names read in directories; may be repeated. Default: *.py *.txt *.md *.rst")
    ] = None,
    key: Annotated[str, typer.Option(help="Entry of a JSONL record that holds its text.")] = "text",
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    max_bytes: Annotated[int | None, typer.Option(help="Read at most this many bytes.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a data directory that exists.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Turn text into tokens for training: train and valid splits, held out by file."""
    from megatron_elastic.corpus.sources import DEFAULT_INCLUDE
    from megatron_elastic.corpus.write import CorpusOptions, write_data

    options = CorpusOptions(
        sources=tuple(sources),
        tokenizer=tokenizer,
        eod=eod,
        holdout=holdout,
        include=tuple(include) if include else DEFAULT_INCLUDE,
        key=key,
        seed=seed,
        max_bytes=max_bytes,
    )
    with _progress_bar() as progress:
        info = write_data(options, out, overwrite=overwrite, progress=progress)
    _print_summary(info)


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """A progress function whose bar, with the remaining time, appears after SECONDS_BEFORE_PROGRESS."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(TextColumn("tokens"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("tokens", total=None)
    began = time.monotonic()

    def progress(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if not bar.live.is_started and time.monotonic() - began > SECONDS_BEFORE_PROGRESS:
            bar.start()

    try:
        yield progress
    finally:
        if bar.live.is_started:  # a bar that was never shown would still print an empty line
            bar.stop()


def _print_summary(info: DataInfo) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("split", box=None, pad_edge=False)
    table.add_column("documents", justify="right")
    table.add_column("tokens", justify="right")
    for name, split in (("train", info.train), ("valid", info.valid)):
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}")
    console.print(f"{info.path}: tokenizer {info.tokenizer}, vocabulary {info.vocab_size}", highlight=False, soft_wrap=True)
    console.print(table)
