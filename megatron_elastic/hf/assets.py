"""What goes with the weights of a Hugging Face model and is none: its config, its tokenizer, how it generates, its name and its licence.

Importing a model keeps them beside the checkpoint, a run takes them over from its parent, and every member that is written gets them. Files are
copied, never run: a model's own Python code stays where it was.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_elastic.errors import CheckpointError
from megatron_elastic.formats import ORIGIN
from megatron_elastic.hf.card import read_license
from megatron_elastic.hf.config import CONFIG, read_config

ORIGIN_FILE = "origin.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATES = "additional_chat_templates"
"""Directory of the chat templates that have names of their own, as transformers has it."""
_TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "tekken.json",
    "*.model",  # sentencepiece, under any name
    "tokenizer.model.v*",  # as Mistral has it
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_PATTERNS = (*_TOKENIZER_FILES, "chat_template.jinja", "chat_template.json", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files that are copied, whatever is in them."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""ORG/NAME, and no path of more or fewer parts."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a model comes from, None: nobody says. license: as its model card names it, as one text (`hf.card`)."""

    name: str | None
    license: str | None


def files_of(directory: Path) -> list[Path]:
    """The files of a model's directory that go with its weights, its config and what `copy_files` copies from below it excluded."""
    return sorted({path for pattern in _PATTERNS for path in directory.glob(pattern) if path.is_file()})


def copy_files(directory: Path, target: Path) -> None:
    """Copy what goes with the weights of a model's directory to `target`, which exists, its config excluded.

    Symbolic links, as the Hugging Face cache has them, become files. Raises OSError when the disk does not take them.
    """
    for file in files_of(directory):
        shutil.copyfile(file, target / file.name)
    if templates := sorted(path for path in (directory / CHAT_TEMPLATES).glob("*.jinja") if path.is_file()):
        (target / CHAT_TEMPLATES).mkdir()
        for file in templates:
            shutil.copyfile(file, target / CHAT_TEMPLATES / file.name)


def save_assets(directory: Path, origin: Origin, assets: Path) -> None:
    """Keep what goes with the weights of a Hugging Face directory (or the assets of another checkpoint) in `assets`, a new directory."""
    assets.mkdir()
    shutil.copyfile(directory / CONFIG, assets / CONFIG)
    copy_files(directory, assets)
    text = json.dumps({**ORIGIN.stamp, "name": origin.name, "license": origin.license}, indent=2)
    (assets / ORIGIN_FILE).write_text(text + "\n", encoding="utf-8")


def read_origin(directory: Path) -> Origin:
    """The origin of a model: from `origin.json`, or from a Hugging Face directory's place, config and model card.

    The name is that of the Hub (ORG/NAME) where its cache's path or `_name_or_path` tells it, else the directory's.
    Raises CheckpointError for a broken file.
    """
    file = directory / ORIGIN_FILE
    if not file.is_file():
        return Origin(_name_of(directory), read_license(directory / "README.md"))
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        ORIGIN.check(data, str(file))
        return Origin(data["name"], data["license"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be understood: {error}; import the model again") from None


def _name_of(directory: Path) -> str:
    """The name of the model in a Hugging Face directory."""
    place = directory.resolve()
    repository = place.parent.parent.name.removeprefix("models--")
    if place.parent.name == "snapshots" and repository != place.parent.parent.name:
        return repository.replace("--", "/")  # models--ORG--NAME/snapshots/COMMIT; the Hub has no name with two hyphens in a row
    said = read_config(directory).get("_name_or_path") if (directory / CONFIG).is_file() else None
    return said if isinstance(said, str) and _HUB_NAME.fullmatch(said) else place.name


def check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Raise CheckpointError when the tokenizer of a directory has more words than a model of `vocab_size`; nothing without a tokenizer.json."""
    if not (directory / TOKENIZER).is_file():
        return
    from megatron_elastic.corpus.tokenizer import open_tokenizer

    words = open_tokenizer(str(directory)).vocab_size
    if words > vocab_size:
        raise CheckpointError(
            f"{str(directory / TOKENIZER)!r} has {words} words, more than the {vocab_size} of vocab_size in {CONFIG}; they are not of one model"
        )
