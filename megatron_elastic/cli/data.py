"""`megatron-elastic data`: text into the directory that training reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_elastic.corpus.info import DataInfo


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
    """Turn text into tokens for training: train and valid splits, held out by file.

    SIGTERM and SIGUSR1 end it with exit code 85, and nothing is left of what was written.
    """
    from rich.progress import DownloadColumn

    from megatron_elastic.cli.progress import progress_bar
    from megatron_elastic.corpus.sources import DEFAULT_INCLUDE
    from megatron_elastic.corpus.write import CorpusOptions, write_data
    from megatron_elastic.preemption import listening

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
    with listening() as stop, progress_bar("tokens", DownloadColumn()) as progress:

        def advance(done: int, total: int) -> None:
            progress(done, total)
            stop.check(None, "nothing is written; start again")

        info = write_data(options, out, overwrite=overwrite, progress=advance)
    _print_summary(info)


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
