"""What a Mamba mixer shows of its heads, channels and state.

A state channel n enters the output as C_n h_n, and h_n is made of B_n x. The fused scan hides h, so what is observed is a proxy: B and C as the
scan gets them, after the convolution and its activation, and a channel is worth the geometric mean of what it shows of both. With a gradient
it is B and C before the convolution, where the gradient is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.importance.places import Place
from megatron_elastic.models.context import context_indices, natural_order
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import conv_parameters
from megatron_elastic.train.data import MicroBatch


def local_slices(mixer: Any, layer: int) -> Iterator[tuple[Place, slice]]:
    """(place, rows of in_proj on this tensor-parallel rank) of x, B and C; rows are z, x, B, C, dt."""
    inner, state = mixer.d_inner_local_tp, mixer.ngroups_local_tp * mixer.d_state
    yield Place(ElasticAxis.MAMBA_HEADS, layer), slice(inner, 2 * inner)
    yield Place(ElasticAxis.MAMBA_STATE, layer, "B"), slice(2 * inner, 2 * inner + state)
    yield Place(ElasticAxis.MAMBA_STATE, layer, "C"), slice(2 * inner + state, 2 * inner + 2 * state)


@torch.no_grad()
def with_convolved_state(mixer: Any, projected: Tensor, batch: MicroBatch, parallel: ParallelContext) -> Tensor:
    """in_proj's output [tokens, rows] of this rank with B and C as the scan gets them. A collective of the context-parallel group.

    A tap reaches into tokens of other ranks and never into another document.
    """
    from megatron.core.ssm.mamba_mixer import causal_conv1d_fn  # pyright: ignore[reportAttributeAccessIssue] - set by the platform on a CPU

    inner, state = mixer.d_inner_local_tp, mixer.ngroups_local_tp * mixer.d_state
    where = slice(2 * inner, 2 * inner + 2 * state)
    mine, size = projected[:, where], parallel.context
    if size > 1:
        everyone = [torch.empty_like(mine) for _ in range(size)]
        torch.distributed.all_gather(everyone, mine.contiguous(), group=parallel.cp)
        mine = torch.cat(everyone)[natural_order(batch.row_tokens, size, mine.device)]
    documents = torch.repeat_interleave(batch.cu_seqlens.diff().to(mine.device))[None].int()
    weight, bias = conv_parameters(mixer)
    convolved = causal_conv1d_fn(mine.T[None], weight[inner:].squeeze(1), bias[inner:], seq_idx=documents, activation=mixer.activation)[0].T
    if size > 1:
        convolved = convolved[context_indices(batch.row_tokens, parallel.context_rank, size, mine.device)]
    result = projected.clone()
    result[:, where] = convolved
    return result
