"""Transformer Engine: whether it is here, and megatron-core's classes on top of it. Nothing else imports them.

megatron-core makes placeholders of these classes where Transformer Engine is missing; they can be neither built nor subclassed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TransformerEngine:
    """The classes a model can be made of.

    norm: makes `rms_norm` or `layer_norm`, by the config. norm_column: norm and column-parallel linear in one kernel. column, row: the
    parallel linears. attention: core attention.
    """

    norm: type[Any]
    rms_norm: type[Any]
    layer_norm: type[Any]
    norm_column: type[Any]
    column: type[Any]
    row: type[Any]
    attention: type[Any]


@functools.cache
def transformer_engine() -> TransformerEngine | None:
    """megatron-core's Transformer Engine classes; None where Transformer Engine cannot be imported."""
    from megatron.core.extensions import transformer_engine as extension

    if not extension.HAVE_TE:
        return None
    return TransformerEngine(
        norm=extension.TENorm,
        rms_norm=extension.te.pytorch.RMSNorm,
        layer_norm=extension.te.pytorch.LayerNorm,
        norm_column=extension.TELayerNormColumnParallelLinear,
        column=extension.TEColumnParallelLinear,
        row=extension.TERowParallelLinear,
        attention=extension.TEDotProductAttention,
    )
