"""transformers' GPT models as references: their configs from a ModelShape, and our full tensors under their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_elastic.shape import LAYER_KINDS, ModelShape


def reference_model(kind: str, shape: ModelShape, **special: Any) -> Any:
    """transformers' `kind`ForCausalLM of `shape`, float32, in eval mode. special: config fields that only this kind has."""
    transformers = pytest.importorskip("transformers")
    attention = shape.attention
    assert attention is not None
    common = {
        "vocab_size": shape.vocab_rows,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_groups,
        "head_dim": attention.head_dim,
        "intermediate_size": shape.mlp.ffn if shape.mlp else 1,
        "hidden_act": shape.activation,
        "max_position_embeddings": 64,
        "tie_word_embeddings": shape.tied_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rope_base,
            "partial_rotary_factor": attention.rope_fraction,
        },
        **{key: shape.norm_epsilon for key in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon")},
    }
    config = getattr(transformers, f"{kind}Config")(**common | special)
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()


def reference_weights(full: dict[str, Tensor], shape: ModelShape, mlp_names: dict[str, str]) -> dict[str, Tensor]:
    """Our full tensors under transformers' names. mlp_names: how this kind spells a dense MLP's linears that are not gate, up and down."""
    out = {
        "model.embed_tokens.weight": full["embedding.word_embeddings.weight"],
        **_renamed(full, "decoder.final_layernorm.", "model.norm."),
    }
    out["lm_head.weight"] = out["model.embed_tokens.weight"] if shape.tied_embeddings else full["output_layer.weight"]
    for n, letter in enumerate(shape.layer_pattern):
        layer = _renamed(full, f"decoder.layers.{n}.", "")
        parts = _attention(layer, shape)
        if "moe" in LAYER_KINDS[letter]:
            parts |= _renamed(layer, "pre_mlp_layernorm.", "post_attention_layernorm.") | _experts(layer, shape.at(n))
        else:
            parts |= _renamed(layer, "mlp.linear_fc1.layer_norm_", "post_attention_layernorm.")
            parts |= {mlp_names.get(name, name): tensor for name, tensor in _mlp(layer, "mlp.", "mlp.", shape).items()}
        out |= {f"model.layers.{n}.{name}": tensor for name, tensor in parts.items()}
    return out


def _renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {new + name.removeprefix(old): tensor for name, tensor in tensors.items() if name.startswith(old)}


def _attention(layer: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    attention = shape.attention
    assert attention is not None and isinstance(attention.heads, int)
    out = _renamed(layer, "self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    for kind in ("weight", "bias"):
        if f"self_attention.linear_qkv.{kind}" in layer:
            # Each group holds its query heads, then its key head, then its value head.
            groups = (attention.kv_groups, attention.heads // attention.kv_groups + 2, attention.head_dim)
            fused = layer[f"self_attention.linear_qkv.{kind}"].unflatten(0, groups)
            out[f"self_attn.q_proj.{kind}"] = fused[:, :-2].flatten(0, 2)
            out[f"self_attn.k_proj.{kind}"] = fused[:, -2].flatten(0, 1)
            out[f"self_attn.v_proj.{kind}"] = fused[:, -1].flatten(0, 1)
    out |= _renamed(layer, "self_attention.linear_proj.", "self_attn.o_proj.")
    return (
        out
        | _renamed(layer, "self_attention.q_layernorm.", "self_attn.q_norm.")
        | _renamed(layer, "self_attention.k_layernorm.", "self_attn.k_norm.")
    )


def _mlp(layer: dict[str, Tensor], mine: str, theirs: str, shape: ModelShape) -> dict[str, Tensor]:
    out = _renamed(layer, f"{mine}linear_fc2.", f"{theirs}down_proj.")
    for kind in ("weight", "bias"):
        if f"{mine}linear_fc1.{kind}" in layer:
            first = layer[f"{mine}linear_fc1.{kind}"]
            halves = zip(("gate_proj", "up_proj"), first.chunk(2), strict=True) if shape.gated else [("up_proj", first)]
            out |= {f"{theirs}{name}.{kind}": half for name, half in halves}
    return out


def _experts(layer: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    assert shape.moe is not None and isinstance(shape.moe.experts, int)
    out = {"mlp.gate.weight": layer["mlp.router.weight"]}
    for mine, theirs in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        experts = [layer[f"mlp.experts.local_experts.{k}.{mine}.weight"] for k in range(shape.moe.experts)]
        out[f"mlp.experts.{theirs}"] = torch.stack(experts)
    if shape.moe.expert_bias:
        out["mlp.gate.e_score_correction_bias"] = layer["mlp.router.expert_bias"]
    return out | _mlp(layer, "mlp.shared_experts.", "mlp.shared_experts.", shape)
