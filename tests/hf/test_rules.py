"""Proves that a tensor of ours becomes theirs and comes back, that nothing of a checkpoint is overlooked, and that only what is asked for is read.

Run: pytest tests/hf/test_rules.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_elastic.errors import CheckpointError
from megatron_elastic.hf import decoders, nemotron
from megatron_elastic.hf.rules import NameMap, OurTensors, check_finite, to_theirs
from megatron_elastic.layout import full_shapes
from megatron_elastic.shape import AttentionShape, ModelShape
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape

SOFTMAX = replace(tiny_moe(score="softmax"), normalization="RMSNorm", activation="silu", gated=True)
HYBRID = tiny_shape(attention=AttentionShape(heads=12, kv_groups=2, head_dim=10))
FAMILIES: dict[str, tuple[NameMap, ModelShape]] = {
    "dense": (decoders.DENSE, tiny_dense(linear_bias=True)),
    "tied": (decoders.DENSE, tiny_dense(tied_embeddings=True)),
    "experts of Qwen": (decoders.QWEN_EXPERTS, SOFTMAX),
    "experts of Mixtral": (decoders.MIXTRAL, SOFTMAX),
    "hybrid": (nemotron.NAMES, HYBRID),
}


class Counted(Mapping[str, Tensor]):
    """Tensors that note who was read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.read = tensors, []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def ours_of(shape: ModelShape) -> dict[str, Tensor]:
    """Every tensor of a model, no two entries alike, padding zero."""
    draw = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(size, generator=draw) for name, size in full_shapes(shape).items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in tensors:
            tensors[name][shape.vocab_size :] = 0
    return tensors


def imported(names: NameMap, shape: ModelShape, theirs: Mapping[str, Tensor], unused: Any = lambda name: False) -> OurTensors:
    return OurTensors(names, shape, theirs, {name: tuple(tensor.shape) for name, tensor in theirs.items()}, unused)


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back(name: str) -> None:
    names, shape = FAMILIES[name]
    ours = ours_of(shape)
    theirs = dict(to_theirs(names, shape, ours.items()))
    assert {own: tuple(tensor.shape) for own, tensor in theirs.items()} == names.shapes(shape)
    assert list(theirs) == list(names.shapes(shape)), "the order in which they are written is the one that was announced"
    back = imported(names, shape, theirs)
    assert list(back) == list(ours) and len(back) == len(ours)
    assert all(torch.equal(back[own], tensor) for own, tensor in ours.items())
    padding = (shape.vocab_rows - shape.vocab_size) * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    assert sum(tensor.numel() for tensor in theirs.values()) == sum(tensor.numel() for tensor in ours.values()) - padding


def test_queries_keys_and_values_by_hand() -> None:
    shape = tiny_dense()
    names, rows = decoders.DENSE, torch.arange(160.0)  # 2 groups of 6 queries, a key and a value, of 10 channels
    query, key, value = (tensor for _, tensor in names.split("decoder.layers.1.self_attention.linear_qkv.bias", rows, shape))
    assert query.tolist() == [*range(60), *range(80, 140)]
    assert key.tolist() == [*range(60, 70), *range(140, 150)] and value.tolist() == [*range(70, 80), *range(150, 160)]
    assert names.names("decoder.layers.1.self_attention.linear_qkv.bias", shape) == [
        f"model.layers.1.self_attn.{letter}_proj.bias" for letter in "qkv"
    ]


def test_experts_by_hand() -> None:
    name, stacked = "decoder.layers.2.mlp.experts.experts.linear_fc1.weight", torch.arange(8 * 112 * 40.0).view(8, 112, 40)
    parts = dict(decoders.MIXTRAL.split(name, stacked, SOFTMAX))
    assert list(parts)[:3] == [
        f"model.layers.2.block_sparse_moe.experts.{n}.{kind}.weight" for n, kind in ((0, "w1"), (0, "w3"), (1, "w1"))
    ]
    assert len(parts) == 16 and torch.equal(parts["model.layers.2.block_sparse_moe.experts.5.w3.weight"], stacked[5, 56:])
    plain = dict(
        nemotron.NAMES.split("decoder.layers.1.mlp.experts.experts.linear_fc2.weight", torch.arange(8 * 40 * 56.0).view(8, 40, 56), HYBRID)
    )
    assert list(plain) == [f"backbone.layers.1.mixer.experts.{n}.down_proj.weight" for n in range(8)]


def test_one_tensor_reads_its_parts_and_no_more() -> None:
    names, shape = FAMILIES["experts of Qwen"]
    theirs = Counted(dict(to_theirs(names, shape, ours_of(shape).items())))
    ours = OurTensors(names, shape, theirs, {name: tuple(tensor.shape) for name, tensor in theirs.tensors.items()}, lambda name: False)
    assert theirs.read == [] and "decoder.layers.1.mlp.router.weight" in list(ours) and theirs.read == []
    _ = ours["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert theirs.read == [f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qkv"]
    with pytest.raises(KeyError):
        _ = ours["decoder.layers.1.mlp.linear_fc1.weight"]


def test_splitting_streams() -> None:
    names, shape = FAMILIES["dense"]
    given: list[str] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in ours_of(shape).items():
            given.append(name)
            yield name, tensor

    first, _ = next(to_theirs(names, shape, stream()))
    assert first == "model.embed_tokens.weight" and given == ["embedding.word_embeddings.weight"]


def test_a_name_that_a_writer_spells_in_its_own_way() -> None:
    theirs = dict(to_theirs(nemotron.NAMES, HYBRID, ours_of(HYBRID).items()))
    theirs["backbone.embedding.weight"] = theirs.pop("backbone.embeddings.weight")
    with pytest.raises(CheckpointError, match=r"backbone\.embeddings\.weight is missing"):
        imported(nemotron.NAMES, HYBRID, theirs)
    spelled = nemotron.NAMES.spelled(theirs)
    assert dict(to_theirs(spelled, HYBRID, imported(spelled, HYBRID, theirs).items())).keys() == theirs.keys()
    assert nemotron.NAMES.spelled({}) == nemotron.NAMES


DISAGREE: dict[str, tuple[dict[str, Tensor | None], list[str]]] = {
    "missing": ({"model.layers.3.mlp.up_proj.weight": None}, ["model.layers.3.mlp.up_proj.weight is missing"]),
    "extra": (
        {"model.layers.4.mlp.up_proj.weight": torch.ones(1)},
        ["model.layers.4.mlp.up_proj.weight is not one of the model's tensors"],
    ),
    "shape": (
        {"model.layers.0.self_attn.k_proj.weight": torch.ones(20, 41)},
        ["model.layers.0.self_attn.k_proj.weight has shape [20, 41], config.json needs [20, 40]"],
    ),
    "rows of the vocabulary": (
        {"lm_head.weight": torch.ones(136, 40)},
        ["lm_head.weight has shape [136, 40], config.json needs [131, 40]"],
    ),
    "all of it": (
        {"model.norm.weight": None, "extra": torch.ones(1), "lm_head.weight": torch.ones(2)},
        ["model.norm.weight is missing", "extra is not one of the model's tensors", "lm_head.weight has shape [2]"],
    ),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_weights_that_the_config_does_not_mean(case: str) -> None:
    names, shape = FAMILIES["dense"]
    changes, lines = DISAGREE[case]
    theirs = {**dict(to_theirs(names, shape, ours_of(shape).items())), **changes}
    with pytest.raises(CheckpointError, match="config.json and weights disagree") as caught:
        imported(names, shape, {name: tensor for name, tensor in theirs.items() if tensor is not None})
    assert len(caught.value.problems) == len(lines)
    assert all(found.startswith(line) for found, line in zip(caught.value.problems, lines, strict=True))


def test_what_may_be_there_all_the_same() -> None:
    names, shape = FAMILIES["dense"]
    theirs = {**dict(to_theirs(names, shape, ours_of(shape).items())), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
    assert len(imported(names, shape, theirs, lambda name: name.endswith("inv_freq"))) == len(full_shapes(shape))


def test_weights_that_are_no_numbers() -> None:
    names, shape = FAMILIES["dense"]
    theirs = dict(to_theirs(names, shape, ours_of(shape).items()))
    theirs["model.layers.2.self_attn.v_proj.weight"][3, 4] = float("nan")
    theirs["model.layers.2.self_attn.v_proj.weight"][5, :2] = torch.tensor([float("inf"), -float("inf")])
    ours = imported(names, shape, theirs)
    assert ours["decoder.layers.1.self_attention.linear_qkv.weight"].isfinite().all()
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.self_attn\.v_proj\.weight: 3 of 800 weights are NaN or infinite"):
        _ = ours["decoder.layers.2.self_attention.linear_qkv.weight"]
    check_finite("a", torch.full((4,), 3e38))  # their sum overflows, they do not
    check_finite("b", torch.full((4,), 6e4, dtype=torch.float16))


@pytest.mark.parametrize(
    ("names", "shape", "missing"),
    [
        (decoders.DENSE, tiny_dense(normalization="LayerNorm"), "decoder.final_layernorm.bias"),
        (decoders.DENSE, SOFTMAX, "decoder.layers.1.mlp.router.weight"),
        (decoders.MIXTRAL, replace(tiny_moe(), attention=SOFTMAX.attention), "decoder.layers.1.mlp.router.expert_bias"),
        (nemotron.NAMES, tiny_shape(), "decoder.layers.2.self_attention.linear_qkv.bias"),
    ],
    ids=["LayerNorm", "experts", "selection bias", "biases of a hybrid"],
)
def test_a_parameter_that_they_do_not_have(names: NameMap, shape: ModelShape, missing: str) -> None:
    with pytest.raises(CheckpointError, match=f"{missing} has no place in a Hugging Face checkpoint of this family"):
        names.shapes(shape)
