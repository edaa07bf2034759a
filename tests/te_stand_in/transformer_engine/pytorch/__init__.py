"""The modules of `transformer_engine.pytorch` that megatron-core subclasses."""

from __future__ import annotations

from transformer_engine.pytorch import distributed as distributed
from transformer_engine.pytorch import ops as ops
from transformer_engine.pytorch.attention_module import DotProductAttention as DotProductAttention
from transformer_engine.pytorch.linear_modules import GroupedLinear as GroupedLinear
from transformer_engine.pytorch.linear_modules import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.linear_modules import Linear as Linear
from transformer_engine.pytorch.norm_modules import LayerNorm as LayerNorm
from transformer_engine.pytorch.norm_modules import RMSNorm as RMSNorm
