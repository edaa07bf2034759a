"""A run with `precision: bf16`: bf16 parameters with fp32 master weights, gradients and decisions; near the fp32 run; resumed bit for bit;
its members extracted in bf16 and verified.

Run: pytest tests/train/test_bf16_run.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.recipe import Recipe
from tests.train import harness
from tests.train.harness import Died, different, in_new_process, plain_recipe, rows, stored, tiny_recipe
from tests.train.test_loop import rank_run
from tests.train.test_resume_run import killed_after_a_step

LAST = "stage-long"
KEPT_IN_FP32 = (".A_log", ".D", ".expert_bias")
"""What megatron-core makes in fp32 whatever the precision of the model."""
NEAR = 0.01
"""Relative difference of a loss to that of the fp32 run: bf16 rounds by up to 2^-8, and over a few steps nothing has drifted further."""


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: Any, data: Path) -> Path:
    """The directory of the same run in fp32."""
    directory = tmp_path_factory.mktemp("fp32") / "run"
    in_new_process(harness.train, tiny_recipe(directory, data))
    return directory


def watched_run(recipe: Recipe) -> dict[str, Any]:
    """Train, and say what was computed in which type."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_elastic.checkpoint.sharded.optimizer import inner_optimizers
    from megatron_elastic.train import loop, run, step

    runs, seen, loss_of = [], {"hidden states": set(), "losses": set(), "leaves": set(), "leaf gradients": set()}, step.batch_loss

    def kept(*args: Any) -> Any:
        runs.append(run.Run(*args))
        return runs[-1]

    def watched(model: Any, hidden: torch.Tensor, *args: Any) -> Any:
        loss = loss_of(model, hidden, *args)
        seen["hidden states"].add(hidden.dtype)
        seen["losses"] |= {value.dtype for value in (loss.total, loss.kl, loss.ce)}
        return loss

    learn = run.Decider.learn

    def watched_learn(self: Any, groups: Any, *args: Any) -> Any:
        leaves = [leaf for group in groups for leaf in group.leaves.values()]
        seen["leaves"] |= {leaf.dtype for leaf in leaves}
        seen["leaf gradients"] |= {leaf.grad.dtype for leaf in leaves if leaf.grad is not None}
        return learn(self, groups, *args)

    loop.Run, step.batch_loss, run.Decider.learn = kept, watched, watched_learn
    output = harness.train(recipe)
    one = runs[0]
    assert [type(chunk) for chunk in one.chunks] == [DistributedDataParallel]
    inner = inner_optimizers(one.optimizer)
    masters = [parameter for each in inner for group in each.optimizer.param_groups for parameter in group["params"]]
    return {
        "output": output,
        **seen,
        "parameters": {name: parameter.dtype for name, parameter in one.parts[0].named_parameters()},
        "teacher": {name: parameter.dtype for name, parameter in one.teacher.named_parameters()},
        "gradients": {parameter.main_grad.dtype for parameter in one.parts[0].parameters()},
        "optimizers": {type(each) is DistributedOptimizer for each in inner},
        "masters": {master.dtype for master in masters},
        "moments": {state[key].dtype for each in inner for state in each.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")},
        "router": {parameter.dtype for parameter in one.decider.router.parameters()},
    }


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: Any, data: Path) -> tuple[Path, dict[str, Any]]:
    """(directory, what was watched) of an uninterrupted run in bf16."""
    directory = tmp_path_factory.mktemp("bf16") / "run"
    return directory, in_new_process(watched_run, tiny_recipe(directory, data, precision="bf16"))


def test_what_is_bf16_and_what_is_fp32(bf16: tuple[Path, dict[str, Any]]) -> None:
    _, seen = bf16
    for model in (seen["parameters"], seen["teacher"]):
        for name, dtype in model.items():
            assert dtype == (torch.float32 if name.endswith(KEPT_IN_FP32) else torch.bfloat16), name
    assert seen["hidden states"] == {torch.bfloat16} and seen["optimizers"] == {True}
    for what in ("losses", "leaves", "leaf gradients", "gradients", "masters", "moments", "router"):
        assert seen[what] == {torch.float32}, what


def test_the_loss_stays_near_that_of_fp32(bf16: tuple[Path, dict[str, Any]], fp32: Path) -> None:
    ours, theirs = rows(bf16[0]), rows(fp32)
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=NEAR)
    assert ours != theirs, "both runs were fp32"
    assert [sorted(row["by_budget"]) for row in ours] == [sorted(row["by_budget"]) for row in theirs]
    for row, other in zip(rows(bf16[0], "eval"), rows(fp32, "eval"), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=NEAR)
    # What the router learns from is a gradient, which is rounded more often than the loss.
    norms = [[row["router_grad_norm"] for row in run] for run in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=5 * NEAR) and max(norms[0]) > 0


def test_the_full_budget_starts_as_the_parent(bf16: tuple[Path, dict[str, Any]]) -> None:
    evaluated = {(row["stage"], row["step"]): row["loss"] for row in rows(bf16[0], "eval")}
    assert evaluated["short", 0]["full"] == evaluated["parent", 3]["parent"]
    assert next(row for row in rows(bf16[0]) if "full" in row["by_budget"])["by_budget"]["full"] == 0


def test_weights_are_the_rounded_master_weights(bf16: tuple[Path, dict[str, Any]]) -> None:
    assert_rounded_masters(bf16[0] / "checkpoints" / LAST)


def assert_rounded_masters(checkpoint: Path) -> None:
    """Every weight is its own master's rounding, and every master is finer than bf16."""
    state, prefix = stored(checkpoint), "optimizer.state.param."
    names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    assert any(name.endswith(".A_log") for name in names)
    for name in names:
        weight, master = state[name], state[prefix + name]
        assert weight.dtype == (torch.float32 if name.endswith(KEPT_IN_FP32) else torch.bfloat16) and master.dtype == torch.float32
        assert torch.equal(weight, master.to(weight.dtype)), name
        assert not torch.equal(master, master.bfloat16().float()), name
    biases = [name for name in state if name.startswith("decoder.") and name.endswith(".expert_bias")]
    assert biases and all(state[name].dtype == torch.float32 for name in biases)


def test_a_killed_run_ends_as_the_uninterrupted_one(bf16: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path) -> None:
    recipe, whole = tiny_recipe(tmp_path / "run", data, precision="bf16"), bf16[0]
    with pytest.raises(Died, match="^-9$"):
        in_new_process(killed_after_a_step, recipe)
    output = in_new_process(harness.train, recipe)
    assert "step-short-0000002 (stage short, step 2)" in output.splitlines()[0]
    assert different(stored(tmp_path / "run" / "checkpoints" / LAST), stored(whole / "checkpoints" / LAST)) == []
    assert rows(tmp_path / "run")[-3:] == rows(whole)[-3:]
    assert (tmp_path / "run" / "family.json").read_bytes() == (whole / "family.json").read_bytes()


@pytest.mark.dist
def test_two_ranks_take_the_same_run(bf16: tuple[Path, dict[str, Any]], data: Path, ranks: Any, tmp_path: Path) -> None:
    recipe = plain_recipe(tmp_path / "run", data, precision="bf16", parallel={"expert": 2})
    routers = ranks(rank_run, 2, recipe)
    assert not different(*routers)
    ours, theirs = rows(tmp_path / "run"), rows(bf16[0])
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-6), "the same bf16 weights on the same tokens"
    # Gradients are summed in another order, in fp32; where that moves a master weight over a rounding, the weight is one step of bf16 away.
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=NEAR)
    assert_rounded_masters(tmp_path / "run" / "checkpoints" / LAST)


def test_members_are_extracted_in_bf16_and_verified(bf16: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path) -> None:
    code, _, error = in_new_process(harness.command, "extract", str(bf16[0]), "--out", str(tmp_path / "members"))
    assert code == 0, error
    for budget in ("full", "medium", "small"):
        member = stored(tmp_path / "members" / budget)
        kinds = {name: tensor.dtype for name, tensor in member.items() if tensor.is_floating_point()}
        assert kinds and all(dtype == (torch.float32 if name.endswith(KEPT_IN_FP32) else torch.bfloat16) for name, dtype in kinds.items())
    # In fp32 arithmetic: 1e-4 of a logit would be lost in the rounding of bf16, and so would a weight cut at the wrong place.
    arguments = ("--members", str(tmp_path / "members"), "--data", str(data), "--sequence-length", "72", "--tokens", "2000")
    code, output, error = in_new_process(harness.command, "verify", str(bf16[0]), *arguments)
    assert code == 0 and "small" in output, error


def test_another_precision_is_another_run(bf16: tuple[Path, dict[str, Any]], data: Path) -> None:
    with pytest.raises(AssertionError, match="precision was 'bf16' and is 'fp32'"):
        in_new_process(harness.train, tiny_recipe(bf16[0], data))
