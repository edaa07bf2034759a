"""The hybrid language model (Mamba-2, attention, dense MLP and mixture-of-experts layers) on megatron-core."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_elastic.models.config import ModelConfigs, part_letters
from megatron_elastic.models.context import WholeRowContextParallel
from megatron_elastic.models.layers import LayerSet, attention_spec, dense_spec, experts_spec, layer_spec
from megatron_elastic.models.recompute import RecomputableMambaLayer, RecomputableMLPLayer, RecomputableTransformerLayer
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import hybrid_classes, parts_pattern
from megatron_elastic.shape import ModelShape


def hybrid_model(shape: ModelShape, configs: ModelConfigs, parallel: ParallelContext, layers: LayerSet, part: int) -> LanguageModule:
    """Part number `part` of this rank's share of a hybrid model, without weights: MambaModel on megatron-core 0.16.1, HybridModel on 0.19."""
    classes = hybrid_classes()
    model = classes.model(
        config=configs.model,
        vocab_size=shape.vocab_rows,
        max_sequence_length=shape.max_sequence_length,
        pre_process=parallel.first_part(part),
        post_process=parallel.last_part(part),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="none",
        pg_collection=parallel.groups,
        **{
            classes.spec_keyword: _stack_spec(shape, configs, parallel, layers, part),
            classes.pattern_keyword: parts_pattern(shape.layer_pattern, parallel.pipeline * parallel.virtual_pipeline),
            **({"vp_stage": part} if parallel.virtual_pipeline > 1 else {}),  # 0.16.1 does not know the word
        },
    )
    if parallel.last_part(part):
        # Both releases hard-code Transformer Engine's class here, so the stack is built without a final norm and gets ours.
        model.decoder.post_layer_norm = True
        model.decoder.final_norm = layers.norm(configs.model, shape.hidden_size, shape.norm_epsilon)
    _set_mixers(model, shape)
    return model


def _set_mixers(model: torch.nn.Module, shape: ModelShape) -> None:
    """megatron-core fixes the scan's chunk and the gated norm's epsilon in the mixer's own arguments, and how rows are cut over ranks."""
    for module in model.modules():
        if isinstance(module, MambaMixer):
            assert shape.mamba is not None
            module.chunk_size = shape.mamba.chunk
            module.norm.eps = shape.norm_epsilon
            module.cp.__class__ = WholeRowContextParallel


def _stack_spec(shape: ModelShape, configs: ModelConfigs, parallel: ParallelContext, layers: LayerSet, part: int) -> ModuleSpec:
    """The spec of the layer stack, one entry for each kind of layer."""
    mine, pattern = configs.of_part(parallel, part), part_letters(shape, parallel, part)

    def own(letter: str) -> list[TransformerConfig]:
        return [config for config, other in zip(mine, pattern, strict=True) if other == letter]

    mixer = ModuleSpec(
        module=MambaMixer,
        params={"d_conv": shape.mamba.conv} if shape.mamba else {},
        submodules=MambaMixerSubmodules(in_proj=layers.norm_linear, out_proj=layers.row),
    )
    mamba = MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add)
    attention = TransformerLayerSubmodules(self_attention=attention_spec(shape, layers), self_attn_bda=get_bias_dropout_add)
    mlp = TransformerLayerSubmodules(mlp=dense_spec(layers), mlp_bda=get_bias_dropout_add)
    moe = TransformerLayerSubmodules(pre_mlp_layernorm=layers.norm, mlp=experts_spec(layers), mlp_bda=get_bias_dropout_add)
    classes = hybrid_classes()
    kinds: dict[str, Any] = {
        "mamba_layer": layer_spec(RecomputableMambaLayer, mamba, own("M")),
        "attention_layer": layer_spec(RecomputableTransformerLayer, attention, own("*")),
        "mlp_layer": layer_spec(RecomputableMLPLayer, mlp, own("-")),
        "moe_layer": layer_spec(RecomputableTransformerLayer, moe, own("E")),
    }
    return ModuleSpec(module=classes.stack, params={"post_layer_norm": False}, submodules=classes.submodules(**kinds))
