"""The router: reproducible fp32 weights that move no global RNG, shapes, and inputs between trained budgets."""

from __future__ import annotations

import pytest
import torch

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import ConfigError
from megatron_elastic.router.network import BudgetRouter
from megatron_elastic.shape import AttentionShape, MlpShape, ModelShape
from megatron_elastic.space import AxisChoices, build_space

SHAPE = ModelShape(
    layer_pattern="*-*-", hidden_size=24, vocab_size=40, attention=AttentionShape(heads=4, kv_groups=2, head_dim=6), mlp=MlpShape(ffn=64)
)
SPACE = build_space(SHAPE, {ElasticAxis.HIDDEN: (24, 16, 12), ElasticAxis.FFN: (64, 32)}, shard_groups=2)
BUDGETS = {"small": 100.0, "full": 400.0, "medium": 200.0}


def _router(seed: int = 1, space=SPACE) -> BudgetRouter:
    return BudgetRouter(space, BUDGETS, seed=seed)


def test_shapes_dtype_and_spread_of_fresh_weights():
    router = _router()
    logits = router(router.budget_input(0))
    assert {axis: tuple(value.shape) for axis, value in logits.items()} == {ElasticAxis.HIDDEN: (1, 3), ElasticAxis.FFN: (1, 2)}
    assert all(p.dtype == torch.float32 for p in router.parameters())
    assert sorted(tuple(p.shape) for p in router.parameters()) == [(2, 256), (3, 256), (256, 3), (256, 3)]
    flat = torch.cat([p.detach().flatten() for p in router.parameters()])
    assert float(flat.std()) == pytest.approx(0.1, rel=0.05)


def test_forward_is_two_linears_with_leaky_relu():
    router = _router()
    network = router.networks["hidden"]
    inner = network.inner[:, 2]
    expected = network.outer @ torch.where(inner > 0, inner, 0.1 * inner)
    torch.testing.assert_close(router(router.budget_input(2))[ElasticAxis.HIDDEN], expected[None])


def test_a_per_layer_axis_has_logits_for_each_of_its_layers():
    space = build_space(
        SHAPE, {ElasticAxis.HIDDEN: (24, 16), ElasticAxis.FFN: AxisChoices(choices=(64, 48, 32), per_layer=True)}, shard_groups=2
    )
    router = _router(space=space)
    network = router.networks["ffn"]
    assert tuple(network.outer.shape) == (6, 256)
    logits = router(router.budget_input(1))
    assert tuple(logits[ElasticAxis.FFN].shape) == (2, 3) and tuple(logits[ElasticAxis.HIDDEN].shape) == (1, 2)
    inner = torch.nn.functional.leaky_relu(network.inner[:, 1], 0.1)
    torch.testing.assert_close(logits[ElasticAxis.FFN][1], network.outer[3:] @ inner)


def test_weights_depend_on_seed_and_axis_only():
    before = torch.get_rng_state()
    torch.manual_seed(5)
    first = _router().state_dict()
    torch.manual_seed(6)
    state = torch.get_rng_state()
    second = _router().state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    narrower = build_space(SHAPE, {ElasticAxis.FFN: (64, 32)}, shard_groups=2)
    assert torch.equal(_router(space=narrower).networks["ffn"].inner, first["networks.ffn.inner"])
    assert not torch.equal(_router(seed=2).networks["ffn"].inner, first["networks.ffn.inner"])
    assert not torch.equal(first["networks.ffn.inner"], first["networks.hidden.inner"])


def test_budgets_run_from_large_to_small_and_interpolate():
    router = _router()
    assert router.budget_names == ("full", "medium", "small")
    assert router.budget_input(router.position_of("medium")).tolist() == [0, 1, 0]
    assert router.budget_input(2).tolist() == [0, 0, 1]
    assert router.budget_input(0.25).tolist() == [0.75, 0.25, 0]
    assert router.position_of_target(400.0) == 0
    assert router.position_of_target(250.0) == 0.75
    assert router.position_of_target(150.0) == 1.5
    assert router.position_of_target(190.0) == pytest.approx(1.1)
    assert router.position_of_target(100.0) == 2


def test_refusals_name_the_value():
    router = _router()
    with pytest.raises(ConfigError, match="'tiny' is unknown.*full, medium, small"):
        router.position_of("tiny")
    with pytest.raises(ConfigError, match="target 50 is outside.*100 to 400"):
        router.position_of_target(50.0)
    with pytest.raises(ConfigError, match=r"position 2\.5 is outside 0 to 2"):
        router.budget_input(2.5)
    with pytest.raises(ConfigError, match="'a' and 'b' have the same target 3"):
        BudgetRouter(SPACE, {"a": 3.0, "b": 3.0}, seed=0)
    with pytest.raises(ConfigError, match="'a': target -1 must be positive"):
        BudgetRouter(SPACE, {"a": -1.0}, seed=0)
