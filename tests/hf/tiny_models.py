"""Tiny transformers models of every family: all sizes pairwise different, hidden other than heads x head_dim, weights moved off their start."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from megatron_elastic.models.weights import generator_of
from megatron_elastic.testing.tiny import random_tensor

LENGTH = 22
"""Tokens of a text; within one chunk of the scan, beyond which transformers' plain-PyTorch NemotronH is wrong."""
LONG = 3000
"""Tokens after which scaled rotations differ much from those that are not."""

_DECODER: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 6},
    # An epsilon and a base no default has: another one would show.
    **{"num_key_value_heads": 3, "head_dim": 10, "max_position_embeddings": 512, "rms_norm_eps": 3e-3, "rope_theta": 500.0},
}
_QWEN_EXPERTS = _DECODER | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
_LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_HYBRID: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    **{"max_position_embeddings": 512, "layer_norm_epsilon": 3e-3, "use_mamba_kernels": False},
    **{"mamba_num_heads": 16, "mamba_head_dim": 7, "n_groups": 4, "ssm_state_size": 9, "conv_kernel": 5, "chunk_size": 32},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "moe_shared_expert_intermediate_size": 34},
    **{"routed_scaling_factor": 2.5},
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _DECODER),
    "llama, biases, tied": ("Llama", _DECODER | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    # One wavelength above 8192 tokens, one between 2048 and that, the others below.
    "llama, scaled": ("Llama", _DECODER | {"rope_theta": 2e4, "rope_scaling": _LLAMA_3, "max_position_embeddings": 16384}),
    "llama, squared relu": ("Llama", _DECODER | {"hidden_act": "relu2", "num_key_value_heads": 6}),
    "mistral": ("Mistral", _DECODER | {"hidden_size": 40, "sliding_window": None}),
    "qwen2, tied": ("Qwen2", _DECODER | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _DECODER | {"hidden_size": 40}),
    "qwen3_moe": ("Qwen3Moe", _QWEN_EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe, every second": ("Qwen3Moe", _QWEN_EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": False}),
    "qwen3_moe, one a token": ("Qwen3Moe", _QWEN_EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", _DECODER | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "nemotron_h, dense": ("NemotronH", _HYBRID | {"layers_block_type": [_KINDS[letter] for letter in "M*-M-"]}),
    "nemotron_h": ("NemotronH", _HYBRID | {"layers_block_type": [_KINDS[letter] for letter in "ME*-ME"]}),
    "nemotron_h, grouped": (
        "NemotronH",
        _HYBRID | {"layers_block_type": [_KINDS[letter] for letter in "EM*"], "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    ),
    "nemotron_h, one a token": (
        "NemotronH",
        _HYBRID | {"layers_block_type": [_KINDS[letter] for letter in "M*E"], "num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
}
"""Name -> transformers' class and the keys of its config."""


def tiny_model(name: str) -> Any:
    """transformers' model, in evaluation."""
    kind, keys = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**keys)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for own, tensor in model.state_dict().items():
            plain = own.replace("norm_f.", "norm.")  # the names `random_tensor` knows
            tensor.copy_(random_tensor(plain, tuple(tensor.shape), generator_of(0, own)))
    return model


def tokens_of(name: str) -> torch.Tensor:
    """A text [batch, length]."""
    length, batch = (LONG, 1) if "scaled" in name else (LENGTH, 2)
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(3))
