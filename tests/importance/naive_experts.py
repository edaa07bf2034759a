"""Experts scored by a naive script: routing, gates and experts computed again token by token in fp64, for every kind of router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import tiny_moe, tiny_shape
from megatron_elastic.train.forward import hidden_states

SOFTMAX = tiny_moe(score="softmax", layer_pattern="TX")
assert SOFTMAX.moe is not None
ROUTERS = {
    "softmax over the chosen": SOFTMAX,
    "softmax before the choice": replace(SOFTMAX, moe=replace(SOFTMAX.moe, pre_softmax=True)),
    "sigmoid and bias": tiny_shape(layer_pattern="-E"),
    "sigmoid, bias and groups": tiny_moe(layer_pattern="TX"),
}
LAYER = 1
"""Global number of the layer with experts in each of them that is scored."""


def naive_scores(model: Any, shape: ModelShape, data: list[Any], *, defect: bool = False) -> dict[str, torch.Tensor]:
    """reap, frequency, gate of each expert of LAYER, token by token in fp64 from the layer's input.

    defect: gates and choice by a softmax of the raw logits, as public code has them.
    """
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


def hide_experts_(model: Any, kept: Mapping[int, torch.Tensor]) -> None:
    """Let a model choose among the kept experts of each layer only, which is all that removing the others should change. For one part."""
    for layer, stay in kept.items():
        router = model.decoder.layers[layer].mlp.router
        dropped = torch.ones(router.weight.shape[0], dtype=torch.bool)
        dropped[stay] = False
        if router.expert_bias is not None:
            router.expert_bias[dropped] = -torch.inf
        else:
            gating = router.gating
            router.gating = lambda states, gating=gating, dropped=dropped: gating(states).masked_fill(dropped, -torch.inf)
