"""ModelShape: an architecture in numbers, from a recipe's `model:` block. Plain Python, no torch.

One table, `AXES`, says for every axis where its parent width stands in the shape and how many groups it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan, validate_space
from megatron_elastic.errors import ConfigError, PlanError, raise_all

LAYER_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Grouped-query attention without positional encoding."""

    heads: int
    """Query heads."""
    kv_groups: int
    """Key/value heads."""
    head_dim: int
    """Channels of one head."""
    qkv_bias: bool = False
    """Whether the query/key/value projection has a bias."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpShape:
    """Dense MLP with squared ReLU, no gate."""

    ffn: int
    """Neurons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeShape:
    """Mixture of experts with a sigmoid router, an expert bias for selection, and an optional shared expert."""

    experts: int
    """Routed experts."""
    topk: int
    """Experts chosen for each token."""
    ffn: int
    """Neurons of one routed expert."""
    shared_ffn: int | None = None
    """Neurons of the shared expert; null for none."""
    scaling_factor: float = 1.0
    """Multiplies the renormalised gates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaShape:
    """Mamba-2 mixer."""

    heads: int
    """SSM heads."""
    head_dim: int
    """Channels of one head."""
    groups: int
    """Groups that share B and C."""
    state: int
    """State size of one group."""
    conv: int = 4
    """Taps of the causal convolution."""
    chunk: int = 128
    """Tokens of one chunk of the scan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A hybrid language model in numbers (the `model:` block of a recipe)."""

    layer_pattern: str
    """One letter a layer: M Mamba-2, * attention, - dense MLP, E mixture of experts."""
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
    norm_epsilon: float = 1e-5
    """Added to the mean square in every RMS norm."""
    linear_bias: bool = False
    """Whether attention output and dense MLP linears have a bias."""
    init_std: float = 0.02
    """Standard deviation of fresh weights."""
    attention: AttentionShape | None = None
    """Shape of the * layers."""
    mlp: MlpShape | None = None
    """Shape of the - layers."""
    moe: MoeShape | None = None
    """Shape of the E layers."""
    mamba: MambaShape | None = None
    """Shape of the M layers."""

    @property
    def num_layers(self) -> int:
        """Layers of the pattern."""
        return len(self.layer_pattern)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, padding included."""
        return self.padded_vocab_size or self.vocab_size

    def count(self, letter: str) -> int:
        """How many layers of a kind the pattern has."""
        return self.layer_pattern.count(letter)

    def problems(self) -> list[str]:
        """Everything wrong with this shape, one line each."""
        found = _size_problems(self, "model")
        if found:
            return found
        unknown = sorted(set(self.layer_pattern) - set(LAYER_KINDS))
        if not self.layer_pattern or unknown:
            found.append(
                f"model.layer_pattern {self.layer_pattern!r}: unknown {unknown or 'nothing'}; use {', '.join(f'{k} ({v})' for k, v in LAYER_KINDS.items())}"
            )
        for letter, kind in LAYER_KINDS.items():
            if letter in self.layer_pattern and getattr(self, kind) is None:
                found.append(f"model.{kind} is missing: layer_pattern {self.layer_pattern!r} has {letter!r} layers")
        if self.vocab_rows < self.vocab_size:
            found.append(f"model.padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")
        if self.attention and self.attention.heads % self.attention.kv_groups:
            found.append(f"model.attention.heads {self.attention.heads} is not a multiple of kv_groups {self.attention.kv_groups}")
        if self.mamba and self.mamba.heads % self.mamba.groups:
            found.append(f"model.mamba.heads {self.mamba.heads} is not a multiple of groups {self.mamba.groups}")
        if self.moe and self.moe.topk > self.moe.experts:
            found.append(f"model.moe.topk {self.moe.topk} is above experts {self.moe.experts}")
        if "E" in self.layer_pattern and self.linear_bias:
            found.append("model.linear_bias with a mixture of experts is not supported by megatron-core's shared expert; set it to false")
        return found


def _size_problems(part: object, key: str) -> list[str]:
    """Every number of a shape (and of its parts) that is not above 0."""
    found = []
    for field in fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if is_dataclass(value):
            found += _size_problems(value, f"{key}.{field.name}")
        elif isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            found.append(f"{key}.{field.name} {value} must be above 0")
    return found


@dataclass(frozen=True, slots=True)
class AxisRule:
    """Where an axis lives in a ModelShape.

    part: the sub-shape it belongs to ("" for the model itself); field: the attribute; letter: the layers it needs ("" for all).
    groups: (shape, shard_groups) -> number of groups.
    """

    part: str
    field: str
    letter: str
    groups: Callable[[ModelShape, int], int]


def _heads_groups(shape: ModelShape, shard_groups: int) -> int:
    assert shape.attention is not None
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
    ElasticAxis.HIDDEN: AxisRule("", "hidden_size", "", _one_group),
    ElasticAxis.FFN: AxisRule("mlp", "ffn", "-", _shard_groups),
    ElasticAxis.MOE_FFN: AxisRule("moe", "ffn", "E", _shard_groups),
    ElasticAxis.SHARED_FFN: AxisRule("moe", "shared_ffn", "E", _shard_groups),
    ElasticAxis.HEADS: AxisRule("attention", "heads", "*", _heads_groups),
    ElasticAxis.MAMBA_HEADS: AxisRule("mamba", "heads", "M", _mamba_groups),
    ElasticAxis.EXPERTS: AxisRule("moe", "experts", "E", _one_group),  # its groups depend on the choices: build_space
    ElasticAxis.LAYERS: AxisRule("", "num_layers", "", _one_group),
}


def parent_width(shape: ModelShape, axis: ElasticAxis) -> int | None:
    """The parent's width of `axis`, or None when the model has no such axis."""
    rule = AXES[axis]
    if rule.letter and rule.letter not in shape.layer_pattern:
        return None
    owner = getattr(shape, rule.part) if rule.part else shape
    return getattr(owner, rule.field)


def parent_plan(shape: ModelShape) -> SubmodelPlan:
    """The plan that keeps everything."""
    widths = {axis: width for axis in ElasticAxis if (width := parent_width(shape, axis)) is not None}
    return SubmodelPlan.of(widths)


def expert_groups(choices: tuple[int, ...]) -> int:
    """The largest of 8, 4, 2, 1 that divides every choice of the experts axis."""
    return next(g for g in (8, 4, 2, 1) if all(choice % g == 0 for choice in choices))


def build_space(
    shape: ModelShape,
    axes: Mapping[ElasticAxis, tuple[int | float, ...]],
    *,
    shard_groups: int = 8,
    num_expert_groups: int | None = None,
    drop_order: tuple[int, ...] = (),
) -> ElasticSpace:
    """The space of a parent from a recipe's `elastic.axes` (axis -> widths; a float is a fraction of the parent's).

    Raises ConfigError that lists every problem: an axis the model lacks, a fraction that lands on no width, a choice that is
    no multiple of its groups, a first choice that is not the parent's width, fewer experts than topk.
    """
    problems, specs = [], []
    for axis in ElasticAxis:
        if axis not in axes:
            continue
        key, parent = f"elastic.axes.{axis.value}", parent_width(shape, axis)
        if parent is None:
            problems.append(f"{key}: the model has no such axis (layer_pattern {shape.layer_pattern!r}); remove it")
            continue
        choices = tuple(_resolve(key, value, parent, problems) for value in axes[axis])
        if not choices or choices[0] != parent:
            problems.append(f"{key}: the first choice must be the parent's width {parent}, not {choices[0] if choices else 'nothing'}")
            continue
        if axis is ElasticAxis.EXPERTS:
            groups = num_expert_groups or expert_groups(choices)
            assert shape.moe is not None
            problems += [
                f"{key}: {n} experts are fewer than model.moe.topk {shape.moe.topk}; keep at least {shape.moe.topk}"
                for n in choices
                if 0 < n < shape.moe.topk
            ]
        else:
            groups = AXES[axis].groups(shape, shard_groups)
        specs.append(AxisSpec(axis, choices, groups))
    space = ElasticSpace(tuple(specs), parent_plan(shape), drop_order, shard_groups)
    try:
        validate_space(space, shape.num_layers)
    except ConfigError as error:
        problems += error.problems
    raise_all(ConfigError, problems, "elastic space")
    return space


def _resolve(key: str, value: int | float, parent: int, problems: list[str]) -> int:
    if isinstance(value, int):
        return value
    width = value * parent
    if not 0 < value <= 1 or abs(width - round(width)) > 1e-9:
        problems.append(f"{key}: fraction {value} of {parent} is {width:g}, not a whole width; write the width itself")
    return round(width)


def resize(shape: ModelShape, plan: SubmodelPlan) -> ModelShape:
    """The shape of the sub-model of `plan`. Raises PlanError when a width is wider than the parent's."""
    problems = [
        f"{axis.value} {width} does not fit the parent's {parent_width(shape, axis)}"
        for axis, width in plan.widths
        if not 0 < width <= (parent_width(shape, axis) or 0)
    ]
    problems += [f"dropped layer {n} is not one of {shape.num_layers}" for n in plan.dropped_layers if not 0 <= n < shape.num_layers]
    raise_all(PlanError, problems, "the plan does not fit the model")
    parts: dict[str, dict[str, int]] = {}
    for axis, width in plan.widths:
        parts.setdefault(AXES[axis].part, {})[AXES[axis].field] = width
    pattern = "".join(letter for n, letter in enumerate(shape.layer_pattern) if plan.keeps_layer(n))
    changed = {name: replace(getattr(shape, name), **fields) for name, fields in parts.items() if name}
    return replace(shape, layer_pattern=pattern, **parts.get("", {}), **changed)
