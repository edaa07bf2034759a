"""config.json of public models as they are published, habits and all, and how many parameters their authors count."""

from __future__ import annotations

from typing import Any

_LLAMA_31_8B = {
    **{
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    **{"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072},
    **{"mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8},
    **{"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "rope_scaling": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
    },
    **{"transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256},
}
_MISTRAL_7B_V03 = {
    **{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu"},
    **{
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
    },
    **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0},
    **{"sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0"},
    **{"use_cache": True, "vocab_size": 32768},
}
_QWEN25_7B = {
    **{
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
    },
    **{
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
    },
    **{"model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06},
    **{"rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064},
}
_QWEN3: dict[str, Any] = {
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128},
    **{"hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960, "num_attention_heads": 32, "rms_norm_eps": 1e-06},
    **{
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
    },
    **{"use_cache": True, "use_sliding_window": False, "vocab_size": 151936},
}
_QWEN3_8B = _QWEN3 | {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288},
    **{"max_window_layers": 36, "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 1000000},
}
_QWEN3_30B_A3B = _QWEN3 | {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144},
    **{"decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True},
    **{"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False},
    **{"rope_theta": 1000000.0, "router_aux_loss_coef": 0.001},
}
_MIXTRAL_8X7B = {
    **{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu"},
    **{
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
    },
    **{"num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8},
    **{"output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None},
    **{
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
}
_SMOLLM2_135M = {
    **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    **{
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
    },
    **{"max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3},
    **{"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000},
    **{"tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "vocab_size": 49152},
}
_NEMOTRON: dict[str, Any] = {
    **{"architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "chunk_size": 128},
    "auto_map": {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
    **{"conv_kernel": 4, "head_dim": 128, "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05},
    **{"mamba_hidden_act": "silu", "mamba_proj_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h"},
    **{"n_groups": 8, "num_logits_to_keep": 1, "pad_token_id": 0, "rescale_prenorm_residual": True, "residual_in_fp32": False},
    **{"sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_max": 0.1},
    **{"time_step_min": 0.001, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True},
    **{"use_mamba_kernels": True, "vocab_size": 131072},
}
_NANO_V2_12B = _NEMOTRON | {
    **{"eos_token_id": 12, "hidden_size": 5120, "intermediate_size": 20480, "mamba_head_dim": 80, "mamba_num_heads": 128},
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    **{"max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 62, "num_key_value_heads": 8},
    **{"num_query_groups": 8, "rms_norm_eps": 1e-05, "time_step_limit": [0.0, float("inf")], "time_step_rank": 256},
    **{"transformers_version": "4.51.3"},
}
_NANO_3_30B = _NEMOTRON | {
    **{"eos_token_id": 2, "expand": 2, "hidden_size": 2688, "intermediate_size": 1856, "mamba_head_dim": 64, "mamba_num_heads": 64},
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    **{"mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "moe_intermediate_size": 1856},
    **{"moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05},
    **{"norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2},
    **{"partial_rotary_factor": 1.0, "rope_theta": 10000, "routed_scaling_factor": 2.5, "topk_group": 1, "transformers_version": "4.55.4"},
}

PUBLIC: dict[str, tuple[dict[str, Any], int]] = {
    "meta-llama/Llama-3.1-8B": (_LLAMA_31_8B, 8_030_261_248),
    "mistralai/Mistral-7B-v0.3": (_MISTRAL_7B_V03, 7_248_023_552),
    "Qwen/Qwen2.5-7B": (_QWEN25_7B, 7_615_616_512),
    "Qwen/Qwen3-8B": (_QWEN3_8B, 8_190_735_360),
    "Qwen/Qwen3-30B-A3B": (_QWEN3_30B_A3B, 30_532_122_624),
    "mistralai/Mixtral-8x7B-v0.1": (_MIXTRAL_8X7B, 46_702_792_704),
    "HuggingFaceTB/SmolLM2-135M": (_SMOLLM2_135M, 134_515_008),
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": (_NANO_V2_12B, 12_310_001_152),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B": (_NANO_3_30B, 31_577_937_344),
}
"""Name on the hub -> its config.json and its number of parameters."""
