"""Proves that a shape or a layout megatron-core cannot say is refused with the value, the key and the remedy, and that layers of equal
sizes share one config."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elastic.errors import ConfigError, UnsupportedError
from megatron_elastic.models.config import model_configs
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape


def test_equal_layers_share_the_models_config(parallel: ParallelContext) -> None:
    configs = model_configs(tiny_moe(), parallel)
    assert len(configs.layers) == 4 and all(layer is configs.model for layer in configs.layers)
    shape = tiny_dense()
    assert shape.mlp is not None
    layers = model_configs(replace(shape, mlp=replace(shape.mlp, ffn=(72, 24, 72, 8))), parallel).layers
    assert [layer.ffn_hidden_size for layer in layers] == [72, 24, 72, 8]
    assert layers[0] is layers[2]


@pytest.mark.parametrize(("stage", "letters"), [(0, [72, 24]), (1, [48, 8])])
def test_a_stage_gets_its_own_layers(parallel: ParallelContext, stage: int, letters: list[int]) -> None:
    shape = tiny_dense()
    assert shape.mlp is not None
    layout = replace(parallel, pipeline=2, pipeline_rank=stage)
    configs = model_configs(replace(shape, mlp=replace(shape.mlp, ffn=(72, 24, 48, 8))), layout)
    assert [config.ffn_hidden_size for config in configs.of_part(layout, 0)] == letters


def test_layouts_that_do_not_fit_are_listed_at_once(parallel: ParallelContext) -> None:
    layout = replace(parallel, tensor=5, pipeline=4, expert=3, expert_tensor=3)
    with pytest.raises(ConfigError) as caught:
        model_configs(tiny_shape(), layout)
    for line in (
        "parallel.tensor 5 does not divide model.padded_vocab_size 136",
        "parallel.tensor 5 does not divide model.attention.heads 12",
        "parallel.tensor 5 is neither a divisor nor a multiple of model.attention.kv_groups 2; change one",
        "parallel.tensor 5 does not divide model.mlp.ffn 72",
        "parallel.tensor 5 does not divide model.mamba.groups 4",
        "parallel.tensor 5 does not divide model.moe.shared_ffn 48",
        "parallel.expert 3 does not divide model.moe.experts 8",
        "parallel.expert_tensor 3 does not divide model.moe.ffn 56",
        "parallel.pipeline 4 does not divide the 6 layers of model.layer_pattern",
    ):
        assert str(caught.value).count(line) == 1


def test_every_width_of_a_per_layer_shape_must_fit_the_layout(parallel: ParallelContext) -> None:
    shape = tiny_moe()
    assert shape.mlp is not None and shape.moe is not None
    shape = replace(shape, moe=replace(shape.moe, experts=(16, 8, 12)))
    with pytest.raises(ConfigError, match="parallel.expert 8 does not divide model.moe.experts 12"):
        model_configs(shape, replace(parallel, expert=8))


def test_what_megatron_core_cannot_say_is_refused(parallel: ParallelContext) -> None:
    dense, softmax = tiny_dense(gated=False), tiny_moe(score="softmax")
    assert dense.attention is not None and softmax.moe is not None
    with pytest.raises(ConfigError, match="model.linear_bias true .* set model.attention.qkv_bias to true"):
        model_configs(replace(dense, attention=replace(dense.attention, qkv_bias=False)), parallel)
    with pytest.raises(ConfigError, match="model.moe.topk 1 .* set model.moe.pre_softmax to true"):
        model_configs(replace(softmax, moe=replace(softmax.moe, topk=(3, 1, 3))), parallel)


def test_biases_of_unequal_layers_can_only_be_frozen(parallel: ParallelContext) -> None:
    """megatron-core stacks the biases of all layers to update them, whatever the rate."""
    shape = tiny_moe()
    assert shape.moe is not None
    shape = replace(shape, moe=replace(shape.moe, experts=(16, 8, 12)))
    with pytest.raises(UnsupportedError, match=r"model.moe.experts \[16, 8, 12\].*freeze them"):
        model_configs(shape, parallel, expert_bias_rate=0.1)
    configs = model_configs(shape, parallel)
    assert not configs.model.moe_router_enable_expert_bias
    assert all(layer.moe_router_enable_expert_bias for layer in configs.layers)
