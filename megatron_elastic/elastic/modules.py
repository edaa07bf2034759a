"""One elastic class per megatron module.

`attach.elasticize` gives a module the elastic class in place of its own (parameters, names and hooks stay, as in PyTorch's
`fully_shard`). An elastic class overrides only where its module is masked or cut. Where megatron's code reads a size or a weight
from an attribute, the elastic class answers with a property: what the current decision keeps.

Without a decision every class behaves exactly as its parent class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import ExtendedRMSNorm, MambaMixer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.elastic.decision import Decision, Mode, Slot
from megatron_elastic.elastic.linear import ElasticColumnLinear, LinearSite, rms_scale
from megatron_elastic.layout import Dim
from megatron_elastic.models.local_layers import LayerNormColumnParallelLinear, LocalRMSNorm
from megatron_elastic.runs import select, select_matrix


@dataclass(frozen=True)
class Site:
    """What an elastic module knows of itself.

    layer: its global layer number (from 0), None outside the layers; dim: its dim in the layout table; shards: ranks that share it.
    """

    slot: Slot
    layer: int | None = None
    dim: Dim | None = None
    shards: int = 1

    @property
    def sliced(self) -> Decision | None:
        """The decision if it is in slice mode."""
        decision = self.slot.decision
        return decision if decision is not None and decision.mode is Mode.SLICE else None

    @property
    def masked(self) -> Decision | None:
        """The decision if it is in mask mode."""
        decision = self.slot.decision
        return decision if decision is not None and decision.mode is Mode.MASK else None

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The entries of dim 0 of `tensor` that slice mode keeps; the tensor itself otherwise."""
        decision = self.sliced
        return tensor if decision is None or self.dim is None else select(tensor, 0, decision.runs(self.dim, self.shards))

    def write_scale(self, like: torch.Tensor) -> torch.Tensor | None:
        """What a write to the residual stream is multiplied by in mask mode: hidden weights times the layer's gate; None for 1."""
        decision = self.masked
        if decision is None:
            return None
        scale = decision.vector(ElasticAxis.HIDDEN, 1, 1, like)
        if decision.survival is None or self.layer is None:
            return scale
        gate = decision.survival[self.layer].to(device=like.device, dtype=like.dtype)
        return gate if scale is None else scale * gate


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None) -> torch.Tensor:
    """RMS norm over the last dim; `scale` = sqrt(d/D) makes a norm over D channels of which d are alive that of the small model."""
    if scale is None:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x / scale, (x.shape[-1],), weight, eps) * scale


class ElasticRMSNorm(LocalRMSNorm):
    """RMS norm over the residual stream."""

    site: Site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., kept hidden] -> the same."""
        return _norm(x, self.site.cut(self.weight), self.eps, rms_scale(self.site.masked, x))


class ElasticNormLinear(ElasticColumnLinear, LayerNormColumnParallelLinear):
    """RMS norm over the residual stream, then a column-parallel linear."""

    norm_site: Site

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        """[s, b, kept hidden] -> ([s, b, kept rows], bias to be added later)."""
        normed = _norm(input_, self.norm_site.cut(self.layer_norm_weight), self.eps, rms_scale(self.norm_site.masked, input_))
        return ElasticColumnLinear.forward(self, normed, weight, runtime_gather_output)


class ElasticEmbedding(VocabParallelEmbedding):
    """Word embedding: the first write to the residual stream."""

    site: Site

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """[rows of this rank, kept hidden]."""
        decision = self.site.sliced
        kept = None if decision is None else decision.hidden_kept()
        whole = self._parameters["weight"]
        assert whole is not None
        return whole if kept is None else whole.narrow(1, 0, kept)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Tokens [b, s] -> their embeddings in kept channels."""
        output = super().forward(input_)
        scale = self.site.write_scale(output)
        return output if scale is None else output * scale


class ElasticGatedNorm(ExtendedRMSNorm):
    """The Mamba mixer's norm over each SSM group: its input is the mask point of mamba_heads."""

    site: Site

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """[kept channels of this rank]."""
        whole = self._parameters["weight"]
        assert whole is not None
        return self.site.cut(whole)

    @property
    def group_size(self) -> int:
        """Kept channels of one SSM group."""
        whole, decision = self.__dict__["group_size"], self.site.sliced
        kept, parent = (1, 1) if decision is None else decision.kept.get(ElasticAxis.MAMBA_HEADS, (1, 1))
        return whole * kept // parent

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """[..., kept channels] -> the same."""
        decision = self.site.masked
        share = None if decision is None else decision.alive_share(ElasticAxis.MAMBA_HEADS, x)
        if decision is None or share is None:
            return super().forward(x) if z is None else super().forward(x, z)
        groups = x.shape[-1] // self.__dict__["group_size"]
        unit = x.shape[-1] // groups // decision.weights[ElasticAxis.MAMBA_HEADS].numel()
        scale = share.sqrt().to(x.dtype)
        vector = decision.vector(ElasticAxis.MAMBA_HEADS, unit, groups, x)
        assert vector is not None
        masked = x * (vector / scale)
        return (super().forward(masked) if z is None else super().forward(masked, z)) * scale


class ElasticMambaContextParallel(MambaContextParallel):
    """Hands the mixer the kept part of its convolution and per-head parameters (context parallelism itself is refused)."""

    conv_site: Site
    heads_site: Site

    def _slice_conv_param(self, param: torch.Tensor) -> torch.Tensor:
        return self.conv_site.cut(param)

    def _slice_vector_param(self, param: torch.Tensor, has_hdim: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 - megatron's signature
        return self.heads_site.cut(param)


def _written(result: Any, site: Site) -> Any:
    """A sublayer's (output, bias) with its write to the residual stream masked, bias included."""
    output, bias = result
    scale = site.write_scale(output)
    if scale is None:
        return result
    return output * scale, None if bias is None else bias * scale


class ElasticMambaMixer(MambaMixer):
    """Writes to the residual stream."""

    site: Site

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the mixer, in kept widths."""
        return _written(super().forward(*args, **kwargs), self.site)


class ElasticSelfAttention(SelfAttention):
    """Writes to the residual stream; counts the query heads that are kept."""

    site: Site

    @property
    def num_attention_heads_per_partition(self) -> int:
        """Kept query heads of this rank."""
        whole, decision = self.__dict__["num_attention_heads_per_partition"], self.site.sliced
        kept, parent = (1, 1) if decision is None else decision.kept.get(ElasticAxis.HEADS, (1, 1))
        return whole * kept // parent

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the attention, in kept widths."""
        return _written(super().forward(*args, **kwargs), self.site)


class ElasticMLP(MLP):
    """Writes to the residual stream."""

    site: Site

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the MLP, in kept widths."""
        return _written(super().forward(*args, **kwargs), self.site)


class ElasticMoELayer(MoELayer):
    """Writes to the residual stream, routed and shared experts together."""

    site: Site

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer, in kept widths."""
        return _written(super().forward(*args, **kwargs), self.site)


class ElasticTopKRouter(TopKRouter):
    """Chooses among live experts only; dispatch keeps the parent's expert numbers."""

    site: Site
    linear_site: LinearSite

    def gating(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - megatron's name
        """Logits [..., experts]; a dropped expert has minus infinity in slice mode."""
        rows, cols = self.linear_site.kept()
        if rows is None and cols is None:
            return super().gating(input)
        weight = select_matrix(self.weight, rows, cols)
        logits = F.linear(input.float(), weight.float())
        if rows is None:
            return logits
        pieces, at, end = [], 0, 0
        for start, length in rows:
            pieces += [logits.new_full((*logits.shape[:-1], start - end), float("-inf")), logits[..., at : at + length]]
            at, end = at + length, start + length
        return torch.cat([*pieces, logits.new_full((*logits.shape[:-1], self.weight.shape[0] - end), float("-inf"))], -1)

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Select by score + bias + log w without gradient; gates are score x w, renormalised over the chosen."""
        weights = self._expert_weights(logits)
        if weights is None:
            return super().routing(logits, padding_mask, **kwargs)
        flat = logits.reshape(-1, logits.shape[-1]).float()
        scores = flat.sigmoid()
        with torch.no_grad():
            # where, then log: a weight of zero gives minus infinity and never a NaN
            assert self.expert_bias is not None  # elasticize refuses a router without one
            wanted = scores + self.expert_bias + torch.where(weights > 0, weights, 0.0).log()
            chosen = wanted.topk(self.topk, dim=-1).indices
        gates = (scores * weights).gather(-1, chosen)
        if self.topk > 1:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        gates = gates * (self.config.moe_router_topk_scaling_factor or 1.0)
        probs = torch.zeros_like(flat).scatter(-1, chosen, gates).to(logits.dtype)
        routing_map = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, chosen, torch.ones_like(chosen, dtype=torch.bool))
        return probs, routing_map

    def _expert_weights(self, like: torch.Tensor) -> torch.Tensor | None:
        """Weights [experts] of this layer's experts in fp32, the same on every rank; None when all are whole."""
        decision, dim = self.site.slot.decision, self.linear_site.rows
        if decision is None:
            return None
        if decision.mode is Mode.MASK:
            return decision.vector(ElasticAxis.EXPERTS, 1, dim.segments[0].groups, like.float())
        runs = decision.runs(dim, 1)
        if runs is None:
            return None
        weights = torch.zeros(dim.size, device=like.device)
        for start, length in runs:
            weights[start : start + length] = 1.0
        return weights


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


class ElasticMambaLayer(MambaLayer):
    """The identity when slice mode drops it."""

    site: Site

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[s, b, kept hidden] -> the same."""
        decision = self.site.sliced
        if decision is not None and self.site.layer is not None and decision.skips(self.site.layer):
            return _skipped(self, hidden_states)
        return super().forward(hidden_states, *args, **kwargs)


class ElasticTransformerLayer(TransformerLayer):
    """The identity when slice mode drops it."""

    site: Site

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[s, b, kept hidden] -> (the same, context)."""
        decision = self.site.sliced
        if decision is not None and self.site.layer is not None and decision.skips(self.site.layer):
            return _skipped(self, hidden_states), kwargs.get("context")
        return super().forward(hidden_states, *args, **kwargs)


class ElasticMLPLayer(ElasticTransformerLayer, MLPLayer):
    """The identity when slice mode drops it."""
