"""Code and prose of Python's own distribution as rows of tokens, one part to calibrate on and another to judge by.

Code: the modules of the standard library. Prose: the chapters of the language's documentation in `pydoc_data/topics.py`. A file or a chapter is on
one side as a whole, decided from its name. Each gives one row, its first tokens, so that a row is one sample to every criterion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

from megatron_elastic.corpus.info import open_data
from megatron_elastic.corpus.sources import STDLIB, find_files, is_held_out, read_documents
from megatron_elastic.corpus.tokenizer import Tokenizer
from megatron_elastic.errors import DataError
from megatron_elastic.platform import prepare_platform

Rows = tuple[NDArray[np.int32], ...]
"""Token ids, each row with the token after it: sequence_length + 1."""
SEED = 1234


@dataclass(frozen=True, slots=True)
class Texts:
    """calibration: rows of all texts in turn. judged: text -> rows that calibration has not seen."""

    calibration: Rows
    judged: Mapping[str, Rows]

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that differ for other texts."""
        digest = hashlib.sha256()
        for row in (*self.calibration, *(row for rows in self.judged.values() for row in rows)):
            digest.update(row.tobytes() + b"\0")
        return digest.hexdigest()[:16]


def read_texts(tokenizer: Tokenizer, *, calibration: int, judged: int, sequence_length: int) -> Texts:
    """Rows of code and prose: `calibration` tokens of both together and `judged` of each, in whole rows.

    Raises DataError when the interpreter's own text is too short for that.
    """
    sources = {"code": list(_code()), "prose": [(f"topics/{name}", text) for name, text in topics.items()]}
    count = {True: judged // sequence_length, False: calibration // sequence_length // len(sources)}
    found = {
        (name, held_out): _rows(name, documents, tokenizer, held_out=held_out, count=count[held_out], length=sequence_length)
        for name, documents in sources.items()
        for held_out in (False, True)
    }
    in_turn = zip(*(found[name, False] for name in sources), strict=True)
    return Texts(tuple(row for rows in in_turn for row in rows), {name: found[name, True] for name in sources})


def _code() -> Iterator[tuple[str, str]]:
    for file in find_files([STDLIB], ("*.py",)):
        if not file.name.endswith("topics.py"):
            yield from ((document.name, document.text) for document in read_documents(file, "text"))


def _rows(name: str, documents: Sequence[tuple[str, str]], tokenizer: Tokenizer, *, held_out: bool, count: int, length: int) -> Rows:
    """The first `count` documents that are long enough, in an order that depends on their names alone."""
    mine = [pair for pair in documents if is_held_out(pair[0], SEED, 0.5) == held_out]
    found: list[NDArray[np.int32]] = []
    for _, text in sorted(mine, key=lambda pair: hashlib.sha256(pair[0].encode()).digest()):
        if len(found) == count:
            break
        ids = tokenizer.encode(text[: 8 * (length + 1)])[: length + 1]
        if len(ids) == length + 1:
            found.append(ids.astype(np.int32))
    if len(found) < count:
        raise DataError(f"{name}: {len(found)} of {count} documents have {length + 1} tokens; ask for fewer or shorter rows")
    return tuple(found)


def data_texts(data: Path, vocab_size: int, *, calibration: int, judged: int, sequence_length: int) -> Texts:
    """The same from a data directory: its training split to calibrate on, its held-out split to judge by, one row of each document.

    Raises DataError when a split is too short for that.
    """
    info = open_data(data, vocab_size)
    prepare_platform()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = {}
    for split, tokens in (("train", calibration), ("valid", judged)):
        documents = IndexedDataset(info.prefix(split))
        order = sorted(range(len(documents)), key=lambda number: hashlib.sha256(str(number).encode()).digest())
        rows = (np.asarray(documents[number])[: sequence_length + 1].astype(np.int32) for number in order)
        found[split] = tuple(islice((row for row in rows if len(row) == sequence_length + 1), tokens // sequence_length))
        if len(found[split]) < tokens // sequence_length:
            raise DataError(
                f"{str(data)!r}, {split}: {len(found[split])} documents have {sequence_length + 1} tokens; ask for fewer tokens"
            )
    return Texts(found["train"], {"held out": found["valid"]})
