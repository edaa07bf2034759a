"""Defects found in public elastic and expert-pruning code, each by its number in docs/defects.md, do not happen here.

Run: pytest tests/elastic/test_public_defects.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.cost import active_params, total_params, widths_of
from megatron_elastic.elastic.decision import Mode, soft_decision
from megatron_elastic.elastic.routing import RoutingRule, route
from megatron_elastic.errors import ConfigError
from megatron_elastic.layout import BUFFERS, axis_groups, dims_of, full_shapes
from megatron_elastic.router.sampling import draw_budget, gumbel_noise
from megatron_elastic.shape import AttentionShape, MambaShape, ModelShape, MoeShape
from megatron_elastic.space import AxisChoices, build_space, parent_plan, resize
from megatron_elastic.testing.tiny import tiny_moe, tiny_shape
from tests.elastic.family import build_family, forward_backward, narrowed, relative, run, tiny_space

NANO_3 = ModelShape(
    layer_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    hidden_size=2688,
    vocab_size=131072,
    attention=AttentionShape(heads=32, kv_groups=2, head_dim=128),
    moe=MoeShape(experts=128, topk=6, ffn=1856, shared_ffn=3712, scaling_factor=2.5),
    mamba=MambaShape(heads=64, head_dim=64, groups=8, state=128),
)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("leading", [(30,), (6, 5)], ids=["tokens", "sequence and batch"])
def test_u1_no_token_goes_to_a_dropped_expert_whatever_the_rank_of_the_logits(_one_process: Any, mode: Mode, leading: Any) -> None:
    model, space, handle, _ = build_family(_one_process)
    router = model.decoder.layers[1].mlp.router
    logits = torch.randn(*leading, 8, generator=torch.Generator().manual_seed(0))
    with handle.use(space.plan({ElasticAxis.EXPERTS: 4}), mode):
        probs, routed = router.routing(logits)
    dropped = [2, 3, 6, 7]  # two groups of four, the first two of each are kept
    assert routed.shape == (30, 8) and (routed.sum(-1) == 3).all()
    assert not routed[:, dropped].any() and not probs[:, dropped].any()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_u4_the_kept_mamba_heads_are_the_same_for_every_tensor_parallelism_and_balanced_over_groups(ranks: int) -> None:
    space = build_space(NANO_3, {ElasticAxis.MAMBA_HEADS: (64, 48)})
    (dim,) = dims_of("decoder.layers.0.mixer.A_log", NANO_3, axis_groups(space))
    local = dim.runs({ElasticAxis.MAMBA_HEADS: (48, 64)}, ranks)
    heads = {rank * 64 // ranks + n for rank in range(ranks) for start, length in local for n in range(start, start + length)}
    assert heads == {8 * group + n for group in range(8) for n in range(6)}


def test_u5_the_count_is_that_of_the_extracted_tensors_shared_expert_router_and_groups_included() -> None:
    space = build_space(NANO_3, {ElasticAxis.HIDDEN: (2688, 2048), ElasticAxis.SHARED_FFN: (3712, 2048), ElasticAxis.EXPERTS: (128, 96)})
    for plan in (space.parent, narrowed(space, None)):
        small, widths = resize(NANO_3, plan), widths_of(plan, NANO_3.num_layers)
        shapes = {name: math.prod(shape) for name, shape in full_shapes(small).items() if not name.endswith(BUFFERS)}
        assert total_params(NANO_3, widths) == sum(shapes.values())
        experts = sum(count for name, count in shapes.items() if ".experts.experts." in name)
        assert small.moe is not None and isinstance(small.moe.experts, int)
        assert active_params(NANO_3, widths) == sum(shapes.values()) - experts + experts * 6 // small.moe.experts
    assert total_params(NANO_3, widths_of(space.parent, 52)) == 31_577_937_344


def test_u6_patterns_with_dense_layers_and_stages_are_counted_and_prediction_heads_are_named() -> None:
    shape = tiny_shape(layer_pattern="M-*E|-M")
    assert shape.layer_pattern == "M-*E-M" and not shape.problems()
    assert total_params(shape, widths_of(parent_plan(shape), 6)) > 0
    assert ModelShape(layer_pattern="T3X2", hidden_size=8, vocab_size=9).layer_pattern == "TTTXX"
    for pattern, what in (("M*E/M", "MTP"), ("MG*", "GatedDeltaNet"), ("M+", "MLA")):
        assert any(what in line for line in tiny_shape(layer_pattern=pattern).problems())


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_u8_any_router_any_mlp_and_balancing_over_what_is_alive(_one_process: Any, score: Any) -> None:
    moe = tiny_moe(score=score).moe
    assert moe is not None
    changed = replace(moe, aux_loss=0.05, z_loss=0.01, expert_bias=False)
    model, space, handle, _ = build_family(_one_process, "moe", per_layer=True, score=score, moe=changed)
    assert any("linear_fc1" in name and p.shape[0] == 112 for name, p in model.named_parameters()) == (score == "sigmoid")  # gated experts
    for choice in (1, 2):
        masked, masked_grads = run(model, handle, narrowed(space, None, choice), "mask")
        sliced, sliced_grads = run(model, handle, narrowed(space, None, choice), "slice")
        assert relative(masked, sliced) < 1e-5
        router = [name for name in sliced_grads if name.endswith("router.weight")]
        assert router and all(relative(masked_grads[name], sliced_grads[name]) < 1e-4 for name in router)


def test_u7_masks_follow_their_input_and_are_built_once(_one_process: Any) -> None:
    model, space, handle, shape = build_family(_one_process, "dense", per_layer=True)
    pi = {spec.axis: torch.full((spec.places, len(spec.choices)), 1 / len(spec.choices)) for spec in space.axes}
    decision = soft_decision(space, pi, shape.num_layers)
    with handle.use(decision):
        forward_backward(model)
        built = dict(decision._vectors)
        model(torch.arange(8)[None], torch.arange(8)[None], None)
    assert decision._vectors.keys() == built.keys()
    assert all(decision._vectors[key] is vector for key, vector in built.items())
    hidden = model.embedding.word_embeddings.site
    for dtype in (torch.bfloat16, torch.float64):
        vector = decision.vector(hidden.dim, None, 1, torch.zeros(1, dtype=dtype))
        assert vector is not None and vector.dtype is dtype


def test_u13_a_width_that_is_no_whole_number_of_groups_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        build_space(tiny_shape(), {ElasticAxis.FFN: (72, 0.51), ElasticAxis.MAMBA_HEADS: (16, 10)}, shard_groups=4)
    text = "\n".join(raised.value.problems)
    assert "elastic.axes.ffn: fraction 0.51 of 72 is 36.72, not a whole width" in text
    assert "elastic.axes.mamba_heads: choice 10 is not a multiple of its 4 groups; use 8 or 12" in text


def test_u16_a_decision_knows_no_rank() -> None:
    """Budget and noise are functions of (seed, stage, step, group): wherever activations meet, one decision holds."""
    space = tiny_space(tiny_shape())
    torch.manual_seed(1)
    first = (draw_budget(5, "short", 7, 3, {"a": 0.5, "b": 0.5}), gumbel_noise(5, "short", 7, 3, space))
    torch.manual_seed(2)
    again = (draw_budget(5, "short", 7, 3, {"a": 0.5, "b": 0.5}), gumbel_noise(5, "short", 7, 3, space))
    assert first[0] == again[0] and all(torch.equal(first[1][axis], again[1][axis]) for axis in first[1])
    other = gumbel_noise(5, "short", 7, 4, space)
    assert any(not torch.equal(first[1][axis], other[axis]) for axis in other)


def test_r1_experts_are_chosen_as_the_model_chooses_not_by_plain_logits() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(200, 16, generator=generator), torch.randn(16, generator=generator)
    rule = RoutingRule(topk=6, score="sigmoid", groups=4, group_topk=3, scaling_factor=2.5)
    live = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(4)
    probs, routed = route(logits, rule, expert_bias=bias, expert_weights=live)
    kept = live.bool()
    small, small_routed = route(logits[:, kept], replace(rule), expert_bias=bias[kept])
    assert torch.equal(routed[:, kept], small_routed) and torch.allclose(probs[:, kept], small)
    plain = torch.zeros_like(routed).scatter(1, logits.masked_fill(~kept, -torch.inf).topk(6).indices, True)
    assert (plain != routed).any(-1).float().mean() > 0.5, "this router chooses like a plain one: the test proves nothing"


def test_r2_the_width_of_a_layer_is_that_of_its_number_behind_a_dense_first_layer(_one_process: Any) -> None:
    model, space, handle, shape = build_family(_one_process, "moe", per_layer=True)
    assert shape.layers_with("moe") == (1, 2, 3)
    experts = {1: 16, 2: 8, 3: 12}
    hits: dict[int, set[int]] = {}
    for layer in experts:
        router = model.decoder.layers[layer].mlp.router
        router.register_forward_hook(
            lambda module, args, output, layer=layer: hits.__setitem__(layer, set(output[1].any(0).nonzero()[:, 0].tolist()))
        )
    with handle.use(space.plan({ElasticAxis.EXPERTS: tuple(experts.values())})):
        tokens = torch.arange(200).view(2, 100) % 131
        model(tokens, torch.arange(100)[None].expand(2, -1), None)
    for layer, count in experts.items():
        alive = {4 * group + n for group in range(4) for n in range(count // 4)}
        assert hits[layer] <= alive
        assert len(hits[layer]) > count // 2


def test_r4_a_number_and_a_fraction_of_experts_are_the_same_choice() -> None:
    shape = tiny_moe()
    by_number = build_space(shape, {ElasticAxis.EXPERTS: (16, 12, 8)})
    by_fraction = build_space(shape, {ElasticAxis.EXPERTS: AxisChoices(choices=(1.0, 0.75, 0.5))})
    assert by_number == by_fraction


def test_r6_kept_experts_are_enough_for_topk_and_fill_whole_groups() -> None:
    with pytest.raises(ConfigError, match="4 experts are fewer than model.moe.topk 6; keep at least 6"):
        build_space(tiny_moe(), {ElasticAxis.EXPERTS: (16, 4)})
    with pytest.raises(ConfigError, match="choice 10 is not a multiple of its 4 groups; use 8 or 12"):
        build_space(tiny_moe(), {ElasticAxis.EXPERTS: (16, 10)})
    with pytest.raises(ConfigError, match="expert_groups 2 is not a multiple of model.moe.routing_groups 4"):
        build_space(tiny_moe(), {ElasticAxis.EXPERTS: (16, 8)}, num_expert_groups=2)
    assert tiny_moe(moe=replace(tiny_moe().moe, topk=17)).problems()
