"""What has no elastic form is refused by name with what to do, before anything has changed; never trained half-elastic.

Run: pytest tests/elastic/test_refusals.py
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.elastic.refusals import REFUSALS, Refusal, config_problems
from megatron_elastic.errors import ConfigError, UnsupportedError
from megatron_elastic.models.build import build_model
from megatron_elastic.platform.versions import Generation, megatron_generation
from megatron_elastic.space import build_space
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape
from tests.elastic.family import build_family, narrowed, tiny_space

LATER = {"moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size", "fused_residual_rmsnorm"}
"""Fields that megatron-core 0.16.1 does not have yet."""
WRONG: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "moe_latent_size": 16,
    "mtp_num_layers": 1,
    "moe_mlp_glu_interleave_size": 32,
    "moe_shared_expert_glu_interleave_size": 32,
    "recompute_granularity": "full",
    "recompute_modules": ["core_attn", "moe"],
    "context_parallel_size": 2,
}


@pytest.fixture(scope="module")
def model(_one_process: Any) -> Any:
    """A mixture of experts that nobody has made elastic."""
    return build_model(tiny_moe(), _one_process)


def test_every_refused_field_is_one_of_megatrons() -> None:
    known = {field.name for field in fields(TransformerConfig)}
    missing = {refusal.field for refusal in REFUSALS} - known
    assert missing <= (LATER if megatron_generation() is Generation.V0_16 else set()) | {"multi_latent_attention"}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.field)
def test_each_is_refused_by_name_and_nothing_has_changed(model: Any, _one_process: Any, refusal: Refusal) -> None:
    space, before = tiny_space(tiny_moe()), [type(module) for module in model.modules()]
    config, had = vars(model.config), refusal.field in vars(model.config)
    value = config.get(refusal.field)
    config[refusal.field] = WRONG.get(refusal.field, True)
    try:
        with pytest.raises(UnsupportedError) as raised:
            elasticize(model, space, _one_process, tiny_moe())
    finally:
        config[refusal.field] = value
        if not had:
            del config[refusal.field]
    (line,) = raised.value.problems
    assert line.startswith(f"{refusal.field} {WRONG.get(refusal.field, True)!r}: ") and line.endswith(refusal.remedy)
    assert [type(module) for module in model.modules()] == before
    assert config_problems(model.config, space) == []


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_a_quantised_model_runs_plans_in_mask_mode_only(_one_process: Any, name: str) -> None:
    model, space, handle, _ = build_family(_one_process, "dense")
    vars(model.config)[name] = "e4m3"
    with (
        pytest.raises(UnsupportedError, match=f"{name} 'e4m3': slice mode .* run the plan with mode 'mask'"),
        handle.use(narrowed(space, None)),
    ):
        pass
    with handle.use(narrowed(space, None), "mask"):
        pass


def test_a_module_with_parameters_of_its_own_is_refused(_one_process: Any) -> None:
    shape = tiny_dense()
    model: Any = build_model(shape, _one_process)
    model.decoder.layers[1].adapter = torch.nn.Linear(3, 3)
    with pytest.raises(UnsupportedError, match=r"decoder.layers.1.adapter \(Linear\) holds parameters but has no elastic form"):
        elasticize(model, tiny_space(shape), _one_process, shape)
    assert not any(type(module).__name__.startswith("Elastic") for module in model.modules())


def test_heads_that_do_not_divide_over_shard_groups_bound_the_tensor_parallelism() -> None:
    shape = tiny_shape()  # 12 query heads in 2 KV groups
    assert build_space(shape, {ElasticAxis.HEADS: (12, 8)}, shard_groups=4).axes[0].groups == 4
    wide = build_space(shape, {ElasticAxis.HEADS: (12, 8)}, shard_groups=8)
    assert wide.axes[0].groups == 2, "8 groups do not divide 12 heads: the KV groups are left"
    assert wide.check_shards(2, 1) == []
    (problem,) = wide.check_shards(4, 1)
    assert "parallel.tensor 4 does not divide the 2 groups of axis 'heads'" in problem


def test_topk_is_not_elastic_where_groups_score_by_it() -> None:
    with pytest.raises(ConfigError, match="elastic.axes.topk: not with group-limited routing"):
        build_space(tiny_moe(), {ElasticAxis.TOPK: (6, 3)})


def test_a_stage_whose_layers_are_all_skipped_returns_a_tensor_of_its_own(_one_process: Any) -> None:
    """megatron frees the storage of what a pipeline stage returns; returning the input would free that."""
    for parent in ("hybrid", "dense"):
        model, space, handle, shape = build_family(_one_process, parent)
        dropped = space.plan({ElasticAxis.LAYERS: space.spec(ElasticAxis.LAYERS).choices[-1]})  # pyright: ignore
        layer = model.decoder.layers[dropped.dropped_layers[0]]
        hidden = torch.randn(5, 2, shape.hidden_size, requires_grad=True)
        with handle.use(dropped):
            output = layer(hidden_states=hidden, attention_mask=None)
        output = output[0] if isinstance(output, tuple) else output
        assert torch.equal(output, hidden) and output.data_ptr() != hidden.data_ptr()
