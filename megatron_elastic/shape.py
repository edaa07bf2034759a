"""ModelShape: an architecture in numbers, from a recipe's `model:` block. Plain Python, no torch.

A model is a row of layers, one letter each. A hybrid model (M, *, -, E) has one sublayer a layer; a GPT model (T, X) has attention
and a feed-forward part in each. Sizes are those of the whole model; one that differs from layer to layer, as in the
sub-model of a per-layer plan, is a tuple with an entry for each layer that has it.

One table, `AXES`, says for every axis where its parent width stands in the shape and how many groups it has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan, Width, validate_space, widths_by_place
from megatron_elastic.errors import ConfigError, PlanError, raise_all

LAYER_KINDS: Mapping[str, tuple[str, ...]] = {
    "M": ("mamba",),
    "*": ("attention",),
    "-": ("mlp",),
    "E": ("moe",),
    "T": ("attention", "mlp"),
    "X": ("attention", "moe"),
}
"""Letter of a layer -> its sublayers, each named as its part of `ModelShape`."""

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
        return all(isinstance(parent_width(self, axis), int | None) for axis in AXES)

    def at(self, layer: int) -> ModelShape:
        """This shape with the sizes of global layer `layer`; itself when it is homogeneous."""
        return _shape_at(self, layer)

    def problems(self) -> list[str]:
        """Everything wrong with this shape, one line each."""
        found = _pattern_problems(self.layer_pattern) or _size_problems(self, "model")
        if found:
            return found
        for part in dict.fromkeys(part for letter in LAYER_KINDS for part in LAYER_KINDS[letter]):
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


def _uneven_sizes(shape: ModelShape) -> list[str]:
    """Sizes that differ from layer to layer but do not name one for each layer that has them."""
    found = []
    for axis, rule in AXES.items():
        width, layers = parent_width(shape, axis), layers_of_axis(shape, axis)
        if isinstance(width, tuple) and len(width) != len(layers):
            key = f"model.{rule.part}.{rule.field}" if rule.part else f"model.{rule.field}"
            found.append(f"{key} names {len(width)} sizes, but {len(layers)} layers have it; write one for each, or one number")
    return found


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
            if isinstance(number, int | float) and not isinstance(number, bool) and not number > 0:
                found.append(f"{key}.{field.name} {number} must be above 0")
    return found


@dataclass(frozen=True, slots=True)
class AxisRule:
    """Where an axis lives in a ModelShape.

    part: the sub-shape it belongs to, which is also the sublayer it needs ("" for the model itself); field: the attribute.
    groups: (shape, shard_groups) -> number of groups.
    sharded: the ranks its groups are dealt over ("" when every rank holds the axis whole).
    """

    part: str
    field: str
    groups: Callable[[ModelShape, int], int]
    sharded: Literal["tensor", "expert", ""]


def _heads_groups(shape: ModelShape, shard_groups: int) -> int:
    assert shape.attention is not None and isinstance(shape.attention.heads, int)
    both = math.lcm(shape.attention.kv_groups, shard_groups)
    return both if shape.attention.heads % both == 0 else shape.attention.kv_groups


def _mamba_groups(shape: ModelShape, shard_groups: int) -> int:
    assert shape.mamba is not None
    return shape.mamba.groups


def _shard_groups(shape: ModelShape, shard_groups: int) -> int:
    return shard_groups


def _one_group(shape: ModelShape, shard_groups: int) -> int:
    return 1


AXES: Mapping[ElasticAxis, AxisRule] = {
    ElasticAxis.HIDDEN: AxisRule("", "hidden_size", _one_group, ""),
    ElasticAxis.FFN: AxisRule("mlp", "ffn", _shard_groups, "tensor"),
    ElasticAxis.MOE_FFN: AxisRule("moe", "ffn", _shard_groups, "tensor"),
    ElasticAxis.SHARED_FFN: AxisRule("moe", "shared_ffn", _shard_groups, "tensor"),
    ElasticAxis.HEADS: AxisRule("attention", "heads", _heads_groups, "tensor"),
    ElasticAxis.MAMBA_HEADS: AxisRule("mamba", "heads", _mamba_groups, "tensor"),
    ElasticAxis.MAMBA_HEAD_DIM: AxisRule("mamba", "head_dim", _one_group, ""),  # a prefix of every head
    ElasticAxis.MAMBA_STATE: AxisRule("mamba", "state", _one_group, ""),  # a prefix of every SSM group's block
    ElasticAxis.EXPERTS: AxisRule("moe", "experts", _one_group, "expert"),  # its groups depend on the choices: build_space
    ElasticAxis.TOPK: AxisRule("moe", "topk", _one_group, ""),
    ElasticAxis.LAYERS: AxisRule("", "num_layers", _one_group, ""),
}


def parent_width(shape: ModelShape, axis: ElasticAxis) -> Width | None:
    """The width of `axis` in `shape`, or None when the model has no such axis."""
    rule = AXES[axis]
    holder = getattr(shape, rule.part) if rule.part else shape
    return getattr(holder, rule.field) if holder is not None and (not rule.part or shape.has(rule.part)) else None


def layers_of_axis(shape: ModelShape, axis: ElasticAxis) -> tuple[int, ...]:
    """Global numbers (from 0) of the layers that have `axis`; empty for one that belongs to the model as a whole."""
    rule = AXES[axis]
    return shape.layers_with(rule.part) if rule.part else ()


def parent_plan(shape: ModelShape) -> SubmodelPlan:
    """The plan that keeps everything."""
    widths = {axis: width for axis in ElasticAxis if (width := parent_width(shape, axis)) is not None}
    return SubmodelPlan.of(widths)


def width_at(shape: ModelShape, axis: ElasticAxis, width: Width, layer: int | None) -> int:
    """The width that global layer `layer` has in `width`, a width of `axis` for the layers of `shape`."""
    return width if isinstance(width, int) else width[layers_of_axis(shape, axis).index(layer)] if layer is not None else max(width)


@lru_cache(maxsize=1024)
def _shape_at(shape: ModelShape, layer: int) -> ModelShape:
    if shape.homogeneous:
        return shape
    parts = dict.fromkeys(part for kinds in LAYER_KINDS.values() for part in kinds)
    own = set(LAYER_KINDS[shape.layer_pattern[layer]])
    changed = {}
    for part in parts:
        if getattr(shape, part) is None:
            continue
        sizes = {
            rule.field: width_at(shape, axis, value, layer if part in own else None)
            for axis, rule in AXES.items()
            if rule.part == part and isinstance(value := getattr(getattr(shape, part), rule.field), tuple)
        }
        changed[part] = replace(getattr(shape, part), **sizes)
    return replace(shape, **changed)


def expert_groups(choices: tuple[int, ...], routing_groups: int | None = None) -> int:
    """The largest of 8, 4, 2, 1 that divides every choice of the experts axis; with group-limited routing a multiple of its groups."""
    base = routing_groups or 1
    return base * next(g for g in (8, 4, 2, 1) if g == 1 or all(choice % (base * g) == 0 for choice in choices))


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisChoices:
    """The choices of an axis in a recipe, when there is more to say than a list of them."""

    choices: tuple[int | float, ...]
    """Widths from wide to narrow, the parent's first; a fraction counts from the parent's."""
    per_layer: bool = False
    """Whether every layer that has the axis gets a width of its own."""


def build_space(
    shape: ModelShape,
    axes: Mapping[ElasticAxis, tuple[int | float, ...] | AxisChoices],
    *,
    shard_groups: int = 8,
    num_expert_groups: int | None = None,
    drop_order: tuple[int, ...] = (),
) -> ElasticSpace:
    """The space of a parent from a recipe's `elastic.axes` (axis -> widths; a float is a fraction of the parent's).

    Raises ConfigError that lists every problem: an axis the model lacks, a fraction that lands on no width, a choice that is
    no multiple of its groups, a first choice that is not the parent's width, fewer experts than topk, a parent whose sizes differ
    from layer to layer.
    """
    if not shape.homogeneous:
        raise ConfigError("model: sizes that differ from layer to layer make no elastic parent; start from the model this one was cut from")
    problems, specs = [], []
    for axis in ElasticAxis:
        if axis not in axes:
            continue
        key, parent = f"elastic.axes.{axis.value}", parent_width(shape, axis)
        if parent is None:
            problems.append(f"{key}: the model has no such axis (layer_pattern {shape.layer_pattern!r}); remove it")
            continue
        assert isinstance(parent, int)
        given = axes[axis]
        wanted = given if isinstance(given, AxisChoices) else AxisChoices(choices=tuple(given))
        choices = tuple(_resolve(key, value, parent, problems) for value in wanted.choices)
        if not choices or choices[0] != parent:
            problems.append(f"{key}: the first choice must be the parent's width {parent}, not {choices[0] if choices else 'nothing'}")
            continue
        rule = AXES[axis]
        if axis is ElasticAxis.EXPERTS:
            assert shape.moe is not None
            groups = num_expert_groups or expert_groups(choices, shape.moe.routing_groups)
        else:
            groups = rule.groups(shape, shard_groups)
        specs.append(AxisSpec(axis, choices, groups, layers_of_axis(shape, axis), wanted.per_layer, rule.sharded))
    problems += _expert_problems(shape, {spec.axis: spec for spec in specs})
    space = ElasticSpace(tuple(specs), parent_plan(shape), drop_order, shard_groups)
    try:
        validate_space(space, shape.num_layers)
    except ConfigError as error:
        problems += error.problems
    raise_all(ConfigError, problems, "elastic space")
    return space


def _expert_problems(shape: ModelShape, specs: Mapping[ElasticAxis, AxisSpec]) -> list[str]:
    """What the router asks of the axes experts and topk (design: groups stay whole, every token finds its experts)."""
    if shape.moe is None:
        return []
    moe: Any = shape.moe
    experts, problems = specs.get(ElasticAxis.EXPERTS), []
    topk = specs.get(ElasticAxis.TOPK)
    if topk is not None and topk.choices[-1] == 1 and moe.score == "softmax" and not moe.pre_softmax:
        problems.append("elastic.axes.topk: choice 1 with a softmax over the chosen experts makes every gate 1; keep at least 2")
    if moe.routing_groups and ElasticAxis.TOPK in specs:
        problems.append(
            "elastic.axes.topk: not with group-limited routing (model.moe.routing_groups), whose groups score by topk; remove it"
        )
    if experts is None:
        return problems
    routing = moe.routing_groups or 1
    if experts.groups % routing:
        problems.append(
            f"elastic.expert_groups {experts.groups} is not a multiple of model.moe.routing_groups {routing}; use a multiple, or leave it out"
        )
    for choice in experts.choices:
        reachable = choice // routing * (moe.groups_per_token or 1)
        if 0 < choice < moe.topk:
            problems.append(f"elastic.axes.experts: {choice} experts are fewer than model.moe.topk {moe.topk}; keep at least {moe.topk}")
        elif choice > 0 and reachable < moe.topk:
            problems.append(
                f"elastic.axes.experts: {choice} experts leave {reachable} in the {moe.groups_per_token} groups of a token, fewer than "
                f"model.moe.topk {moe.topk}; keep more"
            )
        elif choice > 0 and choice // routing < moe.topk // (moe.groups_per_token or 1):
            problems.append(f"elastic.axes.experts: {choice} experts leave a routing group fewer than it is scored by; keep more")
    return problems


def _resolve(key: str, value: int | float, parent: int, problems: list[str]) -> int:
    if isinstance(value, int):
        return value
    width = value * parent
    if not 0 < value <= 1 or abs(width - round(width)) > 1e-9:
        problems.append(f"{key}: fraction {value} of {parent} is {width:g}, not a whole width; write the width itself")
    return round(width)


def resize(shape: ModelShape, plan: SubmodelPlan) -> ModelShape:
    """The shape of the sub-model of `plan`; sizes that differ from layer to layer become tuples.

    Raises PlanError when a width is wider than the parent's or names another number of layers.
    """
    problems = [line for axis, width in plan.widths for line in _misfits(shape, axis, width)]
    problems += [f"dropped layer {n} is not one of {shape.num_layers}" for n in plan.dropped_layers if not 0 <= n < shape.num_layers]
    raise_all(PlanError, problems, "the plan does not fit the model")
    parts: dict[str, dict[str, Any]] = {}
    for axis, width in plan.widths:
        parts.setdefault(AXES[axis].part, {})[AXES[axis].field] = _of_kept_layers(shape, plan, axis, width)
    pattern = "".join(letter for n, letter in enumerate(shape.layer_pattern) if plan.keeps_layer(n))
    changed = {name: replace(getattr(shape, name), **fields) for name, fields in parts.items() if name}
    return replace(shape, layer_pattern=pattern, **parts.get("", {}), **changed)


def _misfits(shape: ModelShape, axis: ElasticAxis, width: Width) -> list[str]:
    layers = layers_of_axis(shape, axis)
    parent = parent_width(shape, axis)
    if parent is None:
        return [f"{axis.value} {width}: the model has no such axis (layer_pattern {shape.layer_pattern!r})"]
    widths = widths_by_place(width, max(len(layers), 1))
    limits = widths_by_place(parent, max(len(layers), 1))
    if widths is None or limits is None:
        return [f"{axis.value} {width} does not name one width for each of the {len(layers)} layers that have it"]
    wrong = dict.fromkeys((n, limit) for n, limit in zip(widths, limits, strict=True) if not 0 < n <= limit)
    return [f"{axis.value} {n} does not fit the parent's {limit}" for n, limit in wrong]


def _of_kept_layers(shape: ModelShape, plan: SubmodelPlan, axis: ElasticAxis, width: Width) -> Width:
    if isinstance(width, int):
        return width
    kept = tuple(n for n, layer in zip(width, layers_of_axis(shape, axis), strict=True) if plan.keeps_layer(layer))
    return (kept[0] if len(set(kept)) == 1 else kept) if kept else max(width)
