"""What a data directory says about itself: `data.json`, written last and checked before anything is trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_elastic.errors import DataError, raise_all
from megatron_elastic.formats import DATA

DESCRIPTION = "data.json"
"""Name of the file beside the splits."""
SPLITS = ("train", "valid")
"""Names of the splits; each is NAME.bin and NAME.idx in megatron-core's indexed format."""


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """One split in numbers."""

    documents: int
    """Documents."""
    tokens: int
    """Tokens, end-of-document ids included."""
    sha256: str
    """Digest of its token ids, so that indices cached for other text are never used."""


@dataclass(frozen=True, slots=True)
class DataInfo:
    """A data directory that was opened and found whole."""

    path: Path
    """The directory."""
    tokenizer: str
    """`byte`, or the path the tokenizer was read from."""
    vocab_size: int
    """Token ids are below this."""
    eod: int
    """The id that ends a document."""
    train: SplitInfo
    """The text to train on."""
    valid: SplitInfo
    """The held-out text."""

    def prefix(self, split: str) -> str:
        """Path of a split without `.bin` or `.idx`, as megatron-core asks for it."""
        return str(self.path / split)


def open_data(path: Path | str, vocab_size: int | None = None) -> DataInfo:
    """The data directory at `path`, checked.

    vocab_size: the model's (`model.vocab_size`); ids must be below it. None: not checked.
    Raises DataError for a missing directory, another format, a missing or truncated file, an empty split, or ids outside the vocabulary.
    """
    path = Path(path)
    file = path / DESCRIPTION
    if not file.is_file():
        what = "is not a data directory (no data.json)" if path.is_dir() else "does not exist"
        raise DataError(f"data.path {str(path)!r} {what}; write one with: megatron-elastic data SOURCE --out {path}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        data = None
    if not isinstance(data, dict):
        raise DataError(f"{file} is not a description of data; write the directory again with: megatron-elastic data")
    DATA.check(data, str(file))
    info = _decode(path, data)
    raise_all(DataError, _problems(info, data["bytes_per_token"], vocab_size), f"data.path {str(path)!r}")
    return info


def check_held_out(info: DataInfo, samples: int, sequence_length: int) -> None:
    """Raise DataError when the held-out text is shorter than `samples` samples."""
    available = (info.valid.tokens - 1) // sequence_length
    if samples > available:
        raise DataError(
            f"eval.samples {samples} of {sequence_length} tokens are more than the {available} the held-out text of "
            f"{str(info.path)!r} gives; lower eval.samples or hold out more"
        )


def _decode(path: Path, data: dict[str, Any]) -> DataInfo:
    try:
        splits = {name: SplitInfo(data[name]["documents"], data[name]["tokens"], data[name]["sha256"]) for name in SPLITS}
        return DataInfo(path, data["tokenizer"], data["vocab_size"], data["eod"], splits["train"], splits["valid"])
    except KeyError as error:
        raise DataError(f"{path / DESCRIPTION}: {error} is missing; write the directory again with: megatron-elastic data") from None


def _problems(info: DataInfo, bytes_per_token: int, vocab_size: int | None) -> list[str]:
    problems = []
    for name, split in zip(SPLITS, (info.train, info.valid), strict=True):
        if split.tokens == 0:
            problems.append(f"its {name} split is empty; give more text or another --holdout")
        tokens, index = Path(info.prefix(name) + ".bin"), Path(info.prefix(name) + ".idx")
        problems += [f"{file.name} is missing; write the directory again" for file in (tokens, index) if not file.is_file()]
        if tokens.is_file() and tokens.stat().st_size != split.tokens * bytes_per_token:
            problems.append(
                f"{tokens.name} has {tokens.stat().st_size} bytes, not {split.tokens * bytes_per_token}; write the directory again"
            )
    if vocab_size is not None and info.vocab_size > vocab_size:
        problems.append(
            f"a token id outside the vocabulary: ids of tokenizer {info.tokenizer!r} run up to {info.vocab_size - 1}, "
            f"but model.vocab_size is {vocab_size}; set it to {info.vocab_size} or more"
        )
    return problems
