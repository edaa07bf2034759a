"""From a router to a family: argmax plans, the parent for the full budget, refusals of what does not nest or misses its target."""

from __future__ import annotations

import pytest
import torch

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.cost import cost_function
from megatron_elastic.errors import ConfigError, PlanError
from megatron_elastic.planning import plan_cost
from megatron_elastic.router.finalize import examine, finalize, hardened
from megatron_elastic.router.network import BudgetRouter
from megatron_elastic.shape import AttentionShape, MlpShape, ModelShape, build_space

SHAPE = ModelShape(
    layer_pattern="*-*-", hidden_size=24, vocab_size=40, attention=AttentionShape(heads=4, kv_groups=2, head_dim=6), mlp=MlpShape(ffn=64)
)
SPACE = build_space(
    SHAPE, {ElasticAxis.HIDDEN: (24, 16, 12), ElasticAxis.FFN: (64, 48, 32), ElasticAxis.LAYERS: (4, 3)}, shard_groups=2, drop_order=(2,)
)
COST = cost_function(SHAPE, "total_params", 16)


def _plan(hidden: int, ffn: int, layers: int):
    return SPACE.plan({ElasticAxis.HIDDEN: hidden, ElasticAxis.FFN: ffn, ElasticAxis.LAYERS: layers})


def _router(picks: dict[str, tuple[int, int, int]], budgets: dict[str, float]) -> BudgetRouter:
    """A router whose most probable choices are `picks`."""
    router = BudgetRouter(SPACE, budgets, seed=0)
    with torch.no_grad():
        for spec, network in zip(SPACE.axes, router.networks.values(), strict=True):
            network.inner.zero_()
            network.outer.zero_()
            for name, widths in picks.items():
                position = router.position_of(name)
                network.inner[position, position] = 1.0
                network.outer[spec.choices.index(widths[SPACE.axes.index(spec)]), position] = 2.0
    return router


def _budgets(*plans: tuple[int, int, int]) -> dict[str, float]:
    names = ("full", "medium", "small")
    return {name: plan_cost(SHAPE, _plan(*plan), COST) for name, plan in zip(names, plans, strict=True)}


FULL, MEDIUM, SMALL = (24, 64, 4), (16, 48, 4), (12, 48, 3)


def test_argmax_plans():
    budgets = _budgets(FULL, MEDIUM, SMALL)
    router = _router({"full": FULL, "medium": MEDIUM, "small": SMALL}, budgets)
    plans = finalize(router, SPACE, budgets, COST, 0.01, num_layers=4, full="full")
    assert plans == {"full": SPACE.parent, "medium": _plan(*MEDIUM), "small": _plan(*SMALL)}
    assert plans["small"].dropped_layers == (2,)


def test_full_is_the_parent_whatever_the_router_says():
    budgets = _budgets(FULL, MEDIUM, SMALL)
    router = _router({"full": SMALL, "medium": MEDIUM, "small": SMALL}, budgets)
    assert finalize(router, SPACE, budgets, COST, 0.01, num_layers=4, full="full")["full"] == SPACE.parent
    with pytest.raises(PlanError, match="'full'"):
        finalize(router, SPACE, budgets, COST, 0.01, num_layers=4, full=None)


def test_every_problem_is_listed_with_values():
    budgets = _budgets(FULL, MEDIUM, SMALL)
    router = _router({"full": FULL, "medium": (16, 32, 3), "small": (24, 48, 4)}, budgets)
    with pytest.raises(PlanError) as error:
        finalize(router, SPACE, budgets, COST, 0.05, num_layers=4, full="full")
    text = str(error.value)
    assert "budget 'small' has hidden 24, wider than 16 of 'medium'" in text
    assert "budget 'small' has ffn 48, wider than 32 of 'medium'" in text
    assert "budget 'small' has layers 4, wider than 3 of 'medium'" in text
    assert "budget 'medium': cost" in text
    assert "router.nest: enforce" in text
    report = examine(router, SPACE, budgets, COST, 0.05, num_layers=4, full="full")
    assert len(report.problems) == 5
    assert report.costs["small"] == plan_cost(SHAPE, report.plans["small"], COST)


def test_enforce_projects_on_the_larger_budget():
    budgets = _budgets(FULL, MEDIUM, (12, 48, 4))
    router = _router({"full": FULL, "medium": MEDIUM, "small": (12, 64, 4)}, budgets)
    with pytest.raises(PlanError, match="wider"):
        finalize(router, SPACE, budgets, COST, 1.0, num_layers=4, full="full")
    plans = finalize(router, SPACE, budgets, COST, 0.01, num_layers=4, full="full", nest="enforce")
    assert plans["small"] == _plan(12, 48, 4)
    with pytest.raises(ConfigError, match="'always' is unknown"):
        finalize(router, SPACE, budgets, COST, 0.01, num_layers=4, full="full", nest="always")


def test_hardened_probabilities():
    budgets = _budgets(FULL, MEDIUM, SMALL)
    table = hardened(_router({"full": FULL, "medium": MEDIUM, "small": SMALL}, budgets), 1.5)
    assert list(table) == ["full", "medium", "small"]
    expected = torch.tensor([0.0, 3.0, 0.0]).softmax(0).tolist()
    assert table["medium"][ElasticAxis.HIDDEN] == pytest.approx(expected)


def test_training_on_the_budget_loss_reaches_a_family():
    """The whole router path: draws, relaxed choices, expected cost, budget and anchor losses; then argmax plans within tolerance."""
    from megatron_elastic.router import objective, sampling, schedules

    full = plan_cost(SHAPE, SPACE.parent, COST)
    budgets = {"full": full, "medium": 0.75 * full, "small": 0.5 * full}
    router = BudgetRouter(SPACE, budgets, seed=0)
    optimizer, steps = torch.optim.Adam(router.parameters(), lr=1e-2), 300
    for step in range(steps):
        progress = step / (steps - 1)
        name = sampling.draw_budget(0, "short", step, 0, dict.fromkeys(budgets, 1 / 3))
        noise = sampling.gumbel_noise(0, "short", step, 0, SPACE)
        tau, scale = schedules.temperature(progress), schedules.logit_scale(progress)
        pi = {axis: sampling.relaxed_choice(logits, noise[axis], tau, scale) for axis, logits in router.logits_of(name).items()}
        loss = objective.budget_loss(COST(objective.expected_widths(SPACE, pi, 4)), budgets[name], 0.02)
        if name == "full":
            loss = loss + objective.anchor_loss(pi)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    plans = finalize(router, SPACE, budgets, COST, 0.1, num_layers=4, full=None, nest="enforce")
    assert plans["full"] == SPACE.parent
