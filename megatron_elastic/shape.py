"""ModelShape: an architecture in numbers, from a recipe's `model:` block. Plain Python, no torch.

A model is a row of layers, one letter each. A hybrid model (M, *, -, E) has one sublayer a layer; a GPT model (T, X) has attention
and a feed-forward part in each. Sizes are those of the whole model; one that differs from layer to layer, as in the
sub-model of a per-layer plan, is a tuple with an entry for each layer that has it.

What can shrink in it is `space.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Literal

LAYER_KINDS: Mapping[str, tuple[str, ...]] = {
    "M": ("mamba",),
    "*": ("attention",),
    "-": ("mlp",),
    "E": ("moe",),
    "T": ("attention", "mlp"),
    "X": ("attention", "moe"),
}
"""Letter of a layer -> its sublayers, each named as its part of `ModelShape`."""

PARTS = tuple(dict.fromkeys(part for parts in LAYER_KINDS.values() for part in parts))
"""Every kind of sublayer, each the name of a part of `ModelShape`."""

HYBRID_LETTERS, GPT_LETTERS = frozenset("M*-E"), frozenset("TX")

UNSUPPORTED_LETTERS: Mapping[str, str] = {
    "G": "GatedDeltaNet layers",
    "D": "sparse attention layers",
    "+": "multi-latent attention (MLA) layers",
    "/": "multi-token prediction (MTP) heads",
}
"""megatron-core's other letters: what stands behind them is refused by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Grouped-query attention."""

    heads: int | tuple[int, ...]
    """Query heads."""
    kv_groups: int
    """Key/value heads."""
    head_dim: int
    """Channels of one head."""
    qkv_bias: bool = False
    """Whether the query/key/value projection has a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, head by head."""
    rope_base: float | None = None
    """Base of rotary position embeddings; null for no positional encoding."""
    rope_fraction: float = 1.0
    """Share of a head's channels that rotate."""
    rope_scaling: float | None = None
    """Factor by which Llama 3 slows its slow rotations, after 8,192 tokens (megatron-core's formula); null for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpShape:
    """Dense MLP; its activation is the model's."""

    ffn: int | tuple[int, ...]
    """Neurons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeShape:
    """Mixture of experts with an optional shared expert; their activation is the model's."""

    experts: int | tuple[int, ...]
    """Routed experts."""
    topk: int | tuple[int, ...]
    """Experts chosen for each token."""
    ffn: int | tuple[int, ...]
    """Neurons of one routed expert."""
    shared_ffn: int | tuple[int, ...] | None = None
    """Neurons of the shared expert; null for none."""
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    """How the router's logits become gates."""
    pre_softmax: bool = False
    """Softmax over all experts before the choice (gates are not renormalised) instead of over the chosen."""
    expert_bias: bool = True
    """Whether a bias that gets no gradient takes part in the choice, not in the gates."""
    scaling_factor: float | None = 1.0
    """Multiplies the gates; null for none."""
    routing_groups: int | None = None
    """Groups of experts of a group-limited router; null for none."""
    groups_per_token: int | None = None
    """How many of `routing_groups` a token may use."""
    aux_loss: float | None = None
    """Weight of the load-balancing loss; null for none."""
    z_loss: float | None = None
    """Weight of the router's z loss; null for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaShape:
    """Mamba-2 mixer."""

    heads: int | tuple[int, ...]
    """SSM heads."""
    head_dim: int | tuple[int, ...]
    """Channels of one head."""
    groups: int
    """Groups that share B and C."""
    state: int | tuple[int, ...]
    """State size of one group."""
    conv: int = 4
    """Taps of the causal convolution."""
    chunk: int = 128
    """Tokens of one chunk of the scan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A language model in numbers (the `model:` block of a recipe)."""

    layer_pattern: str
    """One letter a layer. Hybrid: M Mamba-2, * attention, - dense MLP, E mixture of experts. GPT: T attention and dense MLP,
    X attention and mixture of experts. A number repeats the letter before it (T32); `|` is ignored."""
    hidden_size: int
    """Channels of the residual stream."""
    vocab_size: int
    """Words of the tokenizer."""
    padded_vocab_size: int | None = None
    """Rows of the embedding; a number every tensor parallelism used divides. Null: vocab_size."""
    max_sequence_length: int = 131072
    """Longest sequence the model is meant for."""
    tied_embeddings: bool = False
    """Whether the output layer uses the embedding's weight."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Norm of the residual stream, and of queries and keys."""
    norm_epsilon: float = 1e-5
    """Added to the mean square (or variance) in every norm."""
    activation: Literal["squared_relu", "silu", "gelu"] = "squared_relu"
    """Activation of MLPs and experts."""
    gated: bool = False
    """Whether MLPs and experts multiply the activated half of a double first projection by the other half."""
    linear_bias: bool = False
    """Whether attention output and dense MLP linears have a bias."""
    init_std: float = 0.02
    """Standard deviation of fresh weights."""
    attention: AttentionShape | None = None
    """Shape of attention sublayers."""
    mlp: MlpShape | None = None
    """Shape of dense MLP sublayers."""
    moe: MoeShape | None = None
    """Shape of mixture-of-experts sublayers."""
    mamba: MambaShape | None = None
    """Shape of Mamba-2 sublayers."""

    def __post_init__(self) -> None:
        """Write the pattern out: `T32` as 32 letters, without `|`."""
        plain = re.sub(r"(\D)(\d+)", lambda match: match[1] * int(match[2]), self.layer_pattern.replace("|", ""))
        object.__setattr__(self, "layer_pattern", plain)

    @property
    def num_layers(self) -> int:
        """Layers of the pattern."""
        return len(self.layer_pattern)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, padding included."""
        return self.padded_vocab_size or self.vocab_size

    @property
    def is_gpt(self) -> bool:
        """Whether the layers are a GPT model's (T, X) rather than a hybrid model's."""
        return set(self.layer_pattern) <= GPT_LETTERS

    def layers_with(self, part: str) -> tuple[int, ...]:
        """Global numbers (from 0) of the layers with sublayer `part` ("attention", "mlp", "moe", "mamba")."""
        return tuple(n for n, letter in enumerate(self.layer_pattern) if part in LAYER_KINDS[letter])

    def has(self, part: str) -> bool:
        """Whether any layer has sublayer `part`."""
        return any(part in LAYER_KINDS[letter] for letter in self.layer_pattern)

    @property
    def homogeneous(self) -> bool:
        """Whether no size differs from layer to layer."""
        return not any(_sizes_by_layer(self))

    def at(self, layer: int) -> ModelShape:
        """This shape with the sizes of global layer `layer`; itself when it is homogeneous."""
        return _shape_at(self, layer)

    def problems(self) -> list[str]:
        """Everything wrong with this shape, one line each."""
        found = _pattern_problems(self.layer_pattern) or _size_problems(self, "model")
        if found:
            return found
        for part in PARTS:
            if self.has(part) and getattr(self, part) is None:
                letters = [letter for letter in self.layer_pattern if part in LAYER_KINDS[letter]]
                found.append(f"model.{part} is missing: layer_pattern {self.layer_pattern!r} has {letters[0]!r} layers")
        if self.vocab_rows < self.vocab_size:
            found.append(f"model.padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")
        if self.has("moe") and self.linear_bias:
            found.append("model.linear_bias with a mixture of experts is not supported by megatron-core's shared expert; set it to false")
        if self.normalization == "LayerNorm" and self.has("mamba"):
            found.append("model.normalization 'LayerNorm' with Mamba-2 layers is not supported by megatron-core; use 'RMSNorm'")
        uneven = _uneven_sizes(self)
        for layer in range(0 if uneven else self.num_layers):
            found += [line for line in _layer_problems(self.at(layer), self.layer_pattern[layer]) if line not in found]
        return found + uneven


def _pattern_problems(pattern: str) -> list[str]:
    unsupported = [f"{UNSUPPORTED_LETTERS[c]} ({c!r})" for c in dict.fromkeys(pattern) if c in UNSUPPORTED_LETTERS]
    if unsupported:
        return [f"model.layer_pattern {pattern!r}: {', '.join(unsupported)} cannot be elastic; use a parent without them"]
    unknown = sorted(set(pattern) - set(LAYER_KINDS))
    if not pattern or unknown:
        kinds = ", ".join(f"{letter} ({' + '.join(parts)})" for letter, parts in LAYER_KINDS.items())
        return [f"model.layer_pattern {pattern!r}: unknown {unknown or 'nothing'}; use {kinds}"]
    if set(pattern) & GPT_LETTERS and set(pattern) & HYBRID_LETTERS:
        return [f"model.layer_pattern {pattern!r} mixes the letters of GPT models (T, X) and of hybrid models (M, *, -, E); use one kind"]
    return []


def _sizes_by_layer(shape: ModelShape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(part, field, sizes) of every size that differs from layer to layer."""
    for part in PARTS:
        owner = getattr(shape, part)
        for field in fields(owner) if owner is not None else ():
            value = getattr(owner, field.name)
            if isinstance(value, tuple):
                yield part, field.name, value


def _uneven_sizes(shape: ModelShape) -> list[str]:
    """Sizes that differ from layer to layer but do not name one for each layer that has them."""
    return [
        f"model.{part}.{field} names {len(sizes)} sizes, but {len(layers)} layers have it; write one for each, or one number"
        for part, field, sizes in _sizes_by_layer(shape)
        if len(sizes) != len(layers := shape.layers_with(part))
    ]


@lru_cache(maxsize=1024)
def _shape_at(shape: ModelShape, layer: int) -> ModelShape:
    """`shape` with the sizes of one layer; parts that this layer does not have get their largest."""
    changed: dict[str, dict[str, int]] = {}
    for part, field, sizes in _sizes_by_layer(shape):
        layers = shape.layers_with(part)
        changed.setdefault(part, {})[field] = sizes[layers.index(layer)] if layer in layers else max(sizes)
    return replace(shape, **{part: replace(getattr(shape, part), **sizes) for part, sizes in changed.items()}) if changed else shape


def _layer_problems(shape: ModelShape, letter: str) -> list[str]:
    """What is wrong with the sizes of one layer; `shape` is homogeneous."""
    found, parts = [], LAYER_KINDS[letter]
    if shape.attention and "attention" in parts:
        attention: Any = shape.attention
        if attention.heads % attention.kv_groups:
            found.append(f"model.attention.heads {attention.heads} is not a multiple of kv_groups {attention.kv_groups}")
        if attention.rope_base and (attention.head_dim * attention.rope_fraction % 2 or attention.rope_fraction > 1):
            found.append(
                f"model.attention.rope_fraction {attention.rope_fraction:g} of head_dim {attention.head_dim} is not an even number of channels; change it"
            )
        if attention.rope_base and not shape.is_gpt:
            found.append("model.attention.rope_base: megatron-core's hybrid models have no rotary embeddings here; set it to null")
    if shape.mamba and "mamba" in parts:
        mamba: Any = shape.mamba
        if mamba.heads % mamba.groups:
            found.append(f"model.mamba.heads {mamba.heads} is not a multiple of groups {mamba.groups}")
    if shape.moe and "moe" in parts:
        found += _moe_problems(shape.moe)
    return found


def _moe_problems(moe: Any) -> list[str]:
    found = []
    if moe.topk > moe.experts:
        found.append(f"model.moe.topk {moe.topk} is above experts {moe.experts}")
    if (moe.routing_groups is None) != (moe.groups_per_token is None):
        found.append("model.moe.routing_groups and groups_per_token belong together; set both or neither")
    elif moe.routing_groups:
        groups, chosen = moe.routing_groups, moe.groups_per_token
        if moe.experts % groups or chosen > groups:
            found.append(f"model.moe.routing_groups {groups} must divide experts {moe.experts} and not be below groups_per_token {chosen}")
        elif moe.topk > chosen * (moe.experts // groups) or moe.topk % chosen:
            found.append(
                f"model.moe.topk {moe.topk} must be a multiple of groups_per_token {chosen} and at most the {chosen * (moe.experts // groups)} "
                "experts of those groups"
            )
    if moe.score == "sigmoid" and moe.pre_softmax:
        found.append("model.moe.pre_softmax true needs score 'softmax'; set it to false")
    if moe.score == "softmax" and moe.expert_bias:
        found.append("model.moe.expert_bias true needs score 'sigmoid' in megatron-core; set it to false")
    return found


def _size_problems(part: object, key: str) -> list[str]:
    """Every number of a shape (and of its parts) that is not above 0."""
    found = []
    for field in fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if is_dataclass(value):
            found += _size_problems(value, f"{key}.{field.name}")
            continue
        for number in value if isinstance(value, tuple) else (value,):
            # Python takes true for 1, and a cache of shapes takes one for the other.
            if isinstance(number, bool) and not isinstance(field.default, bool):
                found.append(f"{key}.{field.name} {number} must be a number")
            if isinstance(number, int | float) and not isinstance(number, bool) and not number > 0:
                found.append(f"{key}.{field.name} {number} must be above 0")
    return found
