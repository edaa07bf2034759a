"""NVIDIA Model-Optimizer's Minitron scores of a Llama model, by its own hooks and estimators. Runs in the environment of `environment.py`.

Usage: score_directory.py MODEL ROWS OUT
  MODEL  a Hugging Face directory of a Llama model without biases: config.json and model.safetensors
  ROWS   a safetensors file with `tokens`, int64 [rows, length]; every row is a sample
  OUT    the safetensors file to write: fp32, higher is more important, layers count from 0
         hidden [hidden], ffn/LAYER [ffn], heads/LAYER [query heads], layers [layers]
         metadata: `loss`, mean cross-entropy of the first row, which tells whether the model is the one that was meant; `modelopt`, the release

What Model-Optimizer is shown is a plain megatron-core GPTModel of local layers, built and loaded here. The statistics are those of release 0.40.0,
modelopt/torch/nas/plugins/megatron.py, before it divides them by their largest:
  ffn     input of linear_fc2: mean over a row of abs(a), squared, summed over the rows, root
  heads   the same of the input of linear_proj, then the L2 norm over the channels of each query head. It orders heads inside their query group
          only, by these scores; which groups to drop it would decide by others, which are not read here
  hidden  the same of the output of input_layernorm and of pre_mlp_layernorm, summed over all layers; the final norm is not among them
  layers  1 - cosine of input and output, mean over tokens, summed over the rows
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import modelopt.torch.nas as nas
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel  # noqa: TID251 - the package is not here
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from modelopt.torch.nas.modules import _DynamicLayerNorm
from modelopt.torch.nas.registry import DMRegistry
from modelopt.torch.nas.traced_hp import TracedHp
from safetensors.torch import load_file, save_file
from torch import Tensor

HEARTBEAT_SECONDS = 15.0


@DMRegistry.register({torch.nn.RMSNorm: "nn.RMSNorm"})
class DynamicRMSNorm(_DynamicLayerNorm):
    """torch's RMSNorm, which Model-Optimizer does not know, as it knows Transformer Engine's."""

    def _setup(self, *, num_features: TracedHp) -> None:
        self._register_hparam("num_features", num_features)
        self._register_dynamic_attribute("weight", self._cut_to_active_features)
        self._register_dynamic_attribute("normalized_shape", self._get_normalized_shape)


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"modelopt: {text}", file=sys.stderr, flush=True)


def start_megatron() -> None:
    """One process on the CPU, which is every group of megatron-core."""
    # megatron-core takes this for a device, in buffers of attention and of rotary embeddings.
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    # The local attention forks the random state of a GPU for its dropout; there is neither.
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracker.fork = contextlib.nullcontext


def build(config: Mapping[str, Any]) -> GPTModel:
    """The model of a Hugging Face config, without weights.

    Raises ValueError naming a key whose value this script does not build.
    """
    rotation = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], "rope_type": "default"}
    told = {key: config[key] for key in ("attention_bias", "mlp_bias", "hidden_act")} | {"rope_type": rotation["rope_type"]}
    for key, known in {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_type": "default"}.items():
        if told[key] != known:
            raise ValueError(f"config.json: {key} is {told[key]!r}, and only {known!r} is built here")
    heads = config["num_attention_heads"]
    own = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    return GPTModel(
        config=own,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=config["vocab_size"],
        max_sequence_length=config["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=rotation["rope_theta"],
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
    ).eval()


def converted(weights: Mapping[str, Tensor], config: TransformerConfig, *, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """(megatron-core's name, tensor) of every weight, from those under their Hugging Face names. linear_qkv is [q..., k, v] group by group."""
    groups = config.num_query_groups
    assert groups is not None
    yield "embedding.word_embeddings.weight", weights["model.embed_tokens.weight"]
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (weights[f"{theirs}self_attn.{name}_proj.weight"] for name in "qkv")
        by_group = [part.reshape(groups, -1, config.hidden_size) for part in (q, k, v)]
        yield f"{ours}self_attention.linear_qkv.weight", torch.cat(by_group, dim=1).reshape(-1, config.hidden_size)
        yield f"{ours}self_attention.linear_proj.weight", weights[f"{theirs}self_attn.o_proj.weight"]
        yield f"{ours}mlp.linear_fc1.weight", torch.cat([weights[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        yield f"{ours}mlp.linear_fc2.weight", weights[f"{theirs}mlp.down_proj.weight"]
        yield f"{ours}input_layernorm.weight", weights[f"{theirs}input_layernorm.weight"]
        yield f"{ours}pre_mlp_layernorm.weight", weights[f"{theirs}post_attention_layernorm.weight"]
    yield "decoder.final_layernorm.weight", weights["model.norm.weight"]
    if not tied:
        yield "output_layer.weight", weights["lm_head.weight"]


def load(folder: Path) -> GPTModel:
    """The model of a Hugging Face directory, in fp32. Raises ValueError when its weights are not those of its config."""
    config = json.loads((folder / "config.json").read_text())
    model = build(config)
    found = dict(converted(load_file(folder / "model.safetensors"), model.config, tied=config["tie_word_embeddings"]))
    parameters = dict(model.named_parameters())
    if found.keys() != parameters.keys():
        raise ValueError(
            f"{folder}: in config.json's model or in model.safetensors, not in both: {sorted(found.keys() ^ parameters.keys())}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != found[name].shape:
                raise ValueError(f"{folder}: {name} is {list(found[name].shape)}, expected {list(parameter.shape)}")
            parameter.copy_(found[name])
    return model


def logits_of(model: GPTModel, row: Tensor) -> Tensor:
    """[length, vocabulary] for a row of tokens [length]."""
    positions = torch.arange(len(row))
    masked = positions[:, None] < positions  # True: not attended to
    return model(row[None], positions[None], masked[None, None])[0]


@torch.no_grad()
def first_loss(model: GPTModel, row: Tensor) -> float:
    """Mean cross-entropy of a row. Raises ValueError when it is no number."""
    logits = logits_of(model, row)
    loss = float(F.cross_entropy(logits[:-1], row[1:]))
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("the model's logits are not finite: its weights are not numbers, or are not those of its config")
    return loss


@torch.no_grad()
def minitron_scores(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """Model-Optimizer's scores on rows of tokens [rows, length], by the names of the module's docstring. The GPTModel is converted in place."""
    nas.convert(model, mode="mcore_minitron")  # registers every hook and estimator
    started = said = time.monotonic()
    for done, row in enumerate(rows, start=1):
        logits_of(model, row)
        if (now := time.monotonic()) - said > HEARTBEAT_SECONDS:
            said = now
            say(f"{done} of {len(rows)} rows, {(now - started) / done * (len(rows) - done):.0f} s to go")
    _, by_layer = model.get_activations_and_layer_scores()  # counted from 1
    scores = {"hidden": model._estimate_hidden_size_importance(), "layers": torch.tensor([by_layer[number] for number in sorted(by_layer)])}
    for number, layer in enumerate(model.decoder.layers):
        scores[f"ffn/{number}"] = layer.mlp._estimate_importance()
        scores[f"heads/{number}"] = layer.self_attention._estimate_all_head_importance()
    return {name: values.float().contiguous() for name, values in scores.items()}


def main(arguments: list[str]) -> int:
    """Score and write; returns the exit code."""
    if len(arguments) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder, rows_file, out = (Path(argument) for argument in arguments)
    rows = load_file(rows_file)["tokens"]
    start_megatron()
    model = load(folder)
    loss = first_loss(model, rows[0])
    say(f"{folder.name}: cross-entropy of the first row {loss:.4f}; scoring {len(rows)} rows of {rows.shape[1]} tokens")
    with contextlib.redirect_stdout(sys.stderr):  # Model-Optimizer prints what it finds
        scores = minitron_scores(model, rows)
    save_file(scores, out, metadata={"loss": repr(loss), "modelopt": version("nvidia-modelopt")})
    say(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
