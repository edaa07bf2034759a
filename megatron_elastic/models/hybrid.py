"""Build the hybrid language model (Mamba-2, attention, dense MLP and mixture-of-experts layers) from a ModelShape on megatron-core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_elastic.errors import ConfigError, UnsupportedError, raise_all
from megatron_elastic.models.local_layers import LayerNormColumnParallelLinear, LocalDotProductAttention, LocalRMSNorm
from megatron_elastic.models.weights import initialize_weights
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import (
    Generation,
    hybrid_classes,
    megatron_generation,
    mlp_spec,
    moe_spec,
    stage_pattern,
)
from megatron_elastic.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LayerSet:
    """The classes a model is made of, all with Transformer Engine's parameter names.

    norm: RMS norm of the residual stream. norm_linear: norm and column-parallel linear. column, row: the parallel linears.
    attention: core attention.
    """

    norm: type[Any]
    norm_linear: type[Any]
    column: type[Any]
    row: type[Any]
    attention: type[Any]


def layer_set() -> LayerSet:
    """The layers of this platform. The one place that chooses them."""
    return LayerSet(LocalRMSNorm, LayerNormColumnParallelLinear, ColumnParallelLinear, RowParallelLinear, LocalDotProductAttention)


def build_hybrid(
    shape: ModelShape,
    parallel: ParallelContext,
    *,
    seed: int = 1234,
    params_dtype: torch.dtype = torch.float32,
    expert_bias_rate: float = 0.0,
) -> LanguageModule:
    """This rank's part of the model of `shape`: MambaModel on megatron-core 0.16.1, HybridModel on 0.19.

    seed: of the weights; the same seed gives the same full model on every layout.
    expert_bias_rate: how far megatron-core moves the experts' selection bias a step; 0 freezes it.
    Raises ConfigError or UnsupportedError when the layout does not fit the shape.
    """
    classes = hybrid_classes()
    config = transformer_config(shape, parallel, params_dtype=params_dtype, expert_bias_rate=expert_bias_rate)
    model = classes.model(
        config=config,
        vocab_size=shape.vocab_rows,
        max_sequence_length=shape.max_sequence_length,
        pre_process=parallel.is_first_stage,
        post_process=parallel.is_last_stage,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="none",
        pg_collection=parallel.groups,
        **{
            classes.spec_keyword: hybrid_spec(shape, layer_set()),
            classes.pattern_keyword: stage_pattern(shape.layer_pattern, parallel.pipeline),
        },
    )
    if parallel.is_last_stage:
        # Both releases hard-code Transformer Engine's class here, so the stack is built without a final norm and gets ours.
        model.decoder.post_layer_norm = True
        model.decoder.final_norm = layer_set().norm(config, shape.hidden_size, shape.norm_epsilon)
    _set_mixers(model, shape)
    initialize_weights(model, seed)
    return model


def _set_mixers(model: torch.nn.Module, shape: ModelShape) -> None:
    """megatron-core fixes the scan's chunk and the gated norm's epsilon in the mixer's own arguments."""
    for module in model.modules():
        if isinstance(module, MambaMixer):
            assert shape.mamba is not None
            module.chunk_size = shape.mamba.chunk
            module.norm.eps = shape.norm_epsilon


def hybrid_spec(shape: ModelShape, layers: LayerSet) -> ModuleSpec:
    """The spec of the layer stack, one entry for each kind of layer."""
    classes = hybrid_classes()
    mlp = MLPSubmodules(linear_fc1=layers.norm_linear, linear_fc2=layers.row)
    experts = MLPSubmodules(linear_fc1=layers.column, linear_fc2=layers.row)
    mixer = ModuleSpec(
        module=MambaMixer,
        params={"d_conv": shape.mamba.conv} if shape.mamba else {},
        submodules=MambaMixerSubmodules(in_proj=layers.norm_linear, out_proj=layers.row),
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(linear_qkv=layers.norm_linear, core_attention=layers.attention, linear_proj=layers.row),
    )
    stack = classes.submodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add)),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(self_attention=attention, self_attn_bda=get_bias_dropout_add),
        ),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=TransformerLayerSubmodules(mlp=mlp_spec(mlp), mlp_bda=get_bias_dropout_add)),
        moe_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(pre_mlp_layernorm=layers.norm, mlp=moe_spec(experts), mlp_bda=get_bias_dropout_add),
        ),
    )
    return ModuleSpec(module=classes.stack, params={"post_layer_norm": False}, submodules=stack)


def transformer_config(
    shape: ModelShape,
    parallel: ParallelContext,
    *,
    params_dtype: torch.dtype = torch.float32,
    expert_bias_rate: float = 0.0,
) -> TransformerConfig:
    """megatron-core's config of `shape` on a layout: no dropout, no fused kernels, token-mean loss, sequence parallelism with TP.

    Raises ConfigError listing every size the layout does not divide, UnsupportedError for a layout megatron-core computes wrongly.
    """
    raise_all(ConfigError, shape.problems() + _layout_problems(shape, parallel), "model")
    _refuse_unsummed_experts(shape, parallel)
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        init_method_std=shape.init_std,
        add_bias_linear=shape.linear_bias,
        activation_func=squared_relu,
        gated_linear_unit=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        is_hybrid_model=True,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.tensor > 1,
        variable_seq_lengths=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        transformer_impl="local",
        **_attention_fields(shape, parallel),
        **_moe_fields(shape, expert_bias_rate),
        **_mamba_fields(shape),
    )


def _attention_fields(shape: ModelShape, parallel: ParallelContext) -> dict[str, Any]:
    ffn = shape.mlp.ffn if shape.mlp else shape.hidden_size  # megatron-core asks for both even where no layer has them
    if shape.attention is None:
        return {"num_attention_heads": parallel.tensor, "kv_channels": 1, "ffn_hidden_size": ffn}
    return {
        "ffn_hidden_size": ffn,
        "num_attention_heads": shape.attention.heads,
        "num_query_groups": shape.attention.kv_groups,
        "kv_channels": shape.attention.head_dim,
        "add_qkv_bias": shape.attention.qkv_bias,
    }


def _moe_fields(shape: ModelShape, expert_bias_rate: float) -> dict[str, Any]:
    if shape.moe is None or not shape.count("E"):
        return {}
    return {
        "num_moe_experts": shape.moe.experts,
        "moe_ffn_hidden_size": shape.moe.ffn,
        "moe_shared_expert_intermediate_size": shape.moe.shared_ffn,
        "moe_router_topk": shape.moe.topk,
        "moe_router_topk_scaling_factor": shape.moe.scaling_factor,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": expert_bias_rate,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
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


def _layout_problems(shape: ModelShape, parallel: ParallelContext) -> list[str]:
    """Sizes the layout does not divide, one line each."""
    sharded: dict[str, int] = {"model.padded_vocab_size (or vocab_size)": shape.vocab_rows}
    if shape.attention and shape.count("*"):
        sharded["model.attention.heads"] = shape.attention.heads
    if shape.mlp and shape.count("-"):
        sharded["model.mlp.ffn"] = shape.mlp.ffn
    if shape.mamba and shape.count("M"):
        sharded["model.mamba.groups"] = shape.mamba.groups
    if shape.moe and shape.count("E") and shape.moe.shared_ffn:
        sharded["model.moe.shared_ffn"] = shape.moe.shared_ffn
    found = [f"parallel.tensor {parallel.tensor} does not divide {key} {size}" for key, size in sharded.items() if size % parallel.tensor]
    if shape.attention and shape.count("*"):
        few, many = sorted((shape.attention.kv_groups, parallel.tensor))
        if many % few:
            found.append(
                f"parallel.tensor {parallel.tensor} and model.attention.kv_groups {shape.attention.kv_groups}: one must divide the other"
            )
    if shape.moe and shape.count("E"):
        if shape.moe.experts % parallel.expert:
            found.append(f"parallel.expert {parallel.expert} does not divide model.moe.experts {shape.moe.experts}")
        if shape.moe.ffn % parallel.expert_tensor:
            found.append(f"parallel.expert_tensor {parallel.expert_tensor} does not divide model.moe.ffn {shape.moe.ffn}")
    if shape.num_layers % parallel.pipeline:
        # megatron-core 0.16.1 would drop the remainder without a word.
        found.append(f"parallel.pipeline {parallel.pipeline} does not divide the {shape.num_layers} layers of model.layer_pattern")
    return found


def _refuse_unsummed_experts(shape: ModelShape, parallel: ParallelContext) -> None:
    if not shape.count("E") or megatron_generation() is not Generation.V0_16:
        return
    if parallel.expert == 1 and parallel.expert_tensor != parallel.tensor:
        raise UnsupportedError(
            f"parallel.expert 1 with expert_tensor {parallel.expert_tensor} and tensor {parallel.tensor}: megatron-core 0.16.1 never sums "
            f"these experts' gradients; set expert_tensor to {parallel.tensor} or raise parallel.expert"
        )
