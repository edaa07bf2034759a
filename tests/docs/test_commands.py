"""Every `megatron-elastic` command of README and docs runs as written (training cut short with --steps), in order, in one directory.

Run: pytest tests/docs
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.train.harness import command, in_new_process

ROOT = Path(__file__).parents[2]


def commands(page: Path) -> list[str]:
    """The lines of a page that begin with `$ megatron-elastic`."""
    return re.findall(r"^\$ megatron-elastic (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("page", [ROOT / "docs" / "tutorial.md", ROOT / "README.md"], ids=lambda page: page.name)
def test_commands_run_as_written(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    found = commands(page)
    assert found
    for line in found:
        arguments = shlex.split(line)
        if arguments[0] == "data":
            arguments += ["--max-bytes", "2000000"]
        if arguments[0] == "train":
            arguments += ["--steps", "2", "eval.samples=2"]
        if arguments[0] == "verify":
            arguments += ["--samples", "2"]
        code, out, err = in_new_process(command, *arguments)
        assert code == 0, f"{line}\n{out}\n{err}"
        assert out.strip(), line


def test_readme_snippet_runs(parallel: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("megatron_elastic.parallel.ParallelContext.initialize", lambda **sizes: parallel)  # one per process
    snippet = re.search(r"```python\n(.+?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert snippet is not None
    import torch

    tokens = torch.arange(32)[None]
    names = {"tokens": tokens, "positions": tokens.clone()}
    exec(compile(snippet[1], "README.md", "exec"), names)
    assert names["logits"].shape == (1, 32, 264)
    assert all(
        type(module).__module__.startswith(("megatron.core", "torch", "megatron_elastic.models", "megatron_elastic.platform"))
        for module in names["model"].modules()
    )
