"""Proves that the local layers compute what their docstrings say, carry Transformer Engine's names, and refuse what they cannot do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_elastic.errors import UnsupportedError
from megatron_elastic.models.config import model_configs
from megatron_elastic.models.local_layers import (
    LayerNormColumnParallelLinear,
    LocalDotProductAttention,
    LocalLayerNorm,
    LocalRMSNorm,
    document_lengths,
)
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.testing.tiny import tiny_shape


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(parallel: ParallelContext, **changes: Any) -> LocalDotProductAttention:
    config = dataclasses.replace(model_configs(tiny_shape(), parallel).model, **changes)
    return LocalDotProductAttention(config, 1, AttnMaskType.causal, "self")


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[s, b, heads, d] x [s, b, kv heads, d] -> [s, b, heads * d], written out."""
    repeat = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(repeat, 2), value.repeat_interleave(repeat, 2)
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value).flatten(2)


def qkv(length: int, batch: int, heads: int, kv_heads: int, width: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(length, batch, h, width, generator=g, dtype=torch.float64).requires_grad_() for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
def test_attention_equals_its_formula(parallel: ParallelContext, heads: int, kv_heads: int) -> None:
    """The heads come from the tensors: none of these is the config's 12."""
    tensors = qkv(7, 3, heads, kv_heads, 5)
    mine, expected = attention(parallel)(*tensors, None), plain_attention(*tensors)
    torch.testing.assert_close(mine, expected)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((mine * weight).sum(), tensors), torch.autograd.grad((expected * weight).sum(), tensors), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("padded", [None, [0, 4, 9]])
def test_packed_attention_equals_each_document(parallel: ParallelContext, padded: list[int] | None) -> None:
    tensors = qkv(11, 1, 6, 2, 5)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 3, 9]),
        cu_seqlens_q_padded=None if padded is None else torch.tensor(padded),
    )
    out = attention(parallel)(*(t[:, 0] for t in tensors), None, packed_seq_params=packed)
    ends = [*(padded or [0, 3, 9]), 11]
    expected = torch.cat([plain_attention(*(t[a:b] for t in tensors)) for a, b in zip(ends, ends[1:], strict=False)])
    assert out.shape == (11, 30)
    torch.testing.assert_close(out, expected[:, 0])


def test_empty_documents_are_skipped() -> None:
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 0, 5, 5, 8]))
    assert document_lengths(packed, 8) == [5, 3]


def test_attention_refuses_dropout(parallel: ParallelContext) -> None:
    with pytest.raises(UnsupportedError, match=r"attention dropout 0\.1 is not supported by the local attention; use 0"):
        attention(parallel, attention_dropout=0.1)


def test_attention_refuses_another_mask(parallel: ParallelContext) -> None:
    config = model_configs(tiny_shape(), parallel).model
    with pytest.raises(UnsupportedError, match="cross attention with a padding mask"):
        LocalDotProductAttention(config, 1, AttnMaskType.padding, "cross")


def fused_linear(parallel: ParallelContext, **changes: Any) -> LayerNormColumnParallelLinear:
    config = dataclasses.replace(model_configs(tiny_shape(), parallel).model, layernorm_epsilon=0.1, **changes)
    return LayerNormColumnParallelLinear(
        40,
        24,
        config=config,
        init_method=torch.nn.init.normal_,
        gather_output=False,
        bias=True,
        skip_bias_add=False,
        is_expert=False,
        tp_group=parallel.tp,
    )


@torch.no_grad()
def test_rms_norms_equal_their_formula(parallel: ParallelContext) -> None:
    x = torch.randn(4, 2, 40)
    linear = fused_linear(parallel)
    alone = LocalRMSNorm(linear.config, 40, 0.2)
    for parameter in (*alone.parameters(), *linear.parameters()):
        parameter.normal_()
    torch.testing.assert_close(alone(x), norm(x, alone.weight, 0.2))
    torch.testing.assert_close(linear(x)[0], F.linear(norm(x, linear.layer_norm_weight, 0.1), linear.weight, linear.bias))
    assert set(dict(linear.named_parameters())) == {"layer_norm_weight", "weight", "bias"}
    assert linear.layer_norm_bias is None and linear.normalization == "RMSNorm"


@torch.no_grad()
def test_layer_norms_equal_their_formula(parallel: ParallelContext) -> None:
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return norm(centred, weight, eps) + bias

    x = torch.randn(4, 2, 40) + 1
    linear = fused_linear(parallel, normalization="LayerNorm")
    alone = LocalLayerNorm(linear.config, 40, 0.2)
    for parameter in (*alone.parameters(), *linear.parameters()):
        parameter.normal_()
    assert linear.layer_norm_bias is not None and linear.normalization == "LayerNorm"
    torch.testing.assert_close(alone(x), layer_norm(x, alone.weight, alone.bias, 0.2))
    normed = layer_norm(x, linear.layer_norm_weight, linear.layer_norm_bias, 0.1)
    torch.testing.assert_close(linear(x)[0], F.linear(normed, linear.weight, linear.bias))
    assert set(dict(linear.named_parameters())) == {"layer_norm_weight", "layer_norm_bias", "weight", "bias"}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norm_weights_say_whether_their_gradient_is_summed(parallel: ParallelContext, sequence_parallel: bool) -> None:
    layout = dataclasses.replace(parallel, tensor=2, expert_tensor=2, sequence_parallel=True) if sequence_parallel else parallel
    config = model_configs(tiny_shape(), layout).model
    parameters = [*LocalRMSNorm(config, 40).parameters(), *LocalLayerNorm(config, 40).parameters()]
    assert [vars(parameter)["sequence_parallel"] for parameter in parameters] == [sequence_parallel] * 3
