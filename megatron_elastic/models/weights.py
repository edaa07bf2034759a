"""The full model behind the shards: where each local tensor sits, fresh weights that do not depend on the layout, gather and scatter.

Names are those of the full model: layers and experts are numbered over all ranks, and spelled as in checkpoints.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_elastic.errors import CheckpointError, raise_all
from megatron_elastic.layout import LOCAL_EXPERT
from megatron_elastic.platform.versions import canonical_name

_COLUMN = re.compile(r"(word_embeddings\.weight|output_layer\.weight|linear_qkv\.(weight|bias)|linear_fc1\.(weight|bias))$")
_FIRST_LINEAR = re.compile(r"linear_fc1\.(weight|bias)$")
_ROW = re.compile(r"(linear_proj|linear_fc2|out_proj)\.weight$")
_PER_HEAD = re.compile(r"mixer\.(A_log|D|dt_bias|norm\.weight)$")
_DECODER_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a local tensor sits in its full tensor.

    name: the full tensor's name. dim: the dimension that is cut over ranks, None when every rank holds it whole.
    segments: full lengths along `dim` of the parts that are cut one by one (in_proj: z, x, B, C, dt; a gated fc1: its halves). rank of size: this rank's piece.
    """

    name: str
    tensor: Tensor
    dim: int | None
    segments: tuple[int, ...]
    rank: int
    size: int

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        shape = list(self.tensor.shape)
        if self.dim is not None:
            shape[self.dim] = sum(self.segments)
        return tuple(shape)

    def take(self, full: Tensor) -> Tensor:
        """This rank's piece of the full tensor."""
        if self.dim is None:
            return full
        parts = [part.chunk(self.size, self.dim)[self.rank] for part in full.split(self.segments, self.dim)]
        return torch.cat(parts, self.dim)

    def join(self, pieces: list[Tensor]) -> Tensor:
        """The full tensor from the pieces of all ranks, in rank order."""
        if self.dim is None:
            return pieces[0]
        local = [length // self.size for length in self.segments]
        by_rank = [piece.split(local, self.dim) for piece in pieces]
        return torch.cat([torch.cat(parts, self.dim) for parts in zip(*by_rank, strict=True)], self.dim)


def shards(model: LanguageModule) -> Iterator[Shard]:
    """Every parameter of this rank's part of a model from `build_model`, and the experts' selection biases."""
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("router.expert_bias")]
    for local_name, tensor in [*model.named_parameters(), *biases]:
        name = _full_name(model, local_name)
        group = model.pg_collection.expt_tp if ".local_experts." in name else model.pg_collection.tp
        dim, segments = _cut(name, tensor, _config_of(model, local_name), group.size())
        yield Shard(name, tensor, dim, segments, group.rank(), group.size())


def _config_of(model: LanguageModule, local_name: str) -> TransformerConfig:
    """The config a parameter was built with: its layer's, where its sizes may be its own, or the model's."""
    match = _DECODER_LAYER.match(local_name)
    return model.decoder.layers[int(match[1])].config if match else model.config


def _full_name(model: LanguageModule, local_name: str) -> str:
    name = canonical_name(local_name)
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"  # the last pipeline stage's copy of a tied embedding

    def layer(match: re.Match[str]) -> str:
        return f"decoder.layers.{model.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match[str]) -> str:
        group = model.pg_collection.ep
        experts = _config_of(model, local_name).num_moe_experts
        assert experts is not None
        return f".experts.local_experts.{group.rank() * (experts // group.size()) + int(match[1])}."

    return LOCAL_EXPERT.sub(expert, _DECODER_LAYER.sub(layer, name))


def _cut(name: str, tensor: Tensor, config: TransformerConfig, ranks: int) -> tuple[int | None, tuple[int, ...]]:
    """The dimension cut over tensor-parallel ranks and the full lengths of its segments."""
    if name.endswith("mixer.in_proj.weight") or ".mixer.conv1d." in name:
        heads, bc = config.mamba_num_heads, config.mamba_num_groups * config.mamba_state_dim
        assert heads is not None
        inner = heads * config.mamba_head_dim
        return 0, (inner, bc, bc) if ".conv1d." in name else (inner, inner, bc, bc, heads)
    if config.gated_linear_unit and _FIRST_LINEAR.search(name):
        return 0, (tensor.shape[0] // 2 * ranks,) * 2
    if _COLUMN.search(name) or _PER_HEAD.search(name):
        return 0, (tensor.shape[0] * ranks,)
    if _ROW.search(name):
        return 1, (tensor.shape[1] * ranks,)
    return None, ()


@torch.no_grad()
def initialize_weights(model: LanguageModule, seed: int) -> None:
    """Give every parameter its starting value, drawn from (seed, full name): the same full model on every layout.

    Distributions are megatron-core's: normal(init_method_std) for weights, smaller by sqrt(writes) for those that write to the residual
    stream (as many writes as layers in a hybrid model, twice as many in a GPT),
    Mamba-2's for A_log, dt_bias and the convolution, ones for norms and D, zeros for biases.
    """
    taps = next((module.d_conv for module in model.modules() if isinstance(module, MambaMixer)), 0)
    for shard in shards(model):
        full = torch.empty(shard.full_shape, dtype=torch.float32)
        _draw(shard.name, full, model.config, taps, generator_of(seed, shard.name))
        shard.tensor.copy_(shard.take(full))


def scatter_tensors(model: LanguageModule, tensors: Mapping[str, Tensor]) -> None:
    """Copy full tensors (full name -> tensor) into this rank's part of the model.

    Raises CheckpointError naming every tensor of this rank that is missing or has another shape.
    """
    mine = list(shards(model))
    problems = [f"{shard.name} is missing" for shard in mine if shard.name not in tensors]
    problems += [
        f"{shard.name} has shape {list(tensors[shard.name].shape)}, the model needs {list(shard.full_shape)}"
        for shard in mine
        if shard.name in tensors and tuple(tensors[shard.name].shape) != shard.full_shape
    ]
    raise_all(CheckpointError, problems, "these tensors do not fit the model")
    with torch.no_grad():
        for shard in mine:
            shard.tensor.copy_(shard.take(tensors[shard.name]))


def gather_tensors(model: LanguageModule) -> dict[str, Tensor]:
    """The full tensors of the whole model, on every rank (full name -> copy on the CPU). A collective over all processes.

    Meant for small models: tests, demonstrations and exports that fit one machine's memory.
    """
    pieces = {(shard.name, shard.rank): shard for shard in shards(model)}
    mine = {key: (shard.tensor.detach().cpu(), shard.dim, shard.segments, shard.size) for key, shard in pieces.items()}
    ranks: list[dict[tuple[str, int], tuple[Tensor, int | None, tuple[int, ...], int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    found = {key: value for part in ranks for key, value in part.items()}
    full: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for name, _ in found):
        tensor, dim, segments, size = found[name, min(rank for other, rank in found if other == name)]
        if dim is None:
            full[name] = tensor.clone()
        else:
            full[name] = Shard(name, tensor, dim, segments, 0, size).join([found[name, rank][0] for rank in range(size)])
    return full


def generator_of(seed: int, name: str) -> torch.Generator:
    """A generator of its own for each (seed, name), the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def _draw(name: str, full: Tensor, config: TransformerConfig, taps: int, generator: torch.Generator) -> None:
    if name.endswith("mixer.A_log"):
        full.uniform_(1.0, 16.0, generator=generator).log_()
    elif name.endswith("mixer.dt_bias"):
        # softplus(dt_bias) is log-uniform between 0.001 and 0.1; its inverse is dt + log(1 - exp(-dt)).
        dt = full.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_().clamp_(min=1e-4)
        full.copy_(dt + torch.log(-torch.expm1(-dt)))
    elif ".conv1d." in name:
        bound = taps**-0.5
        full.uniform_(-bound, bound, generator=generator)
    elif name.endswith(("norm.weight", "layernorm.weight", "layer_norm_weight", "mixer.D")):
        full.fill_(1.0)
    elif name.endswith("bias"):
        full.zero_()
    else:
        std = config.init_method_std
        if _ROW.search(name):
            std /= math.sqrt(config.num_layers * (1 if config.is_hybrid_model else 2))
        full.normal_(0.0, std, generator=generator)
