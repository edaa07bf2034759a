"""Proves for every parent, and for shapes whose sizes differ from layer to layer, that a built model has exactly the tensors of the
layout table, that its weights come from the seed alone, and that every parallel layout holds the same full model and computes the same."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_elastic.errors import CheckpointError
from megatron_elastic.layout import full_shapes
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors, scatter_tensors
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import randomize_, tiny_dense, tiny_moe, tiny_shape


def _per_layer() -> dict[str, ModelShape]:
    """Every size that can differ from layer to layer does."""
    hybrid, dense, experts = tiny_shape(), tiny_dense(), tiny_moe()
    assert hybrid.moe and hybrid.mamba and dense.attention and dense.mlp and experts.attention and experts.moe
    return {
        "hybrid per layer": replace(
            hybrid,
            moe=replace(hybrid.moe, experts=(8, 4), topk=(3, 2), ffn=(56, 24), shared_ffn=(16, 48)),
            mamba=replace(hybrid.mamba, heads=(16, 8), head_dim=(6, 4), state=(5, 7)),
        ),
        "dense per layer": replace(
            dense, attention=replace(dense.attention, heads=(12, 8, 4, 12)), mlp=replace(dense.mlp, ffn=(72, 24, 48, 8))
        ),
        "experts per layer": replace(
            experts,
            attention=replace(experts.attention, heads=(12, 8, 4, 12)),
            moe=replace(experts.moe, experts=(16, 8, 12), ffn=(56, 24, 8), shared_ffn=(16, 48, 24)),
        ),
    }


PARENTS: dict[str, ModelShape] = {
    "hybrid": tiny_shape(),
    "hybrid tied": tiny_shape(tied_embeddings=True),
    "dense gated": tiny_dense(),
    "dense plain tied": tiny_dense(gated=False, tied_embeddings=True),
    "sigmoid experts": tiny_moe(),
    "softmax experts tied": tiny_moe(score="softmax", tied_embeddings=True),
    **_per_layer(),
}


def tokens(batch: int = 2, length: int = 22) -> Tensor:
    return torch.randint(0, 131, (batch, length), generator=torch.Generator().manual_seed(5))


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


def stacked_shapes(full: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes with the experts of a layer stacked under one name, as checkpoints keep them."""
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in full.items():
        key = re.sub(r"\.local_experts\.\d+\.", ".experts.", name)
        found[key] = tuple(tensor.shape) if key == name else (found.get(key, (0,))[0] + 1, *tensor.shape)
    return found


@pytest.mark.parametrize("parent", PARENTS)
def test_tensors_are_those_of_the_layout_table(parallel: ParallelContext, parent: str) -> None:
    model = build_model(PARENTS[parent], parallel)
    assert stacked_shapes(gather_tensors(model)) == full_shapes(PARENTS[parent])


@pytest.mark.parametrize("parent", PARENTS)
def test_checkpoint_keys_are_those_names_too(parallel: ParallelContext, parent: str) -> None:
    """Every layer under its own number; what megatron-core saves in parts (in_proj, the convolution) has one more word."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = build_model(PARENTS[parent], parallel).sharded_state_dict()
    apply_factories(state)
    stored = {t.key: t.global_shape for t in nested_values(state) if isinstance(t, ShardedTensor)}
    whole = {key: shape for key, shape in stored.items() if not re.search(r"(in_proj\.weight|conv1d\.\w+)\.\w+$", key)}
    parts = {re.sub(r"\.\w+$", "", key) for key in stored.keys() - whole.keys()}
    wanted = full_shapes(PARENTS[parent])
    assert whole.keys() | parts == wanted.keys()
    assert all(tuple(shape) == wanted[key] for key, shape in whole.items())


@pytest.mark.parametrize("parent", _per_layer())
def test_layers_compute_with_their_own_sizes(parallel: ParallelContext, parent: str) -> None:
    """What no parameter's shape shows: experts chosen for each token, and a training step through unequal layers."""
    shape = PARENTS[parent]
    model = build_model(shape, parallel).train()
    model(tokens(), None, None, labels=tokens().roll(-1, 1)).mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    for layer in shape.layers_with("moe"):
        own = shape.at(layer).moe
        assert own is not None
        router = model.decoder.layers[layer].mlp.router
        _, chosen = router(torch.randn(5, 1, shape.hidden_size))
        assert chosen.shape == (5, own.experts) and (chosen.sum(1) == own.topk).all()


@pytest.mark.parametrize(("parent", "writes"), [("hybrid", 6), ("dense gated", 8), ("sigmoid experts", 8)])
def test_weights_come_from_the_seed_alone(parallel: ParallelContext, parent: str, writes: int) -> None:
    """writes: sublayers that write to the residual stream; the spread of their weights is smaller by its root."""
    shape = PARENTS[parent]
    first = gather_tensors(build_model(shape, parallel, seed=7))
    torch.randn(10)
    again, other = (gather_tensors(build_model(shape, parallel, seed=seed)) for seed in (7, 8))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output_layer.weight"], other["output_layer.weight"])
    reads, wrote = (
        torch.cat([t.flatten() for name, t in first.items() if re.search(kind, name)])
        for kind in (r"layers\..*(in_proj|linear_qkv|linear_fc1)\.weight", r"(out_proj|linear_proj|linear_fc2)\.weight")
    )
    assert abs(float(reads.std()) / shape.init_std - 1) < 0.05
    assert abs(float(wrote.std()) * writes**0.5 / shape.init_std - 1) < 0.05


@pytest.mark.parametrize("parent", ["hybrid", "sigmoid experts"])
def test_scatter_is_the_inverse_of_gather_and_refuses_what_does_not_fit(parallel: ParallelContext, parent: str) -> None:
    model, fresh = build_model(PARENTS[parent], parallel), build_model(PARENTS[parent], parallel, seed=5)
    randomize_(model, 3)
    full = gather_tensors(model)
    scatter_tensors(fresh, full)
    assert all(torch.equal(full[name], t) for name, t in gather_tensors(fresh).items())
    final = "decoder.final_layernorm.weight" if PARENTS[parent].is_gpt else "decoder.final_norm.weight"
    wrong = {**full, final: torch.ones(3)}
    del wrong["output_layer.weight"]
    with pytest.raises(CheckpointError, match=rf"(?s)output_layer.weight is missing.*{final} has shape \[3\], the model needs \[40\]"):
        scatter_tensors(fresh, wrong)


def forward_on_layout(
    rank: int, world: int, layout: dict[str, int], parent: str
) -> tuple[Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
    """A rank's full logits (None before the last stage), the full weights, and the full fresh weights."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    parallel = ParallelContext.initialize(**layout)
    shape = PARENTS[parent]
    model = build_model(shape, parallel).eval()
    fresh = gather_tensors(model)
    randomize_(model, 3)
    ids = tokens()
    with torch.no_grad():
        if parallel.pipeline == 1:
            out = gather_from_tensor_model_parallel_region(model(ids, None, None), group=parallel.tp)
        else:
            out = _through_stages(model, ids, parallel, shape)
    weights = gather_tensors(model)
    parallel.destroy()
    return out, weights, fresh


def _through_stages(model: Any, ids: Tensor, parallel: ParallelContext, shape: ModelShape) -> Tensor | None:
    """Two stages by hand: the first sends its hidden states to the second."""
    peer = 1 - parallel.rank
    if parallel.is_first_stage:
        torch.distributed.send(model(ids, None, None).contiguous(), peer)
        return None
    hidden = torch.empty(ids.shape[1], ids.shape[0], shape.hidden_size)
    torch.distributed.recv(hidden, peer)
    model.set_input_tensor(hidden)
    return model(ids, None, None)


LAYOUTS = [{"tensor": 2}, {"tensor": 2, "expert": 2}, {"expert": 2}, {"pipeline": 2}]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parent", "layout"), [(p, at) for p in PARENTS for at in LAYOUTS if "dense" not in p or "expert" not in at], ids=str
)
def test_layouts_equal_one_process(parallel: ParallelContext, ranks: Any, parent: str, layout: dict[str, int]) -> None:
    model = build_model(PARENTS[parent], parallel).eval()
    started = gather_tensors(model)
    randomize_(model, 3)
    with torch.no_grad():
        expected = model(tokens(), None, None)
    weights = gather_tensors(model)
    results = ranks(forward_on_layout, 2, layout, parent)
    for out, theirs, theirs_started in results:
        assert theirs.keys() == weights.keys()
        assert all(torch.equal(theirs[name], t) for name, t in weights.items())
        assert all(torch.equal(theirs_started[name], t) for name, t in started.items())
        if out is not None:
            assert relative(out, expected) < 1e-5
    assert any(out is not None for out, _, _ in results)
