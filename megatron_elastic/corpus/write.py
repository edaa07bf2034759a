"""Write a data directory: tokens of every document, split by name, in megatron-core's indexed format.

Everything is written under a temporary name beside the final one and renamed at the end, so a directory with its final name is
always whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_elastic.corpus.info import DESCRIPTION, SPLITS, DataInfo, open_data
from megatron_elastic.corpus.sources import DEFAULT_INCLUDE, Document, TextFile, find_files, is_held_out, limit_bytes, read_documents
from megatron_elastic.corpus.tokenizer import BYTE_TOKENIZER, Tokenizer, open_tokenizer
from megatron_elastic.errors import DataError
from megatron_elastic.formats import DATA

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

Progress = Callable[[int, int], None]
"""Called as progress(bytes done, bytes in all) at every document; what it raises ends the work, and nothing is left of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusOptions:
    """What is read and how it is split."""

    sources: tuple[str, ...]
    """Files, directories, or `stdlib`."""
    tokenizer: str = BYTE_TOKENIZER
    """`byte`, or the path of a Hugging Face tokenizer."""
    eod: str | None = None
    """The word that ends a document; None: the tokenizer's own."""
    holdout: float = 0.05
    """Fraction of the documents that is held out, by the hash of their names."""
    include: tuple[str, ...] = DEFAULT_INCLUDE
    """File names that are read inside directories."""
    key: str = "text"
    """Entry of a JSONL record that holds its text."""
    seed: int = 0
    """Seed of the split and of the choice under `max_bytes`."""
    max_bytes: int | None = None
    """Read at most this many bytes of files; None: all."""


def write_data(options: CorpusOptions, out: Path, *, overwrite: bool = False, progress: Progress | None = None) -> DataInfo:
    """Read, tokenize and split the text of `options` into the directory `out`.

    overwrite: replace a data directory that is already there; anything else is never replaced.
    Raises DataError for missing, empty or unreadable sources, an output that exists, text too small to split, or a full disk.
    """
    _check_output(out, overwrite=overwrite)
    if not 0 < options.holdout < 1:
        raise DataError(f"--holdout {options.holdout} must be between 0 and 1")
    if options.max_bytes is not None and options.max_bytes < 1:
        raise DataError(f"--max-bytes {options.max_bytes} must be at least 1")
    tokenizer = open_tokenizer(options.tokenizer, options.eod)
    if tokenizer.vocab_size > np.iinfo(np.int32).max:
        raise DataError(
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} words; the indexed format holds ids up to {np.iinfo(np.int32).max}"
        )
    files = find_files(options.sources, options.include)
    if options.max_bytes is not None:
        files = limit_bytes(files, options.max_bytes, options.seed)
    with _replacing(out) as directory:
        held_out, corpus = _write_splits(files, options, tokenizer, directory, progress)
        description = _describe(options, tokenizer, corpus, held_out)
        (directory / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return open_data(out)


def _check_output(out: Path, *, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise DataError(f"output {str(out)!r} exists; choose another --out, or replace it with --overwrite")
    if not (out / DESCRIPTION).is_file():
        raise DataError(f"output {str(out)!r} is not a data directory, so --overwrite does not replace it; choose another --out")


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A temporary directory beside `out` that takes its name when the block ends well, and is removed when it does not."""
    temporary, old = (out.parent / f".{kind}-{out.name}-{os.getpid()}" for kind in ("tmp", "old"))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rename(old)
        temporary.rename(out)
    except OSError as error:
        raise DataError(f"output {str(out)!r} cannot be written: {error.strerror}; free space or choose another --out") from error
    finally:
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@dataclass(slots=True)
class _Split:
    """A split while it is written."""

    builder: IndexedDatasetBuilder
    documents: int = 0
    tokens: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, ids: np.ndarray) -> None:
        """Append a document: its ids [tokens], of the split's type."""
        self.builder.add_document(ids, [len(ids)])  # pyright: ignore[reportArgumentType] - any array will do
        self.documents += 1
        self.tokens += len(ids)
        self.digest.update(ids.tobytes())


@dataclass(frozen=True, slots=True)
class _Corpus:
    splits: dict[str, _Split]
    dtype: type[np.number]
    not_text: int
    duplicates: int


def _write_splits(
    files: Sequence[TextFile], options: CorpusOptions, tokenizer: Tokenizer, directory: Path, progress: Progress | None
) -> tuple[list[str], _Corpus]:
    """Write both splits; returns the names of the held-out documents and what was written."""
    from megatron_elastic.platform import prepare_platform

    prepare_platform()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    splits = {name: _Split(IndexedDatasetBuilder(str(directory / f"{name}.bin"), dtype=dtype)) for name in SPLITS}
    held_out, not_text = [], 0
    seen: set[bytes] = set()
    duplicates = done = 0
    total = sum(file.size for file in files)
    for file in files:
        found = read = 0
        for document in read_documents(file, options.key):
            content = document.text.encode()
            found, read = found + 1, read + len(content)
            if progress is not None:
                progress(done + read, total)
            digest = hashlib.sha256(content).digest()
            if digest in seen:  # a copy on the other side of the split would be held-out text that was trained on
                duplicates += 1
                continue
            seen.add(digest)
            name = SPLITS[is_held_out(document.name, options.seed, options.holdout)]
            held_out += [document.name] if name == "valid" else []
            splits[name].add(_tokens(document, tokenizer))
        not_text += not found
        done += file.size
        if progress is not None:
            progress(done, total)
    _check_splits(splits, options, len(files))
    for name, split in splits.items():
        split.builder.finalize(str(directory / f"{name}.idx"))
    return held_out, _Corpus(splits, dtype, not_text, duplicates)


def _check_splits(splits: dict[str, _Split], options: CorpusOptions, files: int) -> None:
    documents = sum(split.documents for split in splits.values())
    if documents == 0:
        raise DataError(f"no UTF-8 text in the {files} files of {', '.join(options.sources)}")
    for name, split in splits.items():
        if split.documents == 0:
            raise DataError(
                f"none of the {documents} documents is in the {name} split with --holdout {options.holdout} and --seed {options.seed}; "
                "give more files, another --holdout or another --seed"
            )


def _tokens(document: Document, tokenizer: Tokenizer) -> np.ndarray:
    ids = np.append(tokenizer.encode(document.text), tokenizer.eod)
    if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        raise DataError(
            f"{document.name}: tokenizer {tokenizer.name!r} gives id {ids.max()}, outside the vocabulary of {tokenizer.vocab_size}"
        )
    return ids


def _describe(options: CorpusOptions, tokenizer: Tokenizer, corpus: _Corpus, held_out: Sequence[str]) -> dict[str, Any]:
    return {
        **DATA.stamp,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "bytes_per_token": np.dtype(corpus.dtype).itemsize,
        **{name: {"documents": s.documents, "tokens": s.tokens, "sha256": s.digest.hexdigest()} for name, s in corpus.splits.items()},
        "sources": list(options.sources),
        "include": list(options.include),
        "seed": options.seed,
        "holdout": options.holdout,
        "max_bytes": options.max_bytes,
        "files_without_text": corpus.not_text,
        "duplicates_dropped": corpus.duplicates,
        "held_out_sha256": hashlib.sha256("\n".join(sorted(held_out)).encode()).hexdigest(),
    }
