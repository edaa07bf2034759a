"""The specs of sublayers that hybrid and GPT models share, and how a layer gets a config of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_elastic.errors import UnsupportedError
from megatron_elastic.models.local_layers import LayerNormColumnParallelLinear, LocalDotProductAttention, LocalLayerNorm, LocalRMSNorm
from megatron_elastic.platform.te import transformer_engine
from megatron_elastic.platform.versions import mlp_spec, moe_spec
from megatron_elastic.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LayerSet:
    """The classes a model is made of, all with Transformer Engine's parameter names.

    norm: of the residual stream, and of queries and keys. norm_linear: norm and column-parallel linear. column, row: the parallel
    linears. attention: core attention.
    """

    norm: type[Any]
    norm_linear: type[Any]
    column: type[Any]
    row: type[Any]
    attention: type[Any]


class Layers(StrEnum):
    """Whose layers a model is made of. They have the same parameters under the same names."""

    AUTO = "auto"
    """Transformer Engine's for a model in bf16 where it is installed and there is a CUDA device, else the local ones.

    It multiplies fp32 in TF32, of which 10 bits of 23 count, and its kernels of attention take none.
    """
    LOCAL = "local"
    """Plain PyTorch: they run anywhere."""
    TE = "te"
    """Transformer Engine's."""


def layer_set(shape: ModelShape, layers: Layers, params_dtype: torch.dtype, context: int) -> LayerSet:
    """The layers of a model whose parameters are of that type, on `context` context-parallel ranks. The one place that chooses them.

    Raises UnsupportedError for TE where it cannot be imported.
    """
    te = transformer_engine()
    suits = te is not None and torch.cuda.is_available() and params_dtype is torch.bfloat16
    if layers is Layers.TE or (layers is Layers.AUTO and suits):
        if te is None:
            raise UnsupportedError("layers 'te': Transformer Engine cannot be imported; install megatron-elastic[te] or use 'local'")
        # Transformer Engine's attention over a ring of ranks wants every document padded to a multiple of 2 x context: not our rows.
        attention = te.attention if context == 1 else LocalDotProductAttention
        return LayerSet(te.norm, te.norm_column, te.column, te.row, attention)
    norm = LocalLayerNorm if shape.normalization == "LayerNorm" else LocalRMSNorm
    return LayerSet(norm, LayerNormColumnParallelLinear, ColumnParallelLinear, RowParallelLinear, LocalDotProductAttention)


class _WithOwnConfig:
    """What megatron-core builds in a layer's place: the layer itself, with the next of `configs` instead of the model's."""

    def __new__(cls, *, layer_class: type[Any], configs: Iterator[TransformerConfig], config: TransformerConfig, **layer: Any) -> Any:
        # A class, because `build_module` calls nothing else.
        return layer_class(config=next(configs), **layer)


def layer_spec(layer_class: type[Any], submodules: Any, configs: list[TransformerConfig]) -> ModuleSpec:
    """The spec of the layers of one kind; megatron-core's stacks build their layers in order, and each takes the next of `configs`."""
    return ModuleSpec(module=_WithOwnConfig, params={"layer_class": layer_class, "configs": iter(configs)}, submodules=submodules)


def attention_spec(shape: ModelShape, layers: LayerSet) -> ModuleSpec:
    """Causal self-attention behind its norm."""
    qk_norm = layers.norm if shape.attention is not None and shape.attention.qk_norm else None
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=layers.norm_linear,
            core_attention=layers.attention,
            linear_proj=layers.row,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def dense_spec(layers: LayerSet) -> Any:
    """A dense MLP behind its norm."""
    return mlp_spec(MLPSubmodules(linear_fc1=layers.norm_linear, linear_fc2=layers.row))


def experts_spec(layers: LayerSet) -> Any:
    """A mixture of experts; its norm stands before it, where the router sees its output too."""
    return moe_spec(MLPSubmodules(linear_fc1=layers.column, linear_fc2=layers.row))
