"""Tokenizers: bytes, which need no download, and a Hugging Face `tokenizer.json` from the local disk."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_elastic.errors import DataError

if TYPE_CHECKING:
    import tokenizers

BYTE_TOKENIZER = "byte"
"""The name of the byte tokenizer on the command line and in data.json."""


class Tokenizer(Protocol):
    """Text to token ids, with one id that ends a document."""

    name: str
    """`byte`, or the path the tokenizer was read from."""
    vocab_size: int
    """Ids run from 0 to vocab_size - 1; the end-of-document id is one of them."""

    @property
    def eod(self) -> int:
        """The id appended to every document; text never encodes to it. Raises DataError when nothing says which it is."""
        ...

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of `text` [tokens], without the end-of-document id."""
        ...

    def decode(self, ids: NDArray[np.int64]) -> str:
        """The text of `ids` [tokens]; end-of-document ids become nothing."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 ends a document."""

    name = BYTE_TOKENIZER
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of `text` [bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: NDArray[np.int64]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become the replacement character."""
        return bytes(int(token) for token in ids if token != self.eod).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    path: the file, or a directory that holds it. eod: the word that ends a document, or its id; None: `eos_token` of the
    tokenizer_config.json beside it. Special words inside a text are encoded as plain text, so a document cannot end itself.
    Raises DataError when the library or the file is missing; a word that is missing is an error for those who ask for it.
    """

    def __init__(self, path: Path, eod: str | int | None = None) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        self.name = str(path)
        self._tokenizer = _read_tokenizer(file)
        self._tokenizer.encode_special_tokens = True
        self._end, self._config = eod, file.parent / "tokenizer_config.json"
        self.vocab_size = max(self.words().values()) + 1

    def words(self) -> dict[str, int]:
        """Every word and its id, special words included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def eod(self) -> int:
        """The id that ends a document. Raises DataError when nothing says which it is, or the tokenizer has no such word."""
        return self._eod

    @cached_property
    def _eod(self) -> int:
        if isinstance(self._end, int):
            return self._end
        word = self._end if self._end is not None else _eos_word(self._config)
        if word is None:
            raise DataError(f"tokenizer {self.name!r} does not say which word ends a document; name it with --eod")
        number = self._tokenizer.token_to_id(word)
        if number is None:
            raise DataError(f"tokenizer {self.name!r} has no word {word!r} to end a document with; name another with --eod")
        return number

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of `text` [tokens], without the words a template would add."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: NDArray[np.int64]) -> str:
        """The text of `ids`."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)


def open_tokenizer(name: str, eod: str | int | None = None) -> Tokenizer:
    """The tokenizer called `name`: `byte`, or the path of a tokenizer.json or of a directory with one.

    eod: the word that ends a document, or its id; None: the tokenizer's own.
    Raises DataError when it cannot be read, or when the byte tokenizer is asked to end documents otherwise.
    """
    if name != BYTE_TOKENIZER:
        return HuggingFaceTokenizer(Path(name), eod)
    if eod not in (None, ByteTokenizer.eod):
        raise DataError(f"--eod {eod!r} needs a Hugging Face tokenizer; the byte tokenizer ends documents with id {ByteTokenizer.eod}")
    return ByteTokenizer()


def _read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ImportError:
        raise DataError("a Hugging Face tokenizer needs the 'tokenizers' package; install megatron-elastic[hf]") from None
    if not file.is_file():
        raise DataError(f"no tokenizer.json at {str(file)!r}; give 'byte', a tokenizer.json, or a directory that holds one")
    try:
        return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a file it cannot parse
        raise DataError(f"{file}: not a tokenizer: {' '.join(str(error).split())}") from None


def _eos_word(config: Path) -> str | None:
    if not config.is_file():
        return None
    try:
        word = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{config}: not JSON: {error}") from None
    return word["content"] if isinstance(word, dict) else word
