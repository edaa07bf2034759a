"""The cost model counts what transformers builds: NemotronH on the meta device, published and random, whole and resized."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.cost import active_params, total_params, widths_of
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape, parent_plan, resize
from tests.test_cost import NANO_3, V2_9B, V2_12B

transformers = pytest.importorskip("transformers")
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def counted_by_transformers(shape: ModelShape) -> tuple[int, int]:
    """(total, active) parameters of NemotronHForCausalLM with this shape; no memory is allocated."""
    attention = shape.attention or AttentionShape(heads=2, kv_groups=1, head_dim=2)
    moe = shape.moe or MoeShape(experts=2, topk=1, ffn=2, shared_ffn=2)
    mamba = shape.mamba or MambaShape(heads=2, head_dim=2, groups=1, state=2)
    config = transformers.NemotronHConfig(
        vocab_size=shape.vocab_rows,
        layers_block_type=[KINDS[letter] for letter in shape.layer_pattern],
        hidden_size=shape.hidden_size,
        tie_word_embeddings=shape.tied_embeddings,
        intermediate_size=shape.mlp.ffn if shape.mlp else 2,
        mlp_bias=shape.linear_bias,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_groups,
        head_dim=attention.head_dim,
        mamba_num_heads=mamba.heads,
        mamba_head_dim=mamba.head_dim,
        n_groups=mamba.groups,
        ssm_state_size=mamba.state,
        conv_kernel=mamba.conv,
        n_routed_experts=moe.experts,
        num_experts_per_tok=moe.topk,
        moe_intermediate_size=moe.ffn,
        moe_shared_expert_intermediate_size=moe.shared_ffn,
        num_nextn_predict_layers=0,
    )
    with torch.device("meta"):
        model = transformers.NemotronHForCausalLM(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if shape.tied_embeddings:
        del sizes["lm_head.weight"]  # its NemotronH never ties: a tied model is one without this tensor
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()), sum(sizes.values()) - routed + routed // moe.experts * moe.topk


def counted_here(shape: ModelShape, plan: SubmodelPlan) -> tuple[int, int]:
    widths = widths_of(plan, shape.num_layers)
    return total_params(shape, widths), active_params(shape, widths)


@pytest.mark.parametrize("shape", [NANO_3, V2_12B, V2_9B], ids=["nano-3-30b", "nano-v2-12b", "nano-v2-9b"])
def test_published_models(shape):
    assert counted_here(shape, parent_plan(shape)) == counted_by_transformers(shape)


def random_shape(seed: int) -> ModelShape:
    """Odd seeds have biased linears and therefore no experts (megatron-core has none) and no attention (transformers has none)."""
    draw = random.Random(seed)
    biased = seed % 2 == 1
    letters = "M-" if biased else "M*-E"
    kv, groups, experts = draw.randint(1, 4), draw.randint(1, 4), draw.randint(2, 9)
    return ModelShape(
        layer_pattern=letters + "".join(draw.choices(letters, k=4)),
        hidden_size=draw.randint(5, 90),
        vocab_size=draw.randint(11, 80),
        tied_embeddings=draw.random() < 0.5,
        linear_bias=biased,
        attention=AttentionShape(
            heads=kv * draw.randint(2, 5),
            kv_groups=kv,
            head_dim=2 * draw.randint(1, 9),
        ),
        mlp=MlpShape(ffn=draw.randint(3, 99)),
        moe=None
        if biased
        else MoeShape(experts=experts, topk=draw.randint(1, experts), ffn=draw.randint(3, 50), shared_ffn=draw.randint(3, 60)),
        mamba=MambaShape(
            heads=groups * draw.randint(2, 5),
            head_dim=draw.randint(2, 17),
            groups=groups,
            state=draw.randint(2, 20),
            conv=draw.randint(2, 4),
        ),
    )


def random_plan(shape: ModelShape, seed: int) -> SubmodelPlan:
    draw, widths = random.Random(seed), {}
    assert shape.attention is not None and shape.mamba is not None
    units = {ElasticAxis.HEADS: shape.attention.kv_groups, ElasticAxis.MAMBA_HEADS: shape.mamba.groups}
    for axis, parent in parent_plan(shape).widths:
        unit = units.get(axis, 1)
        least = shape.moe.topk if shape.moe and axis is ElasticAxis.EXPERTS else 1
        widths[axis] = unit * draw.randint(least, parent // unit)
    return SubmodelPlan.of(widths, tuple(draw.sample(range(shape.num_layers), draw.randint(0, 2))))


@pytest.mark.parametrize("seed", range(8))
def test_random_models_and_their_sub_models(seed):
    shape = random_shape(seed)
    assert shape.problems() == []
    assert counted_here(shape, parent_plan(shape)) == counted_by_transformers(shape)
    plan = random_plan(shape, seed)
    assert counted_here(shape, plan) == counted_by_transformers(resize(shape, plan))


def test_a_padded_vocabulary_is_counted():
    shape = replace(random_shape(2), padded_vocab_size=96)
    assert counted_here(shape, parent_plan(shape)) == counted_by_transformers(shape)
