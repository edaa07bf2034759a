"""The one entry to models: from a ModelShape to this rank's part of it, with weights."""

from __future__ import annotations

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_elastic.models.config import model_configs
from megatron_elastic.models.gpt import gpt_model
from megatron_elastic.models.hybrid import hybrid_model
from megatron_elastic.models.layers import Layers, layer_set
from megatron_elastic.models.recompute import RecomputableLayer, Recompute
from megatron_elastic.models.weights import initialize_weights
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape


def build_model(
    shape: ModelShape,
    parallel: ParallelContext,
    *,
    seed: int = 1234,
    params_dtype: torch.dtype = torch.float32,
    expert_bias_rate: float = 0.0,
    layers: Layers | str = Layers.AUTO,
    part: int = 0,
    recompute: Recompute | str = Recompute.NONE,
) -> LanguageModule:
    """This rank's share of the model of `shape`, on its device: a GPTModel, or megatron-core's hybrid model, by the letters of its pattern.

    part: which of the `parallel.virtual_pipeline` parts of this rank's share.
    seed: of the weights; the same seed gives the same full model on every layout.
    expert_bias_rate: how far megatron-core moves the experts' selection bias a step; 0 freezes it.
    layers: whose layers it is made of; the parameters and their names are the same.
    recompute: which activations are thrown away and computed again in the backward.
    Raises ConfigError or UnsupportedError when megatron-core cannot say the shape or the layout does not fit it, and when Transformer
    Engine is asked for where it cannot be imported.
    """
    again = Recompute(recompute)
    configs = model_configs(shape, parallel, params_dtype=params_dtype, expert_bias_rate=expert_bias_rate, recompute=again)
    model = (gpt_model if shape.is_gpt else hybrid_model)(
        shape, configs, parallel, layer_set(shape, Layers(layers), params_dtype, parallel.context), part
    )
    for module in model.modules():
        if isinstance(module, RecomputableLayer):
            module.recompute = again is Recompute.FULL
    initialize_weights(model, seed)
    return model.to(parallel.device)
