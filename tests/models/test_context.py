"""Proves context parallelism of the models: which tokens a rank holds, attention on the whole row, and logits and gradients of one process.

Run: pytest tests/models/test_context.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.fit import context_problems
from megatron_elastic.models.build import build_model
from megatron_elastic.models.config import model_configs
from megatron_elastic.models.context import context_indices, natural_order
from megatron_elastic.models.layers import Layers, layer_set
from megatron_elastic.models.local_layers import LocalDotProductAttention, document_pieces
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import packed_documents
from megatron_elastic.shape import MambaShape, ModelShape
from megatron_elastic.space import build_space
from megatron_elastic.testing.tiny import randomize_, tiny_dense, tiny_moe, tiny_shape
from tests.models.context_rows import LENGTHS, TOTAL, share_gradients

ONE_GROUP = MambaShape(heads=16, head_dim=6, groups=1, state=7, conv=5, chunk=9)
"""Two ranks share its only SSM group."""
SHAPES: dict[str, ModelShape] = {
    "hybrid": tiny_shape(),
    "hybrid, one SSM group": tiny_shape(mamba=ONE_GROUP),
    "dense": tiny_dense(),
    "dense, layer norm": tiny_dense(gated=False),
    "moe": tiny_moe(),
    "moe, softmax": tiny_moe(score="softmax"),
}


def test_a_rank_holds_an_early_and_a_late_chunk() -> None:
    assert [context_indices(12, rank, 3).tolist() for rank in range(3)] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    with pytest.raises(AssertionError, match="10 tokens are not 2 x 2 equal chunks"):
        context_indices(10, 0, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathered_tokens_return_to_row_order(size: int) -> None:
    row = torch.arange(24 * size) * 7
    gathered = torch.cat([row[context_indices(24 * size, rank, size)] for rank in range(size)])
    assert torch.equal(gathered[natural_order(24 * size, size)], row)


def test_pieces_of_documents_in_a_chunk() -> None:
    assert list(document_pieces([3, 2, 6, 1], range(4, 12))) == [(3, 5, 1), (5, 11, 6), (11, 12, 1)]
    assert list(document_pieces([3, 2, 6, 1], range(6, 8))) == [(5, 8, 2)]


def attend(parallel: ParallelContext, lengths: tuple[int, ...] | None, heads: int, kv_heads: int) -> list[torch.Tensor]:
    """Output and gradients of query, key and value in fp64 for this rank's tokens of a fixed row: packed documents, or three plain rows."""
    generator = torch.Generator().manual_seed(2)
    batch = 3 if lengths is None else 1
    config = model_configs(tiny_shape(), parallel).model
    attention = LocalDotProductAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.3, pg_collection=parallel.groups)
    mine = context_indices(TOTAL, parallel.context_rank, parallel.context)
    whole = [torch.randn(TOTAL, batch, n, 10, generator=generator, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    weight = torch.randn(TOTAL, batch, heads * 10, generator=generator, dtype=torch.float64)[mine]
    packed = None
    if lengths is not None:
        boundaries = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        packed = packed_documents(boundaries, max(lengths), TOTAL, context=parallel.context)
    tensors = [t[mine].requires_grad_() for t in whole]
    thd = packed is not None and parallel.context == 1
    out = attention(*(t[:, 0] if thd else t for t in tensors), None, packed_seq_params=packed)
    out = out[:, None] if thd else out
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]


def context_attend(rank: int, world_size: int, *args: Any) -> list[torch.Tensor]:
    """`attend` on a rank of the pool."""
    parallel = ParallelContext.initialize(context=world_size)
    try:
        return attend(parallel, *args)
    finally:
        parallel.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("lengths", [None, LENGTHS, (TOTAL,), (14, 28, 14), (1,) * TOTAL, (51,)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4)])
def test_attention_on_two_ranks_is_that_of_one(
    ranks: Callable[..., list[Any]], _one_process: Any, lengths: tuple[int, ...] | None, heads: int, kv_heads: int
) -> None:
    """Tokens after the last boundary (of 51) form one more document."""
    expected = attend(_one_process, lengths, heads, kv_heads)
    for whole, *shares in zip(expected, *ranks(context_attend, 2, lengths, heads, kv_heads), strict=True):
        torch.testing.assert_close(torch.cat(shares)[natural_order(TOTAL, 2)], whole, rtol=1e-10, atol=1e-10)


def gradients(parallel: ParallelContext, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of a randomised model on a layout."""
    model = build_model(SHAPES[name], parallel)
    randomize_(model, seed=5)
    return share_gradients(model, parallel)


def context_gradients(rank: int, world_size: int, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`gradients` on a rank of the pool."""
    parallel = ParallelContext.initialize(context=world_size)
    try:
        return gradients(parallel, name)
    finally:
        parallel.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_gradients_on_two_ranks_are_those_of_one(ranks: Callable[..., list[Any]], _one_process: Any, name: str) -> None:
    logits, expected = gradients(_one_process, name)
    (first, summed), (second, _) = ranks(context_gradients, 2, name)
    assert relative(torch.cat([first, second])[natural_order(TOTAL, 2)], logits) < 1e-5
    assert set(summed) == set(expected) and all(gradient.norm() > 0 for gradient in expected.values())
    assert {key: error for key in expected if (error := relative(summed[key], expected[key])) > 1e-5} == {}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_context_parallelism_has_its_own_core_attention() -> None:
    assert layer_set(tiny_dense(), Layers.LOCAL, torch.float32, 2).attention is LocalDotProductAttention


def test_what_context_parallelism_cannot_divide_is_said() -> None:
    shape = tiny_shape(mamba=replace(ONE_GROUP, heads=12, groups=2))
    space = build_space(shape, {ElasticAxis.MAMBA_HEADS: (12, 8, 6)})
    assert context_problems(shape, space, 1, 2) == context_problems(tiny_dense(), None, 1, 7) == []
    assert context_problems(shape, space, 2, 2) == [
        "parallel.context 2: 2 ranks cannot share the 3 heads of a group that elastic.axes.mamba_heads 6 keeps; "
        "use a multiple of 4, or lower parallel.context"
    ]
    assert context_problems(shape, None, 1, 3) == [
        "parallel.context 3: a tensor-parallel rank has 2 of the 2 model.mamba.groups, and one number must divide the other; "
        "change parallel.context or parallel.tensor"
    ]
    assert context_problems(shape, None, 1, 8) == [
        "parallel.context 8: 4 ranks cannot share the 6 heads of a group that model.mamba.heads 12 keeps; "
        "use a multiple of 8, or lower parallel.context"
    ]
