"""Every `megatron-elastic` command of README and docs runs as written (training, text and scoring cut short), in order, in one directory.

Run: pytest tests/docs
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.harness import command, in_new_process

ROOT = Path(__file__).parents[2]


def commands(page: Path) -> list[str]:
    """The lines of a page that begin with `$ megatron-elastic`."""
    return re.findall(r"^\$ megatron-elastic (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.+?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


SHORTER = {
    "data": ("--max-bytes", "2000000"),
    "train": ("--steps", "2", "eval.samples=2"),
    "verify": ("--tokens", "512"),
    "rank": ("--tokens", "2048", "--depth-tokens", "256"),
}
"""Command -> what is added so that it takes seconds."""
SHORTER_STILL = SHORTER | {
    "data": ("--max-bytes", "400000"),
    "train": ("--steps", "1", "stages.short.sequence_length=32", "stages.short.warmup_steps=0", "stages.long.sequence_length=32"),
    "verify": ("--tokens", "64", "--sequence-length", "32"),
    "eval": ("--tokens", "128", "--sequence-length", "64"),
    "generate": ("--tokens", "4"),
}
"""The same for a model of 135 million parameters."""


def run_commands(found: list[str], shorter: dict[str, tuple[str, ...]]) -> None:
    """Run the commands of a page in this directory."""
    assert found
    for line in found:
        arguments = shlex.split(line)
        code, out, err = in_new_process(command, *arguments, *shorter.get(arguments[0], ()))
        assert code == 0, f"{line}\n{out}\n{err}"
        assert out.strip(), line


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: empty but for the recipes."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.one_release
@pytest.mark.parametrize(
    "page", [ROOT / "docs" / "tutorial.md", ROOT / "docs" / "cluster.md", ROOT / "README.md"], ids=lambda page: page.name
)
def test_commands_run_as_written(page: Path, empty: Path) -> None:
    run_commands(commands(page), SHORTER)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="two minutes; the small models of the other tests tell the releases apart")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["without verify and train", "whole"])
def test_a_real_model_goes_in_and_out_as_written(whole: bool, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.train.harness.SECONDS", 600.0)  # for one command
    page = ROOT / "docs" / "smollm2.md"
    (fetch,) = [line for line in blocks(page, "bash")[0].splitlines() if line.startswith("cp ")]
    subprocess.run(["bash", "-ec", fetch], check=True)
    (plan,) = blocks(page, "json")
    (empty / "plan.json").write_text(plan, encoding="utf-8")
    found = commands(page)
    if not whole:
        first = next(number for number, line in enumerate(found) if line.startswith("train "))
        found = [line for line in found[:first] if not line.startswith("verify ")]
    run_commands(found, SHORTER_STILL)
    assert json.loads((empty / "runs" / "smollm2_118m" / "config.json").read_text())["num_hidden_layers"] == 28
    (snippet,) = blocks(page, "python")
    ran = subprocess.run(
        [sys.executable, "-I", "-c", snippet], capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("def main("), ran.stdout


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
