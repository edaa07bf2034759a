"""From a router to a family: argmax plans, the parent for the full budget, refusals of what does not nest or misses its target."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.cost import cost_function
from megatron_elastic.errors import ConfigError, PlanError
from megatron_elastic.planning import plan_cost
from megatron_elastic.router.finalize import examine, finalize, hardened, plan_between
from megatron_elastic.router.network import BudgetRouter
from megatron_elastic.shape import AttentionShape, MlpShape, ModelShape
from megatron_elastic.space import AxisChoices, build_space

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


def _finalize(router, budgets, tolerance, fixed=None):
    return finalize(router, SPACE, SHAPE, budgets, COST, fixed={"full": SPACE.parent} if fixed is None else fixed, tolerance=tolerance)


def test_argmax_plans_where_they_fit():
    budgets = _budgets(FULL, MEDIUM, SMALL)
    router = _router({"full": FULL, "medium": MEDIUM, "small": SMALL}, budgets)
    plans = _finalize(router, budgets, 0.01)
    assert plans == {"full": SPACE.parent, "medium": _plan(*MEDIUM), "small": _plan(*SMALL)}
    assert plans["small"].dropped_layers == (2,)


def test_full_is_the_parent_whatever_the_router_says():
    budgets = _budgets(FULL, MEDIUM, SMALL)
    router = _router({"full": SMALL, "medium": MEDIUM, "small": SMALL}, budgets)
    assert _finalize(router, budgets, 0.01)["full"] == SPACE.parent


def test_a_pinned_plan_stands_and_the_smaller_budget_nests_in_it():
    budgets = _budgets(FULL, (12, 64, 4), (12, 48, 4))
    router = _router({"full": FULL, "medium": FULL, "small": (16, 48, 4)}, budgets)
    plans = _finalize(router, budgets, 0.2, fixed={"full": SPACE.parent, "medium": _plan(12, 64, 4)})
    assert plans["medium"] == _plan(12, 64, 4)
    assert plans["medium"].contains(plans["small"])


def test_an_argmax_off_target_gives_way_to_the_most_probable_plan_that_fits():
    budgets = _budgets(FULL, MEDIUM, SMALL)
    router = _router({"full": FULL, "medium": (16, 32, 3), "small": (24, 48, 4)}, budgets)
    report = examine(router, SPACE, SHAPE, budgets, COST, fixed={"full": SPACE.parent}, tolerance=0.02)
    assert report.problems == []
    every = [_plan(*widths) for widths in itertools.product(*(spec.choices for spec in SPACE.axes))]

    def fitting(name, outer):
        return [p for p in every if outer.contains(p) and abs(plan_cost(SHAPE, p, COST) / budgets[name] - 1) <= 0.02]

    def chance(name, plan):
        pi = {axis: logits.softmax(-1) for axis, logits in router.logits_of(name).items()}
        return float(torch.stack([pi[s.axis][0, s.choices.index(SPACE.choices_of(plan, s.axis)[0])] for s in SPACE.axes]).prod())

    medium = max((p for p in fitting("medium", SPACE.parent) if fitting("small", p)), key=lambda p: chance("medium", p))
    small = max(fitting("small", medium), key=lambda p: chance("small", p))
    assert report.plans == {"full": SPACE.parent, "medium": medium, "small": small}
    assert report.costs["small"] == plan_cost(SHAPE, report.plans["small"], COST)


def test_a_target_that_no_plan_fits_is_named_with_its_values():
    budgets = _budgets(FULL, MEDIUM, SMALL) | {"small": 0.52 * plan_cost(SHAPE, _plan(*SMALL), COST)}
    router = _router({"full": FULL, "medium": MEDIUM, "small": SMALL}, budgets)
    with pytest.raises(PlanError, match=r"budget 'small': cost \d+ is \+.*% from its target .*; add choices to elastic.axes or widen"):
        _finalize(router, budgets, 0.01)


def test_a_large_space_gives_the_same_family(monkeypatch):
    budgets = _budgets(FULL, MEDIUM, SMALL)
    router = _router({"full": FULL, "medium": MEDIUM, "small": SMALL}, budgets)
    monkeypatch.setattr("megatron_elastic.planning.ENUMERATED_PLANS", 0)
    assert _finalize(router, budgets, 0.01) == {"full": SPACE.parent, "medium": _plan(*MEDIUM), "small": _plan(*SMALL)}


def _between(router, budgets, plans, target, tolerance=0.02):
    return plan_between(router, SPACE, SHAPE, budgets, plans, target, COST, tolerance=tolerance)


def test_a_target_between_two_budgets_gets_the_most_probable_plan_between_theirs():
    budgets = _budgets(FULL, MEDIUM, SMALL)
    router = _router({"full": FULL, "medium": MEDIUM, "small": SMALL}, budgets)
    plans = _finalize(router, budgets, 0.01)
    target = plan_cost(SHAPE, _plan(16, 48, 3), COST)
    found = _between(router, budgets, plans, target)
    assert plans["medium"].contains(found) and found.contains(plans["small"])
    assert abs(plan_cost(SHAPE, found, COST) / target - 1) <= 0.02
    near = [
        plan
        for plan in (_plan(*widths) for widths in itertools.product(*(spec.choices for spec in SPACE.axes)))
        if plans["medium"].contains(plan) and plan.contains(plans["small"]) and abs(plan_cost(SHAPE, plan, COST) / target - 1) <= 0.02
    ]
    logits = router(router.budget_input(router.position_of_target(target)))

    def chance(plan):
        return sum(float(logits[s.axis].log_softmax(-1)[0, s.choices.index(SPACE.choices_of(plan, s.axis)[0])]) for s in SPACE.axes)

    assert chance(found) == pytest.approx(max(map(chance, near)))
    assert _between(router, budgets, plans, budgets["medium"]) == plans["medium"]


def test_targets_that_no_plan_between_fits():
    budgets = _budgets(FULL, MEDIUM, SMALL)
    router = _router({"full": FULL, "medium": MEDIUM, "small": SMALL}, budgets)
    plans = _finalize(router, budgets, 0.01)
    every = [_plan(*widths) for widths in itertools.product(*(spec.choices for spec in SPACE.axes))]
    between = [plan for plan in every if plans["medium"].contains(plan) and plan.contains(plans["small"])]
    costs = {plan: plan_cost(SHAPE, plan, COST) for plan in every}
    # Where a plan that is not between the two is nearer than any that is.
    target = next(cost + 1 for plan, cost in costs.items() if plan not in between and budgets["small"] < cost + 1 < budgets["medium"])
    near = min((costs[plan] for plan in between), key=lambda cost: abs(cost - target))
    assert near != target - 1
    with pytest.raises(
        PlanError, match=f"no plan between budgets 'medium' and 'small' costs that .*the nearest reachable cost is {near:.6g}: ask"
    ):
        _between(router, budgets, plans, target, 1e-6)
    with pytest.raises(ConfigError, match="is outside the router's budgets"):
        _between(router, budgets, plans, budgets["small"] / 2)


def test_a_per_layer_family():
    choices = AxisChoices(choices=(64, 48, 32), per_layer=True)
    space = build_space(SHAPE, {ElasticAxis.HIDDEN: (24, 16, 12), ElasticAxis.FFN: choices}, shard_groups=2)
    full = plan_cost(SHAPE, space.parent, COST)
    budgets = {"full": full, "medium": 0.7 * full, "small": 0.5 * full}
    router = BudgetRouter(space, budgets, seed=3, init_std=1.0)
    report = examine(router, space, SHAPE, budgets, COST, fixed={"full": space.parent}, tolerance=0.05)
    assert report.problems == []
    assert [len(rows) for rows in hardened(router, 1.0)["small"].values()] == [1, 2]
    every = [
        space.plan({ElasticAxis.HIDDEN: a, ElasticAxis.FFN: (b, c)})
        for a, b, c in itertools.product((24, 16, 12), (64, 48, 32), (64, 48, 32))
    ]

    def chance(name, plan):
        logits = {axis: value.log_softmax(-1).tolist() for axis, value in router.logits_of(name).items()}
        return sum(logits[s.axis][n][s.choices.index(width)] for s in space.axes for n, width in enumerate(space.choices_of(plan, s.axis)))

    def near(name, plan):
        return abs(plan_cost(SHAPE, plan, COST) / budgets[name] - 1) <= 0.05

    mediums = [p for p in every if near("medium", p) and any(p.contains(q) and near("small", q) for q in every)]
    assert report.plans["medium"] == max(mediums, key=lambda p: chance("medium", p))
    smalls = [p for p in every if near("small", p) and report.plans["medium"].contains(p)]
    assert report.plans["small"] == max(smalls, key=lambda p: chance("small", p))


def test_hardened_probabilities():
    budgets = _budgets(FULL, MEDIUM, SMALL)
    table = hardened(_router({"full": FULL, "medium": MEDIUM, "small": SMALL}, budgets), 1.5)
    assert list(table) == ["full", "medium", "small"]
    expected = torch.tensor([0.0, 3.0, 0.0]).softmax(0).tolist()
    assert table["medium"][ElasticAxis.HIDDEN] == [pytest.approx(expected)]


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
    plans = _finalize(router, budgets, 0.1, fixed={})
    assert plans["full"] == SPACE.parent
