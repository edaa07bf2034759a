"""Planning: plans near a cost against brute force, homogeneous and per layer, enumerated and searched; the start-up check of budgets."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic import planning
from megatron_elastic.axes import ElasticAxis
from megatron_elastic.cost import cost_function
from megatron_elastic.errors import ConfigError
from megatron_elastic.planning import (
    check_targets,
    most_probable_family,
    narrowest,
    nearest_plan,
    num_plans,
    order_budgets,
    plan_cost,
    reachable,
    uniform_plan,
)
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape
from megatron_elastic.space import AxisChoices, build_space
from tests.shape_strategies import plans, quick, spaces

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
    fractions = [SPACE.choices_of(plan, spec.axis)[0] / spec.parent for spec in SPACE.axes]
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


# Spaces with a width for each layer.

SMALL = 200
"""Plans of a space that brute force goes through."""


def cut_down(space):
    """The space with the narrowest choices left out, axis after axis, until it is small."""
    while num_plans(space) > SMALL:
        longest = max(space.axes, key=lambda spec: len(spec.choices) ** spec.places)
        space = replace(space, axes=tuple(replace(s, choices=s.choices[:-1]) if s is longest else s for s in space.axes))
    return space


def every_plan(space):
    rows = [
        [widths if spec.per_layer else widths[0] for widths in itertools.product(spec.choices, repeat=spec.places)] for spec in space.axes
    ]
    return [space.plan(dict(zip([spec.axis for spec in space.axes], choice, strict=True))) for choice in itertools.product(*rows)]


@st.composite
def small_cases(draw):
    """A shape, a space of few plans, a kind of cost, a plan as an outer limit and a target."""
    shape, space = draw(spaces())
    space = cut_down(space)
    count = cost_function(shape, draw(st.sampled_from(["total_params", "active_params", "flops", "memory"])), 128)
    low, high = reachable(space, shape, count)
    return shape, space, count, draw(plans(space)), max(low * 0.5, low + draw(st.floats(-0.1, 1.1)) * (high - low))


@quick
@given(small_cases())
def test_nearest_and_uniform_plans_equal_brute_force(case):
    shape, space, count, outer, target = case
    costs = {plan: plan_cost(shape, plan, count) for plan in every_plan(space)}
    assert len(costs) == num_plans(space)
    inside = [plan for plan in costs if outer.contains(plan)]
    least = min(abs(costs[plan] - target) for plan in inside)
    found = nearest_plan(space, shape, target, count, within=outer)
    assert found in inside and abs(costs[found] - target) == pytest.approx(least, rel=1e-9, abs=1e-6)
    uniform = uniform_plan(space, shape, target, count, within=outer, tolerance=0.1)
    assert uniform in inside and abs(costs[uniform] - target) <= max(0.1 * target, least) * (1 + 1e-9)
    around = nearest_plan(space, shape, target, count, around=outer)
    assert around.contains(outer)
    assert abs(costs[around] - target) == pytest.approx(min(abs(costs[p] - target) for p in costs if p.contains(outer)), rel=1e-9, abs=1e-6)


def changed(space, plan, changes):
    """Every plan that differs from `plan` in at most `changes` places."""
    own = [(spec, n, space.choices_of(plan, spec.axis)[n]) for spec in space.axes for n in range(spec.places)]
    for places in itertools.combinations(range(len(own)), changes):
        for choice in itertools.product(*(own[at][0].choices for at in places)):
            widths = [width for _, _, width in own]
            for at, width in zip(places, choice, strict=True):
                widths[at] = width
            by_axis = {}
            for (spec, _, _), width in zip(own, widths, strict=True):
                by_axis[spec.axis] = (*by_axis.get(spec.axis, ()), width)
            yield space.plan({axis: row if space.spec(axis).per_layer else row[0] for axis, row in by_axis.items()})


@quick
@given(small_cases())
def test_a_searched_plan_is_nearer_than_any_change_of_one_or_two_places(case):
    shape, space, count, outer, target = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "ENUMERATED_PLANS", 0)
        found = nearest_plan(space, shape, target, count, within=outer)
    assert outer.contains(found)
    space.check(found)
    miss = abs(plan_cost(shape, found, count) - target)
    near = [plan for changes in (1, 2) for plan in changed(space, found, changes) if outer.contains(plan)]
    assert all(abs(plan_cost(shape, plan, count) - target) >= miss * (1 - 1e-9) for plan in near)


def chances_of(space, seed):
    draw = random.Random(seed)
    return {spec.axis: [[draw.random() ** 3 + 1e-3 for _ in spec.choices] for _ in range(spec.places)] for spec in space.axes}


def log_chance(space, plan, chances):
    return sum(
        math.log(chances[spec.axis][n][spec.choices.index(width)])
        for spec in space.axes
        for n, width in enumerate(space.choices_of(plan, spec.axis))
    )


@quick
@given(small_cases(), st.integers(0, 99))
def test_the_most_probable_family_equals_brute_force(case, seed):
    shape, space, count, _, target = case
    targets = {"full": space.parent, "a": target, "b": (reachable(space, shape, count)[0] + target) / 2}
    chances = {name: chances_of(space, seed + n) for n, name in enumerate("ab")}
    costs = {plan: plan_cost(shape, plan, count) for plan in every_plan(space)}
    fits = {name: [plan for plan in costs if abs(costs[plan] / targets[name] - 1) <= 0.05] for name in "ab"}
    first = [plan for plan in fits["a"] if any(plan.contains(other) for other in fits["b"])]
    found = most_probable_family(space, shape, targets, count, chances, 0.05)
    if not first:
        assert found is None
        return
    assert found is not None and found["full"] == space.parent and found["a"] in first
    assert log_chance(space, found["a"], chances["a"]) == pytest.approx(max(log_chance(space, plan, chances["a"]) for plan in first))
    second = [plan for plan in fits["b"] if found["a"].contains(plan)]
    assert found["b"] in second
    assert log_chance(space, found["b"], chances["b"]) == pytest.approx(max(log_chance(space, plan, chances["b"]) for plan in second))


@quick
@given(small_cases(), st.integers(0, 99))
def test_a_searched_family_nests_is_within_tolerance_and_cannot_be_exchanged_for_a_more_probable_one(case, seed):
    shape, space, count, _, target = case
    targets = {"full": space.parent, "a": target, "b": (reachable(space, shape, count)[0] + target) / 2}
    chances = {name: chances_of(space, seed + n) for n, name in enumerate("ab")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "ENUMERATED_PLANS", 0)
        found = most_probable_family(space, shape, targets, count, chances, 0.05)
    for (_, outer), (name, plan) in itertools.pairwise((found or {}).items()):
        assert outer.contains(plan) and abs(plan_cost(shape, plan, count) / targets[name] - 1) <= 0.05 * (1 + 1e-9)
        better = log_chance(space, plan, chances[name]) + 1e-6
        for other in (p for changes in (1, 2) for p in changed(space, plan, changes) if outer.contains(p)):
            inside = abs(plan_cost(shape, other, count) / targets[name] - 1) <= 0.05 * (1 - 1e-9)
            assert not inside or log_chance(space, other, chances[name]) <= better


NEMOTRON = ModelShape(
    layer_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    hidden_size=2688,
    vocab_size=131072,
    attention=AttentionShape(heads=32, kv_groups=2, head_dim=128),
    moe=MoeShape(experts=128, topk=6, ffn=1856, shared_ffn=3712),
    mamba=MambaShape(heads=64, head_dim=64, groups=8, state=128),
)
FIVE = {
    A.MOE_FFN: (1856, 1536, 1280, 1024, 768),
    A.SHARED_FFN: (3712, 3072, 2560, 2048, 1536),
    A.HEADS: (32, 28, 24, 20, 16),
    A.MAMBA_HEADS: (64, 56, 48, 40, 32),
    A.MAMBA_HEAD_DIM: (64, 56, 48, 40, 32),
    A.MAMBA_STATE: (128, 112, 96, 80, 64),
    A.EXPERTS: (128, 112, 96, 80, 64),
    A.TOPK: (6, 5, 4, 3, 2),
}


@pytest.fixture(scope="module")
def huge():
    """52 layers, a width for each: 168 places of five choices. The shape, the space, a cost and the parent's."""
    axes = {axis: AxisChoices(choices=choices, per_layer=True) for axis, choices in FIVE.items()}
    space = build_space(NEMOTRON, {A.HIDDEN: (2688, 2432, 2176, 1920, 1664)} | axes, shard_groups=4)
    count = cost_function(NEMOTRON, "active_params", 8192)
    return space, count, plan_cost(NEMOTRON, space.parent, count)


def test_a_huge_space_is_planned_in_seconds(huge):
    space, count, full = huge
    assert num_plans(space) == 5**168
    started = time.process_time()
    targets = {"full": space.parent, "medium": 0.7 * full, "small": 0.45 * full}
    assert check_targets(space, NEMOTRON, targets, count, 0.02) == []
    chances = {name: chances_of(space, n) for n, name in enumerate(("medium", "small"))}
    found = most_probable_family(space, NEMOTRON, targets, count, chances, 0.02)
    assert found is not None and found["full"].contains(found["medium"]) and found["medium"].contains(found["small"])
    for name in ("medium", "small"):
        assert abs(plan_cost(NEMOTRON, found[name], count) / targets[name] - 1) <= 0.02
    near = plan_cost(NEMOTRON, nearest_plan(space, NEMOTRON, 0.6 * full, count), count)
    assert abs(near / (0.6 * full) - 1) < 1e-4
    assert time.process_time() - started < 8  # about one second; a loaded machine takes its time


def test_the_uniform_plan_of_a_huge_space_keeps_most_nearly_one_fraction(huge):
    space, count, full = huge
    plan = uniform_plan(space, NEMOTRON, 0.55 * full, count)
    assert abs(plan_cost(NEMOTRON, plan, count) / (0.55 * full) - 1) <= 0.02
    fractions = [width / spec.parent for spec in space.axes for width in space.choices_of(plan, spec.axis)]
    assert max(fractions) - min(fractions) < 0.25


def test_a_searched_family_is_about_as_probable_as_the_best_one(huge):
    """Lagrange: for any price, no plan that costs at most `limit` is more probable than the sum over places of max(log p - price x cost)."""
    space, count, full = huge
    # Where only these two axes and no hidden size are open, costs of layers add up, so that the bound is easy to know.
    open_axes, closed = (A.SHARED_FFN, A.HEADS), {A.HIDDEN: 2176}
    chances = chances_of(space, 5)
    for spec in space.axes:
        if spec.axis not in open_axes:
            chances[spec.axis] = [[1.0 if n == closed.get(spec.axis, spec.parent) else 1e-30 for n in spec.choices]] * spec.places
    target = 0.78 * full
    found = most_probable_family(space, NEMOTRON, {"full": space.parent, "a": target}, count, {"a": chances}, 0.02)
    assert found is not None and found["a"].width(A.HIDDEN) == 2176
    base, limit = plan_cost(NEMOTRON, space.plan(closed), count), 1.02 * target
    assert base > limit

    def bound(price):
        best = price * (limit - base)
        for axis in open_axes:
            shifts = [(plan_cost(NEMOTRON, space.plan(closed | {axis: n}), count) - base) / len(chances[axis]) for n in FIVE[axis]]
            for row in chances[axis]:
                best += max(math.log(p) - price * shift for p, shift in zip(row, shifts, strict=True))
        return best

    least = min(bound(10 ** (n / 8) / full) for n in range(40))
    assert least - 1.0 <= log_chance(space, found["a"], chances) <= least < -20


def test_pinned_per_layer_plans_leave_room(huge):
    space, count, full = huge
    pinned = space.plan({A.HIDDEN: 1920, A.MOE_FFN: (1856, 768) * 11 + (768,), A.TOPK: 3})
    targets = {"full": space.parent, "medium": 0.75 * full, "small": pinned}
    assert check_targets(space, NEMOTRON, targets, count, 0.02) == []
    found = most_probable_family(space, NEMOTRON, targets, count, {"medium": chances_of(space, 1)}, 0.02)
    assert found is not None and found["medium"].contains(pinned) and found["small"] == pinned
    too_small = {"full": space.parent, "medium": plan_cost(NEMOTRON, pinned, count) * 0.8, "small": pinned}
    (problem,) = check_targets(space, NEMOTRON, too_small, count, 0.02)
    assert problem.startswith("elastic.budgets.medium: no plan nested in the larger budgets costs")
    assert most_probable_family(space, NEMOTRON, too_small, count, {"medium": chances_of(space, 1)}, 0.02) is None


def test_unreachable_targets_of_a_huge_space_are_refused(huge):
    space, count, full = huge
    low = plan_cost(NEMOTRON, narrowest(space), count)
    (problem,) = check_targets(space, NEMOTRON, {"full": space.parent, "tiny": low / 2}, count, 0.02)
    assert problem.endswith(f"the nearest reachable cost is {low:.6g}: set it, or add choices to elastic.axes")


def test_budgets_are_ordered_by_target_and_must_differ():
    assert order_budgets({"small": 0.3, "full": 1.0, "medium": 0.6}) == ("full", "medium", "small")
    with pytest.raises(ConfigError, match=r"budget 'b': target -1 must be positive"):
        order_budgets({"a": 1.0, "b": -1.0})
    with pytest.raises(ConfigError, match="budgets 'a' and 'b' have the same target 2; remove one"):
        order_budgets({"a": 2.0, "b": 2.0})
    with pytest.raises(ConfigError, match="there is no budget"):
        order_budgets({})
