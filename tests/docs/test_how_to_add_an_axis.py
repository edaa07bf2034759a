"""The page on axes prints all the code that an axis has: taken out of a copy of the project the axis is unknown and the others work; put
back, its parity tests pass.

Run: pytest tests/docs/test_how_to_add_an_axis.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.page_edits import Edit, edits_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to-add-an-axis.md"
NAME = re.compile(r"\bmamba_state\b|\bMAMBA_STATE\b")


@pytest.fixture
def without(tmp_path: Path) -> Path:
    """A copy of what the example needs, without the axis."""
    ignored = shutil.ignore_patterns("__pycache__")
    for part in ("megatron_elastic", "tests/elastic", "tests/docs", "docs"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignored)
    for file in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    for edit in reversed(edits_of(PAGE)):
        edit.undo(tmp_path)
    return tmp_path


def test_the_page_prints_all_code_of_the_axis(without: Path) -> None:
    package = without / "megatron_elastic"
    left = [f"{file.relative_to(without)}: {line}" for file in package.rglob("*.py") for line in file.read_text("utf-8").splitlines()]
    assert not [line for line in left if NAME.search(line)]


@pytest.mark.timeout(600)
def test_the_blocks_make_the_axis(without: Path) -> None:
    assert any((without / edit.file).read_bytes() != (ROOT / edit.file).read_bytes() for edit in edits_of(PAGE))
    environment = os.environ | {"PYTHONPATH": str(without), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.axis_example"],
        cwd=without,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout and "3 passed" in done.stdout, done.stdout
    for edit in edits_of(PAGE):
        assert (without / edit.file).read_bytes() == (ROOT / edit.file).read_bytes()


def test_a_block_that_no_longer_applies_is_an_error(tmp_path: Path) -> None:
    for edit in edits_of(PAGE):
        (tmp_path / edit.file).parent.mkdir(parents=True, exist_ok=True)
        for text in (edit.after.replace(" ", "  "), edit.after * 2, edit.before):
            (tmp_path / edit.file).write_text(text, encoding="utf-8")
            with pytest.raises(ValueError, match="bring the page up to date"):
                edit.undo(tmp_path)


def test_context_is_shared_by_both_sides(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("**`a/b.py`**\n\n```diff\n one\n\n-two\n+TWO\n+\n+three\n four\n```\n", encoding="utf-8")
    assert edits_of(page) == [Edit("a/b.py", "one\n\ntwo\nfour\n", "one\n\nTWO\n\nthree\nfour\n")]
    page.write_text("```diff\n+two\n```\n", encoding="utf-8")
    with pytest.raises(ValueError, match="1 diff blocks, 0 of them with a file above"):
        edits_of(page)
