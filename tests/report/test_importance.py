"""A run whose parent was ranked shows its importance: the arrays that are drawn, the figures on the page, and what is left out or refused.

Run: pytest tests/report/test_importance.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.checkpoint.files import RANKING_FILE
from megatron_elastic.errors import CheckpointError
from megatron_elastic.importance.ranking import read_ranking
from megatron_elastic.report.importance import over_best, over_mean, spread, spread_by_layer
from megatron_elastic.report.importance_plots import ERROR_COLOUR, INFLUENCE_COLOUR
from megatron_elastic.report.record import read_run
from tests.report.synthetic_run import DROPPED, FEW_AXES, write_importance, write_run
from tests.report.test_page import page
from tests.report.test_plots import pixels, share_of

A = ElasticAxis
TITLES = ["How importance is spread over each axis", "What the parent loses without its layers", "How much each expert matters"]


def test_spread_falls_from_the_best_whatever_the_number_of_components():
    scores = np.array([2.0, 1.0, 4.0, 1.0])
    assert spread(scores, 4).tolist() == [1, 0.5, 0.25, 0.25]
    assert spread(scores, 8).tolist() == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert spread(scores, 2).tolist() == [0.75, 0.25]
    assert spread(np.array([1.0, 4.0, 2.0]), 2) == pytest.approx([(1 + 0.25) / 1.5, (0.25 + 0.25) / 1.5])
    assert spread(np.array([3.0]), 3).tolist() == [1, 1, 1]


def test_orders_of_one_layer_become_their_mean_and_the_unused_are_left_out():
    assert spread(np.array([[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]]), 2).tolist() == [1, 0.25]
    assert spread(np.zeros((2, 5)), 3).tolist() == [0, 0, 0]
    rows = spread_by_layer({1: np.array([1.0, 2.0]), 4: np.array([[8.0, 2.0], [4.0, 1.0]])}, 2)
    assert rows.tolist() == [[1, 0.5], [1, 0.25]]


def test_experts_over_the_best_and_the_mean_of_their_layer():
    assert over_best({1: np.array([1.0, 4.0]), 4: np.array([5.0, 0.0]), 5: np.zeros(2)}).tolist() == [[0.25, 1], [1, 0], [0, 0]]
    assert over_mean({1: np.array([30.0, 10.0]), 4: np.zeros(2)}).tolist() == [[1.5, 0.5], [0, 0]]


def test_what_is_read_is_what_was_ranked(tmp_path):
    run = write_importance(write_run(tmp_path / "run", *FEW_AXES))
    found, ranking = read_run(run).importance, read_ranking(run / RANKING_FILE)
    assert found is not None and A.LAYERS not in found.scores
    assert found.scores.keys() == ranking.scores.keys() - {A.LAYERS} and found.criteria == ranking.criteria
    assert {axis: list(by_layer) for axis, by_layer in found.scores.items() if axis in (A.HIDDEN, A.MOE_FFN, A.MAMBA_HEADS)} == {
        A.HIDDEN: [None],
        A.MOE_FFN: [1, 5],
        A.MAMBA_HEADS: [0, 4],
    }
    assert np.array_equal(found.scores[A.MOE_FFN][5], ranking.scores[A.MOE_FFN][5].double().numpy())
    assert found.drop_order == DROPPED and found.errors == (0.001, 0.02, 0.1, 0.5, 1.5) and found.influence[3] == 0.01
    assert list(found.routed) == [1, 5] and found.routed[1].tolist() == [100, 200, 300, 400, 500, 600, 700, 800]


def test_layers_are_in_their_order_when_there_are_more_than_nine(tmp_path):
    """A safetensors file has its tensors by name: 10 before 2."""
    run = write_run(tmp_path / "run", "model.layer_pattern=M*M-M-M*M-M-", "elastic.axes={hidden: [128, 96]}", "elastic.drop_order=[]")
    write_importance(run, without=("layers",), depth=None, expert_tokens=None)
    found = read_run(run).importance
    assert found is not None and list(found.scores[A.MAMBA_HEADS]) == [0, 2, 4, 6, 8, 10]
    assert found.drop_order == found.errors == found.influence == () and not found.routed


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The page of a run with a ranking, and the directory of its plots."""
    folder = tmp_path_factory.mktemp("importance")
    parsed, _ = page(write_importance(write_run(folder / "run", *FEW_AXES)), folder / "plots")
    return parsed, folder / "plots"


def test_the_page_shows_it_and_says_what_it_is_from(shown):
    parsed, plots = shown
    assert parsed.texts("h3")[-3:] == TITLES
    images = [attributes for tag, attributes, _ in parsed.elements if tag == "img"]
    assert len(images) == len(list(plots.glob("*.png"))) == 8
    told = dict(zip(parsed.texts("dt"), parsed.texts("dd"), strict=True))["Parent ranked by"]
    assert told.startswith("activation (hidden, ffn, ") and told.endswith(
        "; reap (experts); kl (layers) on 4,096 tokens of a text, before it was sorted"
    )


@pytest.mark.parametrize("name", ["importance", "importance_depth", "importance_experts"])
def test_the_figures_are_whole(shown, name):
    image = pixels(shown[1] / f"{name}.png")
    assert image.std() > 0.02 and np.allclose(image[[0, -1]], 1) and np.allclose(image[:, [0, -1]], 1), "something is cut at the border"
    if name == "importance_depth":
        half = image.shape[1] * 6 // 10
        assert share_of(image[:, :half], ERROR_COLOUR) > 1e-3 and share_of(image[:, half:], INFLUENCE_COLOUR) > 1e-2
    else:
        assert share_of(image, "#081D58") > 1e-3, "the best of a layer is dark blue"


@pytest.mark.parametrize(
    ("changes", "titles"),
    [
        ({"depth": None}, [TITLES[0], TITLES[2]]),
        ({"without": ("layers", "experts"), "depth": None, "expert_tokens": None}, TITLES[:1]),
        ({"expert_tokens": None, "tokens": None}, TITLES),
    ],
)
def test_what_was_not_ranked_is_left_out(changes, titles, tmp_path):
    run = write_importance(write_run(tmp_path / "run", *FEW_AXES), **changes)
    parsed, _ = page(run, tmp_path / "plots")
    assert [title for title in parsed.texts("h3") if title in TITLES] == titles


def test_a_run_without_a_ranking_says_nothing_of_it(tmp_path):
    run = write_run(tmp_path / "run", *FEW_AXES)
    assert read_run(run).importance is None
    parsed, text = page(run, tmp_path / "plots")
    assert not set(TITLES) & set(parsed.texts("h3")) and "anked" not in text


def test_a_file_that_is_no_ranking_of_the_parent_is_one_line(tmp_path):
    run = write_run(tmp_path / "run", *FEW_AXES)
    other = write_importance(write_run(tmp_path / "other", *FEW_AXES, "model.mlp.ffn=384", "elastic.axes={hidden: [128, 96]}"))
    (other / RANKING_FILE).rename(run / RANKING_FILE)
    assert refusal(run) == (
        f"ranking '{run / RANKING_FILE}' is not of the run's parent: model.mlp.ffn is 384 there and 512 here; "
        "restore it, or remove it to report without importance"
    )
    (run / RANKING_FILE).write_bytes(b"nothing")
    assert "cannot be read as a ranking: " in refusal(run)
    damaged: list[tuple[dict[str, Any], str]] = [
        ({"depth": {"errors": [1.0], "influence": [1.0]}}, "1 errors and 1 influences of 6 layers"),
        ({"depth": {"errors": [1.0]}}, "influence"),
        ({"expert_tokens": {"1": [4, 4]}}, "tokens of 2 experts in layer 1"),
        ({"expert_tokens": {"0": [1] * 8}}, "tokens of 8 experts in layer 0"),
        ({"expert_tokens": [4]}, "no attribute"),
    ]
    for bad, reason in damaged:
        (run / RANKING_FILE).unlink()
        message = refusal(write_importance(run, **bad))
        assert message.startswith(f"'{run / RANKING_FILE}' cannot be read as a ranking: ") and reason in message


def refusal(run):
    """The one line of a run that is not read."""
    with pytest.raises(CheckpointError) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)
