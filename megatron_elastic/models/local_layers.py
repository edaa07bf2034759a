"""Layers that run anywhere and keep Transformer Engine's module tree and parameter names, so that a checkpoint fits both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right

from megatron_elastic.errors import UnsupportedError
from megatron_elastic.models.context import context_chunks, natural_order


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
    With context parallelism (`models/context.py`) every rank gathers the keys and values of the whole row for its own queries.
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
        """pg_collection: its `cp` is the context-parallel group, needed where the config has one.

        Raises UnsupportedError for dropout, a mask other than causal, or attention over other states.
        """
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout > 0:
            raise UnsupportedError(f"attention dropout {dropout} is not supported by the local attention; use 0")
        if attn_mask_type is not AttnMaskType.causal or attention_type != "self":
            raise UnsupportedError(
                f"{attention_type} attention with a {attn_mask_type.name} mask: the local attention is causal self-attention"
            )
        self.scale = softmax_scale
        self.context = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None, "context parallelism needs a process group"
            self.context = pg_collection.cp

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
        With context parallelism s counts this rank's tokens, packed or not, and cu_seqlens_q those of the whole row.
        """
        assert attention_bias is None, "the local attention takes no bias"
        if self.context is not None:
            return self._attend_to_row(query, key, value, packed_seq_params, self.context)
        if packed_seq_params is None:
            return self._attend(query, key, value)
        lengths = document_lengths(packed_seq_params, query.shape[0])
        documents = zip(*(t[:, None].split(lengths) for t in (query, key, value)), strict=True)
        return torch.cat([self._attend(*document) for document in documents])[:, 0]

    def _attend_to_row(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams | None, context: ProcessGroup) -> Tensor:
        """This rank's queries on the keys of their own documents, which begin on any rank. Backward, gradients of keys go to their ranks."""
        total = query.shape[0] * context.size()
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=context)
        in_order = gathered.index_select(0, natural_order(total, context.size(), query.device))
        keys, values = in_order.split([key.shape[-1], value.shape[-1]], -1)
        lengths, rest, parts = [total] if packed is None else document_lengths(packed, total), query, []
        for chunk in context_chunks(total, context.rank(), context.size()):
            for start, end, queries in document_pieces(lengths, chunk):
                parts.append(self._attend(rest[:queries], keys[start:end], values[start:end]))
                rest = rest[queries:]
        return torch.cat(parts)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The last query stands at the last key."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        square = q.shape[2] == k.shape[2]
        # `is_causal` would put the first query at the first key.
        mask = None if square else causal_lower_right(q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=square, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def document_lengths(packed: PackedSeqParams, total: int) -> list[int]:
    """Tokens of each document of a packed batch of `total` tokens; those after the last boundary form one more, as in the Mamba layers."""
    boundaries = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    ends = [*boundaries.tolist(), total]
    return [end - start for start, end in zip(ends, ends[1:], strict=False) if end > start]


def document_pieces(lengths: list[int], chunk: range) -> Iterator[tuple[int, int, int]]:
    """What of documents of these lengths, one after another, is in a chunk of their row: (document's start, piece's end, piece's tokens)."""
    start = 0
    for length in lengths:
        begin, end = max(start, chunk.start), min(start + length, chunk.stop)
        if begin < end:
            yield start, end, end - begin
        start += length
