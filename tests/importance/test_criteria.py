"""Every criterion's streamed sums equal its definition over all tokens at once, put a planted component first, and survive pieces and shards.

Run: pytest tests/importance/test_criteria.py
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron_elastic.errors import DataError
from megatron_elastic.importance.criteria import CRITERIA, CriterionName, Statistics, selection

TOKENS, ENTRIES, ROWS, PLANTED = 40, 7, 3, 4
DRAW = torch.Generator().manual_seed(0)
ACTIVATION = torch.randn(TOKENS, ENTRIES, generator=DRAW)
ACTIVATION[:, PLANTED] *= 5
GRADIENT = torch.randn(TOKENS, ENTRIES, generator=DRAW)
ROW = torch.randint(-1, ROWS, (TOKENS,), generator=DRAW)


def naive(name: CriterionName) -> list[float]:
    """Scores by loops over Python numbers."""
    scores = []
    for entry in range(ENTRIES):
        values = [(int(ROW[t]), float(ACTIVATION[t, entry]), float(GRADIENT[t, entry])) for t in range(TOKENS) if ROW[t] >= 0]
        if name is CriterionName.ENERGY:
            scores.append(math.sqrt(sum(a * a for _, a, _ in values) / len(values)))
        elif name is CriterionName.ACTIVATION:
            scores.append(sum(abs(a) for _, a, _ in values) / len(values))
        elif name is CriterionName.TAYLOR:
            scores.append(sum(abs(a * g) for _, a, g in values) / len(values))
        elif name is CriterionName.MAGNITUDE:
            scores.append(math.sqrt(sum(a * a for _, a, _ in values)))
        else:
            of_rows = [[abs(a) for row, a, _ in values if row == number] for number in range(ROWS)]
            scores.append(math.sqrt(sum((sum(row) / len(row)) ** 2 for row in of_rows)))
    return scores


def streamed(name: CriterionName, pieces: list[slice], shards: list[slice]) -> torch.Tensor:
    """The same through `Statistics`, some tokens and some entries at a time."""
    criterion = CRITERIA[name]
    statistics = Statistics({"before": 2, "here": ENTRIES, "after": 3}, criterion, rows=ROWS)
    for piece in pieces:
        for shard in shards:
            gradient = GRADIENT[piece, shard] if criterion.needs == "backward" else None
            statistics.add("here", ACTIVATION[piece, shard], ROW[piece], gradient=gradient, first=shard.start)
    counts = torch.stack([(ROW == row).sum() for row in range(ROWS)]).double()
    statistics.reduce(None, counts if criterion.by_row else counts.sum()[None])
    found = statistics.scores()
    assert not found["before"].any() and not found["after"].any()
    return found["here"]


@pytest.mark.parametrize("name", CRITERIA)
def test_streamed_scores_are_the_definition(name: CriterionName) -> None:
    whole = streamed(name, [slice(0, TOKENS)], [slice(0, ENTRIES)])
    torch.testing.assert_close(whole, torch.tensor(naive(name), dtype=torch.float64), rtol=1e-5, atol=0)
    assert int(whole.argmax()) == PLANTED
    cut = streamed(name, [slice(0, 9), slice(9, 9), slice(9, TOKENS)], [slice(0, 3), slice(3, ENTRIES)])
    torch.testing.assert_close(cut, whole, rtol=1e-6, atol=0)


def test_rows_closed_one_after_another_are_rows_closed_together() -> None:
    together = streamed(CriterionName.MINITRON, [slice(0, TOKENS)], [slice(0, ENTRIES)])
    statistics = Statistics({"here": ENTRIES}, CRITERIA[CriterionName.MINITRON], rows=1)
    for row in range(ROWS):
        statistics.add("here", ACTIVATION, torch.where(ROW.eq(row), 0, -1))
        statistics.reduce(None, ROW.eq(row).sum()[None].double())
    torch.testing.assert_close(statistics.scores()["here"], together, rtol=1e-6, atol=0)


def test_half_precision_does_not_overflow() -> None:
    """bf16 activations are measured in fp32; squares of weights that fp16 holds are too large for it."""
    statistics = Statistics({"here": 1}, CRITERIA[CriterionName.MAGNITUDE])
    statistics.add("here", torch.full((4, 1), 6e4, dtype=torch.float16), torch.zeros(4, dtype=torch.int64))
    statistics.reduce(None, torch.tensor([4.0]))
    assert float(statistics.scores()["here"]) == pytest.approx(2 * float(torch.tensor(6e4, dtype=torch.float16)), rel=1e-6)


def test_selection_leaves_out_what_does_not_count() -> None:
    assert selection(torch.tensor([1, -1, 0, 1]), 2).tolist() == [[0, 0, 1, 0], [1, 0, 0, 1]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_refused_by_its_place(bad: float) -> None:
    statistics = Statistics({"first": 2, "layer 3, ffn": 2, "last": 2}, CRITERIA[CriterionName.ACTIVATION])
    for place in ("first", "layer 3, ffn", "last"):
        statistics.add(place, torch.tensor([[1.0, 2.0 if place == "first" else bad]]), torch.zeros(1, dtype=torch.int64))
    statistics.reduce(None, torch.tensor([1.0]))
    with pytest.raises(DataError, match="^layer 3, ffn: its activations are NaN or infinite"):
        statistics.scores()


def test_no_tokens_are_refused() -> None:
    statistics = Statistics({"here": 2}, CRITERIA[CriterionName.ACTIVATION])
    statistics.reduce(None, torch.tensor([0.0]))
    with pytest.raises(DataError, match="no tokens to rank on"):
        statistics.scores()
