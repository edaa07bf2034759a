"""Memory of training: weights against real ranks' models, activations against what autograd keeps, and the rules around them.

Run: pytest tests/test_training_memory.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_elastic.cost import total_params, widths_of
from megatron_elastic.models.build import build_model
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.recipe import ParallelConfig, Recipe, StageConfig
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape
from megatron_elastic.space import parent_plan
from megatron_elastic.testing.tiny import tiny_moe, tiny_shape
from megatron_elastic.training_memory import checkpoint_bytes, fullest_rank

TOKENS = 144
STAGE = StageConfig(name="only", sequence_length=TOKENS, global_batch_size=8, micro_batch_size=1, steps=1, lr=1e-3, elastic=False)


def recipe_of(shape: ModelShape, precision: Any = "fp32", **layout: Any) -> Recipe:
    return Recipe(format_version=1, model=shape, precision=precision, parallel=ParallelConfig(**layout))


def numel(rank: int, world: int, layout: dict[str, Any], shape: ModelShape) -> int:
    """Parameters of the whole model on this rank."""
    parallel = ParallelContext.initialize(**layout)
    found = sum(parameter.numel() for parameter in build_model(shape, parallel).parameters())
    parallel.destroy()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"expert": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("shape", [tiny_shape(), tiny_moe(tied_embeddings=True)], ids=["hybrid", "tied GPT"])
def test_weights_are_those_of_the_fullest_rank(ranks: Any, layout: dict[str, Any], shape: ModelShape) -> None:
    assert fullest_rank(recipe_of(shape, **layout), STAGE, 2).weights == 4 * max(ranks(numel, 2, layout, shape))


def bytes_kept(shape: ModelShape, parallel: ParallelContext) -> int:
    """What autograd keeps of a forward pass, weights left out."""
    model = build_model(shape, parallel)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # the storages themselves: a freed one's address would be given out again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model((torch.arange(TOKENS) * 7 % 131)[None], torch.arange(TOKENS)[None], None)
    return sum(storage.nbytes() for storage in kept.values())


SHAPE = ModelShape(
    layer_pattern="*",
    hidden_size=192,
    vocab_size=136,
    attention=AttentionShape(heads=12, kv_groups=4, head_dim=16),
    mlp=MlpShape(ffn=512),
    moe=MoeShape(experts=4, topk=2, ffn=256, shared_ffn=320),
    mamba=MambaShape(heads=8, head_dim=32, groups=4, state=32, chunk=36),
)


@pytest.mark.parametrize(
    ("letter", "gated", "most"),
    [("-", False, 1.2), ("-", True, 1.2), ("E", False, 1.2), ("E", True, 1.2), ("*", False, 1.6), ("M", False, 3)],
)
def test_activations_are_at_least_what_is_counted_and_not_much_more(letter: str, gated: bool, most: float, _one_process: Any) -> None:
    """One layer more, so that embedding and loss cancel. The plain layers keep more than those the count is for, the plain scan most."""
    shapes = [replace(SHAPE, layer_pattern=letter * count, gated=gated) for count in (2, 4)]
    measured = bytes_kept(shapes[1], _one_process) - bytes_kept(shapes[0], _one_process)
    few, many = (fullest_rank(recipe_of(shape), STAGE, 1).activations for shape in shapes)
    assert 0.99 <= measured / (many - few) <= most


def test_bytes_of_a_parameter_are_megatron_cores() -> None:
    """Its documentation of the distributed optimizer: 6 + 12/d in bf16, 8 + 8/d in fp32."""
    shape = tiny_shape()
    count = total_params(shape, widths_of(parent_plan(shape), shape.num_layers))
    for precision, fixed, shared in (("bf16", 6, 12), ("fp32", 8, 8)):
        need = fullest_rank(recipe_of(shape, precision), STAGE, 4)
        assert need.weights + need.gradients == fixed * count and need.optimizer == pytest.approx(shared * count / 4)
        assert need.parent == 0
        assert fullest_rank(recipe_of(shape, precision), replace(STAGE, elastic=True), 4).parent == need.weights
    assert checkpoint_bytes(recipe_of(shape, "bf16")) == 14 * count


def test_routed_experts_have_fewer_copies_than_the_rest() -> None:
    whole, shared = (fullest_rank(recipe_of(tiny_moe(), expert=expert), STAGE, 4) for expert in (1, 2))
    assert shared.weights < whole.weights and shared.optimizer == pytest.approx(whole.optimizer)


@pytest.mark.parametrize(
    "change",
    [{"recompute": "full"}, {"context": 2}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": False}],
    ids=str,
)
def test_what_lowers_activations(change: dict[str, Any]) -> None:
    shape = replace(SHAPE, layer_pattern="*-" * 8)
    before = fullest_rank(recipe_of(shape), STAGE, 4).activations
    assert fullest_rank(recipe_of(shape, **change), STAGE, 4).activations < 0.75 * before


def test_the_first_rank_of_a_pipeline_keeps_the_most_microbatches() -> None:
    shape = replace(SHAPE, layer_pattern="*-" * 8)
    one, four = (fullest_rank(recipe_of(shape, pipeline=pipeline), STAGE, 4) for pipeline in (1, 4))
    assert four.activations == pytest.approx(one.activations, rel=0.25)  # a quarter of the layers, four microbatches
    few = fullest_rank(recipe_of(shape, pipeline=4), replace(STAGE, global_batch_size=1), 4)
    assert few.activations < 0.5 * four.activations
    interleaved = fullest_rank(recipe_of(shape, pipeline=4, virtual_pipeline=2), STAGE, 4)
    assert interleaved.activations > 1.2 * four.activations
