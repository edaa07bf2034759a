"""The experts that stay are those of a naive fp64 script, and a model without the others computes what its parent does when they cannot be chosen.

Run: pytest tests/importance/test_reap.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import ConfigError
from megatron_elastic.importance.collect import collect
from megatron_elastic.importance.ranking import Ranking
from megatron_elastic.importance.reap import (
    REAPED,
    LayerCut,
    best_experts,
    layer_cuts,
    number_to_keep,
    reaped_provenance,
    reaped_record,
    reaped_shape,
    reaped_text,
    select_experts,
)
from megatron_elastic.importance.sort import SORTED, sorted_record, unsorted_axes
from megatron_elastic.layout import full_shapes
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors, scatter_tensors
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.experts import stack_experts, unstack_experts
from megatron_elastic.testing.tiny import randomize_, tiny_moe, tiny_shape
from tests.elastic.family import text, tiny_space
from tests.export.pretrained import family_shapes
from tests.importance.calibration import ROWS, random_parts
from tests.importance.naive_experts import LAYER, ROUTERS, hide_experts_, naive_scores
from tests.importance.rankings import random_ranking, random_tensors
from tests.importance.rows import rows

EXPERTS = ElasticAxis.EXPERTS
SOFTMAX = tiny_moe(score="softmax")
assert SOFTMAX.moe is not None
MODELS: Mapping[str, ModelShape] = {
    "softmax": SOFTMAX,
    "softmax first": replace(SOFTMAX, moe=replace(SOFTMAX.moe, pre_softmax=True)),
    "qwen3_moe": family_shapes()["qwen3_moe"],
    "sigmoid": tiny_shape(),
    "groups": tiny_moe(),
}


def experts_of(shape: ModelShape) -> int:
    assert shape.moe is not None and isinstance(shape.moe.experts, int)
    return shape.moe.experts


def ranking_of(scores: Any, shape: ModelShape, criterion: str = "reap", **provenance: Any) -> Ranking:
    """A ranking of experts alone. scores: layer -> scores."""
    return Ranking(shape, {EXPERTS: criterion}, {EXPERTS: scores}, {"model": {"fingerprint": "0"}, **provenance})


def naive_best(scores: Tensor, number: int, groups: int) -> list[int]:
    """The best of each group, one at a time."""
    values, size, kept = scores.tolist(), len(scores) // groups, []
    for group in range(groups):
        left = {expert: values[expert] for expert in range(group * size, (group + 1) * size)}
        for _ in range(number // groups):
            best = max(left, key=lambda expert: left[expert])
            kept.append(best)
            del left[best]
    return sorted(kept)


@pytest.mark.parametrize("router", ROUTERS)
def test_what_stays_is_what_a_naive_script_keeps(router: str, parallel: Any) -> None:
    shape = ROUTERS[router]
    assert shape.moe is not None
    parts, data = random_parts(shape, parallel), rows(shape.vocab_size, ROWS, parallel)
    naive = naive_scores(parts[0], shape, data)
    groups, experts = shape.moe.routing_groups or 1, experts_of(shape)
    for criterion, scores in naive.items():
        found = collect(parts, shape, parallel, data, criterion="random", experts=criterion)
        ranking = ranking_of({LAYER: found.scores[EXPERTS][LAYER]}, shape, criterion)
        for number in range(experts // 2, experts, groups):
            assert best_experts(ranking, number)[LAYER].tolist() == naive_best(scores, number, groups), (criterion, number)


def test_planted_bad_experts_go(parallel: Any) -> None:
    """Two experts whose output is a hundredth of what it was are the first two to go, wherever they stand."""
    shape = ROUTERS["sigmoid and bias"]
    parts = random_parts(shape, parallel)
    with torch.no_grad():
        for bad in (2, 7):
            parts[0].decoder.layers[LAYER].mlp.experts.local_experts[bad].linear_fc2.weight *= 0.01
    found = collect(parts, shape, parallel, rows(shape.vocab_size, ROWS, parallel), criterion="random")
    assert best_experts(ranking_of(found.scores[EXPERTS], shape), 6)[LAYER].tolist() == [0, 1, 3, 4, 5, 6]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_smaller_model_computes_what_its_parent_does_among_the_kept(name: str, parallel: Any) -> None:
    shape = MODELS[name]
    parent = build_model(shape, parallel).eval()
    randomize_(parent, seed=5)
    tensors = stack_experts(gather_tensors(parent))
    number = number_to_keep(shape, 0.5, None)
    kept = best_experts(random_ranking(shape, seed=2), number)
    assert all(len(stay) == number and stay.tolist() == sorted(stay.tolist()) for stay in kept.values())
    small_shape = reaped_shape(shape, number)
    cut = dict(select_experts(tensors, shape, kept))
    assert {n: tuple(t.shape) for n, t in cut.items()} == full_shapes(small_shape) and not small_shape.problems()
    small = build_model(small_shape, parallel).eval()
    scatter_tensors(small, unstack_experts(cut))
    tokens, positions = text()
    whole, found = parent(tokens, positions, None), small(tokens, positions, None)
    hide_experts_(parent, kept)
    masked = parent(tokens, positions, None)
    assert float((found - masked).abs().max()) <= 1e-5 and float((whole - masked).abs().max()) > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_what_keeps_everything_changes_nothing(name: str) -> None:
    shape = MODELS[name]
    tensors, ranking, number = random_tensors(shape), random_ranking(shape), number_to_keep(shape, 1.0, None)
    kept = best_experts(ranking, number)
    assert reaped_shape(shape, number) == shape
    assert all(torch.equal(cut, tensors[key]) for key, cut in select_experts(tensors, shape, kept).items())
    assert reaped_provenance({SORTED: {"groups": {"experts": 8}}}, reaped_record(ranking, kept), 9) == {SORTED: {"groups": {"experts": 8}}}


def test_only_what_belongs_to_routed_experts_is_cut_and_nothing_is_rescaled() -> None:
    shape = tiny_moe()
    tensors, kept = random_tensors(shape), {layer: torch.tensor([1, 2, 4, 5, 8, 11, 13, 15]) for layer in (1, 2, 3)}
    for name, cut in select_experts(tensors, shape, kept).items():
        routed = ".router." in name or ".experts.experts." in name
        assert torch.equal(cut, tensors[name][kept[1]]) if routed else cut is tensors[name], name
    assert sum(".shared_experts." in name for name in tensors) == 6


def test_of_equal_scores_the_first_stay() -> None:
    shape = tiny_moe()
    scores = torch.zeros(16)
    scores[7] = 1
    assert best_experts(ranking_of({1: scores}, shape), 8)[1].tolist() == [0, 1, 4, 7, 8, 9, 12, 13]


def test_the_nearest_number_to_a_share() -> None:
    groups = tiny_moe()  # 16 experts in 4 groups, of which a token takes 6 from 3
    assert [number_to_keep(groups, share, None) for share in (0.5, 0.6, 0.63, 0.9)] == [8, 8, 12, 16]
    assert [number_to_keep(SOFTMAX, share, None) for share in (0.375, 0.5, 0.7)] == [3, 4, 6]
    assert number_to_keep(groups, None, 12) == 12
    assert number_to_keep(uneven(), None, 5) == 5


def uneven() -> ModelShape:
    """A model whose layers have 8, 6 and 8 experts."""
    assert SOFTMAX.moe is not None
    return replace(SOFTMAX, moe=replace(SOFTMAX.moe, experts=(8, 6, 8)))


@pytest.mark.parametrize(
    ("shape", "share", "number", "message"),
    [
        (SOFTMAX, None, None, "give one of --keep and --keep-experts"),
        (SOFTMAX, 0.5, 4, "give one of --keep and --keep-experts"),
        (SOFTMAX, 0.0, None, "--keep 0 must be above 0 and at most 1"),
        (SOFTMAX, 1.5, None, "--keep 1.5 must be above 0 and at most 1"),
        (SOFTMAX, float("nan"), None, "--keep nan must be above 0 and at most 1"),
        (SOFTMAX, None, 9, "--keep-experts 9 is above the 8 experts of layer 1; keep fewer"),
        (SOFTMAX, None, 2, r"--keep-experts 2 is below the 3 that a token of layer 1 chooses \(topk\); keep at least 3"),
        (SOFTMAX, 0.2, None, r"--keep 0.2 \(2 of 8 experts\) is below the 3"),
        (tiny_moe(), None, 10, "--keep-experts 10 is not a multiple of the 4 groups that layer 1 routes in; keep 8"),
        (tiny_moe(), None, 5, "--keep-experts 5 is not a multiple of the 4 groups that layer 1 routes in; keep 8"),
        (
            tiny_moe(),
            0.25,
            None,
            r"--keep 0.25 \(4 of 16 experts\) leaves 1 in each of the 4 groups of layer 1, of which a token uses 3: 3 to choose 6 from \(topk\); "
            "keep at least 8",
        ),
        (uneven(), 0.5, None, "--keep 0.5: layers have from 6 to 8 experts; give --keep-experts"),
        (uneven(), None, 7, "--keep-experts 7 is above the 6 experts of layer 2; keep fewer"),
    ],
)
def test_numbers_that_cannot_be_kept(shape: ModelShape, share: float | None, number: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        number_to_keep(shape, share, number)


def test_what_a_layer_loses() -> None:
    """Saliency counts an expert as often as it is chosen; the other criteria are sums already."""
    scores, kept = {1: torch.tensor([4.0, 1.0, 2.0, 0.0])}, {1: torch.tensor([0, 2])}
    tokens = {"expert_tokens": {"1": [1, 6, 3, 0]}, "tokens": 10}
    assert layer_cuts(ranking_of(scores, SOFTMAX, **tokens), kept) == [LayerCut(1, 2, 4, 6 / 16, 0.6)]
    assert layer_cuts(ranking_of(scores, SOFTMAX, "gate", **tokens), kept) == [LayerCut(1, 2, 4, 1 / 7, 0.6)]
    assert layer_cuts(ranking_of(scores, SOFTMAX, "gate"), kept) == [LayerCut(1, 2, 4, 1 / 7, None)]
    assert layer_cuts(ranking_of(scores, SOFTMAX), kept) == layer_cuts(ranking_of(scores, SOFTMAX, "random"), kept)
    assert layer_cuts(ranking_of(scores, SOFTMAX, "random"), kept) == [LayerCut(1, 2, 4, None, None)]
    assert layer_cuts(ranking_of({1: torch.zeros(4)}, SOFTMAX, "gate"), kept) == [LayerCut(1, 2, 4, 0.0, None)]


def test_what_the_smaller_model_says_about_itself() -> None:
    """Its experts are not dealt over groups any more; the other axes of a sorted parent are."""
    shape = tiny_moe()
    space, ranking = tiny_space(shape), random_ranking(shape)
    ranking = replace(
        ranking, criteria={**ranking.criteria, EXPERTS: "reap"}, provenance={**ranking.provenance, "data": "code", "tokens": 4096}
    )
    kept = best_experts(ranking, 8)
    record = reaped_record(ranking, kept)
    assert record["kept"] == {str(layer): stay.tolist() for layer, stay in kept.items()} and record["ranking"] == ranking.fingerprint
    text = "8 of 16 in every layer that has them, the best by reap, on 4,096 tokens of code; the others were removed, nothing was rescaled"
    assert reaped_text(record) == text
    found = reaped_provenance({SORTED: sorted_record(ranking, space), "license": "mit", "parent_parameters": None}, record, 77)
    assert found["license"] == "mit" and found["parent_parameters"] == 77 and found[REAPED] == record
    assert unsorted_axes(space, found) == (EXPERTS,)
    assert reaped_provenance({"parent_parameters": 99}, record, 77) == {"parent_parameters": 99, REAPED: record}
