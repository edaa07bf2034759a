"""A small family that is awkward on purpose: every axis elastic, all sizes different, groups that do not divide each other."""

from __future__ import annotations

from typing import Any

import torch

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.elastic.decision import Decision
from megatron_elastic.models.hybrid import build_hybrid
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import canonical_name
from megatron_elastic.shape import ModelShape, build_space
from megatron_elastic.testing.tiny import randomize_, tiny_shape

CHOICES: dict[ElasticAxis, tuple[int | float, ...]] = {
    ElasticAxis.HIDDEN: (40, 32, 20),
    ElasticAxis.FFN: (72, 48, 24),
    ElasticAxis.MOE_FFN: (56, 44, 16),
    ElasticAxis.SHARED_FFN: (48, 36, 12),
    ElasticAxis.HEADS: (12, 8, 4),
    ElasticAxis.MAMBA_HEADS: (16, 12, 4),
    ElasticAxis.EXPERTS: (8, 6, 4),
    ElasticAxis.LAYERS: (6, 5, 3),
}


def tiny_space(shape: ModelShape) -> ElasticSpace:
    """The space of `tiny_shape` (without the axes a changed shape lacks)."""
    kinds = {ElasticAxis.FFN: "-", ElasticAxis.MOE_FFN: "E", ElasticAxis.SHARED_FFN: "E", ElasticAxis.EXPERTS: "E"}
    kinds |= {ElasticAxis.HEADS: "*", ElasticAxis.MAMBA_HEADS: "M"}
    choices = {axis: values for axis, values in CHOICES.items() if kinds.get(axis, shape.layer_pattern[0]) in shape.layer_pattern}
    return build_space(shape, choices, shard_groups=4, drop_order=(3, 4, 1))


def narrowed(space: ElasticSpace, axis: ElasticAxis | None, choice: int = -1) -> SubmodelPlan:
    """The plan with choice number `choice` of one axis, or of all of them (None)."""
    return space.plan({spec.axis: spec.choices[choice] for spec in space.axes if axis is None or spec.axis is axis})


def build_family(parallel: ParallelContext, **changes: Any) -> tuple[Any, ElasticSpace, ElasticHandle, ModelShape]:
    """A randomised model, made elastic: (model, space, handle, shape)."""
    shape = tiny_shape(**changes)
    model = build_hybrid(shape, parallel)
    randomize_(model, seed=5)
    space = tiny_space(shape)
    return model, space, elasticize(model, space, parallel, shape), shape


def text(batch: int = 2, length: int = 23, vocab: int = 131) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions [batch, length]."""
    tokens = torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(11))
    return tokens, torch.arange(length)[None].expand(batch, -1)


def forward_backward(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [batch, length, vocabulary] and the gradient of every parameter that got one, for a fixed text and a fixed loss."""
    model.zero_grad()
    tokens, positions = text()
    logits = model(tokens, positions, None)
    weight = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(3))
    (logits.tanh() * weight).sum().backward()
    return logits.detach(), {canonical_name(name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run(model: Any, handle: ElasticHandle, plan: SubmodelPlan | Decision | None, mode: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`forward_backward` under a plan."""
    with handle.use(plan, mode):
        return forward_backward(model)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of `b`."""
    return float((a - b).norm() / b.norm().clamp(min=1e-12))
