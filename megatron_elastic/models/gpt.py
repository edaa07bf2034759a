"""The GPT language model: layers of attention and a dense MLP or a mixture of experts, on megatron-core."""

from __future__ import annotations

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
from megatron_elastic.shape import LAYER_KINDS, ModelShape


def gpt_model(shape: ModelShape, configs: ModelConfigs, parallel: ParallelContext, layers: LayerSet, part: int) -> LanguageModule:
    """Part number `part` of this rank's share of a GPT model, without weights. Its position embeddings are rotary, or there are none."""
    assert shape.attention is not None
    base = shape.attention.rope_base
    letters = zip(part_letters(shape, parallel, part), configs.of_part(parallel, part), strict=True)
    rotary = {"position_embedding_type": "none"} if base is None else _rotary(base, shape.attention.rope_fraction)
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
        **rotary,
    )


def _rotary(base: float, fraction: float) -> dict[str, object]:
    """The first `fraction` of a head's channels rotate, in two halves (as in Llama), not in pairs."""
    return {"position_embedding_type": "rope", "rotary_base": base, "rotary_percent": fraction}


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
