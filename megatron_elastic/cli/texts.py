"""The options that choose the text a model is scored on, shared by `eval` and `verify`, and that text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_elastic.export.sources import Source
    from megatron_elastic.export.texts import Text

HeldOutOption = Annotated[Path | None, typer.Option(help="A data directory: its held-out split.", metavar="DIR")]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option(help="For --text: file names read in directories; may be repeated. Default: *.py *.txt *.md *.rst"),
]
KeyOption = Annotated[str | None, typer.Option(help="For --text: entry of a JSONL record that holds its text. Default: text")]


def read_texts(  # noqa: PLR0913 - one argument an option
    source: Source,
    text: Sequence[str],
    data: Path | None,
    *,
    tokens: int | None,
    tokenizer: str | None,
    include: Sequence[str] | None,
    key: str | None,
) -> list[Text]:
    """The texts of `--text`, each by itself, then that of `--data`: at most `tokens` tokens of each.

    Raises ConfigError for options about files without `--text`, and what `read_text`, `held_out_text`, `find_tokenizer` and
    `check_data_tokenizer` raise.
    """
    from megatron_elastic.corpus.info import open_data
    from megatron_elastic.corpus.sources import DEFAULT_INCLUDE
    from megatron_elastic.errors import ConfigError
    from megatron_elastic.export.prompts import check_data_tokenizer, find_tokenizer
    from megatron_elastic.export.texts import held_out_text, read_text

    of_files = {"--tokenizer": tokenizer, "--include": include, "--key": key}
    unused = [name for name, value in of_files.items() if value and not text]
    if unused:
        raise ConfigError(f"{' and '.join(unused)}: only files of --text are read with that; add --text, or leave it out")
    vocab_size, texts = source.shape.vocab_size, []
    if text:
        words, patterns = find_tokenizer(source, tokenizer), tuple(include or DEFAULT_INCLUDE)
        texts += [read_text(name, words, vocab_size=vocab_size, limit=tokens, include=patterns, key=key or "text") for name in text]
    if data is not None:
        check_data_tokenizer(source, open_data(data, vocab_size))
        texts.append(held_out_text(data, vocab_size=vocab_size, limit=tokens))
    return texts
