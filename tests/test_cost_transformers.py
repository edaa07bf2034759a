"""The cost model counts what transformers builds, published and random, whole and resized, and what it computes and caches.

NemotronH for hybrid parents; Llama, Qwen2, Qwen3, Qwen3-MoE and GLM-4-MoE (dense first layers, shared expert) for GPT parents. Models are
counted on the meta device; FLOPs and caches are those of a forward pass of a tiny model.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.cost import active_params, flops_per_token, total_params, widths_of
from megatron_elastic.memory import conv_state_bytes, kv_cache_bytes, ssm_state_bytes
from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape
from megatron_elastic.space import parent_plan, resize
from tests.test_cost import LLAMA_8B, NANO_3, QWEN3_30B, V2_9B, V2_12B

transformers = pytest.importorskip("transformers")
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def hybrid_config(shape: ModelShape) -> Any:
    """NemotronH's config of a hybrid shape."""
    attention: Any = shape.attention or AttentionShape(heads=2, kv_groups=1, head_dim=2)
    moe: Any = shape.moe or MoeShape(experts=2, topk=1, ffn=2, shared_ffn=2)
    mamba: Any = shape.mamba or MambaShape(heads=2, head_dim=2, groups=1, state=2)
    return transformers.NemotronHConfig(
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


def gpt_config(shape: ModelShape) -> Any:
    """The config of the family that has what the shape has; all of them gated."""
    assert shape.gated and shape.attention is not None
    moe: Any = shape.moe
    common: dict[str, Any] = {
        "vocab_size": shape.vocab_rows,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "intermediate_size": shape.mlp.ffn if shape.mlp else 2,
        "num_attention_heads": shape.attention.heads,
        "num_key_value_heads": shape.attention.kv_groups,
        "head_dim": shape.attention.head_dim,
        "pad_token_id": None,
    }
    if moe is None:
        if shape.attention.qk_norm:
            return transformers.Qwen3Config(**common)
        if shape.attention.qkv_bias and not shape.linear_bias:
            return transformers.Qwen2Config(**common)
        # Its config refuses heads that do not divide hidden, which it needs only to guess head_dim.
        config = transformers.LlamaConfig(
            **common | {"num_attention_heads": 1}, attention_bias=shape.linear_bias, mlp_bias=shape.linear_bias
        )
        config.num_attention_heads = shape.attention.heads
        return config
    common |= {"num_experts_per_tok": moe.topk, "moe_intermediate_size": moe.ffn}
    if moe.shared_ffn:
        assert moe.shared_ffn % moe.ffn == 0
        return transformers.Glm4MoeConfig(
            **common,
            n_routed_experts=moe.experts,
            n_shared_experts=moe.shared_ffn // moe.ffn,
            first_k_dense_replace=shape.layer_pattern.index("X"),
            attention_bias=shape.attention.qkv_bias,
            use_qk_norm=shape.attention.qk_norm,
        )
    return transformers.Qwen3MoeConfig(**common, num_experts=moe.experts, mlp_only_layers=list(shape.layers_with("mlp")))


def counted_by_transformers(shape: ModelShape) -> tuple[int, int]:
    """(total, active) parameters of the model of this shape; no memory is allocated."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(gpt_config(shape) if shape.is_gpt else hybrid_config(shape))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if shape.tied_embeddings:
        sizes.pop("lm_head.weight", 0)  # its NemotronH never ties: a tied model is one without this tensor
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    moe: Any = shape.moe
    return sum(sizes.values()), sum(sizes.values()) - routed + (routed // moe.experts * moe.topk if moe else 0)


def counted_here(shape: ModelShape, plan: SubmodelPlan) -> tuple[int, int]:
    widths = widths_of(plan, shape.num_layers)
    return total_params(shape, widths), active_params(shape, widths)


@pytest.mark.parametrize(
    "shape",
    [NANO_3, V2_12B, V2_9B, LLAMA_8B, QWEN3_30B],
    ids=["nano-3-30b", "nano-v2-12b", "nano-v2-9b", "llama-3.1-8b", "qwen3-30b-a3b"],
)
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


def random_gpt(kind: str) -> ModelShape:
    """A gated GPT shape of one kind; see `gpt_config`."""
    draw = random.Random(kind)
    kv, routed = draw.randint(1, 4), kind.startswith("experts")
    experts, ffn = draw.randint(4, 9), draw.randint(3, 50)
    return ModelShape(
        layer_pattern={"experts": "XTX", "experts-shared": "TTXX"}.get(kind, "T3"),
        hidden_size=2 * draw.randint(5, 45),
        vocab_size=draw.randint(11, 80),
        tied_embeddings=draw.random() < 0.5,
        linear_bias=kind == "biases",
        activation="silu",
        gated=True,
        attention=AttentionShape(
            heads=kv * draw.randint(2, 5),
            kv_groups=kv,
            head_dim=4 * draw.randint(1, 5),
            qkv_bias=kind in ("biases", "qkv-bias", "experts-shared"),
            qk_norm=kind in ("qk-norm", "experts", "experts-shared"),
            rope_base=1e4,
            rope_fraction=0.5 if kind == "experts-shared" else 1.0,  # as GLM's config has it
        ),
        mlp=MlpShape(ffn=draw.randint(3, 99)),
        moe=MoeShape(experts=experts, topk=draw.randint(1, experts - 2), ffn=ffn, shared_ffn=2 * ffn if "shared" in kind else None)
        if routed
        else None,
    )


def random_plan(shape: ModelShape, seed: int) -> SubmodelPlan:
    """Any widths the configs can say, up to two layers dropped."""
    draw, widths = random.Random(seed), {}
    units = {
        ElasticAxis.HIDDEN: 2,
        ElasticAxis.HEADS: shape.attention.kv_groups if shape.attention else 1,
        ElasticAxis.MAMBA_HEADS: shape.mamba.groups if shape.mamba else 1,
    }
    for axis, parent in sorted(parent_plan(shape).widths, key=lambda item: item[0] is not ElasticAxis.TOPK):
        unit, least = units.get(axis, 1), max(widths[ElasticAxis.TOPK], 2) if axis is ElasticAxis.EXPERTS else 1  # GLM ranks two at least
        assert isinstance(parent, int)
        widths[axis] = unit * draw.randint(least, parent // unit)
    if ElasticAxis.SHARED_FFN in widths and shape.is_gpt:
        widths[ElasticAxis.SHARED_FFN] = widths[ElasticAxis.MOE_FFN] * 2  # GLM's config counts shared experts as large as the routed ones
    return SubmodelPlan.of(widths, tuple(draw.sample(range(shape.num_layers), draw.randint(0, 1 if shape.is_gpt else 2))))


def compare(shape: ModelShape, seed: int) -> None:
    """Whole and resized, here and in transformers."""
    assert shape.problems() == []
    assert counted_here(shape, parent_plan(shape)) == counted_by_transformers(shape)
    plan = random_plan(shape, seed)
    assert counted_here(shape, plan) == counted_by_transformers(resize(shape, plan))


@pytest.mark.parametrize("seed", range(8))
def test_random_models_and_their_sub_models(seed):
    compare(random_shape(seed), seed)


GPT_KINDS = ["plain", "biases", "qkv-bias", "qk-norm", "experts", "experts-shared"]


@pytest.mark.parametrize("kind", GPT_KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_random_gpt_models_and_their_sub_models(kind, seed):
    compare(random_gpt(kind), seed)


@pytest.mark.parametrize("kind", GPT_KINDS)
def test_flops_are_those_torch_counts(kind):
    shape, length = random_gpt(kind), 9
    for small in (shape, resize(shape, random_plan(shape, 3))):
        model = transformers.AutoModelForCausalLM.from_config(
            gpt_config(small), attn_implementation="eager", experts_implementation="eager"
        ).eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.arange(2 * length).view(2, length) % 11)
        assert small.attention is not None
        # transformers multiplies positions by frequencies as matrices, for both sequences at once; here rotary embeddings cost nothing
        angles = small.attention.head_dim * small.attention.rope_fraction * length
        per_token = flops_per_token(small, widths_of(parent_plan(small), small.num_layers), length)
        assert counter.get_total_flops() - angles == 2 * length * per_token


def test_caches_are_those_transformers_keeps():
    shape = replace(random_shape(4), layer_pattern="M*M")
    config = hybrid_config(shape)
    with torch.no_grad():
        caches = transformers.AutoModelForCausalLM.from_config(config).eval()(torch.arange(18).view(2, 9) % 11).past_key_values.layers
    widths = widths_of(parent_plan(shape), 3)
    assert kv_cache_bytes(shape, widths, 2, 9, "fp32") == caches[1].keys.nbytes + caches[1].values.nbytes
    assert ssm_state_bytes(shape, widths, 2, "fp32") == sum(caches[n].recurrent_states[0].nbytes for n in (0, 2))
    assert conv_state_bytes(shape, widths, 2, "fp32") == sum(caches[n].conv_states[0].nbytes for n in (0, 2))


def test_a_padded_vocabulary_is_counted():
    shape = replace(random_shape(2), padded_vocab_size=96)
    assert counted_here(shape, parent_plan(shape)) == counted_by_transformers(shape)
