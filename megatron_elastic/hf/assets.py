"""What goes with the weights of a Hugging Face model and is none: its config, its tokenizer, how it generates, its name and its licence.

Importing a model keeps them beside the checkpoint, a run takes them over from its parent, and every member that is written gets them. Files are
copied, never run: a model's own Python code stays where it was.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_elastic.errors import CheckpointError
from megatron_elastic.formats import ORIGIN
from megatron_elastic.hf.config import CONFIG

ORIGIN_FILE = "origin.json"
TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_PATTERNS = (*_TOKENIZER_FILES, "chat_template.jinja", "chat_template.json", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files that are copied, whatever is in them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a model comes from, None: nobody says. license: as its model card names it."""

    name: str | None
    license: str | None


def files_of(directory: Path) -> list[Path]:
    """The files of a model's directory that go with its weights, its config excluded."""
    return sorted({path for pattern in _PATTERNS for path in directory.glob(pattern) if path.is_file()})


def save_assets(directory: Path, origin: Origin, assets: Path) -> None:
    """Keep what goes with the weights of a Hugging Face directory (or the assets of another checkpoint) in `assets`, a new directory."""
    assets.mkdir()
    for file in (directory / CONFIG, *files_of(directory)):
        shutil.copyfile(file, assets / file.name)  # symbolic links, as the Hugging Face cache has them, become files
    text = json.dumps({**ORIGIN.stamp, "name": origin.name, "license": origin.license}, indent=2)
    (assets / ORIGIN_FILE).write_text(text + "\n", encoding="utf-8")


def read_origin(directory: Path) -> Origin:
    """The origin of a model: from `origin.json`, or from the model card of a Hugging Face directory. Raises CheckpointError for a broken file."""
    file = directory / ORIGIN_FILE
    if not file.is_file():
        return Origin(directory.resolve().name, _card_license(directory / "README.md"))
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        ORIGIN.check(data, str(file))
        return Origin(data["name"], data["license"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be understood: {error}; import the model again") from None


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


def _card_license(card: Path) -> str | None:
    """`license` in the YAML header of a model card."""
    try:
        text = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not text.startswith("---"):
        return None
    try:
        header = yaml.safe_load(text.split("---", 2)[1])
    except yaml.YAMLError:
        return None
    found = header.get("license") if isinstance(header, dict) else None
    return found if isinstance(found, str) else None
