"""Core attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.base import TransformerEngineBaseModule


class DotProductAttention(TransformerEngineBaseModule):
    """Causal self-attention. Groups of keys and values and the size of a head are fixed; query heads are read from the tensors."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0 and attention_type == "self" and attn_mask_type == "causal"
        assert num_attention_heads % (num_gqa_groups or num_attention_heads) == 0
        self.num_gqa_groups_per_partition = (num_gqa_groups or num_attention_heads) // tp_size
        self.head_dim, self.scale = kv_channels, softmax_scale

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str = "sbhd",
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: bool | None = None,
    ) -> torch.Tensor:
        """[s, b, heads, d] -> [s, b, heads * d]; packed: [t, heads, d] -> [t, heads * d], zeros after the last document."""
        assert key_layer.shape == value_layer.shape and query_layer.shape[-1] == key_layer.shape[-1] == self.head_dim
        groups = key_layer.shape[-2]
        assert groups == self.num_gqa_groups_per_partition, f"Keys and values must have {self.num_gqa_groups_per_partition} heads"
        if qkv_format == "sbhd":
            assert attn_mask_type == "causal"
            return self._attend(query_layer, key_layer, value_layer)
        assert qkv_format == "thd" and attn_mask_type == "padding_causal" and cu_seqlens_q is not None
        assert cu_seqlens_q.dtype == torch.int32
        output = query_layer.new_zeros(query_layer.shape[0], query_layer.shape[1] * self.head_dim)
        ends = cu_seqlens_q.tolist()
        for start, end in zip(ends, ends[1:], strict=False):
            q, k, v = (t[start:end, None] for t in (query_layer, key_layer, value_layer))
            output[start:end] = self._attend(q, k, v)[:, 0]
        return output

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).flatten(2)
