"""Sorting changes no logit, on every kind of model and all axes at once, and changes the parameters as a naive script does; every plan of a sorted
model keeps the best components.

Run: pytest tests/importance/test_sort.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import CheckpointError
from megatron_elastic.export.extract import extract
from megatron_elastic.formats import SORTED as FORMAT
from megatron_elastic.importance.dealing import fixed_groups, permutations
from megatron_elastic.importance.ranking import Ranking
from megatron_elastic.importance.sort import SORTED, permute, read_record, sorted_record, unsorted_axes, write_record
from megatron_elastic.layout import full_shapes
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors, scatter_tensors
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import build_space
from megatron_elastic.testing.experts import stack_experts, unstack_experts
from megatron_elastic.testing.tiny import randomize_, tiny_dense, tiny_moe, tiny_shape
from tests.elastic.family import text, tiny_space
from tests.importance.rankings import random_ranking, random_tensors, ranking_of
from tests.shape_strategies import plans, quick, spaces

A = ElasticAxis
MODELS: Mapping[str, ModelShape] = {
    "hybrid": tiny_shape(),
    "gated hybrid": tiny_shape(gated=True, activation="silu", tied_embeddings=True),
    "dense": tiny_dense(gated=False),
    "gated dense": tiny_dense(tied_embeddings=True),
    "sigmoid": tiny_moe(),
    "softmax": tiny_moe(score="softmax"),
}


@pytest.fixture(params=list(MODELS))
def case(request: Any, parallel: Any) -> tuple[Any, ModelShape, dict[str, Tensor], Ranking]:
    """A model with weights moved off their start, its shape, its tensors as checkpoints have them, and a ranking by chance."""
    shape = MODELS[request.param]
    model = build_model(shape, parallel)
    randomize_(model, seed=3)
    return model.eval(), shape, stack_experts(gather_tensors(model)), random_ranking(shape, seed=1)


@torch.no_grad()
def logits(model: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """The logits of a fixed text with other weights."""
    scatter_tensors(model, unstack_experts(dict(tensors)))
    tokens, positions = text()
    return model(tokens, positions, None)


def test_logits_stay(case: Any) -> None:
    """All axes at once, then each by itself."""
    model, shape, tensors, ranking = case
    before, space = logits(model, tensors), tiny_space(shape)
    orders = permutations(ranking, space)
    assert float(before.std()) > 0.1
    for part in [orders, *({axis: order} for axis, order in orders.items())]:
        moved = dict(permute(tensors, shape, part))
        assert list(moved) == list(tensors) and any(not torch.equal(moved[name], tensors[name]) for name in moved)
        assert float((logits(model, moved) - before).abs().max()) <= 1e-5, list(part)


def test_every_parameter_has_to_move(case: Any) -> None:
    """The comparison of logits sees it when any one parameter that should be sorted is not."""
    model, shape, tensors, ranking = case
    before, moved = logits(model, tensors), dict(permute(tensors, shape, permutations(ranking, tiny_space(shape))))
    for name in tensors:
        if not torch.equal(moved[name], tensors[name]):
            assert float((logits(model, {**moved, name: tensors[name]}) - before).abs().max()) > 1e-3, name
    still = {name for name in tensors if torch.equal(moved[name], tensors[name])}
    assert all(".q_layernorm." in name or ".k_layernorm." in name for name in still)


def naive(name: str, tensor: np.ndarray, shape: Any, orders: Mapping[ElasticAxis, Any], layer: int | None) -> np.ndarray:
    """A parameter sorted by a script that knows it by name. orders: axis -> layer -> order."""
    own = {axis: (rows[None] if None in rows else rows.get(layer)) for axis, rows in orders.items()}
    hidden, short = own[A.HIDDEN], re.sub(r"^decoder\.layers\.\d+\.", "", name)
    if short.startswith(("embedding", "output_layer")):
        return tensor[:, hidden]
    if "q_layernorm" in name or "k_layernorm" in name:
        return tensor
    if "layernorm" in name or "layer_norm" in name or "final_norm" in name:
        return tensor[hidden]
    if "self_attention" in name:
        return naive_attention(short, tensor, shape.attention, own[A.HEADS], hidden)
    if short.startswith("mixer"):
        return naive_mamba(short, tensor, shape.mamba, own, hidden)
    if "router" in name:
        return tensor[own[A.EXPERTS]] if short.endswith("bias") else tensor[own[A.EXPERTS]][:, hidden]
    if ".experts.experts." in name:
        each = [naive_mlp(short, tensor[old], shape.gated, own[A.MOE_FFN][old], hidden) for old in own[A.EXPERTS]]
        return np.stack(each)
    return naive_mlp(short, tensor, shape.gated, own[A.SHARED_FFN if "shared" in name else A.FFN], hidden)


def naive_mlp(short: str, tensor: np.ndarray, gated: bool, neurons: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    if "fc2.bias" in short:
        return tensor[hidden]
    if "fc2" in short:
        return tensor[hidden][:, neurons]
    halves = np.split(tensor, 2) if gated else [tensor]
    rows = np.concatenate([half[neurons] for half in halves])
    return rows if short.endswith("bias") else rows[:, hidden]


def naive_attention(short: str, tensor: np.ndarray, part: Any, heads: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    width = part.head_dim
    if "linear_proj.bias" in short:
        return tensor[hidden]
    if "linear_proj" in short:
        by_head = tensor.reshape(-1, part.heads, width)
        return by_head[hidden][:, heads].reshape(tensor.shape)
    each = part.heads // part.kv_groups
    rows = []
    for group in range(part.kv_groups):  # megatron's order: the queries of a group, its key, its value
        block = tensor[group * (each + 2) * width :][: (each + 2) * width]
        for new in range(group * each, (group + 1) * each):
            old = heads[new] - group * each
            rows.append(block[old * width : (old + 1) * width])
        rows.append(block[each * width :])
    joined = np.concatenate(rows)
    return joined if short.endswith("bias") else joined[:, hidden]


def naive_mamba(short: str, tensor: np.ndarray, part: Any, own: Mapping[ElasticAxis, Any], hidden: np.ndarray) -> np.ndarray:
    heads, channels, states = own[A.MAMBA_HEADS], own[A.MAMBA_HEAD_DIM], own[A.MAMBA_STATE]
    inner = np.array([head * part.head_dim + channel for head in heads for channel in channels])
    state = np.array([group * part.state + n for group in range(part.groups) for n in states[group]])
    x, s = part.heads * part.head_dim, part.groups * part.state
    if short.endswith(("A_log", "D", "dt_bias")):
        return tensor[heads]
    if short.endswith("norm.weight"):
        return tensor[inner]
    if "out_proj" in short:
        return tensor[hidden][:, inner]
    if "conv1d" in short:
        return tensor[np.concatenate([inner, x + state, x + s + state])]
    rows = np.concatenate([inner, x + inner, 2 * x + state, 2 * x + s + state, 2 * x + 2 * s + heads])
    return tensor[rows][:, hidden]


def test_parameters_move_as_in_a_naive_script(case: Any) -> None:
    _, shape, tensors, ranking = case
    orders = permutations(ranking, tiny_space(shape))
    plain = {axis: {layer: order.numpy() for layer, order in rows.items()} for axis, rows in orders.items()}
    for name, moved in permute(tensors, shape, orders).items():
        layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else None
        wanted = naive(name, tensors[name].numpy().astype(np.float64), shape, plain, layer)
        assert np.array_equal(moved.numpy().astype(np.float64), wanted), name


def test_the_order_they_have_changes_nothing(case: Any) -> None:
    """A ranking that deals every component to the place where it is, and sorting a second time by the scores in their new places."""
    _, shape, tensors, ranking = case
    space = tiny_space(shape)
    orders = permutations(ranking, space)
    moved = dict(permute(tensors, shape, orders))
    again = replace(ranking, scores={**ranking.scores, **{axis: resorted(ranking, axis, orders) for axis in orders}})
    assert all(
        torch.equal(order, torch.arange(order.shape[-1]).expand_as(order))
        for rows in permutations(again, space).values()
        for order in rows.values()
    )
    twice = dict(permute(moved, shape, permutations(again, space)))
    assert all(torch.equal(twice[name], moved[name]) and twice[name].dtype == moved[name].dtype for name in tensors)


def resorted(ranking: Ranking, axis: ElasticAxis, orders: Any) -> dict[int | None, Tensor]:
    """The scores of the components where they are after sorting."""
    found = {layer: scores.gather(-1, orders[axis][layer]) for layer, scores in ranking.scores[axis].items()}
    if axis is A.MOE_FFN:
        found = {layer: scores[orders[A.EXPERTS][layer]] for layer, scores in found.items()}
    return found


def test_tensors_are_read_when_they_are_asked_for() -> None:
    shape = tiny_shape()
    tensors, read = random_tensors(shape), []

    class Watched(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    moved = permute(Watched(tensors), shape, permutations(random_ranking(shape), tiny_space(shape)))
    assert len(moved) == len(tensors) and read == []
    for name in moved:
        moved[name]
    assert read == list(tensors)
    assert permute(tensors, shape, {})["decoder.final_norm.weight"] is tensors["decoder.final_norm.weight"]
    with pytest.raises(CheckpointError, match="parameter 'decoder.layers.2.mlp.linear_fc1.weight' is not one of a layer of attention"):
        permute({"decoder.layers.2.mlp.linear_fc1.weight": torch.ones(2, 2)}, shape, {})["decoder.layers.2.mlp.linear_fc1.weight"]


PROBES: Mapping[ElasticAxis, str] = {
    A.FFN: "mlp.linear_fc2.weight",
    A.SHARED_FFN: "mlp.shared_experts.linear_fc2.weight",
    A.MOE_FFN: "mlp.experts.experts.linear_fc2.weight",
    A.EXPERTS: "mlp.router.weight",
    A.HEADS: "self_attention.linear_proj.weight",
    A.MAMBA_HEADS: "mixer.D",
    A.MAMBA_STATE: "mixer.conv1d.weight",
    A.MAMBA_HEAD_DIM: "mixer.norm.weight",
}
"""A parameter of each axis whose entries say which component they belong to."""


def best(scores: Tensor, width: int, fixed: int = 1) -> set[int]:
    """The best components of scores [n], the same number in each of `fixed` blocks."""
    block, rows = len(scores) // fixed, scores.tolist()
    return {
        n
        for start in range(0, len(rows), block)
        for n in sorted(range(start, start + block), key=lambda n: (-rows[n], n))[: width // fixed]
    }


def labelled(shape: Any) -> dict[str, Tensor]:
    """Tensors whose entries are the numbers of their components (moe_ffn and mamba_state: counted over all experts or groups)."""
    found = {}
    for name, size in full_shapes(shape).items():
        axis = next((axis for axis, probe in PROBES.items() if name.startswith("decoder.layers.") and name.endswith(f".{probe}")), None)
        tensor = torch.zeros(size)
        if axis in (A.FFN, A.SHARED_FFN):
            tensor += torch.arange(size[1])
        elif axis is A.MOE_FFN:
            tensor += (torch.arange(size[0])[:, None] * size[2] + torch.arange(size[2]))[:, None]
        elif axis is A.EXPERTS:
            tensor += torch.arange(size[0])[:, None]
        elif axis is A.HEADS:
            tensor += torch.arange(size[1]) // shape.attention.head_dim
        elif axis is A.MAMBA_HEADS:
            tensor += torch.arange(size[0])
        elif axis is A.MAMBA_STATE:
            tensor += (torch.arange(size[0]) - shape.mamba.heads * shape.mamba.head_dim)[:, None, None]
        elif axis is A.MAMBA_HEAD_DIM:
            tensor += torch.arange(size[0]) % shape.mamba.head_dim
        elif name.startswith("decoder.final"):
            tensor += torch.arange(size[0])
        found[name] = tensor
    return found


@quick
@given(st.data())
def test_every_plan_of_a_sorted_model_keeps_the_best(data: st.DataObject) -> None:
    """Random models, families and plans; layers are not dropped, so that they keep their numbers."""
    shape, space = data.draw(spaces())
    space = replace(space, axes=tuple(spec for spec in space.axes if spec.axis is not A.LAYERS))
    plan, ranking = data.draw(plans(space)), random_ranking(shape, seed=data.draw(st.integers(0, 99)))
    member = dict(extract(permute(labelled(shape), shape, permutations(ranking, space)).items(), shape, space, plan))
    for spec in space.axes:
        rows = ranking.scores.get(spec.axis, {})
        for layer, scores in rows.items():
            width = space.choices_of(plan, spec.axis)[spec.place_of(layer)]
            if spec.axis is A.HIDDEN:
                kept = member["decoder.final_layernorm.weight" if shape.is_gpt else "decoder.final_norm.weight"]
                assert set(kept.int().tolist()) == best(scores, width)
            else:
                check_probe(member[f"decoder.layers.{layer}.{PROBES[spec.axis]}"].int(), spec.axis, scores, width, shape)


def check_probe(kept: Tensor, axis: ElasticAxis, scores: Tensor, width: int, shape: Any) -> None:
    """The labels in a parameter of a member are those of the best components."""
    if axis is A.MOE_FFN:
        for rows in kept:
            labels = set(rows.flatten().tolist())
            expert = min(labels) // scores.shape[1]
            assert labels == {expert * scores.shape[1] + n for n in best(scores[expert], width)}
    elif axis is A.MAMBA_STATE:
        groups, state = scores.shape
        wanted = {group * state + n for group in range(groups) for n in best(scores[group], width)}
        assert {n for n in kept.flatten().tolist() if n >= 0} == wanted | {groups * state + n for n in wanted}
    else:
        assert set(kept.flatten().tolist()) == best(scores, width, fixed_groups(shape, axis))


def test_what_a_sorted_model_says_about_itself(tmp_path: Any) -> None:
    shape = tiny_shape()
    ranking, space = random_ranking(shape), tiny_space(shape)
    record = sorted_record(ranking, space)
    assert record["groups"]["ffn"] == 4 and record["groups"]["mamba_heads"] == 4 and not {"topk", "layers"} & set(record["groups"])
    assert record["ranking"] == ranking.fingerprint and sorted(record["drop_order"]) == list(range(6))
    assert unsorted_axes(space, {SORTED: record}) == ()
    wider = build_space(shape, {A.HIDDEN: (40, 20), A.FFN: (72, 48), A.LAYERS: (6, 6)[:1]}, shard_groups=8)
    assert unsorted_axes(wider, {SORTED: record}) == (A.FFN,) and unsorted_axes(wider, {}) == (A.HIDDEN, A.FFN)
    assert read_record(tmp_path) is None
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    (tmp_path / "sorted.json").write_text('{"format_version": 1}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="sorted.json' cannot be understood .KeyError.'ranking'..; sort the model again"):
        read_record(tmp_path)
    (tmp_path / "sorted.json").write_text('{"format_version": 2}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"format_version 2 is not {FORMAT.version}"):
        read_record(tmp_path)


def test_ties_keep_their_order() -> None:
    """With nothing to tell components apart on an axis of one group, nothing moves."""
    shape = tiny_dense()
    tensors = random_tensors(shape)
    ranking = ranking_of(shape, lambda _, size: torch.zeros(size))
    space = build_space(shape, {A.HIDDEN: (40, 20), A.FFN: (72, 36)}, shard_groups=1)
    assert all(torch.equal(moved, tensors[name]) for name, moved in permute(tensors, shape, permutations(ranking, space)).items())
