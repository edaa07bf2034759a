"""One elastic class per megatron module; those of a Mamba mixer are in `elastic/mamba.py`.

`attach.elasticize` gives a module the elastic class in place of its own (parameters, names and hooks stay, as in PyTorch's
`fully_shard`). An elastic class overrides only where its module is masked or cut. Where megatron's code reads a size or a weight
from an attribute, the elastic class answers with a property: what the current decision keeps.

Without a decision every class behaves exactly as its parent class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.elastic.decision import Slot
from megatron_elastic.elastic.linear import ElasticColumnLinear
from megatron_elastic.layout import Dim
from megatron_elastic.models.local_layers import LayerNormColumnParallelLinear, LocalLayerNorm, LocalRMSNorm
from megatron_elastic.models.recompute import RecomputableMambaLayer, RecomputableMLPLayer, RecomputableTransformerLayer, Replay
from megatron_elastic.runs import select


@dataclass(frozen=True)
class Site:
    """What an elastic module knows of itself.

    layer: its global layer number (from 0), None outside the layers; dim: its dim in the layout table; shards: ranks that share it.
    """

    slot: Slot
    layer: int | None
    dim: Dim
    shards: int = 1

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The entries of dim 0 of `tensor` that are computed."""
        decision = self.slot.decision
        return tensor if decision is None else select(tensor, 0, decision.runs(self.dim, self.layer, self.shards))

    def vector(self, like: torch.Tensor) -> torch.Tensor | None:
        """What the computed entries of the dim are multiplied by; None for ones."""
        decision = self.slot.decision
        return None if decision is None else decision.vector(self.dim, self.layer, self.shards, like)

    def alive_share(self, like: torch.Tensor) -> torch.Tensor | None:
        """d/D of a norm over the dim (0-d, fp32); None for 1."""
        decision = self.slot.decision
        return None if decision is None else decision.alive_share(self.dim, self.layer, self.shards, like)

    def share(self, axis: ElasticAxis, whole: int) -> int:
        """What a decision computes of `whole` entries that belong to `axis`."""
        decision = self.slot.decision
        if decision is None:
            return whole
        width, parent = decision.width(axis, self.layer)
        return whole * width // parent

    def written(self, output: torch.Tensor) -> torch.Tensor:
        """A write to the residual stream (`dim` is hidden): times the weights of its channels and the layer's gate."""
        decision, vector = self.slot.decision, self.vector(output)
        gate = None if decision is None else decision.gate(self.layer, output)
        scale = gate if vector is None else vector if gate is None else vector * gate
        return output if scale is None else output * scale

    @property
    def skipped(self) -> bool:
        """Whether this layer is not computed."""
        return self.slot.decision is not None and self.layer in self.slot.decision.skipped


@dataclass(frozen=True)
class RouterSite:
    """What the router of a mixture of experts knows of itself. layer: its global layer number (from 0); experts: its rows."""

    slot: Slot
    layer: int | None
    experts: Dim

    def expert_weights(self, like: torch.Tensor) -> torch.Tensor | None:
        """Weights [experts] in fp32, zero for those that are cut, the same on every rank; None for ones."""
        decision = self.slot.decision
        return None if decision is None else decision.numbered(self.experts, self.layer, like)

    def rank_weights(self, like: torch.Tensor) -> torch.Tensor | None:
        """Weights [topk] in fp32 of the chosen experts in the order they are chosen; None for ones."""
        decision = self.slot.decision
        return None if decision is None else decision.component_weights(ElasticAxis.TOPK, self.layer, like)

    def gate(self, like: torch.Tensor) -> torch.Tensor | None:
        """What the layer's output is multiplied by (0-d); None for 1."""
        decision = self.slot.decision
        return None if decision is None else decision.gate(self.layer, like)


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the type norms are computed in: fp32, or fp64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_layer_norm(x: torch.Tensor, vector: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the channels of x [..., D] that are alive, in fp32: that of the small model when `vector` [D] is zeros and ones.

    Every write to x was multiplied by w = `vector`, so x = w y. Mean and variance are those of y under weights w^2 (d = sum of w^2),
    as for the RMS norm, and the output is w times the norm of y: a channel that is not alive gives zero, its bias too.
    """
    values, w = wide(x), wide(vector)
    alive = w.square().sum()
    mean = (values * w).sum(-1, keepdim=True) / alive
    centered = values - w * mean
    variance = centered.square().sum(-1, keepdim=True) / alive
    return (centered * torch.rsqrt(variance + eps) * weight + w * bias).to(x.dtype)


def rms_norm(x: torch.Tensor, share: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the channels of x [..., D] of which the share d/D is alive: that of the small model of d channels.

    RMS over D of x * sqrt(D/d) is RMS over d of x; the output is scaled back, so that eps stays (it is a float inside fused kernels).
    """
    if share is None:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    scale, values = share.sqrt(), wide(x)
    return (F.rms_norm(values / scale, (x.shape[-1],), wide(weight), eps) * scale).to(x.dtype)


class ElasticRMSNorm(LocalRMSNorm):
    """RMS norm over the residual stream (or over a head, whose channels are no axis)."""

    site: Site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., kept hidden] -> the same."""
        return rms_norm(x, self.site.alive_share(x), self.site.cut(self.weight), self.eps)


class ElasticLayerNorm(LocalLayerNorm):
    """LayerNorm over the residual stream (or over a head, whose channels are no axis)."""

    site: Site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., kept hidden] -> the same."""
        return layer_norm(x, self.site, self.weight, self.bias, self.eps)


def layer_norm(x: torch.Tensor, site: Site, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the computed channels of x [..., kept hidden], by the decision of `site`."""
    weight, bias, vector = site.cut(weight), site.cut(bias), site.vector(x)
    if vector is None:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return masked_layer_norm(x, vector, weight, bias, eps)


class ElasticNormLinear(ElasticColumnLinear, LayerNormColumnParallelLinear):
    """Norm over the residual stream, then a column-parallel linear."""

    norm_site: Site

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        """[s, b, kept hidden] -> ([s, b, kept rows], bias to be added later)."""
        return ElasticColumnLinear.forward(self, self.normalize(input_), weight, runtime_gather_output)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """The norm alone: x [..., kept hidden]."""
        if self.layer_norm_bias is not None:
            return layer_norm(x, self.norm_site, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return rms_norm(x, self.norm_site.alive_share(x), self.norm_site.cut(self.layer_norm_weight), self.eps)


class ElasticEmbedding(VocabParallelEmbedding):
    """Word embedding: the first write to the residual stream."""

    site: Site

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """[rows of this rank, kept hidden]."""
        whole = self._parameters["weight"]
        assert whole is not None
        kept = self.site.share(ElasticAxis.HIDDEN, whole.shape[1])
        # The parameter itself, not a view of all of it: megatron looks for `main_grad` on a tied embedding.
        return whole if kept == whole.shape[1] else whole.narrow(1, 0, kept)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Tokens [b, s] -> their embeddings in kept channels."""
        return self.site.written(super().forward(input_))


def write_result(result: Any, site: Site) -> Any:
    """A sublayer's (output, bias) with its write to the residual stream masked, bias included."""
    output, bias = result
    return site.written(output), None if bias is None else site.written(bias)


class ElasticSelfAttention(SelfAttention):
    """Writes to the residual stream; counts the query heads that are kept."""

    site: Site

    @property
    def num_attention_heads_per_partition(self) -> int:
        """Kept query heads of this rank."""
        return self.site.share(ElasticAxis.HEADS, self.__dict__["num_attention_heads_per_partition"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the attention, in kept widths."""
        return write_result(super().forward(*args, **kwargs), self.site)


class ElasticMLP(MLP):
    """Writes to the residual stream."""

    site: Site

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the MLP, in kept widths."""
        return write_result(super().forward(*args, **kwargs), self.site)


class ElasticMoELayer(MoELayer):
    """Writes to the residual stream, routed and shared experts together."""

    site: Site

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer, in kept widths."""
        return write_result(super().forward(*args, **kwargs), self.site)


class _ZeroGradients(torch.autograd.Function):
    """The input, and zero gradients for parameters that were not used: DDP's overlapped reduction waits for every parameter."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def _skipped(layer: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """The identity as a tensor of its own (a pipeline stage must never return its input: megatron frees it)."""
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad] if torch.is_grad_enabled() else []
    result = _ZeroGradients.apply(hidden_states, *parameters)
    assert isinstance(result, torch.Tensor)
    return result


def _decision_replay(slot: Slot) -> Replay:
    """What gives a layer that is computed again the decision of the microbatch it belongs to."""
    decision = None if slot.decision is None else slot.decision.snapshot()
    return lambda: slot.replaying(decision)


class ElasticMambaLayer(RecomputableMambaLayer):
    """The identity when slice mode drops it."""

    site: Site

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[s, b, kept hidden] -> the same."""
        if self.site.skipped:
            return _skipped(self, hidden_states)
        return super().forward(hidden_states, *args, **kwargs)

    def replays(self) -> Sequence[Replay]:
        """The decision, and what the layer replays."""
        return [_decision_replay(self.site.slot), *super().replays()]


class ElasticTransformerLayer(RecomputableTransformerLayer):
    """The identity when slice mode drops it."""

    site: Site

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[s, b, kept hidden] -> (the same, context)."""
        if self.site.skipped:
            return _skipped(self, hidden_states), kwargs.get("context")
        return super().forward(hidden_states, *args, **kwargs)

    def replays(self) -> Sequence[Replay]:
        """The decision, and what the layer replays."""
        return [_decision_replay(self.site.slot), *super().replays()]


class ElasticMLPLayer(ElasticTransformerLayer, RecomputableMLPLayer):
    """The identity when slice mode drops it."""
