"""Texts to continue, and the tokenizer a model was trained with. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_elastic.checkpoint.files import RECIPE_FILE, in_run_of
from megatron_elastic.config import load_recipe
from megatron_elastic.corpus.info import DESCRIPTION, DataInfo, open_data
from megatron_elastic.corpus.tokenizer import HuggingFaceTokenizer, Tokenizer, open_tokenizer
from megatron_elastic.errors import ConfigError, DataError, raise_all
from megatron_elastic.hf.assets import TOKENIZER

if TYPE_CHECKING:
    from megatron_elastic.export.sources import Source


def read_prompts(file: Path) -> list[str]:
    """The prompts of a text file, one a line; empty lines are left out. Raises DataError when it cannot be read or has none."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts {str(file)!r} cannot be read: {error}") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise DataError(f"--prompts {str(file)!r} is empty; give one prompt a line")
    return found


def encode_prompts(prompts: list[str], tokenizer: Tokenizer, tokens: int, max_sequence_length: int) -> list[list[int]]:
    """The ids of every prompt, without an end of document.

    Raises ConfigError listing every prompt that is not text, has no token, or leaves no room for `tokens` more in the model.
    """
    encoded, problems = [], []
    for text in prompts:
        try:
            ids = [int(number) for number in tokenizer.encode(text)]
        except UnicodeEncodeError:  # a command line that is not UTF-8 reaches Python as lone surrogates
            problems.append(f"prompt {text!r} is not UTF-8")
            continue
        encoded.append(ids)
        if not ids:
            problems.append(f"prompt {text!r} is empty; give at least one token: a document has nothing before its first")
        elif len(ids) + tokens > max_sequence_length:
            problems.append(
                f"prompt {text[:20]!r} has {len(ids)} tokens and --tokens is {tokens}, but model.max_sequence_length is "
                f"{max_sequence_length}; shorten one"
            )
    raise_all(ConfigError, problems, "generate")
    return encoded


def find_tokenizer(source: Source, name: str | None, eod: str | None = None) -> Tokenizer:
    """The tokenizer called `name`; else the one beside the weights; else that of the data which the run was trained on.

    An extracted checkpoint tells the run it comes from. eod: the word that ends a document, with `name` only.
    Raises DataError when nothing says which it is, it cannot be read, or it has more words than the model.
    """
    if name is None and eod is not None:
        raise DataError(f"--eod {eod!r} needs --tokenizer; the model's own says what ends a document")
    if name is not None:
        tokenizer = open_tokenizer(name, eod)
    elif (beside := _beside(source)) is not None:
        tokenizer = beside
    else:
        tokenizer = _run_tokenizer(source)
    if tokenizer.vocab_size > source.shape.vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} words, but model.vocab_size is {source.shape.vocab_size}; "
            "name the tokenizer the model was trained with: --tokenizer"
        )
    return tokenizer


def check_data_tokenizer(source: Source, data: DataInfo) -> None:
    """Raise DataError when a data directory holds the ids of another tokenizer than the model's own, where both are known.

    The model's own is the one beside its weights, else that of the data of its run. Tokenizers of one name and size, or with the same words,
    are the same; where one is not at its place any more, only their sizes are compared.
    """
    own = _own_tokenizer(source)
    if own is None or own == (data.tokenizer, data.vocab_size):
        return
    name, words = own
    if words != data.vocab_size or not _same_words(name, data.tokenizer):
        raise DataError(
            f"data.path {str(data.path)!r} holds ids of tokenizer {data.tokenizer!r} ({data.vocab_size:,} words), but the model's own is {name!r} "
            f"({words:,} words); write the text again with: megatron-elastic data SOURCE --tokenizer {name} --out DIR"
        )


def _own_tokenizer(source: Source) -> tuple[str, int] | None:
    """Name and words of a model's own tokenizer; None when it is not known."""
    if (beside := _beside(source)) is not None:
        return beside.name, beside.vocab_size
    for recipe in _recipes(source):
        trained_on = load_recipe(recipe).data
        if trained_on is not None and (Path(trained_on.path) / DESCRIPTION).is_file():
            info = open_data(trained_on.path)
            return info.tokenizer, info.vocab_size
    return None


def _same_words(one: str, other: str) -> bool:
    """Whether two tokenizers of one size have the same words; also where one cannot be read any more."""
    try:
        first, second = open_tokenizer(one), open_tokenizer(other)
    except DataError:
        return True
    if isinstance(first, HuggingFaceTokenizer) and isinstance(second, HuggingFaceTokenizer):
        return first.words() == second.words()
    return type(first) is type(second)


def _beside(source: Source) -> Tokenizer | None:
    """The tokenizer beside a model's weights."""
    if source.assets is None or not (source.assets / TOKENIZER).is_file():
        return None
    return open_tokenizer(str(source.assets))


def _run_tokenizer(source: Source) -> Tokenizer:
    for recipe in _recipes(source):
        data = load_recipe(recipe).data
        if data is not None:
            try:
                return _data_tokenizer(data.path)
            except DataError as error:
                raise DataError(f"{error}; or name the tokenizer with --tokenizer") from None
    raise DataError(
        f"nothing says which tokenizer {str(source.path)!r} was trained with: there is none beside it, and neither it nor what it was "
        "extracted from is in a run; name one: --tokenizer byte, or the path of a tokenizer.json"
    )


def _data_tokenizer(path: str) -> Tokenizer:
    data = open_data(path)
    tokenizer = open_tokenizer(data.tokenizer, data.eod)
    if tokenizer.vocab_size != data.vocab_size:
        raise DataError(f"tokenizer {data.tokenizer!r} has {tokenizer.vocab_size} words, not the {data.vocab_size} of {path!r}; restore it")
    return tokenizer


def _recipes(source: Source) -> Iterator[Path]:
    """The recipe of the checkpoint's run, then that of the run it was extracted from."""
    origin = source.provenance.get("extracted_from")
    for checkpoint in (source.path, *([] if origin is None else [Path(origin)])):
        if (recipe := in_run_of(checkpoint, RECIPE_FILE)) is not None:
            yield recipe
