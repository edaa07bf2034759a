"""Scores of experts equal a naive script in fp64: routing, gates and experts computed again token by token, for every kind of router.

The public defect (gates and choice from a softmax of the raw logits, whatever the model's router) put back gives another order.

Run: pytest tests/importance/test_experts.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import DataError, UnsupportedError
from megatron_elastic.importance.collect import collect
from megatron_elastic.importance.experts import ExpertRecord
from tests.importance.calibration import ROWS, random_parts
from tests.importance.naive_experts import LAYER, ROUTERS, naive_scores
from tests.importance.rows import row, rows


@pytest.mark.parametrize("router", ROUTERS)
def test_experts_score_as_in_a_naive_script(router: str, parallel: Any) -> None:
    shape = ROUTERS[router]
    parts = random_parts(shape, parallel)
    data = rows(shape.vocab_size, ROWS, parallel)
    expected = naive_scores(parts[0], shape, data)
    for name, values in expected.items():
        found = collect(parts, shape, parallel, data, criterion="random", experts=name)
        torch.testing.assert_close(found.scores[ElasticAxis.EXPERTS][LAYER], values, rtol=2e-5, atol=0)
        assert found.criteria[ElasticAxis.EXPERTS] == name
        assert found.experts is not None
        assert torch.equal(found.experts.tokens[LAYER], expected["frequency"].mul(found.tokens).round())


@pytest.mark.parametrize("router", [name for name in ROUTERS if name.startswith("sigmoid")])
def test_public_defect_gates_by_a_softmax_of_raw_logits_give_another_order(router: str, parallel: Any) -> None:
    shape = ROUTERS[router]
    parts = random_parts(shape, parallel)
    data = rows(shape.vocab_size, ROWS, parallel)
    right, wrong = naive_scores(parts[0], shape, data), naive_scores(parts[0], shape, data, defect=True)
    assert right["reap"].argsort().tolist() != wrong["reap"].argsort().tolist()
    assert not torch.equal(right["frequency"], wrong["frequency"])


def test_planted_experts_come_first(parallel: Any) -> None:
    shape = ROUTERS["sigmoid and bias"]
    parts = random_parts(shape, parallel)
    layer = parts[0].decoder.layers[LAYER].mlp
    with torch.no_grad():
        layer.experts.local_experts[6].linear_fc2.weight *= 8
        layer.router.expert_bias[2] += 5
    data = rows(shape.vocab_size, ROWS, parallel)
    for name, first in (("reap", 6), ("frequency", 2), ("gate", 2)):
        scores = collect(parts, shape, parallel, data, criterion="random", experts=name).scores[ElasticAxis.EXPERTS][LAYER]
        assert int(scores.argmax()) == first, (name, scores)


def test_an_expert_without_tokens_scores_zero_and_few_tokens_are_told_with_numbers(parallel: Any) -> None:
    shape = ROUTERS["sigmoid and bias"]
    parts = random_parts(shape, parallel)
    with torch.no_grad():
        parts[0].decoder.layers[LAYER].mlp.router.expert_bias[4] -= 9
    found = collect(parts, shape, parallel, [row(shape.vocab_size, number) for number in range(2)])
    assert found.scores[ElasticAxis.EXPERTS][LAYER][4] == 0
    assert found.experts is not None
    assert int(found.experts.tokens[LAYER].sum()) == found.tokens * 3
    (line,) = found.experts.warnings(least=6)
    assert line.startswith("layer 1: ") and f"fewer than 6 of {found.tokens} tokens (expert 4: 0" in line
    enough = ExpertRecord({0: torch.ones(2)}, {0: torch.tensor([40.0, 32.0])}, {0: torch.ones(2)}, 72)
    assert enough.warnings() == []


def test_experts_whose_output_is_not_a_number_or_not_weighted_late_are_refused(parallel: Any) -> None:
    shape = ROUTERS["sigmoid and bias"]
    parts = random_parts(shape, parallel)
    layer = parts[0].decoder.layers[LAYER].mlp
    data = rows(shape.vocab_size, 2, parallel)
    layer.config.moe_apply_probs_on_input = True
    with pytest.raises(UnsupportedError, match="layer 1: moe_apply_probs_on_input"):
        collect(parts, shape, parallel, data)
    layer.config.moe_apply_probs_on_input = False
    with torch.no_grad():
        for expert in layer.experts.local_experts:
            expert.linear_fc2.weight.fill_(torch.nan)
    with pytest.raises(DataError, match="layer 1, experts: their outputs are NaN"):
        collect(parts, shape, parallel, data, criterion="random")
