"""Text to score: the ids of its documents, from files or from the held-out split of a data directory. No torch until a split is read.

Every document stands alone, and what is scored are the tokens of its text: the id that ends a document belongs to data directories, not to
the text, so it is neither appended nor scored, and files give the same numbers as the split that was written from them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_elastic.corpus.info import open_data
from megatron_elastic.corpus.sources import DEFAULT_INCLUDE, TextFile, find_files, read_documents
from megatron_elastic.corpus.tokenizer import BYTE_TOKENIZER, Tokenizer
from megatron_elastic.errors import ConfigError, DataError

LEAST_TOKENS = 2
"""Tokens a document needs to be scored: the first has nothing before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Documents as token ids, ready to be scored."""

    name: str
    """What the user called it."""
    documents: tuple[NDArray[np.int32], ...]
    """Ids of each document [tokens], the last of them cut where `cut` is true."""
    tokens_per_byte: float | None
    """Tokens of its whole documents over their bytes in UTF-8; None where the bytes are not known."""
    cut: bool
    """Whether there was more text than was asked for."""
    files_without_text: int = 0
    """Files that were left out: they are empty or not UTF-8."""

    @property
    def num_scored(self) -> int:
        """Tokens that have a loss: all but the first of each document."""
        return sum(max(len(ids) - 1, 0) for ids in self.documents)


def read_text(
    source: str,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    limit: int | None = None,
    include: Sequence[str] = DEFAULT_INCLUDE,
    key: str = "text",
) -> Text:
    """The text of a file, a directory or `stdlib`, read as `megatron-elastic data` reads it (`corpus.sources`).

    vocab_size: words of the model. limit: at most so many tokens, in the order of the files' names; None: all. include: names of the
    files read in a directory. key: the entry of a JSONL record with its text.
    Raises DataError for a source that is missing or empty, holds no UTF-8 text or nothing to score, a JSONL line without text, or an id
    outside the vocabulary; ConfigError for a limit that leaves nothing.
    """
    files, without_text = find_files([source], include), []
    return _text(source, _encoded(files, key, tokenizer, without_text), vocab_size, limit, files=len(files), without_text=without_text)


def held_out_text(data: Path, *, vocab_size: int, limit: int | None = None) -> Text:
    """The held-out split of a data directory.

    Raises DataError for a directory that cannot be used (`open_data`), with nothing to score, or with ids outside the vocabulary.
    """
    from megatron_elastic.platform import prepare_platform

    info = open_data(data, vocab_size)
    prepare_platform()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    split = IndexedDataset(info.prefix("valid"))
    bytes_known = info.tokenizer == BYTE_TOKENIZER
    documents = (_without_end(np.asarray(split[number]), info.eod) for number in range(len(split)))
    return _text(str(data), ((ids, len(ids) if bytes_known else 0) for ids in documents), vocab_size, limit)


def _without_end(ids: NDArray[np.integer], eod: int) -> NDArray[np.integer]:
    return ids[:-1] if len(ids) and ids[-1] == eod else ids


def _encoded(files: Sequence[TextFile], key: str, tokenizer: Tokenizer, without_text: list[str]) -> Iterator[tuple[NDArray[np.int64], int]]:
    """(ids, bytes) of every document; files that have none are added to `without_text`."""
    for file in files:
        found = False
        for document in read_documents(file, key):
            found = True
            yield tokenizer.encode(document.text), len(document.text.encode("utf-8"))
        if not found:
            without_text.append(file.name)


def _text(
    name: str,
    documents: Iterable[tuple[NDArray[np.integer], int]],
    vocab_size: int,
    limit: int | None,
    *,
    files: int = 1,
    without_text: Sequence[str] = (),
) -> Text:
    """The first `limit` tokens of (ids, bytes) documents; bytes are 0 where they are not known."""
    if limit is not None and limit < LEAST_TOKENS:
        raise ConfigError(f"--tokens {limit} must be at least {LEAST_TOKENS}: the first token of a document has nothing before it")
    kept: list[NDArray[np.int32]] = []
    tokens = size = 0
    room, cut = sys.maxsize if limit is None else limit, False
    for ids, num_bytes in documents:
        if room <= 0:
            cut = True
            break
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise DataError(
                f"{name!r}: token id {ids.max()} is outside the vocabulary, model.vocab_size is {vocab_size}; "
                "use the tokenizer the model was trained with"
            )
        kept.append(ids[:room].astype(np.int32))
        cut = len(ids) > room
        tokens, size, room = tokens + len(ids), size + num_bytes, room - len(ids)
    if not kept:
        raise DataError(f"no UTF-8 text in the {files} files of {name!r}; give a text or JSONL file, or a directory with some")
    if all(len(ids) < LEAST_TOKENS for ids in kept):
        raise DataError(
            f"{name!r} has nothing to score: none of its {len(kept)} documents has {LEAST_TOKENS} tokens, and the first has nothing before it"
        )
    rate = tokens / size if size else None
    return Text(name=name, documents=tuple(kept), tokens_per_byte=rate, cut=cut, files_without_text=len(without_text))
