"""Proves that the tiny models are as awkward as they claim and that their random weights leave no parameter at its start."""

from __future__ import annotations

import pytest
import torch

from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import randomize_, tiny_dense, tiny_moe, tiny_shape

SHAPES = {
    "hybrid": tiny_shape(),
    "dense gated": tiny_dense(),
    "dense plain": tiny_dense(gated=False),
    "sigmoid experts": tiny_moe(),
    "softmax experts": tiny_moe(score="softmax"),
}


def sizes(shape: ModelShape) -> list[int | float | None]:
    found: list[int | float | tuple[int, ...] | None] = [shape.hidden_size, shape.vocab_size, shape.vocab_rows]
    if a := shape.attention:
        assert isinstance(a.heads, int)
        found += [a.heads, a.kv_groups, a.head_dim, a.heads * a.head_dim, a.kv_groups * a.head_dim]
    if shape.mlp:
        found.append(shape.mlp.ffn)
    if e := shape.moe:
        found += [e.experts, e.topk, e.ffn, e.shared_ffn, e.routing_groups, e.groups_per_token]
    if m := shape.mamba:
        assert isinstance(m.heads, int) and isinstance(m.head_dim, int) and isinstance(m.state, int)
        found += [m.heads, m.head_dim, m.groups, m.state, m.conv, m.chunk, m.heads * m.head_dim, m.groups * m.state]
    return [size for size in found if isinstance(size, int)]


@pytest.mark.parametrize("name", SHAPES)
def test_all_sizes_differ_pairwise(name: str) -> None:
    shape = SHAPES[name]
    assert shape.problems() == []
    assert len(set(sizes(shape))) == len(sizes(shape))
    assert shape.attention is not None and shape.attention.heads != shape.attention.kv_groups


def test_between_them_they_have_everything() -> None:
    """Both norms, both ways of activating, every bias, both routers, layers of both kinds after each other."""
    shapes = list(SHAPES.values())
    assert {shape.normalization for shape in shapes} == {"RMSNorm", "LayerNorm"}
    assert {shape.activation for shape in shapes} == {"squared_relu", "silu", "gelu"}
    assert {shape.gated for shape in shapes} == {shape.linear_bias for shape in shapes} == {True, False}
    assert {shape.moe.score for shape in shapes if shape.moe} == {"sigmoid", "softmax"}
    assert {shape.attention.qk_norm for shape in shapes if shape.attention} == {True, False}
    assert {shape.layer_pattern for shape in shapes} == {"ME*-ME", "TTTT", "TXXX"}


@pytest.mark.parametrize("name", SHAPES)
def test_random_weights_move_everything(parallel: ParallelContext, name: str) -> None:
    model = build_model(SHAPES[name], parallel)
    before = gather_tensors(model)
    randomize_(model, 1)
    after = gather_tensors(model)
    assert any(key.endswith("expert_bias") for key in after) == (SHAPES[name].moe is not None and name != "softmax experts")
    assert [key for key in after if (before[key] == after[key]).any()] == []
    randomize_(model, 2)
    assert not torch.equal(gather_tensors(model)["output_layer.weight"], after["output_layer.weight"])
