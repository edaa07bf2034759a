"""The GPT language model: layers of attention and a dense MLP or a mixture of experts, on megatron-core."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_elastic.models.config import ModelConfigs, part_letters
from megatron_elastic.models.layers import LayerSet, attention_spec, dense_spec, experts_spec, layer_spec
from megatron_elastic.models.recompute import RecomputableTransformerLayer
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import LAYER_KINDS, AttentionShape, ModelShape


def gpt_model(shape: ModelShape, configs: ModelConfigs, parallel: ParallelContext, layers: LayerSet, part: int) -> LanguageModule:
    """Part number `part` of this rank's share of a GPT model, without weights. Its position embeddings are rotary, or there are none."""
    assert shape.attention is not None
    letters = zip(part_letters(shape, parallel, part), configs.of_part(parallel, part), strict=True)
    return GPTModel(
        config=configs.model,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[_layer_spec(letter, config, shape, layers) for letter, config in letters], layer_norm=layers.norm
        ),
        vocab_size=shape.vocab_rows,
        max_sequence_length=shape.max_sequence_length,
        pre_process=parallel.first_part(part),
        post_process=parallel.last_part(part),
        vp_stage=part if parallel.virtual_pipeline > 1 else None,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        pg_collection=parallel.groups,
        **_positions(shape.attention),
    )


def _positions(attention: AttentionShape) -> dict[str, Any]:
    """The first `rope_fraction` of a head's channels rotate, in two halves (as in Llama), not in pairs; or nothing does."""
    if attention.rope_base is None:
        return {"position_embedding_type": "none"}
    rotations = {"position_embedding_type": "rope", "rotary_base": attention.rope_base, "rotary_percent": attention.rope_fraction}
    if attention.rope_scaling is not None:
        rotations |= {"rope_scaling": True, "rope_scaling_factor": attention.rope_scaling}
    return rotations


def _layer_spec(letter: str, config: TransformerConfig, shape: ModelShape, layers: LayerSet) -> ModuleSpec:
    moe = "moe" in LAYER_KINDS[letter]
    submodules = TransformerLayerSubmodules(
        self_attention=attention_spec(shape, layers),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=layers.norm if moe else IdentityOp,
        mlp=experts_spec(layers) if moe else dense_spec(layers),
        mlp_bda=get_bias_dropout_add,
    )
    return layer_spec(RecomputableTransformerLayer, submodules, [config])
