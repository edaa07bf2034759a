"""The demo for a few steps, through the command line, and the package's first promises on one model.

Run: pytest tests/test_smoke.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.export.extract import extract
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors, scatter_tensors
from megatron_elastic.space import resize
from megatron_elastic.testing.experts import stack_experts, unstack_experts
from tests.elastic.family import build_family, forward_backward, narrowed, relative, run
from tests.train.harness import command, in_new_process, rows

RECIPE = Path(__file__).parents[1] / "recipes" / "demo_hybrid.yaml"


def succeed(*arguments: str | Path) -> str:
    """Standard output of a command that ends well."""
    code, out, err = in_new_process(command, *map(str, arguments))
    assert code == 0, err
    return out


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="tests/docs runs these commands and more of docs/tutorial.md; `make test-latest` does not"
)
def test_the_demo_for_two_steps(tmp_path: Path) -> None:
    data, directory, members = tmp_path / "data", tmp_path / "run", tmp_path / "members"
    succeed("data", "stdlib", "--out", data, "--max-bytes", "2000000")
    output = succeed("train", RECIPE, "--steps", "2", f"run_dir={directory}", f"data.path={data}", "eval.samples=2", "seed=7")
    assert "tokens/s" in output and "held-out loss full" in output
    assert [(row["stage"], row["step"]) for row in rows(directory)] == [(s, n) for s in ("parent", "short", "long") for n in (0, 1)]
    succeed("extract", directory, "--out", members)
    assert {path.name for path in members.iterdir()} == {"full", "medium", "small"}
    succeed("verify", directory, "--members", members, "--data", data, "--tokens", "2000")
    verified = json.loads((directory / "verify.json").read_text(encoding="utf-8"))["budgets"]
    assert set(verified) == {"full", "medium", "small"}
    assert all(max(row["masked_sliced"], row["masked_extracted"]) < 1e-4 for (row,) in verified.values())
    assert "small" in succeed("report", directory)


def test_a_plan_masked_sliced_and_extracted(parallel: Any) -> None:
    model, space, handle, shape = build_family(parallel)
    plan = narrowed(space, None)
    masked, _ = run(model, handle, plan, "mask")
    sliced, _ = run(model, handle, plan, "slice")
    small = build_model(resize(shape, plan), parallel)
    scatter_tensors(small, unstack_experts(dict(extract(stack_experts(gather_tensors(model)).items(), shape, space, plan))))
    extracted, _ = forward_backward(small)
    assert relative(run(model, handle, None, "slice")[0], sliced) > 1e-2, "the plan changes nothing"
    assert max(relative(masked, sliced), relative(extracted, sliced)) < 1e-5


def test_the_full_budget_is_the_parent_bit_for_bit(parallel: Any) -> None:
    model, space, handle, _ = build_family(parallel)
    elastic = [run(model, handle, plan, mode) for plan in (None, space.parent) for mode in ("mask", "slice")]
    handle.remove()
    logits, grads = forward_backward(model)
    for again, again_grads in elastic:
        assert torch.equal(again, logits) and grads.keys() == again_grads.keys()
        assert all(torch.equal(grads[name], again_grads[name]) for name in grads)
