"""A ranking comes back from its file as it was; what is missing, foreign, not a number or of another model is refused by name.

Run: pytest tests/importance/test_ranking.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import CheckpointError
from megatron_elastic.importance.dealing import permutations
from megatron_elastic.importance.ranking import check_model, fingerprint_of, read_ranking, score_shapes, write_ranking
from megatron_elastic.importance.sort import permute
from megatron_elastic.space import build_space
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape
from tests.elastic.family import tiny_space
from tests.importance.rankings import random_ranking, random_tensors

A = ElasticAxis
FILE = Path("mine.ranking")


def with_scores(ranking: Any, axis: ElasticAxis, **changes: Any) -> Any:
    """A ranking with changed scores of one axis. changes: layer (as text) -> scores."""
    rows = {**ranking.scores[axis], **{None if key == "None" else int(key): value for key, value in changes.items()}}
    return replace(ranking, scores={**ranking.scores, axis: rows})


@pytest.mark.parametrize("shape", [tiny_shape(), tiny_dense(), tiny_moe()], ids=["hybrid", "dense", "moe"])
def test_a_ranking_comes_back(shape: Any, tmp_path: Path) -> None:
    ranking = random_ranking(shape)
    ranking = with_scores(ranking, A.LAYERS, **{"None": torch.arange(shape.num_layers, dtype=torch.float64) / 3})
    write_ranking(tmp_path / "new" / FILE, ranking)
    again = read_ranking(tmp_path / "new" / FILE)
    assert (again.shape, again.criteria, again.provenance) == (ranking.shape, ranking.criteria, ranking.provenance)
    assert again.scores.keys() == ranking.scores.keys() and A.TOPK not in again.scores
    for axis, rows in ranking.scores.items():
        assert all(
            torch.equal(again.scores[axis][layer], scores) and again.scores[axis][layer].dtype == scores.dtype
            for layer, scores in rows.items()
        )
    assert again.scores[A.LAYERS][None].dtype == torch.float64 and again.fingerprint == ranking.fingerprint
    assert [path.name for path in (tmp_path / "new").iterdir()] == [str(FILE)]
    with safe_open(tmp_path / "new" / FILE, "pt") as stored:
        assert {"hidden", "layers"} <= set(stored.keys()) and json.loads(stored.metadata()["ranking"])["format_version"] == 1


def test_the_sizes_of_scores() -> None:
    hybrid = tiny_shape()
    assert score_shapes(hybrid, A.HIDDEN) == {None: (40,)} and score_shapes(hybrid, A.LAYERS) == {None: (6,)}
    assert score_shapes(hybrid, A.MOE_FFN) == {1: (8, 56), 5: (8, 56)} and score_shapes(hybrid, A.MAMBA_STATE) == {0: (4, 7), 4: (4, 7)}
    assert score_shapes(hybrid, A.MAMBA_HEAD_DIM) == {0: (6,), 4: (6,)} and score_shapes(hybrid, A.FFN) == {3: (72,)}
    assert score_shapes(hybrid, A.TOPK) == {} and score_shapes(tiny_dense(), A.EXPERTS) == {}


def test_another_ranking_has_another_fingerprint() -> None:
    ranking = random_ranking(tiny_shape())
    one = with_scores(ranking, A.FFN, **{"3": ranking.scores[A.FFN][3] + 1e-3})
    assert len({ranking.fingerprint, one.fingerprint, random_ranking(tiny_shape(), fingerprint="1").fingerprint}) == 3


PROBLEMS: dict[str, tuple[Any, str]] = {
    "NaN": (lambda r: with_scores(r, A.FFN, **{"3": torch.full((72,), torch.nan)}), "ffn/3 has 72 scores that are NaN or infinite"),
    "infinite": (
        lambda r: with_scores(r, A.HIDDEN, **{"None": torch.tensor([torch.inf] + [0.0] * 39)}),
        "hidden has 1 scores that are NaN or infinite",
    ),
    "layer that has none": (lambda r: with_scores(r, A.FFN, **{"2": torch.ones(72)}), "ffn/2 is not one of the model's"),
    "size": (lambda r: with_scores(r, A.EXPERTS, **{"1": torch.ones(7)}), "experts/1 has shape [7], not [8]"),
    "missing layer": (lambda r: replace(r, scores={**r.scores, A.EXPERTS: {1: torch.ones(8)}}), "experts/5 is missing"),
    "axis without components": (
        lambda r: replace(r, scores={**r.scores, A.TOPK: {1: torch.ones(3)}}, criteria={**r.criteria, A.TOPK: "x"}),
        "axis 'topk' is none that this model ranks",
    ),
    "criterion": (lambda r: replace(r, criteria={}), "axis 'hidden' has scores but no criterion"),
    "model": (lambda r: replace(r, provenance={}), "it does not say which model it ranks"),
    "nothing": (lambda r: replace(r, scores={}), "it has no scores"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_ranking_with_problems_is_not_written(case: str, tmp_path: Path) -> None:
    change, text = PROBLEMS[case]
    with pytest.raises(CheckpointError) as caught:
        write_ranking(tmp_path / FILE, change(random_ranking(tiny_shape())))
    assert text in caught.value.problems and str(tmp_path / FILE) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_ranking_with_problems_is_not_read(tmp_path: Path) -> None:
    write_ranking(tmp_path / FILE, random_ranking(tiny_shape()))
    with safe_open(tmp_path / FILE, "pt") as stored:
        metadata, tensors = stored.metadata(), {key: stored.get_tensor(key) for key in stored.keys()}
    tensors["ffn/3"][5] = torch.nan
    save_file(tensors, tmp_path / "nan", metadata)
    with pytest.raises(CheckpointError, match="ffn/3 has 1 scores that are NaN or infinite"):
        read_ranking(tmp_path / "nan")
    save_file({**tensors, "depth": torch.ones(3)}, tmp_path / "axis", metadata)
    with pytest.raises(CheckpointError, match="cannot be read as a ranking: 'depth' is not a valid ElasticAxis; rank the model again"):
        read_ranking(tmp_path / "axis")


def test_what_is_no_ranking_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no ranking at .*mine.ranking'; write one with `megatron-elastic rank`"):
        read_ranking(tmp_path / FILE)
    (tmp_path / "text").write_text("importance", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read as a ranking"):
        read_ranking(tmp_path / "text")
    save_file({"hidden": torch.ones(3)}, tmp_path / "weights")
    with pytest.raises(CheckpointError, match="is a safetensors file, but not a ranking; give one that"):
        read_ranking(tmp_path / "weights")
    write_ranking(tmp_path / FILE, random_ranking(tiny_dense()))
    with pytest.raises(CheckpointError, match="exists; choose another path or delete it"):
        write_ranking(tmp_path / FILE, random_ranking(tiny_dense()))


def test_a_ranking_is_of_one_model() -> None:
    shape = tiny_shape()
    tensors = random_tensors(shape)
    ranking = random_ranking(shape, fingerprint=fingerprint_of(tensors, shape))
    check_model(ranking, FILE, shape, tensors)
    with pytest.raises(CheckpointError, match=r"ranking 'mine.ranking' is of another model: model.hidden_size is 40 there and 48 here"):
        check_model(ranking, FILE, replace(shape, hidden_size=48), {})
    with pytest.raises(CheckpointError, match=r"'mine.ranking' is of other weights \(somewhere\); rank this model"):
        check_model(ranking, FILE, shape, random_tensors(shape, seed=1))


def test_a_fingerprint_is_that_of_the_weights_whatever_their_format() -> None:
    shape = tiny_dense()
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(shape).items()}
    found = fingerprint_of(tensors, shape)
    assert found == fingerprint_of({name: tensor.float() for name, tensor in tensors.items()}, shape)
    rows = shape.vocab_size
    padded = {
        name: torch.cat([t[:rows], t.new_zeros(9, t.shape[1])]) if t.shape[0] == shape.vocab_rows else t for name, t in tensors.items()
    }
    assert found == fingerprint_of(padded, replace(shape, padded_vocab_size=rows + 9))
    tensors["decoder.final_layernorm.weight"][7] += 0.5
    assert found != fingerprint_of(tensors, shape)


@pytest.mark.parametrize("shape", [tiny_shape(), tiny_moe()], ids=["hybrid", "moe"])
def test_another_order_of_any_axis_has_another_fingerprint(shape: Any) -> None:
    tensors, ranking = random_tensors(shape), random_ranking(shape)
    for spec in tiny_space(shape).axes:
        if spec.axis not in (A.TOPK, A.LAYERS):
            space = build_space(shape, {spec.axis: spec.choices}, shard_groups=4)
            assert fingerprint_of(permute(tensors, shape, permutations(ranking, space)), shape) != fingerprint_of(tensors, shape), spec.axis


def test_two_neurons_of_an_expert_that_change_places() -> None:
    """Only a line along its neurons sees them."""
    shape = tiny_moe()
    tensors, name = random_tensors(shape), "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
    moved = tensors[name].clone()
    moved[0][:, [3, 5]] = moved[0][:, [5, 3]]
    assert fingerprint_of({**tensors, name: moved}, shape) != fingerprint_of(tensors, shape)
