"""The demo for a few steps, through the command line: what also runs on the latest megatron-core (`make test-latest`).

Run: pytest -m smoke
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.cli.main import build_app, run
from megatron_elastic.platform import prepare_platform

RECIPE = Path(__file__).parents[1] / "recipes" / "demo_hybrid.yaml"


def _command(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(build_app(), [str(argument) for argument in arguments])
    assert stopped.value.code in (0, None), arguments


@pytest.mark.smoke
def test_the_demo_for_two_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, directory = tmp_path / "data", tmp_path / "run"
    _command("data", "stdlib", "--out", data, "--max-bytes", "2000000")
    _command("train", RECIPE, "--steps", "2", f"run_dir={directory}", f"data.path={data}", "eval.samples=2", "seed=7")
    _command("extract", directory, "--out", tmp_path / "members")
    _command("verify", directory, "--members", tmp_path / "members", "--data", data, "--samples", "2")
    capfd.readouterr()
    _command("report", directory)
    assert "small" in capfd.readouterr().out
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [(row["stage"], row["step"]) for row in rows if row["kind"] == "train"]
    assert trained == [(stage, step) for stage in ("parent", "short", "long") for step in (0, 1)]
    verified = json.loads((directory / "verify.json").read_text(encoding="utf-8"))["budgets"]
    assert set(verified) == {"full", "medium", "small"}
    assert max(max(row["masked_sliced"], row["masked_extracted"]) for row in verified.values()) < 1e-4


@pytest.mark.smoke
def test_full_budget_is_the_parent_and_a_plan_is_its_slice(parallel: Any) -> None:
    prepare_platform()
    from tests.elastic.family import build_family, forward_backward, narrowed, relative
    from tests.elastic.family import run as run_plan

    model, space, handle, _ = build_family(parallel)
    whole, grads = run_plan(model, handle, space.parent, "slice")
    masked, _ = run_plan(model, handle, narrowed(space, None), "mask")
    sliced, _ = run_plan(model, handle, narrowed(space, None), "slice")
    assert relative(masked, sliced) < 1e-5
    handle.remove()
    again, again_grads = forward_backward(model)
    assert torch.equal(whole, again)
    assert all(torch.equal(grads[name], again_grads[name]) for name in grads)
