"""NemotronH: Mamba-2, attention, MLP and MoE layers in any order, a sigmoid router with a selection bias, no rotary embeddings.

It reads what transformers' class reads, and the keys of the published models that came with code of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_elastic.hf.config import NUMBER, CannotSay, ConfigKeys
from megatron_elastic.hf.decoders import activation_name, read_activation, read_habits, suffixed, write_habits
from megatron_elastic.hf.rules import EXPERT, EXPERTS, QKV, WHOLE, WORDS, NameMap, Rule
from megatron_elastic.shape import HYBRID_LETTERS, AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape

_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
_SHAPES_FRESH_WEIGHTS = ("rescale_prenorm_residual", "time_step_max", "time_step_floor", "time_step_rank", "expand")
_CLAMPS_WITHOUT_KERNELS = ("time_step_min",)
"""It shapes fresh weights, too, but transformers' plain-PyTorch mixer also raises every smaller time step to it in evaluation. Its CUDA kernels and
megatron-core's mixer do not: they limit time steps by time_step_limit alone, and they are what the published models were trained with."""
_SAID_ELSEWHERE = ("mtp_layers_block_type", "moe_shared_expert_overlap", "mamba_ssm_cache_dtype", "residual_in_fp32")
_MOE_KEYS = ("n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor")
_MOE_KEYS += ("moe_shared_expert_intermediate_size", "n_group", "topk_group", "n_shared_experts", "norm_topk_prob", "moe_latent_size")
_NO_LIMITS: tuple[list[Any], ...] = ([0.0, float("inf")], [0.0, "Infinity"], [0.0, {"__float__": "Infinity"}])
"""Time steps without a limit, as JSON's writers spell it."""

DEFAULTS: Mapping[str, Any] = {
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096},
    **{"tie_word_embeddings": False, "intermediate_size": 21504, "mlp_hidden_act": "relu2", "initializer_range": 0.02},
    **{"layer_norm_epsilon": 1e-5, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688},
    **{"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128},
}
"""What a key means that config.json leaves out."""


def read_nemotron(keys: ConfigKeys) -> ModelShape:
    """Layers in any order; parts that no layer has are None."""
    pattern = _pattern(keys)
    for name in ("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"):
        keys.demand(name, False, default=False, what="choose a model without it")
    keys.demand("use_conv_bias", True, default=True, what="megatron-core's convolution has a bias")
    keys.demand("mamba_hidden_act", "silu", default="silu", what="megatron-core's mixer has silu")
    keys.demand("sliding_window", None, default=None, what="attention over a sliding window; choose a model without it")
    keys.demand("num_nextn_predict_layers", 0, default=0, what="multi-token prediction heads; choose a model without them")
    keys.demand("tie_word_embeddings", False, default=False, what="transformers does not tie the two matrices of this family")
    # Attention has no rotary embeddings, whatever the file says, and sizes are said outright.
    keys.ignore(
        "rope_theta", "rope_parameters", "partial_rotary_factor", *_SHAPES_FRESH_WEIGHTS, *_CLAMPS_WITHOUT_KERNELS, *_SAID_ELSEWHERE
    )
    limits = keys.take("time_step_limit", default=_NO_LIMITS[0], kind=list)
    if limits not in _NO_LIMITS:
        keys.problem(f"time_step_limit {limits} is not supported: megatron-core does not limit time steps")
    ffn, moe = keys.require("intermediate_size"), None
    if "E" in pattern:
        moe = _read_moe(keys)
    else:
        keys.ignore(*_MOE_KEYS)
    attention, mamba = _read_attention(keys), _read_mamba(keys)
    return ModelShape(
        layer_pattern=pattern,
        hidden_size=keys.require("hidden_size"),
        norm_epsilon=float(keys.require("layer_norm_epsilon", "norm_eps", "rms_norm_eps", kind=NUMBER)),
        activation=read_activation(keys, "mlp_hidden_act"),
        attention=attention if "*" in pattern else None,
        mlp=MlpShape(ffn=ffn) if "-" in pattern else None,
        moe=moe,
        mamba=mamba if "M" in pattern else None,
        **read_habits(keys),
    )


def _pattern(keys: ConfigKeys) -> str:
    """The letters of the layers, from either spelling of the keys; one that a hybrid model has when they say nothing."""
    kinds = keys.take("layers_block_type", "layer_types", default=[], kind=list)
    pattern = keys.take("hybrid_override_pattern", default="", kind=str)
    if unknown := [kind for kind in kinds if not isinstance(kind, str) or kind not in _LETTERS]:
        keys.problem(f"layers_block_type {unknown[0]!r} is not supported: layers are {', '.join(_LETTERS)}")
        kinds = []
    letters = "".join(_LETTERS[kind] for kind in kinds)
    if pattern and letters and letters != pattern:
        keys.problem(f"layers_block_type {letters!r} and hybrid_override_pattern {pattern!r} contradict each other; remove one")
    pattern = pattern or letters
    if others := sorted(set(pattern) - HYBRID_LETTERS):
        keys.problem(f"hybrid_override_pattern {pattern!r} is not supported: {others[0]!r} is not one of {', '.join('M*-E')}")
    elif not pattern and not unknown:
        keys.problem("hybrid_override_pattern is missing, as is layers_block_type: nothing says the kinds of the layers")
    if not pattern or others:
        keys.ignore("num_hidden_layers")
        return "*"
    keys.demand("num_hidden_layers", len(pattern), default=len(pattern), what=f"the layers are {pattern!r}")
    return pattern


def _read_attention(keys: ConfigKeys) -> AttentionShape:
    heads = keys.require("num_attention_heads")
    groups = keys.take("num_key_value_heads", "num_query_groups", default=heads)
    return AttentionShape(heads=heads, kv_groups=groups, head_dim=keys.require("head_dim", "attention_head_dim"))


def _read_moe(keys: ConfigKeys) -> MoeShape:
    topk, groups, chosen = (keys.require(name) for name in ("num_experts_per_tok", "n_group", "topk_group"))
    keys.demand("moe_latent_size", None, default=None, what="experts on a latent space; choose a model without it")
    keys.demand("n_shared_experts", 1, default=1, what="there is one shared expert of moe_shared_expert_intermediate_size")
    keys.demand("norm_topk_prob", topk > 1, default=True, what="megatron-core renormalises gates of a sigmoid router if there are several")
    if groups > 1 and topk != 2 * chosen:
        keys.problem(
            f"num_experts_per_tok {topk} with topk_group {chosen}: groups are ranked by their two best experts, as in megatron-core only when "
            "num_experts_per_tok is twice topk_group"
        )
    return MoeShape(
        experts=keys.take("n_routed_experts", "num_local_experts", default=8),
        topk=topk,
        ffn=keys.require("moe_intermediate_size"),
        shared_ffn=keys.require("moe_shared_expert_intermediate_size"),
        scaling_factor=float(keys.require("routed_scaling_factor", kind=NUMBER)),
        routing_groups=groups if groups > 1 else None,
        groups_per_token=chosen if groups > 1 else None,
    )


def _read_mamba(keys: ConfigKeys) -> MambaShape:
    return MambaShape(
        heads=keys.require("mamba_num_heads"),
        head_dim=keys.require("mamba_head_dim"),
        groups=keys.take("n_groups", "mamba_n_groups", default=8),
        state=keys.require("ssm_state_size"),
        conv=keys.take("conv_kernel", "mamba_d_conv", default=4),
        chunk=keys.take("chunk_size", "mamba_chunk_size", default=128),
    )


def write_nemotron(shape: ModelShape) -> dict[str, Any]:
    """The keys of `read_nemotron`."""
    if shape.is_gpt:
        raise CannotSay(f"model.layer_pattern {shape.layer_pattern!r}: layers of attention with a feed-forward part")
    if shape.normalization != "RMSNorm" or shape.gated:
        raise CannotSay(f"model.normalization {shape.normalization!r} with gated {shape.gated}: it has RMSNorm and no gates")
    if shape.tied_embeddings:
        raise CannotSay("model.tied_embeddings true: transformers does not tie the two matrices of this family")
    keys: dict[str, Any] = {
        **write_habits(shape),
        "hybrid_override_pattern": shape.layer_pattern,
        "layer_norm_epsilon": shape.norm_epsilon,
        "mlp_hidden_act": activation_name(shape),
        "num_nextn_predict_layers": 0,
    }
    if attention := shape.attention:
        keys |= {"num_attention_heads": attention.heads, "num_key_value_heads": attention.kv_groups, "head_dim": attention.head_dim}
    if shape.mlp:
        keys["intermediate_size"] = shape.mlp.ffn
    if shape.moe and shape.has("moe"):
        keys |= _moe_keys(shape.moe)
    if mamba := shape.mamba:
        keys |= {"mamba_num_heads": mamba.heads, "mamba_head_dim": mamba.head_dim, "n_groups": mamba.groups, "conv_kernel": mamba.conv}
        keys |= {"ssm_state_size": mamba.state, "chunk_size": mamba.chunk}
    return keys


def _moe_keys(moe: MoeShape) -> dict[str, Any]:
    if moe.shared_ffn is None:
        raise CannotSay("model.moe.shared_ffn null: it always has a shared expert")
    return {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.topk,
        "norm_topk_prob": moe.topk != 1,
        "moe_intermediate_size": moe.ffn,
        "moe_shared_expert_intermediate_size": moe.shared_ffn,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0 if moe.scaling_factor is None else moe.scaling_factor,
        "n_group": moe.routing_groups or 1,
        "topk_group": moe.groups_per_token or 1,
    }


_MIXER_PARAMETERS = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")
_QKV = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")

NAMES = NameMap(
    "backbone.layers.{layer}.",
    (
        Rule("", "embedding.word_embeddings.weight", ("backbone.embeddings.weight",), WORDS),
        Rule("", "output_layer.weight", ("lm_head.weight",), WORDS),
        Rule("", "decoder.final_norm.weight", ("backbone.norm_f.weight",), WHOLE),
        Rule("mamba", "mixer.in_proj.layer_norm_weight", ("norm.weight",), WHOLE),
        *(Rule("mamba", f"mixer.{name}", (f"mixer.{name}",), WHOLE) for name in _MIXER_PARAMETERS),
        Rule("attention", "self_attention.linear_qkv.layer_norm_weight", ("norm.weight",), WHOLE),
        Rule("attention", "self_attention.linear_qkv.weight", suffixed(_QKV, "weight"), QKV),
        Rule("attention", "self_attention.linear_proj.weight", ("mixer.o_proj.weight",), WHOLE),
        Rule("mlp", "mlp.linear_fc1.layer_norm_weight", ("norm.weight",), WHOLE),
        Rule("mlp", "mlp.linear_fc1.weight", ("mixer.up_proj.weight",), WHOLE),
        Rule("mlp", "mlp.linear_fc2.weight", ("mixer.down_proj.weight",), WHOLE),
        Rule("moe", "pre_mlp_layernorm.weight", ("norm.weight",), WHOLE),
        Rule("moe", "mlp.router.weight", ("mixer.gate.weight",), WHOLE),
        Rule("moe", "mlp.router.expert_bias", ("mixer.gate.e_score_correction_bias",), WHOLE),
        Rule("moe", "mlp.experts.experts.linear_fc1.weight", (f"mixer.experts.{EXPERT}.up_proj.weight",), EXPERTS),
        Rule("moe", "mlp.experts.experts.linear_fc2.weight", (f"mixer.experts.{EXPERT}.down_proj.weight",), EXPERTS),
        Rule("moe", "mlp.shared_experts.linear_fc1.weight", ("mixer.shared_experts.up_proj.weight",), WHOLE),
        Rule("moe", "mlp.shared_experts.linear_fc2.weight", ("mixer.shared_experts.down_proj.weight",), WHOLE),
    ),
    # transformers 5 renames on the way out what it renamed on the way in, and finds this word too.
    others={"backbone.embeddings.weight": "backbone.embedding.weight"},
)
"""Names of NemotronH."""
