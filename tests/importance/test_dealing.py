"""Dealing equals a loop over ranks; for every width that an axis may have, what a plan keeps are exactly the best components of each fixed group.

Run: pytest tests/importance/test_dealing.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import ConfigError
from megatron_elastic.importance.dealing import deal, drop_order, fixed_groups, permutations
from megatron_elastic.space import build_space
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape
from tests.elastic.family import tiny_space
from tests.importance.rankings import random_ranking, ranking_of
from tests.shape_strategies import quick

A = ElasticAxis


def best_first(scores: Sequence[float]) -> list[int]:
    """Components from the best to the worst; of equal ones the first comes first."""
    return sorted(range(len(scores)), key=lambda n: (-scores[n], n))


def dealt(scores: Sequence[float], groups: int) -> list[int]:
    """New position -> old one: hand out the components one by one, from the best on, to one group after the other."""
    hands: list[list[int]] = [[] for _ in range(groups)]
    for rank, component in enumerate(best_first(scores)):
        hands[rank % groups].append(component)
    return [component for hand in hands for component in hand]


@quick
@given(
    st.integers(1, 6).flatmap(
        lambda g: st.tuples(st.just(g), st.integers(1, 7).flatmap(lambda n: st.lists(st.integers(0, 9), min_size=n * g, max_size=n * g)))
    )
)
def test_dealing_is_handing_out_cards(case: tuple[int, list[int]]) -> None:
    groups, scores = case
    found = deal(torch.tensor(scores, dtype=torch.float32), groups).tolist()
    assert found == dealt(scores, groups)
    each = len(scores) // groups
    for kept in range(1, each + 1):
        prefix = {found[group * each + n] for group in range(groups) for n in range(kept)}
        assert prefix == set(best_first(scores)[: kept * groups])


@pytest.mark.parametrize(
    "shape", [tiny_shape(), tiny_dense(), tiny_moe(), tiny_moe(score="softmax")], ids=["hybrid", "dense", "sigmoid", "softmax"]
)
def test_every_width_keeps_the_best_of_each_fixed_group(shape) -> None:
    ranking, space = random_ranking(shape), tiny_space(shape)
    found = permutations(ranking, space)
    assert set(found) == {spec.axis for spec in space.axes} - {A.TOPK, A.LAYERS}
    for spec in space.axes:
        for layer, order in found.get(spec.axis, {}).items():
            scores = ranking.scores[spec.axis][layer]
            assert order.shape == scores.shape and order.dtype == torch.int64
            fixed = fixed_groups(shape, spec.axis)
            for row, points in zip(order.reshape(-1, order.shape[-1]).tolist(), scores.reshape(-1, scores.shape[-1]).tolist(), strict=True):
                assert sorted(row) == list(range(len(row)))
                for width in range(spec.groups, spec.parent + 1, spec.groups):
                    check_kept(row, points, width, spec.groups, fixed)


def check_kept(order: list[int], scores: list[float], width: int, groups: int, fixed: int) -> None:
    """The prefixes of all groups hold the best of every block that components may not leave."""
    size, block = len(order) // groups, len(order) // fixed
    kept = {order[group * size + n] for group in range(groups) for n in range(width // groups)}
    wanted = {start + n for start in range(0, len(order), block) for n in best_first(scores[start : start + block])[: width // fixed]}
    assert kept == wanted


def test_fixed_groups_are_those_the_model_computes_with() -> None:
    hybrid, moe = tiny_shape(), tiny_moe()
    assert hybrid.mamba is not None and moe.moe is not None and moe.attention is not None
    assert fixed_groups(hybrid, A.MAMBA_HEADS) == hybrid.mamba.groups == 4
    assert fixed_groups(moe, A.HEADS) == moe.attention.kv_groups == 2
    assert fixed_groups(moe, A.EXPERTS) == moe.moe.routing_groups == 4 and fixed_groups(hybrid, A.EXPERTS) == 1
    assert {fixed_groups(hybrid, axis) for axis in (A.HIDDEN, A.FFN, A.MOE_FFN, A.SHARED_FFN, A.MAMBA_STATE, A.MAMBA_HEAD_DIM)} == {1}


def test_heads_are_dealt_over_the_ranks_of_their_kv_group() -> None:
    shape = tiny_dense()
    space = build_space(shape, {A.HEADS: (12, 4)}, shard_groups=4)
    scores = torch.tensor([1.0, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1])
    ranking = ranking_of(shape, lambda key, size: scores if key.startswith("heads") else torch.zeros(size))
    spec = space.spec(A.HEADS)
    assert spec is not None and spec.groups == math.lcm(2, 4)
    for order in permutations(ranking, space)[A.HEADS].values():
        assert order.tolist() == [5, 3, 1, 4, 2, 0, 6, 8, 10, 7, 9, 11]


def test_layers_are_dropped_from_the_least_important_on() -> None:
    shape = tiny_dense()
    ranking = ranking_of(shape, lambda key, size: torch.tensor([3.0, 1.0, 1.0, 0.5]) if key.startswith("layers") else torch.zeros(size))
    assert drop_order(ranking) == (3, 1, 2, 0)
    without = replace(ranking, scores={axis: rows for axis, rows in ranking.scores.items() if axis is not A.LAYERS})
    assert drop_order(without) == ()


def test_an_elastic_axis_without_scores_is_named() -> None:
    shape = tiny_shape()
    ranking = random_ranking(shape)
    less = replace(ranking, scores={axis: rows for axis, rows in ranking.scores.items() if axis not in (A.FFN, A.LAYERS)})
    with pytest.raises(ConfigError) as caught:
        permutations(less, tiny_space(shape))
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "axis 'ffn' is elastic, but the ranking does not score it",
        "axis 'layers' is elastic, but the ranking does not score it",
    ]
    assert set(permutations(less, build_space(shape, {A.HEADS: (12, 8)}))) == {A.HEADS}
