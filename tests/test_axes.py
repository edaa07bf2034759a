"""Axes, plans and spaces: nesting, serialisation, and one clear message for everything that does not fit."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan, validate_space
from megatron_elastic.errors import ConfigError, PlanError
from tests.shape_strategies import quick

A = ElasticAxis
PARENT = SubmodelPlan.of({A.HIDDEN: 12, A.FFN: 20, A.EXPERTS: 6})
SPACE = ElasticSpace(
    axes=(
        AxisSpec(A.HIDDEN, (12, 8), 1, sharded=""),
        AxisSpec(A.FFN, (20, 12, 4), 4),
        AxisSpec(A.EXPERTS, (6, 4), 2, sharded="expert"),
        AxisSpec(A.LAYERS, (5, 3), 1, sharded=""),
    ),
    parent=PARENT,
    drop_order=(3, 1),
    shard_groups=4,
)

plans = st.builds(
    SubmodelPlan.of,
    st.dictionaries(
        st.sampled_from([axis for axis in A if axis is not A.LAYERS]),
        st.one_of(st.integers(1, 100), st.lists(st.integers(1, 100), min_size=1, max_size=4).map(tuple)),
    ),
    st.sets(st.integers(0, 30)).map(tuple),
)


@quick
@given(plans)
def test_plan_survives_json(plan):
    assert SubmodelPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@quick
@given(plans, st.randoms())
def test_plan_does_not_depend_on_the_order_it_is_given(plan, random):
    widths, dropped = list(plan.widths), list(plan.dropped_layers)
    random.shuffle(widths)
    random.shuffle(dropped)
    again = SubmodelPlan.of(dict(widths), tuple(dropped))
    assert again == plan and hash(again) == hash(plan)


def test_plan_leaves_the_number_of_layers_to_the_dropped_ones():
    assert SubmodelPlan.of({A.LAYERS: 3, A.HIDDEN: 4}).widths == ((A.HIDDEN, 4),)


def test_contains_is_never_wider_and_never_deeper():
    small = SPACE.plan({A.HIDDEN: 8, A.LAYERS: 3})
    other = SPACE.plan({A.FFN: 4})
    assert PARENT.contains(small) and not small.contains(PARENT) and small.contains(small)
    assert not small.contains(other) and not other.contains(small)
    assert not SPACE.plan({A.LAYERS: 3}).contains(PARENT)
    assert not SubmodelPlan.of({A.FFN: 20}).contains(PARENT)  # an axis it does not know


def test_plan_width_and_layers():
    plan = SPACE.plan({A.LAYERS: 3, A.FFN: 12})
    assert (plan.width(A.FFN), plan.width(A.HIDDEN), plan.dropped_layers) == (12, 12, (1, 3))
    assert [plan.keeps_layer(n) for n in range(5)] == [True, False, True, False, True]
    assert SPACE.choices_of(plan, A.LAYERS) == (3,) and SPACE.choices_of(plan, A.FFN) == (12,)
    with pytest.raises(PlanError, match="the plan has no width for axis 'heads'"):
        plan.width(A.HEADS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format_version": 9, "widths": {}, "dropped_layers": []}, "plan: format_version 9 is not 1 or 2; write it again"),
        ({}, "plan: format_version None is not 1 or 2"),
        ({"format_version": 1, "widths": [], "dropped_layers": []}, "a plan needs 'widths' (a mapping) and 'dropped_layers' (a list)"),
        ({"format_version": 1, "widths": {"depth": 3}, "dropped_layers": []}, "unknown axis 'depth'; axes are hidden, ffn"),
    ],
)
def test_from_dict_refuses(data, message):
    with pytest.raises(PlanError) as caught:
        SubmodelPlan.from_dict(data)
    assert message in str(caught.value)


def test_space_plan_lists_every_width_that_is_no_choice():
    with pytest.raises(PlanError) as caught:
        SPACE.plan({A.HIDDEN: 9, A.FFN: 8, A.HEADS: 2, A.LAYERS: 4})
    assert caught.value.problems == [
        "hidden 9 is not one of its choices [12, 8]",
        "ffn 8 is not one of its choices [20, 12, 4]",
        "axis 'heads' is not elastic here; elastic axes: hidden, ffn, experts, layers",
        "layers 4 is not one of its choices [5, 3]",
    ]


def test_space_plan_takes_the_parent_s_width_of_a_fixed_axis():
    space = ElasticSpace((AxisSpec(A.HIDDEN, (12, 8), 1),), PARENT)
    assert space.plan({A.FFN: 20, A.HIDDEN: 8}) == SubmodelPlan.of({A.HIDDEN: 8, A.FFN: 20, A.EXPERTS: 6})
    assert space.choices_of(PARENT, A.LAYERS) == (0,)


def test_space_check_lists_everything_that_does_not_fit():
    SPACE.check(SPACE.plan({A.LAYERS: 3}))
    SPACE.check(PARENT)
    with pytest.raises(PlanError) as caught:
        SPACE.check(SubmodelPlan.of({A.HIDDEN: 9, A.EXPERTS: 6}, (3,)))
    first, second, third = caught.value.problems
    assert first == "its axes ['hidden', 'experts'] are not the model's ['hidden', 'ffn', 'experts']"
    assert second == "hidden 9 is not one of its choices [12, 8]"
    assert third == "dropped layers [3] are not a prefix of the drop order [3, 1] that a choice names"


def test_space_check_knows_the_width_of_axes_that_are_not_elastic():
    space = ElasticSpace((AxisSpec(A.HIDDEN, (12, 8), 1),), PARENT)
    with pytest.raises(PlanError, match=r"ffn 12 is not one of its choices \[20\]"):
        space.check(SubmodelPlan.of({A.HIDDEN: 8, A.FFN: 12, A.EXPERTS: 6}))


def test_shards_hold_whole_groups():
    assert SPACE.check_shards(4, 2) == [] == SPACE.check_shards(1, 1)
    assert SPACE.check_shards(3, 4) == [
        "parallel.tensor 3 does not divide elastic.shard_groups 4; choose a divisor or raise shard_groups",
        "parallel.tensor 3 does not divide the 4 groups of axis 'ffn'; choose a divisor",
        "parallel.expert 4 does not divide the 2 groups of axis 'experts'; choose a divisor",
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (AxisSpec(A.FFN, (20, 10), 4), "elastic.axes.ffn: choice 10 is not a multiple of its 4 groups; use 8 or 12"),
        (AxisSpec(A.FFN, (20, 2), 4), "elastic.axes.ffn: choice 2 is not a multiple of its 4 groups; use 4"),
        (AxisSpec(A.FFN, (20, 0), 4), "elastic.axes.ffn: choice 0 must be positive"),
        (AxisSpec(A.FFN, (20, -4), 4), "elastic.axes.ffn: choice -4 must be positive"),
        (AxisSpec(A.FFN, (20, 4, 12), 4), "elastic.axes.ffn: choices [20, 4, 12] must be distinct and run from wide to narrow"),
        (AxisSpec(A.FFN, (20, 20), 4), "elastic.axes.ffn: choices [20, 20] must be distinct and run from wide to narrow"),
    ],
)
def test_axis_problems(spec, message):
    assert spec.problems() == [message]
    with pytest.raises(ConfigError) as caught:
        validate_space(ElasticSpace((spec,), PARENT), 5)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((3,), "elastic.drop_order names 1 layers, but axis 'layers' drops up to 2; list them, first dropped first"),
        ((3, 3), "elastic.drop_order [3, 3] must be distinct layer numbers from 0 to 4"),
        ((3, 5), "elastic.drop_order [3, 5] must be distinct layer numbers from 0 to 4"),
        ((3, -1), "elastic.drop_order [3, -1] must be distinct layer numbers from 0 to 4"),
    ],
)
def test_drop_order_problems(order, message):
    space = ElasticSpace((AxisSpec(A.LAYERS, (5, 3), 1),), PARENT, order)
    with pytest.raises(ConfigError) as caught:
        validate_space(space, 5)
    assert caught.value.problems == [message]


PER_LAYER = ElasticSpace(
    axes=(AxisSpec(A.HIDDEN, (12, 8), 1), AxisSpec(A.FFN, (20, 12, 4), 4, (1, 3, 4), per_layer=True)),
    parent=SubmodelPlan.of({A.HIDDEN: 12, A.FFN: 20}),
)


def test_a_per_layer_axis_has_a_width_for_each_of_its_layers():
    plan = PER_LAYER.plan({A.FFN: (20, 4, 12)})
    assert plan.width(A.FFN) == (20, 4, 12) and not plan.homogeneous
    assert PER_LAYER.choices_of(plan, A.FFN) == (20, 4, 12) and PER_LAYER.choices_of(plan, A.HIDDEN) == (12,)
    everywhere = PER_LAYER.plan({A.FFN: 12})
    assert PER_LAYER.choices_of(everywhere, A.FFN) == (12, 12, 12) and everywhere.homogeneous
    assert everywhere == PER_LAYER.plan({A.FFN: (12, 12, 12)}), "equal widths are one plan, however they are written"
    PER_LAYER.check(plan)
    PER_LAYER.check(everywhere)
    assert SubmodelPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_per_layer_plans_nest_layer_by_layer():
    wide, narrow, other = (PER_LAYER.plan({A.FFN: widths}) for widths in ((20, 12, 12), (20, 4, 12), (12, 20, 4)))
    assert wide.contains(narrow) and not narrow.contains(wide) and not wide.contains(other) and not other.contains(narrow)
    assert PER_LAYER.plan({A.FFN: 20}).contains(other) and other.contains(PER_LAYER.plan({A.FFN: 4}))
    assert not wide.contains(PER_LAYER.plan({A.FFN: 20}))


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({A.FFN: (20, 4)}, "ffn names 2 widths, but it has 3 layers"),
        ({A.FFN: (20, 5, 4)}, "ffn 5 is not one of its choices [20, 12, 4]"),
        ({A.HIDDEN: (12, 8, 8)}, "hidden names 3 widths, but it is not per layer (set per_layer: true)"),
    ],
)
def test_per_layer_widths_that_do_not_fit(widths, message):
    with pytest.raises(PlanError) as caught:
        PER_LAYER.plan(widths)
    assert caught.value.problems == [message]
    with pytest.raises(PlanError) as caught:
        PER_LAYER.check(SubmodelPlan.of(dict(PER_LAYER.parent.widths) | widths))
    assert caught.value.problems == [message]


def test_a_plan_of_the_first_format_is_still_read():
    data = {"format_version": 1, "widths": {"hidden": 8}, "dropped_layers": [2]}
    assert SubmodelPlan.from_dict(data) == SubmodelPlan.of({A.HIDDEN: 8}, (2,))


def test_axis_spec_sizes():
    spec = AxisSpec(A.FFN, (20, 12), 4)
    assert (spec.parent, spec.group_size) == (20, 5)
    assert SPACE.spec(A.HEADS) is None
