"""Tiny models that are awkward on purpose, and weights moved off their start."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape

if TYPE_CHECKING:
    import torch
    from megatron.core.models.common.language_module.language_module import LanguageModule


def tiny_shape(**changes: Any) -> ModelShape:
    """A hybrid of six layers, every kind of layer twice where it may differ, all sizes pairwise different, grouped queries, biases where possible.

    Sizes divide by 2 ranks of any kind, and by 4 except for attention's key/value heads. changes: fields of ModelShape to replace.
    """
    shape = ModelShape(
        layer_pattern="ME*-ME",
        hidden_size=40,
        vocab_size=131,
        padded_vocab_size=136,
        max_sequence_length=512,
        init_std=0.05,
        attention=AttentionShape(heads=12, kv_groups=2, head_dim=10, qkv_bias=True),
        mlp=MlpShape(ffn=72),
        moe=MoeShape(experts=8, topk=3, ffn=56, shared_ffn=48, scaling_factor=2.5),
        mamba=MambaShape(heads=16, head_dim=6, groups=4, state=7, conv=5, chunk=9),
    )
    return replace(shape, **changes)


def tiny_dense(*, gated: bool = True, **changes: Any) -> ModelShape:
    """A dense GPT of four layers with grouped queries, partial rotary embeddings, and a head size of its own.

    gated: RMSNorm, gated SiLU, norms of queries and keys, biases of queries, keys and values only; not gated: LayerNorm, GELU, biases on
    every linear. Sizes divide as those of `tiny_shape`. changes: fields of ModelShape to replace.
    """
    shape = ModelShape(
        layer_pattern="TTTT",
        hidden_size=40,
        vocab_size=131,
        padded_vocab_size=136,
        max_sequence_length=512,
        init_std=0.05,
        normalization="RMSNorm" if gated else "LayerNorm",
        activation="silu" if gated else "gelu",
        gated=gated,
        linear_bias=not gated,
        attention=AttentionShape(heads=12, kv_groups=2, head_dim=10, qkv_bias=True, qk_norm=gated, rope_base=500.0, rope_fraction=0.6),
        mlp=MlpShape(ffn=72),
    )
    return replace(shape, **changes)


def tiny_moe(*, score: Literal["sigmoid", "softmax"] = "sigmoid", **changes: Any) -> ModelShape:
    """A GPT of four layers, the first dense and the others mixtures of experts, with norms of queries and keys and rotary embeddings.

    score: sigmoid has RMSNorm, gated SiLU, a group-limited router with an expert bias and a shared expert; softmax has LayerNorm, plain
    GELU, a softmax over the chosen experts, and no shared expert.
    Sizes divide as those of `tiny_shape`. changes: fields of ModelShape to replace.
    """
    sigmoid = score == "sigmoid"
    grouped = MoeShape(experts=16, topk=6, ffn=56, shared_ffn=48, scaling_factor=2.5, routing_groups=4, groups_per_token=3)
    plain = MoeShape(experts=8, topk=3, ffn=56, score="softmax", expert_bias=False, scaling_factor=None)
    shape = ModelShape(
        layer_pattern="TXXX",
        hidden_size=40,
        vocab_size=131,
        padded_vocab_size=136,
        max_sequence_length=512,
        init_std=0.05,
        normalization="RMSNorm" if sigmoid else "LayerNorm",
        activation="silu" if sigmoid else "gelu",
        gated=sigmoid,
        attention=AttentionShape(heads=12, kv_groups=2, head_dim=10, qkv_bias=True, qk_norm=True, rope_base=500.0),
        mlp=MlpShape(ffn=72),
        moe=grouped if sigmoid else plain,
    )
    return replace(shape, **changes)


def randomize_(model: LanguageModule, seed: int = 0) -> None:
    """Move every parameter and every expert bias off its start, by (seed, full name): the same full model on every layout."""
    import torch

    from megatron_elastic.models.weights import generator_of, shards

    with torch.no_grad():
        for shard in shards(model):
            full = random_tensor(shard.name, shard.full_shape, generator_of(seed, f"random/{shard.name}"))
            shard.tensor.copy_(shard.take(full))


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A full tensor of that name with values a trained model could have: every term of every formula matters."""
    import torch

    draw = torch.randn(shape, generator=generator)
    if name.endswith("mixer.A_log"):
        return 0.5 + 0.5 * draw
    if name.endswith("mixer.dt_bias"):
        return draw - 2.0
    if name.endswith(("norm.weight", "layernorm.weight", "layer_norm_weight", "mixer.D")):
        return 1.0 + 0.3 * draw
    if name.endswith("bias"):
        return 0.1 * draw
    return draw * (0.3 if len(shape) == 3 else shape[1] ** -0.5)
