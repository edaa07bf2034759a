"""Scores of experts equal a naive script in fp64: routing, gates and experts computed again token by token, for every kind of router.

The public defect (gates and choice from a softmax of the raw logits, whatever the model's router) put back gives another order.

Run: pytest tests/importance/test_experts.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import DataError, UnsupportedError
from megatron_elastic.importance.collect import collect
from megatron_elastic.importance.experts import ExpertRecord
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import tiny_moe, tiny_shape
from megatron_elastic.train.forward import hidden_states
from tests.importance.calibration import ROWS, random_parts
from tests.importance.rows import row, rows

SOFTMAX = tiny_moe(score="softmax", layer_pattern="TX")
assert SOFTMAX.moe is not None
ROUTERS = {
    "softmax over the chosen": SOFTMAX,
    "softmax before the choice": replace(SOFTMAX, moe=replace(SOFTMAX.moe, pre_softmax=True)),
    "sigmoid and bias": tiny_shape(layer_pattern="-E"),
    "sigmoid, bias and groups": tiny_moe(layer_pattern="TX"),
}
LAYER = 1


def _naive(model: Any, shape: ModelShape, data: list[Any], *, defect: bool = False) -> dict[str, torch.Tensor]:
    """reap, frequency, gate of each expert of LAYER, token by token in fp64 from the layer's input. defect: by a softmax of the raw logits."""
    moe = shape.moe
    assert moe is not None and isinstance(moe.experts, int) and isinstance(moe.topk, int)
    layer, inputs = model.decoder.layers[LAYER].mlp, []
    handle = layer.router.register_forward_pre_hook(lambda _, args: inputs.append(args[0][:, 0].double()))
    with torch.no_grad():
        for batch in data:
            hidden_states(model.eval(), batch)
    handle.remove()
    saliency, tokens, gates = (torch.zeros(moe.experts, dtype=torch.float64) for _ in range(3))
    total = 0
    for batch, states in zip(data, inputs, strict=True):
        for x, counts in zip(states, batch.loss_mask[0], strict=True):
            if counts == 0:
                continue
            total += 1
            logits = layer.router.weight.double() @ x
            for expert, gate in (_by_defect if defect else _route)(logits, layer.router.expert_bias, moe).items():
                saliency[expert] += gate * _output(layer.experts.local_experts[expert], x, shape).norm()
                tokens[expert] += 1
                gates[expert] += gate
    return {"reap": saliency / tokens.clamp(min=1), "frequency": tokens / total, "gate": gates / total}


def _route(logits: torch.Tensor, bias: torch.Tensor | None, moe: Any) -> dict[int, float]:
    """Expert -> gate of one token, by the rules of the model's router."""
    if moe.score == "softmax":
        chosen = logits.topk(moe.topk).indices
        scores = logits.softmax(-1)[chosen] if moe.pre_softmax else logits[chosen].softmax(-1)
    else:
        scores = torch.sigmoid(logits)
        wanted = scores + bias.double() if bias is not None else scores
        if moe.routing_groups:
            grouped = wanted.view(moe.routing_groups, -1)
            best = grouped.topk(moe.topk // moe.groups_per_token, -1).values.sum(-1).topk(moe.groups_per_token).indices.tolist()
            for group in range(moe.routing_groups):
                if group not in best:
                    grouped[group] = -torch.inf
        chosen = wanted.topk(moe.topk).indices
        scores = scores[chosen] / scores[chosen].sum()
    return dict(zip(chosen.tolist(), (scores * (moe.scaling_factor or 1.0)).tolist(), strict=True))


def _by_defect(logits: torch.Tensor, bias: torch.Tensor | None, moe: Any) -> dict[int, float]:
    scores = logits.softmax(-1)
    chosen = scores.topk(moe.topk)
    return dict(zip(chosen.indices.tolist(), chosen.values.tolist(), strict=True))


def _output(expert: Any, x: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """The expert's unweighted output [hidden]."""
    inner = expert.linear_fc1.weight.double() @ x
    activation = {"squared_relu": lambda v: F.relu(v).square(), "silu": F.silu, "gelu": lambda v: F.gelu(v)}[shape.activation]
    if shape.gated:
        first, second = inner.chunk(2)
        inner = activation(first) * second
    else:
        inner = activation(inner)
    return expert.linear_fc2.weight.double() @ inner


@pytest.mark.parametrize("router", ROUTERS)
def test_experts_score_as_in_a_naive_script(router: str, parallel: Any) -> None:
    shape = ROUTERS[router]
    parts = random_parts(shape, parallel)
    data = rows(shape.vocab_size, ROWS, parallel)
    expected = _naive(parts[0], shape, data)
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
    right, wrong = _naive(parts[0], shape, data), _naive(parts[0], shape, data, defect=True)
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
