"""Planning: nearest and uniform plans against brute force, and the start-up check of a family of budgets."""

from __future__ import annotations

import itertools

import pytest

from megatron_elastic import planning
from megatron_elastic.axes import ElasticAxis
from megatron_elastic.cost import cost_function
from megatron_elastic.errors import ConfigError
from megatron_elastic.planning import check_targets, nearest_plan, num_plans, order_budgets, plan_cost, reachable, uniform_plan
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape, build_space

A = ElasticAxis
SHAPE = ModelShape(
    layer_pattern="ME*-M-",
    hidden_size=30,
    vocab_size=19,
    attention=AttentionShape(heads=8, kv_groups=2, head_dim=3),
    mlp=MlpShape(ffn=60),
    moe=MoeShape(experts=6, topk=2, ffn=18, shared_ffn=14),
    mamba=MambaShape(heads=4, head_dim=5, groups=2, state=6),
)
SPACE = build_space(
    SHAPE,
    {A.HIDDEN: (30, 22, 13), A.FFN: (60, 35, 10), A.MOE_FFN: (18, 5), A.HEADS: (8, 4, 2), A.EXPERTS: (6, 4, 3), A.LAYERS: (6, 5, 4)},
    shard_groups=1,
    drop_order=(3, 0),
)
COST = cost_function(SHAPE, "total_params", 8)
ALL = [
    SPACE.plan(dict(zip([s.axis for s in SPACE.axes], widths, strict=True)))
    for widths in itertools.product(*(s.choices for s in SPACE.axes))
]
SMALLEST, LARGEST = reachable(SPACE, SHAPE, COST)
TARGETS = [SMALLEST * 0.5, SMALLEST, SMALLEST * 1.37, (SMALLEST + LARGEST) / 2, LARGEST * 0.93, LARGEST, LARGEST * 2]


def cost(plan):
    return plan_cost(SHAPE, plan, COST)


def test_reachable_costs_are_those_of_the_narrowest_plan_and_the_parent():
    assert num_plans(SPACE) == len(ALL) == 486
    assert (min(map(cost, ALL)), max(map(cost, ALL))) == (SMALLEST, LARGEST)


@pytest.mark.parametrize("target", TARGETS)
def test_the_nearest_plan_is_the_nearest_of_all(target):
    found = cost(nearest_plan(SPACE, SHAPE, target, COST))
    assert abs(found - target) == min(abs(cost(plan) - target) for plan in ALL)


@pytest.mark.parametrize("kind", ["active_params", "flops", "memory"])
def test_every_kind_of_cost_can_be_planned(kind):
    other = cost_function(SHAPE, kind, 8)
    half = plan_cost(SHAPE, SPACE.parent, other) / 2
    assert abs(plan_cost(SHAPE, nearest_plan(SPACE, SHAPE, half, other), other) - half) == min(
        abs(plan_cost(SHAPE, plan, other) - half) for plan in ALL
    )


@pytest.mark.parametrize("target", TARGETS)
def test_plans_stay_inside_the_larger_budget(target):
    outer = SPACE.plan({A.HIDDEN: 22, A.EXPERTS: 4, A.LAYERS: 5})
    inside = [plan for plan in ALL if outer.contains(plan)]
    found = nearest_plan(SPACE, SHAPE, target, COST, within=outer)
    assert found in inside and abs(cost(found) - target) == min(abs(cost(plan) - target) for plan in inside)
    assert uniform_plan(SPACE, SHAPE, target, COST, within=outer) in inside


def spread(plan):
    fractions = [SPACE.choice_of(plan, spec.axis) / spec.parent for spec in SPACE.axes]
    mean = sum(fractions) / len(fractions)
    return sum((fraction - mean) ** 2 for fraction in fractions)


@pytest.mark.parametrize("target", TARGETS)
def test_the_uniform_plan_is_the_most_uniform_of_the_near_ones(target):
    found = uniform_plan(SPACE, SHAPE, target, COST, tolerance=0.05)
    least = min(abs(cost(plan) / target - 1) for plan in ALL)
    near = [plan for plan in ALL if abs(cost(plan) / target - 1) <= max(0.05, least)]
    assert found in near and spread(found) == pytest.approx(min(map(spread, near)))


@pytest.fixture
def large(monkeypatch):
    """Treats every space as too large to enumerate."""
    monkeypatch.setattr(planning, "ENUMERATED_PLANS", 0)


@pytest.mark.parametrize("target", TARGETS)
def test_descent_comes_near_in_a_large_space(large, target):
    least = min(abs(cost(plan) / target - 1) for plan in ALL)
    assert abs(cost(nearest_plan(SPACE, SHAPE, target, COST)) / target - 1) <= max(0.01, least * 1.0001)
    assert abs(cost(uniform_plan(SPACE, SHAPE, target, COST)) / target - 1) <= max(0.02, least * 1.0001)


def test_a_family_that_nests_has_no_problems():
    targets = {"full": LARGEST, "medium": LARGEST * 0.7, "small": LARGEST * 0.45}
    assert check_targets(SPACE, SHAPE, targets, COST, 0.02) == []
    assert check_targets(SPACE, SHAPE, targets | {"medium": SPACE.plan({A.FFN: 35})}, COST, 0.05) == []


def test_an_unreachable_target_is_refused_with_the_nearest_cost():
    (problem,) = check_targets(SPACE, SHAPE, {"full": LARGEST, "tiny": SMALLEST / 2}, COST, 0.02)
    assert problem == (
        f"elastic.budgets.tiny: no plan nested in the larger budgets costs {SMALLEST / 2:.6g} within 0.02; "
        f"the nearest reachable cost is {SMALLEST:.6g}: set it, or add choices to elastic.axes"
    )


def test_targets_reachable_alone_but_not_together_are_refused():
    # Two axes with two choices: each half can be reached by one of them, but the two plans do not nest.
    shape = ModelShape(
        layer_pattern="*-",
        hidden_size=30,
        vocab_size=2,
        attention=AttentionShape(heads=30, kv_groups=1, head_dim=10),
        mlp=MlpShape(ffn=290),
    )
    space = build_space(shape, {A.FFN: (290, 10), A.HEADS: (30, 1)}, shard_groups=1)
    count = cost_function(shape, "total_params", 8)
    one, other = plan_cost(shape, space.plan({A.FFN: 10}), count), plan_cost(shape, space.plan({A.HEADS: 1}), count)
    large, small = max(one, other), min(one, other)
    assert large > small
    assert check_targets(space, shape, {"a": large}, count, 1e-6) == [] == check_targets(space, shape, {"a": small}, count, 1e-6)
    (problem,) = check_targets(space, shape, {"a": large, "b": small}, count, 1e-6)
    assert problem.startswith("elastic.budgets.b: no plan nested in the larger budgets")


def test_the_check_finds_a_chain_that_the_nearest_plans_miss():
    # The plan nearest to the first target is a dead end for the second; another within tolerance is not.
    targets = {"full": LARGEST, "medium": LARGEST * 0.6, "small": LARGEST * 0.4}
    chains = [
        (a, b)
        for a in ALL
        if abs(cost(a) / targets["medium"] - 1) <= 0.03
        for b in ALL
        if a.contains(b) and abs(cost(b) / targets["small"] - 1) <= 0.03
    ]
    assert (check_targets(SPACE, SHAPE, targets, COST, 0.03) == []) == bool(chains) and chains


@pytest.mark.parametrize("tolerance", [1e-4, 1e-3, 4e-3, 0.02])
@pytest.mark.parametrize("fractions", [(0.8, 0.6), (0.7, 0.35), (0.52, 0.5)])
def test_the_check_agrees_with_brute_force(fractions, tolerance):
    first, second = (LARGEST * fraction for fraction in fractions)
    near = [[plan for plan in ALL if abs(cost(plan) / target - 1) <= tolerance] for target in (first, second)]
    possible = any(a.contains(b) for a in near[0] for b in near[1])
    assert (check_targets(SPACE, SHAPE, {"a": first, "b": second}, COST, tolerance) == []) == possible


def test_pinned_plans_must_nest():
    wide, other = SPACE.plan({A.HIDDEN: 22}), SPACE.plan({A.FFN: 10})
    (problem,) = check_targets(SPACE, SHAPE, {"full": LARGEST, "a": wide, "b": other}, COST, 0.02)
    assert problem == "elastic.budgets.b: its pinned plan is not nested in the larger budgets; narrow it or reorder the budgets"


def test_large_spaces_are_checked_too(large):
    assert check_targets(SPACE, SHAPE, {"full": LARGEST, "medium": LARGEST * 0.7, "small": LARGEST * 0.45}, COST, 0.02) == []
    (problem,) = check_targets(SPACE, SHAPE, {"full": LARGEST, "tiny": SMALLEST / 2}, COST, 0.02)
    assert f"the nearest reachable cost is {SMALLEST:.6g}" in problem
    (problem,) = check_targets(SPACE, SHAPE, {"a": SPACE.plan({A.HIDDEN: 22}), "b": SPACE.plan({A.FFN: 10})}, COST, 0.02)
    assert "elastic.budgets.b: its pinned plan is not nested" in problem


def test_budgets_are_ordered_by_target_and_must_differ():
    assert order_budgets({"small": 0.3, "full": 1.0, "medium": 0.6}) == ("full", "medium", "small")
    with pytest.raises(ConfigError, match=r"budget 'b': target -1 must be positive"):
        order_budgets({"a": 1.0, "b": -1.0})
    with pytest.raises(ConfigError, match="budgets 'a' and 'b' have the same target 2; remove one"):
        order_budgets({"a": 2.0, "b": 2.0})
    with pytest.raises(ConfigError, match="there is no budget"):
        order_budgets({})
