"""The benchmark of extraction measures what it says: sizes, members that are the plan's, the peak of the extracting process alone.

Run: pytest tests/benchmarks
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import extract_stream
from megatron_elastic.cost import total_params, widths_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("gigabytes", [0.02, 0.5, 4.0, 9.0])
def test_the_model_has_the_size_that_is_asked_for(gigabytes: float) -> None:
    shape = extract_stream.model_of(gigabytes)
    assert shape.problems() == [] and 2 * total_params(
        shape, widths_of(extract_stream.parent_plan(shape), shape.num_layers)
    ) == pytest.approx(1e9 * gigabytes, rel=0.05)
    space = extract_stream.family_of(shape)
    half = space.plan({spec.axis: spec.choices[-1] for spec in space.axes})
    sizes = [total_params(shape, widths_of(plan, shape.num_layers)) for plan in (space.parent, half)]
    assert 0.4 < sizes[1] / sizes[0] < 0.75


@pytest.fixture(scope="module")
def result(tmp_path_factory: Any) -> dict[str, Any]:
    """What the command prints last, of a source of 20 MB."""
    directory = tmp_path_factory.mktemp("disk")
    command = [sys.executable, "-m", "benchmarks.extract_stream", "--gigabytes", "0.02", "--rounds", "2", "--directory", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert list(directory.iterdir()) == [], "something was left on the disk"
    assert "speed / cp" in done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_the_last_line_is_the_whole_result(result: dict[str, Any]) -> None:
    assert list(result["variants"]) == list(extract_stream.VARIANTS)
    written = {name: each["written_bytes"] for name, each in result["variants"].items()}
    assert written["cp"] == result["source_bytes"] == pytest.approx(2e7, rel=0.1)
    for format_ in ("megatron", "hf"):
        assert written[f"whole {format_}"] == pytest.approx(result["source_bytes"], rel=0.01)
        assert 0.4 < written[f"half {format_}"] / result["source_bytes"] < 0.75


def test_a_small_source_needs_little_more_than_the_libraries(result: dict[str, Any]) -> None:
    for name, each in result["variants"].items():
        assert each["speed_over_cp"]["median"] > 0
        assert name == "cp" or 1e8 < each["peak_bytes"] < 1e9
    assert result["variants"]["cp"]["speed_over_cp"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}


def test_misses_are_named(result: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(result))
    for each in changed["variants"].values():
        each |= {"peak_bytes": 0, "speed_over_cp": {"median": 0.9, "q1": 0.9, "q3": 0.9}}
    assert extract_stream.misses(changed) == []
    changed["variants"]["half hf"] |= {"peak_bytes": 1_700_000_000, "speed_over_cp": {"median": 0.3, "q1": 0.2, "q3": 0.4}}
    assert extract_stream.misses(changed) == ["half hf: 1.70 GB is above 1.5 GB", "half hf: 0.30 of the copy's speed is below 0.5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "1"], "--rounds 1: quartiles need at least 2"),
        (["--gigabytes", "0"], "--gigabytes 0.0 must be above 0"),
        (["--directory", "nowhere"], "--directory 'nowhere' is not a directory"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        extract_stream.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract_stream.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**8))
    assert extract_stream.main(["--gigabytes", "0.02", "--directory", str(tmp_path)]) == 2
    assert "has 0.1 GB free, 0.1 GB are needed; lower --gigabytes" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
