"""megatron-core's configs of a model: one for the model, and one for each layer whose sizes are its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_elastic.errors import ConfigError, UnsupportedError, raise_all
from megatron_elastic.fit import model_problems, release_problems
from megatron_elastic.models.recompute import Recompute
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape

_ACTIVATIONS = {"squared_relu": squared_relu, "silu": F.silu, "gelu": F.gelu}
"""gelu is exact (erf), which transformers calls "gelu"; its "gelu_new" and "gelu_pytorch_tanh" are another function."""


@dataclass(frozen=True, slots=True)
class ModelConfigs:
    """The configs a model is built with.

    model: of the embedding, the output layer, the final norm and the training loop.
    layers: of each global layer, in order; where the sizes are the same on all layers, every one is `model` itself.
    """

    model: TransformerConfig
    layers: tuple[TransformerConfig, ...]

    def of_part(self, parallel: ParallelContext, part: int) -> tuple[TransformerConfig, ...]:
        """The configs of the layers of part number `part` of this rank's model."""
        return self.layers[_part(len(self.layers), parallel, part)]


def part_letters(shape: ModelShape, parallel: ParallelContext, part: int) -> str:
    """The letters of the layers of part number `part` of this rank's model."""
    return shape.layer_pattern[_part(shape.num_layers, parallel, part)]


def _part(layers: int, parallel: ParallelContext, part: int) -> slice:
    """Parts go round the pipeline: all ranks' first parts, then all second ones."""
    count, place = layers // (parallel.pipeline * parallel.virtual_pipeline), part * parallel.pipeline + parallel.pipeline_rank
    return slice(place * count, (place + 1) * count)


def model_configs(
    shape: ModelShape,
    parallel: ParallelContext,
    *,
    params_dtype: torch.dtype = torch.float32,
    expert_bias_rate: float = 0.0,
    recompute: Recompute = Recompute.NONE,
) -> ModelConfigs:
    """megatron-core's configs of `shape` on a layout: no dropout, no fused kernels, token-mean loss.

    expert_bias_rate: how far megatron-core moves the experts' selection bias a step; 0 freezes it.
    recompute: the selective one is megatron-core's; the full one is ours (`models/recompute.py`) and sets nothing here.
    Raises ConfigError listing everything megatron-core cannot say and every size the layout does not divide, UnsupportedError for
    what it computes wrongly.
    """
    raise_all(ConfigError, shape.problems() or model_problems(shape, parallel.sizes), "model")
    raise_all(UnsupportedError, release_problems(shape, parallel.sizes), "model")
    built: dict[ModelShape, TransformerConfig] = {}
    for layer in range(shape.num_layers):
        own = shape.at(layer)
        if own not in built:
            built[own] = _transformer_config(own, parallel, params_dtype, expert_bias_rate, recompute)
    layers = tuple(built[shape.at(layer)] for layer in range(shape.num_layers))
    return ModelConfigs(_model_config(shape, layers[0], expert_bias_rate), layers)


def _model_config(shape: ModelShape, first: TransformerConfig, expert_bias_rate: float) -> TransformerConfig:
    if shape.moe is None or isinstance(shape.moe.experts, int) or not shape.moe.expert_bias:
        return first
    if expert_bias_rate:
        raise UnsupportedError(
            f"model.moe.experts {list(shape.moe.experts)}: megatron-core moves the expert biases of all layers in one tensor, which layers with "
            "different numbers of experts do not fit; freeze them (expert_bias_rate 0)"
        )
    # The update stacks all layers' biases even to move them by nothing; the routers' own configs keep the bias in the choice.
    return replace(first, moe_router_enable_expert_bias=False)


def _transformer_config(
    shape: ModelShape, parallel: ParallelContext, params_dtype: torch.dtype, expert_bias_rate: float, recompute: Recompute
) -> TransformerConfig:
    """The config of a homogeneous shape."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        normalization=shape.normalization,
        layernorm_epsilon=shape.norm_epsilon,
        init_method_std=shape.init_std,
        add_bias_linear=shape.linear_bias,
        activation_func=_ACTIVATIONS[shape.activation],
        gated_linear_unit=shape.gated,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=params_dtype,
        bf16=params_dtype is torch.bfloat16,
        pipeline_dtype=params_dtype,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        is_hybrid_model=not shape.is_gpt,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        context_parallel_size=parallel.context,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        # With two stages a batch of sends and receives would mistake what goes forward for what comes back: both are with the same rank.
        overlap_p2p_comm=parallel.virtual_pipeline > 1,
        batch_p2p_comm=parallel.virtual_pipeline == 1,
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="selective" if recompute is Recompute.SELECTIVE else None,
        recompute_modules=["core_attn"],
        hetereogenous_dist_checkpoint=True,  # megatron-core's spelling: each layer of a GPT under its own name, as in a hybrid model
        transformer_impl="local",
        **_attention_fields(shape, parallel),
        **_moe_fields(shape, parallel, expert_bias_rate),
        **_mamba_fields(shape),
    )


def _attention_fields(shape: ModelShape, parallel: ParallelContext) -> dict[str, Any]:
    ffn = shape.mlp.ffn if shape.mlp else shape.hidden_size  # megatron-core asks for both even where no layer has them
    if shape.attention is None or not shape.has("attention"):
        return {"num_attention_heads": parallel.tensor, "kv_channels": 1, "ffn_hidden_size": ffn}
    return {
        "ffn_hidden_size": ffn,
        "num_attention_heads": shape.attention.heads,
        "num_query_groups": shape.attention.kv_groups,
        "kv_channels": shape.attention.head_dim,
        "add_qkv_bias": shape.attention.qkv_bias,
        "qk_layernorm": shape.attention.qk_norm,
    }


def _moe_fields(shape: ModelShape, parallel: ParallelContext, expert_bias_rate: float) -> dict[str, Any]:
    moe = shape.moe
    if moe is None or not shape.has("moe"):
        return {}
    return {
        "num_moe_experts": moe.experts,
        "moe_ffn_hidden_size": moe.ffn,
        "moe_shared_expert_intermediate_size": moe.shared_ffn,
        "moe_router_topk": moe.topk,
        "moe_router_topk_scaling_factor": moe.scaling_factor,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.pre_softmax,
        "moe_router_num_groups": moe.routing_groups,
        "moe_router_group_topk": moe.groups_per_token,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": expert_bias_rate,
        "moe_router_load_balancing_type": "none" if moe.aux_loss is None else "aux_loss",
        "moe_aux_loss_coeff": moe.aux_loss or 0.0,
        "moe_z_loss_coeff": moe.z_loss,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": parallel.dispatcher,
        "moe_grouped_gemm": False,
    }


def _mamba_fields(shape: ModelShape) -> dict[str, Any]:
    if shape.mamba is None:
        return {}
    return {
        "mamba_num_heads": shape.mamba.heads,
        "mamba_head_dim": shape.mamba.head_dim,
        "mamba_num_groups": shape.mamba.groups,
        "mamba_state_dim": shape.mamba.state,
    }
