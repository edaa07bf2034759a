"""`megatron-elastic eval`: loss and perplexity of a model, or of every budget of a family, on text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_elastic.cli.calibration import FilesOption, TokenizerOption
from megatron_elastic.cli.texts import HeldOutOption, IncludeOption, KeyOption

if TYPE_CHECKING:
    from megatron_elastic.export.evaluate import Plans, Score
    from megatron_elastic.export.sources import Source
    from megatron_elastic.export.texts import Text

LONGEST_DEFAULT = 2048
"""Tokens of a window where none are asked for and the model takes more."""


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run, a checkpoint, or a Hugging Face directory.")],
    text: FilesOption = None,
    data: HeldOutOption = None,
    budget: Annotated[list[str] | None, typer.Option(help="Budget to score; may be repeated. Default: every one.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Score at most this many tokens of each text.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help=f"Tokens a window sees; default: the most the model takes, up to {LONGEST_DEFAULT}.")
    ] = None,
    tokenizer: TokenizerOption = None,
    include: IncludeOption = None,
    key: KeyOption = None,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers to this file.", metavar="FILE")] = None,
) -> None:
    """Score text: nats per token, perplexity and bits per byte of the whole model and of every budget of its family.

    Documents are independent. Each is cut into windows that do not overlap, and every token but a document's first is scored once.

    \b
    Examples:
      megatron-elastic eval runs/demo --data runs/demo/data
      megatron-elastic eval runs/demo/members/small --text book.txt --tokens 20000 --json small.json
    """
    from megatron_elastic.cli.texts import read_texts
    from megatron_elastic.errors import ConfigError
    from megatron_elastic.export.sources import open_source

    if not text and data is None:
        raise ConfigError("there is nothing to score; give --text FILE or DIR, or --data DIR")
    if json is not None and json.exists():
        raise ConfigError(f"--json {str(json)!r} exists; name another file or delete it")
    if json is not None and not json.parent.is_dir():
        raise ConfigError(f"--json {str(json)!r}: there is no directory {str(json.parent)!r}; make it first")
    source = open_source(path)
    texts = read_texts(source, text or (), data, tokens=tokens, tokenizer=tokenizer, include=include, key=key)
    from megatron_elastic.export.evaluate import check_sequence_length, write_scores

    length = min(LONGEST_DEFAULT, source.shape.max_sequence_length) if sequence_length is None else sequence_length
    check_sequence_length(length, source.shape)
    results = list(zip(texts, _score(source, _plans(source, path, budget or []), texts, length), strict=True))
    for scored, scores in results:
        _print(scored, length, scores)
    if json is not None:
        write_scores(json, path, length, results)
        typer.echo(f"wrote {json}")


def _plans(source: Source, path: Path, budgets: Sequence[str]) -> Plans:
    """Name -> plan of what is scored."""
    from megatron_elastic.errors import CheckpointError
    from megatron_elastic.export.evaluate import MODEL, plans_to_score
    from megatron_elastic.export.sources import choose_plans, describe

    if source.space is None:
        if budgets:
            raise CheckpointError(f"{describe(source)} holds no family, so there is nothing for --budget; leave it out")
        return {MODEL: None}
    chosen = {name: plan for budget in budgets or [None] for name, plan in choose_plans(source.plans, budget, path).items()}
    return plans_to_score(chosen, source.space)


def _score(source: Source, plans: Plans, texts: Sequence[Text], sequence_length: int) -> list[dict[str, Score]]:
    """Name -> score, for one text after the other."""
    from rich.progress import MofNCompleteColumn

    from megatron_elastic.cli.progress import progress_bar
    from megatron_elastic.elastic.attach import elasticize
    from megatron_elastic.errors import ConfigError
    from megatron_elastic.export.evaluate import Evaluator
    from megatron_elastic.export.load import load_model
    from megatron_elastic.parallel import ParallelContext

    parallel = ParallelContext.initialize()
    try:
        if parallel.world_size > 1:
            raise ConfigError(f"eval runs on one process, not on {parallel.world_size}; start it without torchrun")
        model = load_model(source, parallel)
        handle = None if source.space is None else elasticize(model, source.space, parallel, source.shape)
        evaluator = Evaluator(model, handle, source.shape, parallel)
        total, done = sum(text.num_scored for text in texts), 0
        with progress_bar("tokens", MofNCompleteColumn()) as progress:

            def advance(tokens: int) -> None:
                nonlocal done
                done += tokens
                progress(done, total)

            return [evaluator.score(plans, text, sequence_length, advance) for text in texts]
    finally:
        parallel.destroy()


def _print(text: Text, sequence_length: int, scores: Mapping[str, Score]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text as Plain

    table = Table("budget", box=None, pad_edge=False)
    for title in ("parameters", "tokens", "loss", "perplexity", "bits/byte", "perplexity/parent"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, score in scores.items():
        rate = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        perplexity = f"{score.perplexity:,.2f}" if score.perplexity < 1e6 else f"{score.perplexity:.2e}"
        numbers = [f"{score.parameters:,}", f"{score.tokens:,}", f"{score.loss:.4f}", perplexity, rate, f"{score.to_parent:.4f}"]
        table.add_row(Plain(name), *numbers)
    console = Console(highlight=False)
    console.print(Plain(_title(text, sequence_length)), soft_wrap=True)
    console.print(table, soft_wrap=True)


def _title(text: Text, sequence_length: int) -> str:
    """What was scored, in one line."""
    documents = len(text.documents)
    parts = [f"{text.name}: {documents:,} document{'s' * (documents != 1)} in windows of {sequence_length:,} tokens"]
    if text.cut:
        parts.append(f"cut at --tokens {sum(len(ids) for ids in text.documents):,}: there is more")
    if text.files_without_text:
        parts.append(f"{text.files_without_text:,} files without UTF-8 text left out")
    return "; ".join(parts)
