"""The start-up check against brute force, its refusals, large spaces, uniform plans, and that none of it imports torch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time

import pytest

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.cost import cost_function
from megatron_elastic.errors import ConfigError
from megatron_elastic.router import search
from megatron_elastic.router.search import nearest_nested_plans, plan_cost, uniform_plan
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape, build_space

SHAPE = ModelShape(
    layer_pattern="ME*-ME",
    hidden_size=96,
    vocab_size=256,
    attention=AttentionShape(heads=8, kv_groups=2, head_dim=12),
    mlp=MlpShape(ffn=320),
    moe=MoeShape(experts=8, topk=2, ffn=64, shared_ffn=128),
    mamba=MambaShape(heads=8, head_dim=24, groups=4, state=16),
)
SPACE = build_space(
    SHAPE,
    {ElasticAxis.HIDDEN: (96, 72, 48), ElasticAxis.FFN: (320, 160), ElasticAxis.EXPERTS: (8, 4), ElasticAxis.LAYERS: (6, 5)},
    drop_order=(3,),
)
COST = cost_function(SHAPE, "total_params", 128)
N = SHAPE.num_layers


def _all_plans() -> list[SubmodelPlan]:
    return [
        SPACE.plan(dict(zip((s.axis for s in SPACE.axes), widths, strict=True)))
        for widths in itertools.product(*(s.choices for s in SPACE.axes))
    ]


def _parent_cost() -> float:
    return plan_cost(SPACE.parent, COST, N)


def _brute_force(targets: list[float]) -> float:
    """Smallest sum of deviations of a nested chain that starts at the parent."""
    priced = [(plan, plan_cost(plan, COST, N)) for plan in _all_plans()]
    best = math.inf
    for (a, cost_a), (b, cost_b) in itertools.product(priced, priced):
        if a.contains(b):
            best = min(best, abs(cost_a / targets[1] - 1) + abs(cost_b / targets[2] - 1))
    return best


@pytest.mark.parametrize(("medium", "small"), [(0.7, 0.45), (0.8, 0.75), (0.9, 0.35)])
def test_the_chain_is_the_best_one(medium, small):
    full = _parent_cost()
    targets = {"small": small * full, "full": full, "medium": medium * full}
    plans = nearest_nested_plans(SPACE, targets, COST, 1.0, num_layers=N, full="full")
    assert list(plans) == ["full", "medium", "small"]
    assert plans["full"] == SPACE.parent
    assert plans["full"].contains(plans["medium"])
    assert plans["medium"].contains(plans["small"])
    found = sum(abs(plan_cost(plans[name], COST, N) / targets[name] - 1) for name in ("medium", "small"))
    assert found == pytest.approx(_brute_force([full, medium * full, small * full]), rel=1e-9)


def test_an_unreachable_target_is_refused_with_the_nearest_cost():
    full, least = _parent_cost(), min(plan_cost(plan, COST, N) for plan in _all_plans())
    with pytest.raises(ConfigError) as error:
        nearest_nested_plans(SPACE, {"full": full, "small": 0.1 * full}, COST, 0.05, num_layers=N, full="full")
    assert "budget 'small'" in str(error.value)
    assert f"cost {least:.6g}" in str(error.value)
    assert "elastic.axes" in str(error.value)
    assert "'full'" not in str(error.value)


def test_targets_reachable_alone_but_not_nested_are_refused():
    """Two plans that do not nest, with targets that nothing else reaches."""
    space = build_space(SHAPE, {ElasticAxis.HIDDEN: (96, 48), ElasticAxis.EXPERTS: (8, 4)})
    wide = plan_cost(space.plan({ElasticAxis.HIDDEN: 96, ElasticAxis.EXPERTS: 4}), COST, N)
    narrow = plan_cost(space.plan({ElasticAxis.HIDDEN: 48, ElasticAxis.EXPERTS: 8}), COST, N)
    for target in (wide, narrow):
        nearest_nested_plans(space, {"one": target}, COST, 1e-6, num_layers=N, full=None)
    with pytest.raises(ConfigError, match="nearest nested plan"):
        nearest_nested_plans(space, {"one": wide, "two": narrow}, COST, 0.01, num_layers=N, full=None)


def test_the_full_budget_must_be_the_parents_cost_and_the_largest():
    full = _parent_cost()
    with pytest.raises(ConfigError, match="'full'.*the full budget is the parent"):
        nearest_nested_plans(SPACE, {"full": 1.5 * full, "small": 0.5 * full}, COST, 0.05, num_layers=N, full="full")
    with pytest.raises(ConfigError, match="must be the largest"):
        nearest_nested_plans(SPACE, {"full": 0.5 * full, "huge": full}, COST, 0.05, num_layers=N, full="full")


def _large_space():
    return build_space(
        SHAPE,
        {
            ElasticAxis.HIDDEN: tuple(range(96, 23, -3)),
            ElasticAxis.FFN: tuple(range(320, 7, -8)),
            ElasticAxis.MOE_FFN: tuple(range(64, 7, -8)),
            ElasticAxis.SHARED_FFN: tuple(range(128, 7, -8)),
            ElasticAxis.MAMBA_HEADS: (8, 4),
            ElasticAxis.EXPERTS: tuple(range(8, 1, -1)),
            ElasticAxis.LAYERS: (6, 5),
        },
        drop_order=(3,),
    )


def test_a_large_space_is_searched_in_seconds(monkeypatch):
    space = _large_space()
    assert math.prod(len(spec.choices) for spec in space.axes) > 2 * search.MAX_EXACT
    full = _parent_cost()
    targets = {"full": full, "medium": 0.613 * full, "small": 0.287 * full}
    start = time.process_time()
    plans = nearest_nested_plans(space, targets, COST, 1e-4, num_layers=N, full="full")
    assert time.process_time() - start < 5.0
    assert plans["medium"].contains(plans["small"])
    # So coarse a start misses the targets: the local search must find them.
    monkeypatch.setattr(search, "MAX_EXACT", 130)
    plans = nearest_nested_plans(space, targets, COST, 1e-3, num_layers=N, full="full")
    assert plans["medium"].contains(plans["small"])
    for name, plan in plans.items():
        space.check(plan)
        assert plan_cost(plan, COST, N) == pytest.approx(targets[name], rel=1e-3)


def test_uniform_plan_narrows_all_axes_alike():
    axes = {ElasticAxis.HIDDEN: (96, 72, 48), ElasticAxis.FFN: (320, 240, 160), ElasticAxis.MOE_FFN: (64, 48, 32)}
    space = build_space(SHAPE, axes)
    half = space.plan({ElasticAxis.HIDDEN: 48, ElasticAxis.FFN: 160, ElasticAxis.MOE_FFN: 32})
    assert uniform_plan(space, _parent_cost(), COST, num_layers=N) == space.parent
    assert uniform_plan(space, plan_cost(half, COST, N), COST, num_layers=N) == half
    assert uniform_plan(space, 1.0, COST, num_layers=N) == half
    for target in (0.9, 0.8, 0.7, 0.6):
        plan = uniform_plan(space, target * _parent_cost(), COST, num_layers=N)
        fractions = [plan.width(spec.axis) / spec.parent for spec in space.axes]
        assert max(fractions) - min(fractions) <= 0.25


def test_uniform_plan_uses_ties_to_come_nearer():
    """Two axes that narrow at the same fraction may do so one after the other."""
    space = build_space(SHAPE, {ElasticAxis.HIDDEN: (96, 48), ElasticAxis.FFN: (320, 160)})
    one = space.plan({ElasticAxis.HIDDEN: 96, ElasticAxis.FFN: 160})
    assert uniform_plan(space, plan_cost(one, COST, N), COST, num_layers=N) == one


def test_uniform_plan_takes_the_nearest_choice_of_every_axis():
    """ffn narrows at r = 0.55, where hidden's nearest choice is already 48: the pair (96, 32) is not uniform."""
    space = build_space(SHAPE, {ElasticAxis.HIDDEN: (96, 72, 48), ElasticAxis.FFN: (320, 32)})
    uniform = space.plan({ElasticAxis.HIDDEN: 48, ElasticAxis.FFN: 320})
    uneven = space.plan({ElasticAxis.HIDDEN: 96, ElasticAxis.FFN: 32})
    assert uniform_plan(space, plan_cost(uniform, COST, N), COST, num_layers=N) == uniform
    assert uniform_plan(space, plan_cost(uneven, COST, N), COST, num_layers=N) != uneven


def test_layers_narrow_too():
    space = build_space(SHAPE, {ElasticAxis.LAYERS: (6, 5, 4)}, drop_order=(3, 1))
    assert uniform_plan(space, 1.0, COST, num_layers=N).dropped_layers == (1, 3)


def test_no_torch_is_imported():
    code = "import sys, megatron_elastic.router.search, megatron_elastic.router.finalize; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
