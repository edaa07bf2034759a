"""Where text comes from: files, directories, JSONL files, and the sources of Python's own standard library.

Every document has a name that does not depend on the machine's paths; whether it is held out is decided from that name and a
seed alone, so the split survives another order, another place on disk, and files added later.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_elastic.errors import DataError, raise_all

STDLIB = "stdlib"
"""The source word for the running interpreter's standard library."""
DEFAULT_INCLUDE = ("*.py", "*.txt", "*.md", "*.rst")
"""Names of the files that are read in a directory."""
_SKIPPED_DIRECTORIES = {"__pycache__", "site-packages", "dist-packages", ".git", ".venv", "node_modules"}


@dataclass(frozen=True, slots=True)
class Document:
    """One text with the name its split is decided from."""

    name: str
    """Path relative to its source, with the source's own name in front; JSONL records add `:line`."""
    text: str
    """The text; never empty."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file that was found, not read yet."""

    name: str
    """Path relative to its source, with the source's own name in front."""
    path: Path
    """Where it is."""
    size: int
    """Bytes."""


def find_files(sources: Sequence[str], include: Sequence[str] = DEFAULT_INCLUDE) -> list[TextFile]:
    """Every file of `sources`, in the order of their names; a file that two sources share is listed once.

    sources: paths of files and directories, or `stdlib`. include: patterns of file names inside directories.
    Raises DataError that lists every source that is missing or holds no such file.
    """
    found: dict[Path, TextFile] = {}
    problems = []
    for source in sources:
        root = Path(sysconfig.get_path("stdlib")) if source == STDLIB else Path(source)
        if not root.exists():
            problems.append(f"source {source!r} does not exist; give a file, a directory or {STDLIB!r}")
            continue
        label = STDLIB if source == STDLIB else root.resolve().name
        files = list(_walk(root, label, include)) if root.is_dir() else [TextFile(label, root, root.stat().st_size)]
        if not any(file.size for file in files):
            problems.append(
                f"source {source!r} is empty: no file with text named {', '.join(include)}"
                if root.is_dir()
                else f"source {source!r} is empty"
            )
        for file in files:
            found.setdefault(file.path.resolve(), file)
    raise_all(DataError, problems, "data")
    return sorted((file for file in found.values() if file.size), key=lambda file: (file.name, str(file.path)))


def _walk(root: Path, label: str, include: Sequence[str]) -> Iterator[TextFile]:
    for directory, children, names in os.walk(root):
        children[:] = [child for child in children if child not in _SKIPPED_DIRECTORIES]
        for name in names:
            path = Path(directory, name)
            if any(fnmatch.fnmatch(name, pattern) for pattern in include) and path.is_file():
                yield TextFile(f"{label}/{path.relative_to(root).as_posix()}", path, path.stat().st_size)


def limit_bytes(files: Sequence[TextFile], max_bytes: int, seed: int) -> list[TextFile]:
    """A subset of at most `max_bytes`, drawn by the hash of name and seed (at least one file), in the order of `files`."""
    kept: set[str] = set()
    total = 0
    for file in sorted(files, key=lambda file: _draw(file.name, seed, "limit")):
        if not kept or total + file.size <= max_bytes:
            kept.add(str(file.path))
            total += file.size
    return [file for file in files if str(file.path) in kept]


def read_documents(file: TextFile, key: str = "text") -> Iterator[Document]:
    """The documents of one file: a JSONL file has one per record, any other file is one.

    key: the entry of a JSONL record that holds its text. A file that is not UTF-8, or has nothing but white space, has none.
    Raises DataError for a JSONL line that is not a record with a string under `key`.
    """
    try:
        text = file.path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read: {error.strerror}") from None
    if file.path.suffix != ".jsonl":
        if text.strip():
            yield Document(file.name, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            record = _record(file.path, number, line, key)
            if record.strip():
                yield Document(f"{file.name}:{number}", record)


def _record(path: Path, number: int, line: str, key: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not a JSON record: {error.msg}") from None
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{path}:{number}: no text under the key {key!r} (found: {keys}); name the key with --key")
    text = record[key]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise DataError(
            f"{path}:{number}: the text under the key {key!r} is no Unicode text: half of a surrogate pair stands alone"
        ) from None
    return text


def is_held_out(name: str, seed: int, fraction: float) -> bool:
    """Whether the document called `name` belongs to the held-out split: the hash of name and seed is below `fraction`."""
    return _draw(name, seed, "split") < fraction


def _draw(name: str, seed: int, purpose: str) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.sha256(f"{purpose}\0{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
