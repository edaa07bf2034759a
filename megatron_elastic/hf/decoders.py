"""Decoders of the Llama kind, dense and with experts: what their config.json says, and how their tensors are called.

Readers turn the keys of a config.json into a ModelShape and note what they cannot; writers are their inverse. What a key means that is left
out is what transformers' class takes for it (DEFAULTS).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_elastic.hf.config import NUMBER, CannotSay, ConfigKeys
from megatron_elastic.hf.rules import EXPERT, EXPERTS, GATED_EXPERTS, HALVES, QKV, WHOLE, WORDS, NameMap, Rule
from megatron_elastic.shape import AttentionShape, MlpShape, ModelShape, MoeShape

LLAMA3_ROTATIONS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core's scaled rotations take for granted."""
ACTIVATIONS = {"silu": "silu", "relu2": "squared_relu", "gelu": "gelu"}
"""Hugging Face's name of an activation -> ours."""

_ALL = {"num_key_value_heads": None, "max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
_ALL |= {"tie_word_embeddings": False, "initializer_range": 0.02}
_MISTRAL = _ALL | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
_QWEN = _ALL | {"num_key_value_heads": 32, "max_position_embeddings": 32768}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _ALL | {"attention_bias": False, "mlp_bias": False},
    "mistral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN
    | {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
    | {"norm_topk_prob": False, "decoder_sparse_step": 1},
    "mixtral": _MISTRAL | {"num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
}
"""model_type -> what a key means that config.json leaves out."""


def read_llama(keys: ConfigKeys) -> ModelShape:
    """Llama: biases everywhere in attention and MLP, or nowhere; Llama 3's scaled rotations."""
    biases = keys.require("attention_bias", kind=bool), keys.require("mlp_bias", kind=bool)
    if biases[0] != biases[1]:
        keys.problem(f"attention_bias {biases[0]} with mlp_bias {biases[1]} is not supported: both or neither")
    return _decoder(keys, linear_bias=biases[0], qkv_bias=biases[0], **_dense(keys))


def write_llama(shape: ModelShape) -> dict[str, Any]:
    """The keys of `read_llama`."""
    keys = _decoder_keys(shape) | _dense_keys(shape) | {"attention_bias": shape.linear_bias, "mlp_bias": shape.linear_bias}
    if shape.hidden_size % keys["num_attention_heads"]:
        raise CannotSay(
            f"model.hidden_size {shape.hidden_size}: transformers wants a multiple of attention.heads {keys['num_attention_heads']}"
        )
    return keys


def read_mistral(keys: ConfigKeys) -> ModelShape:
    """Mistral: no biases, no sliding window."""
    _refuse_windows(keys)
    return _decoder(keys, **_dense(keys))


def write_mistral(shape: ModelShape) -> dict[str, Any]:
    """The keys of `read_mistral`."""
    return _decoder_keys(shape) | _dense_keys(shape) | {"sliding_window": None}


def read_qwen2(keys: ConfigKeys) -> ModelShape:
    """Qwen2: biases of query, key and value."""
    _refuse_switched_windows(keys)
    return _decoder(keys, qkv_bias=True, **_dense(keys))


def read_qwen3(keys: ConfigKeys) -> ModelShape:
    """Qwen3: norms of queries and keys, head by head."""
    _refuse_switched_windows(keys)
    _refuse_other_attention(keys)
    return _decoder(keys, qk_norm=True, **_dense(keys))


def write_qwen(shape: ModelShape) -> dict[str, Any]:
    """The keys of `read_qwen2` and `read_qwen3`."""
    return _decoder_keys(shape) | _dense_keys(shape) | {"use_sliding_window": False}


def read_qwen3_moe(keys: ConfigKeys) -> ModelShape:
    """Qwen3-MoE: softmax router, single layers dense."""
    _refuse_switched_windows(keys)
    _refuse_other_attention(keys)
    layers, every = keys.require("num_hidden_layers"), keys.require("decoder_sparse_step")
    dense = keys.take("mlp_only_layers", default=[], kind=list)
    pattern = "".join("X" if layer not in dense and (layer + 1) % every == 0 else "T" for layer in range(layers))
    mlp = MlpShape(ffn=keys.require("intermediate_size"))
    moe = _experts(keys, 128, "moe_intermediate_size", renormalised=keys.require("norm_topk_prob", kind=bool))
    return _decoder(keys, pattern=pattern, qk_norm=True, mlp=mlp if "T" in pattern else None, moe=moe if "X" in pattern else None)


def write_qwen3_moe(shape: ModelShape) -> dict[str, Any]:
    """The keys of `read_qwen3_moe`."""
    if shape.moe is None or not shape.has("moe"):
        raise CannotSay(f"model.layer_pattern {shape.layer_pattern!r}: a model without experts")
    return _decoder_keys(shape) | {
        "intermediate_size": shape.mlp.ffn if shape.mlp else shape.moe.ffn,
        "mlp_only_layers": list(shape.layers_with("mlp")),
        "decoder_sparse_step": 1,
        "num_experts": shape.moe.experts,
        "num_experts_per_tok": shape.moe.topk,
        "moe_intermediate_size": shape.moe.ffn,
        "norm_topk_prob": not shape.moe.pre_softmax,
        "use_sliding_window": False,
    }


def read_mixtral(keys: ConfigKeys) -> ModelShape:
    """Mixtral: softmax over the chosen experts."""
    _refuse_windows(keys)
    return _decoder(keys, pattern="X" * keys.require("num_hidden_layers"), moe=_experts(keys, 8, "intermediate_size", renormalised=True))


def write_mixtral(shape: ModelShape) -> dict[str, Any]:
    """The keys of `read_mixtral`."""
    if shape.moe is None or not shape.has("moe") or shape.has("mlp"):
        raise CannotSay(f"model.layer_pattern {shape.layer_pattern!r}: layers without experts")
    sizes = {"num_local_experts": shape.moe.experts, "num_experts_per_tok": shape.moe.topk, "intermediate_size": shape.moe.ffn}
    return _decoder_keys(shape) | sizes | {"sliding_window": None}


# What they share.


def _decoder(
    keys: ConfigKeys, *, pattern: str, qkv_bias: bool = False, qk_norm: bool = False, linear_bias: bool = False, **parts: Any
) -> ModelShape:
    hidden, heads = keys.require("hidden_size"), keys.require("num_attention_heads")
    base, scaling = _rotations(keys)
    attention = AttentionShape(
        heads=heads,
        kv_groups=keys.take("num_key_value_heads", default=heads),
        head_dim=keys.take("head_dim", default=hidden // heads),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        rope_base=base,
        rope_scaling=scaling,
    )
    return ModelShape(
        layer_pattern=pattern,
        hidden_size=hidden,
        gated=True,
        linear_bias=linear_bias,
        norm_epsilon=float(keys.require("rms_norm_eps", kind=NUMBER)),
        activation=read_activation(keys, "hidden_act"),
        attention=attention,
        **read_habits(keys),
        **parts,
    )


def read_habits(keys: ConfigKeys) -> dict[str, Any]:
    """The fields of a shape that every family says in the same words."""
    return {
        "vocab_size": keys.require("vocab_size"),
        "max_sequence_length": keys.require("max_position_embeddings"),
        "tied_embeddings": keys.require("tie_word_embeddings", kind=bool),
        "init_std": float(keys.require("initializer_range", kind=NUMBER)),
    }


def write_habits(shape: ModelShape) -> dict[str, Any]:
    """The keys of `read_habits`, and the sizes that every family calls the same."""
    return {
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_sequence_length,
        "tie_word_embeddings": shape.tied_embeddings,
        "initializer_range": shape.init_std,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
    }


def read_activation(keys: ConfigKeys, name: str) -> Any:
    """Our name of the activation that key `name` says."""
    wanted = keys.require(name, kind=str, otherwise="silu")
    if wanted not in ACTIVATIONS:
        keys.problem(f"{name} {wanted!r} is not supported: activations are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.get(wanted, "silu")


def activation_name(shape: ModelShape) -> str:
    """Hugging Face's name of a shape's activation."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == shape.activation)


def _dense(keys: ConfigKeys) -> dict[str, Any]:
    return {"pattern": "T" * keys.require("num_hidden_layers"), "mlp": MlpShape(ffn=keys.require("intermediate_size"))}


def _dense_keys(shape: ModelShape) -> dict[str, Any]:
    if shape.mlp is None or shape.has("moe"):
        raise CannotSay(f"model.layer_pattern {shape.layer_pattern!r}: layers with a mixture of experts")
    return {"intermediate_size": shape.mlp.ffn}


def _experts(keys: ConfigKeys, experts: int, ffn: str, *, renormalised: bool) -> MoeShape:
    """Experts of a softmax router. experts: how many there are by default; renormalised: whether the gates of a token sum to 1."""
    topk = keys.require("num_experts_per_tok")
    if topk == 1 and renormalised:
        keys.problem("num_experts_per_tok 1 with renormalised gates makes every gate 1, which megatron-core does not compute")
    return MoeShape(
        experts=keys.take("num_experts", "num_local_experts", default=experts),
        topk=topk,
        ffn=keys.require(ffn),
        score="softmax",
        pre_softmax=not renormalised,
        expert_bias=False,
        scaling_factor=None,
    )


def _refuse_windows(keys: ConfigKeys) -> None:
    keys.demand("sliding_window", None, default=None, what="attention over a sliding window; choose a model without it")
    _refuse_layer_types(keys)


def _refuse_switched_windows(keys: ConfigKeys) -> None:
    """The same where a window means nothing without `use_sliding_window`."""
    keys.demand("use_sliding_window", False, default=False, what="attention over a sliding window; choose a model without it")
    keys.ignore("sliding_window", "max_window_layers")
    _refuse_layer_types(keys)


def _refuse_layer_types(keys: ConfigKeys) -> None:
    others = [kind for kind in keys.take("layer_types", default=[], kind=list) if kind != "full_attention"]
    if others:
        keys.problem(f"layer_types {others[0]!r} is not supported: every layer must be 'full_attention'")


def _refuse_other_attention(keys: ConfigKeys) -> None:
    """Attention of Qwen3 has no bias, and norms of queries and keys whether the file says so (Qwen3-Coder's does) or not."""
    keys.demand("use_qk_norm", True, default=True, what="this family has norms of queries and keys")
    keys.demand("attention_bias", False, default=False, what="a bias of attention alone; choose a model without it")


def _rotations(keys: ConfigKeys) -> tuple[float, float | None]:
    """Base of the rotary embeddings, and Llama 3's factor or None, from either spelling of the keys."""
    newer, older = (keys.take(name, default={}, kind=dict) for name in ("rope_parameters", "rope_scaling"))
    if any(newer.get(name, value) != value for name, value in older.items()):
        keys.problem(f"rope_parameters {newer} and rope_scaling {older} contradict each other; remove one")
    base, said = keys.require("rope_theta", kind=NUMBER), {**newer, **older}
    theta = said.pop("rope_theta", base)
    if keys.given("rope_theta") and theta != base:
        keys.problem(f"rope_theta {base} and rope_parameters {newer} contradict each other; remove one")
    if not isinstance(theta, NUMBER):
        keys.problem(f"rope_parameters: rope_theta {theta!r} is not a number; mend it")
        theta = base
    what = "this family rotates whole heads"
    keys.demand("partial_rotary_factor", 1, default=1, what=what)
    if (part := said.pop("partial_rotary_factor", 1)) != 1:
        keys.problem(f"rope_parameters: partial_rotary_factor {part!r} is not supported: {what}")
    plain = said.pop("type", "default")
    kind = said.pop("rope_type", plain)
    if kind == "default" and not said:
        return float(theta), None
    factor = said.pop("factor", None)
    if kind == "llama3" and said == LLAMA3_ROTATIONS and isinstance(factor, NUMBER):
        return float(theta), float(factor)
    keys.problem(
        f"rotary embeddings of type {kind!r} with factor {factor}, {said} are not supported: only the default ones, and Llama 3's with "
        f"{LLAMA3_ROTATIONS}"
    )
    return float(theta), None


def _decoder_keys(shape: ModelShape) -> dict[str, Any]:
    attention = shape.attention
    if attention is None or not shape.is_gpt:
        raise CannotSay(f"model.layer_pattern {shape.layer_pattern!r}: layers that are not attention and a feed-forward part")
    if shape.normalization != "RMSNorm" or not shape.gated:
        raise CannotSay(f"model.normalization {shape.normalization!r} with gated {shape.gated}: it has RMSNorm and a gated MLP")
    return {
        **write_habits(shape),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_groups,
        "head_dim": attention.head_dim,
        "hidden_act": activation_name(shape),
        "rms_norm_eps": shape.norm_epsilon,
        **_rotation_keys(attention),
    }


def _rotation_keys(attention: AttentionShape) -> dict[str, Any]:
    """Both spellings: transformers 5 reads rope_parameters; transformers 4, vLLM and llama.cpp rope_theta and rope_scaling."""
    if attention.rope_base is None:
        raise CannotSay("model.attention.rope_base null: attention without rotary embeddings")
    scaling = {} if attention.rope_scaling is None else {"rope_type": "llama3", "factor": attention.rope_scaling, **LLAMA3_ROTATIONS}
    parameters = {"rope_type": "default", "rope_theta": attention.rope_base} | scaling
    return {"rope_theta": attention.rope_base, "rope_parameters": parameters} | ({"rope_scaling": scaling} if scaling else {})


# Names.

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")


def suffixed(stems: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """The names of the weights (or biases) of several linears."""
    return tuple(f"{stem}.{kind}" for stem in stems)


_DENSE = (
    Rule("", "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), WORDS),
    Rule("", "output_layer.weight", ("lm_head.weight",), WORDS),
    Rule("", "decoder.final_layernorm.weight", ("model.norm.weight",), WHOLE),
    Rule("attention", "self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), WHOLE),
    Rule("attention", "self_attention.linear_qkv.weight", suffixed(_QKV, "weight"), QKV),
    Rule("attention", "self_attention.linear_qkv.bias", suffixed(_QKV, "bias"), QKV),
    Rule("attention", "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), WHOLE),
    Rule("attention", "self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), WHOLE),
    Rule("attention", "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), WHOLE),
    Rule("attention", "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), WHOLE),
    Rule("mlp", "mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), WHOLE),
    Rule("mlp", "mlp.linear_fc1.weight", suffixed(_GATED, "weight"), HALVES),
    Rule("mlp", "mlp.linear_fc1.bias", suffixed(_GATED, "bias"), HALVES),
    Rule("mlp", "mlp.linear_fc2.weight", ("mlp.down_proj.weight",), WHOLE),
    Rule("mlp", "mlp.linear_fc2.bias", ("mlp.down_proj.bias",), WHOLE),
    Rule("moe", "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), WHOLE),
)


def _expert_rules(block: str, first: tuple[str, str], second: str) -> tuple[Rule, ...]:
    """The router and gated experts inside `block`; first, second: names of an expert's linears."""
    expert = f"{block}.experts.{EXPERT}."
    return (
        Rule("moe", "mlp.router.weight", (f"{block}.gate.weight",), WHOLE),
        Rule("moe", "mlp.experts.experts.linear_fc1.weight", tuple(f"{expert}{name}.weight" for name in first), GATED_EXPERTS),
        Rule("moe", "mlp.experts.experts.linear_fc2.weight", (f"{expert}{second}.weight",), EXPERTS),
    )


_LAYERS = "model.layers.{layer}."
DENSE = NameMap(_LAYERS, _DENSE)
"""Names of a dense decoder."""
QWEN_EXPERTS = NameMap(_LAYERS, _DENSE + _expert_rules("mlp", ("gate_proj", "up_proj"), "down_proj"))
"""Names of Qwen3-MoE."""
MIXTRAL = NameMap(_LAYERS, _DENSE + _expert_rules("block_sparse_moe", ("w1", "w3"), "w2"))
"""Names of Mixtral."""
