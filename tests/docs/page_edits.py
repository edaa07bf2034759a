"""The changes that a page of the docs prints as diff blocks, done and undone on a copy of the project."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^\*\*`(?P<file>[\w/.]+)`\*\*\n\n```diff\n(?P<lines>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Edit:
    """One block: the text of `file` that stands before the change, and after it."""

    file: str
    before: str
    after: str

    def apply(self, root: Path) -> None:
        """Make the change under `root`. Raises ValueError when its place is not there once."""
        self._replace(root, self.before, self.after)

    def undo(self, root: Path) -> None:
        """Take the change back under `root`. Raises ValueError when what the page prints is not in the file once."""
        self._replace(root, self.after, self.before)

    def _replace(self, root: Path, old: str, new: str) -> None:
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{self.file} has this {text.count(old)} times, not once; bring the page up to date:\n{old}")
        path.write_text(text.replace(old, new), encoding="utf-8")


def edits_of(page: Path) -> list[Edit]:
    """The ```diff blocks of `page` in their order; each has its file in bold above it."""
    text = page.read_text(encoding="utf-8")
    found = [_edit(match["file"], match["lines"].splitlines(keepends=True)) for match in _BLOCK.finditer(text)]
    if len(found) != text.count("```diff") or not found:
        raise ValueError(f"{page.name}: {text.count('```diff')} diff blocks, {len(found)} of them with a file above")
    return found


def _edit(file: str, lines: list[str]) -> Edit:
    """A line begins with `+`, `-`, or a space that both sides share (an empty line is one too)."""
    wrong = [line for line in lines if line[0] not in "+- \n"]
    if wrong:
        raise ValueError(f"{file}: a line of the block begins with neither +, - nor a space: {wrong[0]!r}")
    before, after = (
        "".join(line if line == "\n" else line[1:] for line in lines if line[0] != other)  # what the other side alone has is left out
        for other in "+-"
    )
    return Edit(file, before, after)
