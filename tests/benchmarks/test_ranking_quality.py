"""The benchmark of rankings keeps what a ranking says, computes once what two rankings keep alike, and compares criteria point by point.

Run: pytest tests/benchmarks/test_ranking_quality.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from benchmarks import ranking_quality
from benchmarks.ranking_points import Point, choices, compare, expert_points, over_parent, tables, width_points
from benchmarks.ranking_texts import Texts, read_texts
from megatron_elastic.axes import ElasticAxis
from megatron_elastic.config import load_recipe
from megatron_elastic.corpus.tokenizer import open_tokenizer
from megatron_elastic.errors import DataError
from megatron_elastic.export.sources import Source
from megatron_elastic.importance.dealing import permutations
from megatron_elastic.importance.ranking import Ranking
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors
from megatron_elastic.platform import prepare_platform
from megatron_elastic.space import build_space
from megatron_elastic.testing.experts import stack_experts
from megatron_elastic.testing.tiny import randomize_, tiny_dense
from tests.importance.rankings import random_ranking

A = ElasticAxis
FFN = Point("ffn 67%", ((A.FFN, 2 / 3),))
LENGTH = 16


def test_smollm2_points_are_widths_that_it_can_have() -> None:
    shape = load_recipe(Path(__file__).parents[2] / "recipes" / "smollm2_135m.yaml").model
    points = width_points()
    assert len(points) == 4 + 4 + 2 + 4 + 4 and len({point.name for point in points}) == len(points)
    found = {point.name: point.widths(shape) for point in points}
    assert found["hidden 95%"] == {A.HIDDEN: 544} and found["ffn 70%"] == {A.FFN: 1072}
    assert found["heads 67%"] == {A.HEADS: 6} and found["heads 33%"] == {A.HEADS: 3}
    assert found["all 80%"] == {A.HIDDEN: 464, A.FFN: 1232, A.HEADS: 6, A.LAYERS: 24}
    assert choices(points, shape)[A.LAYERS] == (30, 28, 27, 24, 21)
    assert [point.name for point in expert_points()] == ["experts 75%", "experts 50%"]


def test_criteria_are_compared_at_every_point() -> None:
    losses = {
        ("a", "p", "code"): 2.0,
        ("b", "p", "code"): 2.1,
        ("a", "q", "code"): 3.0,
        ("b", "q", "code"): 2.9,
        ("a", "q", "prose"): 1.0,
        ("b", "q", "prose"): 1.0,
        ("a", "only a", "prose"): 9.0,
    }
    found = compare(losses, "a", "b")
    assert found.at_least_as_good == pytest.approx(2 / 3)
    assert found.worst == pytest.approx(math.exp(0.1)) and found.worst_at == ("q", "code")
    assert found.ratio == pytest.approx(1.0) and not found.met
    assert compare(losses, "b", "b").met
    assert over_parent(losses, "b", {"code": 2.0, "prose": 1.0}, ["p", "q"]) == pytest.approx(math.exp(1.0 / 3))
    assert "7.39*" in tables(losses, {"code": 1.0}, ["p"], ["a", "b"])
    with pytest.raises(KeyError, match="no point in common"):
        compare(losses, "a", "c")


def test_nothing_is_judged_that_was_calibrated_on() -> None:
    texts = read_texts(open_tokenizer("byte"), calibration=8 * 256, judged=3 * 256, sequence_length=256)
    assert len(texts.calibration) == 8 and {name: len(rows) for name, rows in texts.judged.items()} == {"code": 3, "prose": 3}
    assert {len(row) for row in texts.calibration} == {257}
    seen = {row.tobytes() for row in texts.calibration}
    assert not seen & {row.tobytes() for rows in texts.judged.values() for row in rows} and len(seen) == 8
    again = read_texts(open_tokenizer("byte"), calibration=8 * 256, judged=3 * 256, sequence_length=256)
    assert again.fingerprint == texts.fingerprint
    with pytest.raises(DataError, match="ask for fewer"):
        read_texts(open_tokenizer("byte"), calibration=2 * 256, judged=10**9, sequence_length=256)


@pytest.fixture
def bench(_one_process: Any, tmp_path: Path) -> ranking_quality.Bench:
    """A dense model whose neurons with odd numbers do nothing, with text."""
    prepare_platform()
    shape = tiny_dense()
    model = build_model(shape, _one_process)
    randomize_(model, seed=3)
    tensors = stack_experts(gather_tensors(model))
    for name, tensor in tensors.items():
        if name.endswith("mlp.linear_fc2.weight"):
            tensor[:, 1::2] = 0.0
    source = Source(path=tmp_path, shape=shape, tensors=tensors, dtypes={}, space=None, plans={}, provenance={}, assets=None)
    numbers = np.random.default_rng(0).integers(0, shape.vocab_size, (6, LENGTH + 1)).astype(np.int32)
    texts = Texts(tuple(numbers[:2]), {"one": tuple(numbers[2:4]), "other": tuple(numbers[4:])})
    options = ranking_quality.Options("widths", tmp_path, tmp_path, (), None, LENGTH, 2 * LENGTH, 2 * LENGTH)
    return ranking_quality.Bench(source, texts, _one_process, options)


def test_a_member_keeps_what_its_ranking_puts_first(bench: ranking_quality.Bench) -> None:
    parent = bench.parent()
    good = bench.judge(bench.ranking("magnitude"), [FFN])
    assert {text: good[FFN.name, text] for text in parent} == pytest.approx(parent, rel=1e-6)
    bad = bench.judge(bench.ranking("random"), [FFN])
    assert all(abs(bad[FFN.name, text] - loss) > 1e-4 for text, loss in parent.items())


def test_what_is_known_is_not_computed_again(bench: ranking_quality.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ranking = bench.ranking("activation")
    found = bench.judge(ranking, [FFN])
    monkeypatch.setattr(bench, "_family", lambda *_: pytest.fail("a known point was computed"))
    assert bench.judge(bench.ranking("activation"), [FFN]) == found


def test_rankings_that_keep_the_same_share_their_points() -> None:
    shape = tiny_dense()
    ranking, other = random_ranking(shape, seed=1), random_ranking(shape, seed=2)
    space = build_space(shape, choices([FFN], shape), shard_groups=1)
    plan = space.plan(FFN.widths(shape))

    def best_first_or_last(scores: Tensor, *, reverse: bool) -> Tensor:
        """What is kept above all others, in its own order or the other way round."""
        best = scores.argsort(descending=True)[: FFN.widths(shape)[A.FFN]]
        return scores.index_fill(0, best, 0.0).index_add(0, best, 10 + (-scores if reverse else scores)[best])

    def kept(one: Ranking) -> str:
        return ranking_quality.kept(plan, space, permutations(one, space))

    def with_ffn(*, reverse: bool) -> Ranking:
        found = {layer: best_first_or_last(scores, reverse=reverse) for layer, scores in ranking.scores[A.FFN].items()}
        return replace(ranking, scores={**ranking.scores, A.FFN: found})

    assert kept(with_ffn(reverse=False)) == kept(with_ffn(reverse=True)) == kept(ranking) != kept(other)
