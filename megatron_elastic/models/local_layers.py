"""Layers that run anywhere and keep Transformer Engine's module tree and parameter names, so that a checkpoint fits both."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_elastic.errors import UnsupportedError


def _norm_parameter(config: TransformerConfig, width: int, value: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.full((width,), value, dtype=config.params_dtype))
    # Each tensor-parallel rank sees its own tokens (of queries and keys: its own heads), so the gradient is summed over the group.
    vars(parameter)["sequence_parallel"] = config.sequence_parallel
    return parameter


class LocalRMSNorm(nn.Module):
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight.

    weight: [hidden_size], whole on every rank.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        """eps: added to the mean square. Accepts and ignores what only Transformer Engine's norm uses."""
        super().__init__()
        self.weight = _norm_parameter(config, hidden_size, 1.0)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x [..., hidden_size]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class LocalLayerNorm(nn.Module):
    """Layer norm: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    weight, bias: [hidden_size], whole on every rank.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        """eps: added to the variance. Accepts and ignores what only Transformer Engine's norm uses."""
        super().__init__()
        self.weight = _norm_parameter(config, hidden_size, 1.0)
        self.bias = _norm_parameter(config, hidden_size, 0.0)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x [..., hidden_size]."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """The config's norm (RMSNorm or LayerNorm), then a column-parallel linear: Transformer Engine's fused module in two steps.

    layer_norm_weight: [input_size], whole on every rank; layer_norm_bias: the same for LayerNorm, else None. normalization: which norm.
    The norm acts on this rank's tokens, before a sequence-parallel gather.
    """

    layer_norm_bias: nn.Parameter | None

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **linear: Any) -> None:
        """linear: what megatron-core gives a column-parallel linear."""
        super().__init__(input_size, output_size, config=config, **linear)
        self.normalization = config.normalization
        self.layer_norm_weight = _norm_parameter(config, input_size, 1.0)
        has_bias = config.normalization == "LayerNorm"
        self.register_parameter("layer_norm_bias", _norm_parameter(config, input_size, 0.0) if has_bias else None)
        self.eps = config.layernorm_epsilon

    def normalize(self, x: Tensor) -> Tensor:
        """The norm alone: x [..., input_size]."""
        if self.layer_norm_bias is None:
            return F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.eps)
        return F.layer_norm(x, (x.shape[-1],), self.layer_norm_weight, self.layer_norm_bias, self.eps)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Norm and linear of input_ [sequence, batch, input_size]; returns the output and the bias that was not added, if any."""
        return super().forward(self.normalize(input_), *args, **kwargs)


class LocalDotProductAttention(nn.Module):
    """Causal core attention on `scaled_dot_product_attention`, grouped queries included.

    The number of heads is read from the tensors. Packed batches are computed document by document.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Raises UnsupportedError for context parallelism, dropout, a mask other than causal, or attention over other states."""
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if config.context_parallel_size > 1:
            raise UnsupportedError(
                f"parallel.context {config.context_parallel_size}: the local attention has no context parallelism; use 1"
            )
        if dropout > 0:
            raise UnsupportedError(f"attention dropout {dropout} is not supported by the local attention; use 0")
        if attn_mask_type is not AttnMaskType.causal or attention_type != "self":
            raise UnsupportedError(
                f"{attention_type} attention with a {attn_mask_type.name} mask: the local attention is causal self-attention"
            )
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend causally; `attention_mask` is implied and not read.

        query: [s, b, heads, d]; key, value: [s, b, kv heads, d]; returns [s, b, heads * d].
        Packed: [t, heads, d] with `packed_seq_params.cu_seqlens_q`; returns [t, heads * d].
        """
        assert attention_bias is None, "the local attention takes no bias"
        if packed_seq_params is None:
            return self._attend(query, key, value)
        lengths = document_lengths(packed_seq_params, query.shape[0])
        documents = zip(*(t[:, None].split(lengths) for t in (query, key, value)), strict=True)
        return torch.cat([self._attend(*document) for document in documents])[:, 0]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).flatten(2)


def document_lengths(packed: PackedSeqParams, total: int) -> list[int]:
    """Tokens of each document of a packed batch of `total` tokens; those after the last boundary form one more, as in the Mamba layers."""
    boundaries = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    ends = [*boundaries.tolist(), total]
    return [end - start for start, end in zip(ends, ends[1:], strict=False) if end > start]
