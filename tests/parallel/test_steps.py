"""Two training steps on every layout equal those of one process: losses, every weight's gradient, the router's, and the updated weights.

Dense, mixture-of-experts and hybrid parents, soft and hard budgets, every axis per layer where it can be, four microbatches of different
budgets a step, a router off its start, auxiliary losses and a moving expert bias.

Run: pytest tests/parallel
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.checkpoint import save_checkpoint
from megatron_elastic.models.build import build_model
from megatron_elastic.testing.tiny import randomize_
from tests.elastic.family import relative
from tests.parallel.layouts import LAYOUTS, cases, models
from tests.parallel.steps import STEPS, Outcome, outcome, recipe_of

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def parents(tmp_path_factory: Any, _one_process: Any) -> dict[str, Path]:
    """Model -> a checkpoint of its parent, weights moved off their start."""
    root, found = tmp_path_factory.mktemp("parents"), {}
    for name, shape in models().items():
        model = build_model(shape, _one_process)
        randomize_(model, seed=5)
        found[name] = root / name
        save_checkpoint(found[name], model=model, shape=shape, parallel=_one_process)
    return found


@pytest.fixture(scope="module")
def alone(parents: dict[str, Path], ranks: Any) -> Any:
    """(model, mode) -> what one process gets; computed once."""
    known: dict[tuple[str, str], Outcome] = {}

    def of(model: str, mode: str) -> Outcome:
        if (model, mode) not in known:
            known[model, mode] = ranks(outcome, 1, recipe_of(models()[model], parents[model], mode, {}))[0]
        return known[model, mode]

    return of


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "model", "mode"), cases())
def test_two_steps_equal_one_process(ranks: Any, alone: Any, parents: dict[str, Path], layout: str, model: str, mode: str) -> None:
    expected = alone(model, mode)
    recipe = recipe_of(models()[model], parents[model], mode, dict(LAYOUTS[layout].parallel))
    found = ranks(outcome, LAYOUTS[layout].ranks, recipe)[0]
    wrong = differences(found, expected)
    assert not wrong, "\n".join(wrong[:40])


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Everything that differs by more than the tolerance, by name."""
    wrong = []
    for step in range(STEPS):
        one, two = expected.metrics[step], found.metrics[step]
        for key in ("loss", "grad_norm", "router_grad_norm"):
            if getattr(two, key) != pytest.approx(getattr(one, key), rel=TOLERANCE, abs=1e-9):
                wrong.append(f"step {step} {key}: {getattr(two, key)} is not {getattr(one, key)}")
        if two.by_budget != pytest.approx(one.by_budget, rel=TOLERANCE) or two.cost_ratio != pytest.approx(one.cost_ratio, rel=TOLERANCE):
            wrong.append(f"step {step}: {two.by_budget}, {two.cost_ratio} are not {one.by_budget}, {one.cost_ratio}")
        for what in ("gradients", "weights", "router"):
            wrong += _different_tensors(f"step {step} {what}", getattr(found, what)[step], getattr(expected, what)[step])
    return wrong


def _different_tensors(where: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    wrong = [f"{where}: {name} is on one side only" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys():
        error = relative(found[name], expected[name])
        if not error <= TOLERANCE:
            wrong.append(f"{where}: {name} is off by {error:.1e} of {float(expected[name].norm()):.1e}")
    return sorted(wrong)


@pytest.mark.dist
@pytest.mark.parametrize("model", ["dense", "moe", "hybrid"])
def test_the_harness_sees_everything(alone: Any, model: str) -> None:
    soft, hard = alone(model, "soft"), alone(model, "hard")
    for result in (soft, hard):
        assert len({name for metrics in result.metrics for name in metrics.by_budget}) == 4, "a budget was never drawn"
        assert all(len(metrics.by_budget) >= 3 for metrics in result.metrics)
        weights, gradients = result.weights[0], result.gradients[0]
        assert set(gradients) == {name for name in weights if not name.endswith("expert_bias")}
        assert all(gradient.any() for gradient in gradients.values())
        assert not any(torch.equal(weights[name], result.weights[1][name]) for name in weights)
    assert soft.router[0] and not hard.router[0] and soft.metrics[0].router_grad_norm > 0
    assert all(tensor.any() for name, tensor in soft.router[0].items() if name.endswith(".grad"))
