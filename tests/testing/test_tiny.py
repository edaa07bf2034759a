"""Proves that the tiny model is as awkward as it claims and that its random weights leave no parameter at its start."""

from __future__ import annotations

import torch

from megatron_elastic.models.hybrid import build_hybrid
from megatron_elastic.models.weights import gather_tensors
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.testing.tiny import randomize_, tiny_shape


def test_all_sizes_differ_pairwise() -> None:
    shape = tiny_shape()
    assert shape.problems() == []
    assert shape.attention and shape.mlp and shape.moe and shape.mamba
    a, m = shape.attention, shape.mamba
    sizes = [shape.hidden_size, shape.vocab_size, shape.vocab_rows, a.heads, a.kv_groups, a.head_dim, shape.mlp.ffn]
    sizes += [shape.moe.experts, shape.moe.topk, shape.moe.ffn, shape.moe.shared_ffn]
    sizes += [m.heads, m.head_dim, m.groups, m.state, m.conv, m.chunk]
    sizes += [a.heads * a.head_dim, a.kv_groups * a.head_dim, m.heads * m.head_dim, m.groups * m.state]
    assert len(set(sizes)) == len(sizes)


def test_random_weights_move_everything(parallel: ParallelContext) -> None:
    model = build_hybrid(tiny_shape(), parallel)
    before = gather_tensors(model)
    randomize_(model, 1)
    after = gather_tensors(model)
    assert any(name.endswith("expert_bias") for name in after)
    assert [name for name in after if (before[name] == after[name]).any()] == []
    randomize_(model, 2)
    assert not torch.equal(gather_tensors(model)["output_layer.weight"], after["output_layer.weight"])
