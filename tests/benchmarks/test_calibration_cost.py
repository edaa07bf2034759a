"""The benchmark of calibration times each criterion against a plain forward, and prints everything as one JSON object last.

Run: pytest tests/benchmarks/test_calibration_cost.py
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from benchmarks import calibration_cost
from megatron_elastic.config import load_recipe
from tests.train.harness import in_new_process

RECIPES = Path(__file__).parents[2] / "recipes"


def run(*arguments: str) -> tuple[int, str, str]:
    """(exit code, what it printed, what it said on stderr)."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        return calibration_cost.main(arguments), out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("recipe", "variants"),
    [
        ("demo_dense", ["energy", "activation", "minitron", "taylor"]),
        ("demo_moe", ["energy", "activation", "minitron", "reap", "rank", "taylor"]),
    ],
)
def test_every_criterion_is_timed(recipe: str, variants: list[str]) -> None:
    shape = RECIPES / f"{recipe}.yaml"
    assert list(calibration_cost.variants_of(load_recipe(shape).model)) == variants
    code, out, err = in_new_process(run, "--shape", str(shape), "--pairs", "2", "--rows", "1", "--tokens", "32")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert list(result["ratios"]) == list(result["cpu_ratios"]) == variants
    assert all(ratio["median"] > 0 for ratio in result["ratios"].values())


def test_rows_that_the_model_cannot_take() -> None:
    code, _, err = in_new_process(run, "--shape", str(RECIPES / "demo_dense.yaml"), "--tokens", "5000")
    assert code == 2 and "--tokens 5000 is above model.max_sequence_length 1024" in err
