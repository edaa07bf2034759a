"""A family begun on one megatron-core release is read and continued by the other, both ways: every weight, moment and step number arrives
bit for bit, the router's and its optimizer's too, and training goes on as the release that began it would have. GPT models likewise.

Both interpreters are needed: this one, and the other one's environment, which scripts/run.sh makes the first time.
Run: pytest tests/checkpoint/test_two_releases.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.checkpoint import open_checkpoint
from megatron_elastic.recipe_files import flatten
from tests.checkpoint.one_release import GPTS, LAST, UNTIL
from tests.train import harness
from tests.train.harness import different, in_new_process, rows, stored

SCRIPTS = Path(__file__).parents[2] / "scripts"
RELEASES = {"3.11": "0.16.1", "3.12": "0.19"}
"""Python -> megatron-core."""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER = next(python for python in RELEASES if python != HERE)
DIRECTIONS = [(writer, reader) for writer in RELEASES for reader in RELEASES if writer != reader]
SAME_MATH = 1e-5
"""Relative: the releases do the same sums in fp32, a few of them in another order. Seen after three steps: 6e-7 in a loss; 3e-5 of the largest
entry in a weight, where Adam's division by a moment near zero amplifies rounding."""
KINDS = ("decoder.", "optimizer.state.param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "common.optimizer.step")
FAMILY_KINDS = ("common.run.step", "common.run.router.", "common.run.router_optimizer.state.")
"""What names begin with."""
FAMILY = f"begun/checkpoints/stage-{UNTIL}"
PLACES = {FAMILY: f"again/checkpoints/stage-{UNTIL}", **{name: f"again-{name}" for name in GPTS}}
"""A checkpoint -> where the other release writes it again, both inside the directory of a release."""

both_ways = pytest.mark.parametrize(
    ("writer", "reader"), DIRECTIONS, ids=[f"{RELEASES[writer]} read by {RELEASES[reader]}" for writer, reader in DIRECTIONS]
)
pytestmark = [
    pytest.mark.timeout(900),  # the first test may have to make an environment
    pytest.mark.skipif(HERE == "3.12", reason="both releases run in this test, and `make test` of the other has it"),
]


@pytest.fixture(scope="module")
def other_python() -> str:
    """The interpreter of the other release."""
    found = subprocess.run([SCRIPTS / "find_python.sh", OTHER], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"no working Python {OTHER}, which megatron-core {RELEASES[OTHER]} is tested on")
    return found.stdout.strip()


def on_both(other_python: str, arguments: dict[str, list[Any]]) -> None:
    """Run one_release with the arguments of each Python, both at once."""
    commands = {HERE: [sys.executable], OTHER: [SCRIPTS / "run.sh", "python"]}
    environment = os.environ | {"PYTHON": other_python}
    started = {
        python: subprocess.Popen(
            [*commands[python], "-m", "tests.checkpoint.one_release", *map(str, words)],
            env=environment,
            cwd=SCRIPTS.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for python, words in arguments.items()
    }
    try:
        for python, process in started.items():
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, f"on Python {python}:\n{output}"
    finally:
        for process in started.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def runs(other_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Python -> a directory: what it began itself, and what it made of what the other one began (see one_release)."""
    data = in_new_process(harness.write_data, tmp_path_factory.mktemp("text"))
    directories = {python: tmp_path_factory.mktemp(f"python{python}") for python in RELEASES}
    on_both(other_python, {python: ["begin", directory, data] for python, directory in directories.items()})
    source = {reader: directories[writer] for writer, reader in DIRECTIONS}
    on_both(other_python, {python: ["take_over", directory, data, source[python]] for python, directory in directories.items()})
    return directories


def numbers(run: Path) -> dict[str, float]:
    """Every number of the rows of stage LAST, under `number of the step.key`."""
    found = enumerate((flatten(row) for row in rows(run) if row["stage"] == LAST), 1)
    return {f"{number}.{key}": value for number, row in found for key, value in row.items() if isinstance(value, float)}


@pytest.mark.parametrize("path", PLACES)
def test_both_releases_give_the_same_names(runs: dict[str, Path], path: str) -> None:
    first, second = (stored(directory / path) for directory in runs.values())
    assert first.keys() == second.keys()
    assert {name: tensor.shape for name, tensor in first.items()} == {name: tensor.shape for name, tensor in second.items()}


@both_ways
@pytest.mark.parametrize("path", PLACES)
def test_what_is_read_is_what_was_written(runs: dict[str, Path], path: str, writer: str, reader: str) -> None:
    source, copy = runs[writer] / path, runs[reader] / PLACES[path]
    for checkpoint, python in ((source, writer), (copy, reader)):
        assert open_checkpoint(checkpoint).provenance["megatron-core"].startswith(RELEASES[python])
    written, read = stored(source), stored(copy)
    kinds = KINDS + FAMILY_KINDS if path == FAMILY else KINDS
    assert [kind for kind in kinds if not any(name.startswith(kind) for name in written)] == []
    assert different(read, written) == []


@both_ways
@pytest.mark.parametrize("name", GPTS)
def test_another_step_of_a_gpt(runs: dict[str, Path], name: str, writer: str, reader: str) -> None:
    own, taken = (json.loads(path.read_text()) for path in (runs[writer] / f"{name}.json", runs[reader] / f"again-{name}.json"))
    assert len(own) == 2 and taken == pytest.approx(own, rel=SAME_MATH)


@both_ways
def test_training_goes_on(runs: dict[str, Path], writer: str, reader: str) -> None:
    own, taken = runs[writer] / "ended", runs[reader] / "continued"
    expected, found = (numbers(run) for run in (own, taken))
    assert found == pytest.approx(expected, rel=SAME_MATH) and "3.loss" in expected
    assert (taken / "family.json").read_bytes() == (own / "family.json").read_bytes()
    first, second = (stored(run / "checkpoints" / f"stage-{LAST}") for run in (own, taken))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=SAME_MATH, atol=10 * SAME_MATH * float(tensor.double().abs().max()), msg=name)
