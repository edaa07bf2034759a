"""The table: which entries of every parameter belong to which axis.

Each dim of a parameter is a row of segments, repeated `repeat` times; a segment is (size, axis, groups). A grouped prefix of
an axis then selects *runs* of entries. Everything that cuts or masks reads this table: slice mode, extraction, cost tests.

Names are those of the full model on one process in Transformer Engine's module tree; routed experts are stacked along a
leading dim, as megatron's `torch_dist` checkpoints store them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.errors import CheckpointError
from megatron_elastic.shape import LAYER_KINDS, ModelShape

Runs = tuple[tuple[int, int], ...]
"""Kept entries of one dim: (start, length) in ascending order, merged."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive entries of a dim.

    size: entries over all repeats; axis: the axis they belong to (None: always kept); groups: the axis' groups over all repeats.
    """

    size: int
    axis: ElasticAxis | None = None
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a parameter: `repeat` times the row of segments (repeat > 1 interleaves, as linear_qkv does per KV group)."""

    segments: tuple[Segment, ...]
    repeat: int = 1

    @property
    def size(self) -> int:
        """Entries of the whole dim."""
        return sum(segment.size for segment in self.segments)

    def runs(self, kept: Mapping[ElasticAxis, tuple[int, int]], shards: int = 1) -> Runs:
        """Runs of kept entries of one of `shards` equal shards; a shard holds whole groups, so all shards are alike.

        kept: axis -> (kept width, parent's width); an axis that is missing is whole.
        """
        repeat, parts = (self.repeat // shards, 1) if self.repeat > 1 else (1, shards)
        runs: list[tuple[int, int]] = []
        start = 0
        for _ in range(repeat):
            for segment in self.segments:
                size = segment.size // self.repeat // parts
                width, parent = kept.get(segment.axis, (1, 1)) if segment.axis else (1, 1)
                groups = segment.groups // self.repeat // parts if width != parent else 1
                block = size // groups
                for group in range(groups):
                    _append(runs, start + group * block, block * width // parent)
                start += size
        return tuple(runs)


def _append(runs: list[tuple[int, int]], start: int, length: int) -> None:
    if runs and sum(runs[-1]) == start:
        runs[-1] = (runs[-1][0], runs[-1][1] + length)
    elif length:
        runs.append((start, length))


def kept_widths(space: ElasticSpace, plan: SubmodelPlan) -> dict[ElasticAxis, tuple[int, int]]:
    """axis -> (kept width, parent's width) for the axes on which `plan` is narrower than the parent."""
    parent = dict(space.parent.widths)
    return {axis: (width, parent[axis]) for axis, width in plan.widths if width != parent[axis]}


Groups = Callable[[ElasticAxis], int]
"""axis -> its number of groups (1 when it is not elastic)."""


def _hidden(shape: ModelShape, groups: Groups) -> Dim:
    return Dim((Segment(shape.hidden_size, ElasticAxis.HIDDEN, 1),))


def _vocab(shape: ModelShape, groups: Groups) -> Dim:
    return Dim((Segment(shape.vocab_rows),))


def _neurons(axis: ElasticAxis, size: int | None, groups: Groups) -> Dim:
    assert size is not None
    return Dim((Segment(size, axis, groups(axis)),))


def _ffn(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.mlp is not None
    return _neurons(ElasticAxis.FFN, shape.mlp.ffn, groups)


def _moe_ffn(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.moe is not None
    return _neurons(ElasticAxis.MOE_FFN, shape.moe.ffn, groups)


def _shared_ffn(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.moe is not None
    return _neurons(ElasticAxis.SHARED_FFN, shape.moe.shared_ffn, groups)


def _experts(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.moe is not None
    return _neurons(ElasticAxis.EXPERTS, shape.moe.experts, groups)


def _context(shape: ModelShape, groups: Groups) -> Dim:
    part = shape.attention
    assert part is not None
    return Dim((Segment(part.heads * part.head_dim, ElasticAxis.HEADS, groups(ElasticAxis.HEADS)),))


def _qkv(shape: ModelShape, groups: Groups) -> Dim:
    part = shape.attention
    assert part is not None
    one = part.kv_groups * part.head_dim
    return Dim((*_context(shape, groups).segments, Segment(one), Segment(one)), part.kv_groups)


def _mamba_heads(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.mamba is not None
    return _neurons(ElasticAxis.MAMBA_HEADS, shape.mamba.heads, groups)


def _mamba_inner(shape: ModelShape, groups: Groups) -> Dim:
    part = shape.mamba
    assert part is not None
    return Dim((Segment(part.heads * part.head_dim, ElasticAxis.MAMBA_HEADS, groups(ElasticAxis.MAMBA_HEADS)),))


def _mamba_conv(shape: ModelShape, groups: Groups) -> Dim:
    part = shape.mamba
    assert part is not None
    states = Segment(part.groups * part.state)
    return Dim((*_mamba_inner(shape, groups).segments, states, states))


def _mamba_in(shape: ModelShape, groups: Groups) -> Dim:
    inner, heads = _mamba_inner(shape, groups).segments, _mamba_heads(shape, groups).segments
    return Dim((*inner, *_mamba_conv(shape, groups).segments, *heads))


def _taps(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.mamba is not None
    return Dim((Segment(shape.mamba.conv),))


def _one(shape: ModelShape, groups: Groups) -> Dim:
    return Dim((Segment(1),))


DimRule = Callable[[ModelShape, Groups], Dim]


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """Parameters whose name (after `decoder.layers.N.` for rows of a layer kind) matches `pattern` have these dims.

    letter: the layer kind, "" for parameters outside the layers.
    """

    letter: str
    pattern: str
    dims: tuple[DimRule, ...]


TABLE: tuple[LayoutRow, ...] = (
    LayoutRow("", r"embedding\.word_embeddings\.weight|output_layer\.weight", (_vocab, _hidden)),
    LayoutRow("", r"decoder\.final_norm\.weight", (_hidden,)),
    LayoutRow("M", r"mixer\.in_proj\.layer_norm_weight", (_hidden,)),
    LayoutRow("M", r"mixer\.in_proj\.weight", (_mamba_in, _hidden)),
    LayoutRow("M", r"mixer\.conv1d\.weight", (_mamba_conv, _one, _taps)),
    LayoutRow("M", r"mixer\.conv1d\.bias", (_mamba_conv,)),
    LayoutRow("M", r"mixer\.(A_log|D|dt_bias)", (_mamba_heads,)),
    LayoutRow("M", r"mixer\.norm\.weight", (_mamba_inner,)),
    LayoutRow("M", r"mixer\.out_proj\.weight", (_hidden, _mamba_inner)),
    LayoutRow("*", r"self_attention\.linear_qkv\.layer_norm_weight", (_hidden,)),
    LayoutRow("*", r"self_attention\.linear_qkv\.weight", (_qkv, _hidden)),
    LayoutRow("*", r"self_attention\.linear_qkv\.bias", (_qkv,)),
    LayoutRow("*", r"self_attention\.linear_proj\.weight", (_hidden, _context)),
    LayoutRow("*", r"self_attention\.linear_proj\.bias", (_hidden,)),
    LayoutRow("-", r"mlp\.linear_fc1\.layer_norm_weight", (_hidden,)),
    LayoutRow("-", r"mlp\.linear_fc1\.weight", (_ffn, _hidden)),
    LayoutRow("-", r"mlp\.linear_fc1\.bias", (_ffn,)),
    LayoutRow("-", r"mlp\.linear_fc2\.weight", (_hidden, _ffn)),
    LayoutRow("-", r"mlp\.linear_fc2\.bias", (_hidden,)),
    LayoutRow("E", r"pre_mlp_layernorm\.weight", (_hidden,)),
    LayoutRow("E", r"mlp\.router\.weight", (_experts, _hidden)),
    LayoutRow("E", r"mlp\.router\.expert_bias", (_experts,)),
    LayoutRow("E", r"mlp\.experts\.experts\.linear_fc1\.weight", (_experts, _moe_ffn, _hidden)),
    LayoutRow("E", r"mlp\.experts\.experts\.linear_fc2\.weight", (_experts, _hidden, _moe_ffn)),
    LayoutRow("E", r"mlp\.shared_experts\.linear_fc1\.weight", (_shared_ffn, _hidden)),
    LayoutRow("E", r"mlp\.shared_experts\.linear_fc2\.weight", (_hidden, _shared_ffn)),
)

BUFFERS = ("mlp.router.expert_bias",)
"""Names (after the layer prefix) that are saved with the model but are not parameters."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def axis_groups(space: ElasticSpace | None) -> Groups:
    """The groups function of a space; every axis has one group without a space."""
    table = {spec.axis: spec.groups for spec in space.axes} if space else {}
    return lambda axis: table.get(axis, 1)


def layer_of(name: str) -> int | None:
    """Global layer number (from 0) of a parameter, None outside the layers."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def dims_of(name: str, shape: ModelShape, groups: Groups) -> tuple[Dim, ...]:
    """The dims of the full parameter `name`. Raises CheckpointError for a name no row of the table knows."""
    match = _LAYER.fullmatch(name)
    letter, rest = ("", name) if match is None else (shape.layer_pattern[int(match[1]) : int(match[1]) + 1], match[2])
    if match is None or letter:
        for row in TABLE:
            if row.letter == letter and re.fullmatch(row.pattern, rest):
                return tuple(rule(shape, groups) for rule in row.dims)
    where = f"a {LAYER_KINDS[letter]} layer" if letter else "this model"
    raise CheckpointError(
        f"parameter {name!r} is not one of {where} with layer_pattern {shape.layer_pattern!r}; is it a checkpoint of another model?"
    )


def full_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every saved tensor of a model with its full shape, in the order of the layers."""
    groups = axis_groups(None)
    names = ["embedding.word_embeddings.weight", "decoder.final_norm.weight"]
    names += [] if shape.tied_embeddings else ["output_layer.weight"]
    for layer, letter in enumerate(shape.layer_pattern):
        names += [f"decoder.layers.{layer}.{rest}" for rest in _layer_names(shape, letter)]
    return {name: tuple(dim.size for dim in dims_of(name, shape, groups)) for name in names}


def _layer_names(shape: ModelShape, letter: str) -> list[str]:
    names = {
        "M": ["mixer.in_proj.layer_norm_weight", "mixer.in_proj.weight", "mixer.conv1d.weight", "mixer.conv1d.bias"]
        + ["mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.norm.weight", "mixer.out_proj.weight"],
        "*": [f"self_attention.{n}" for n in ("linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight")],
        "-": [f"mlp.{n}" for n in ("linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight")],
        "E": ["pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias"]
        + ["mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight"],
    }[letter]
    if letter == "*" and shape.attention and shape.attention.qkv_bias:
        names.append("self_attention.linear_qkv.bias")
    if letter == "*" and shape.linear_bias:
        names.append("self_attention.linear_proj.bias")
    if letter == "-" and shape.linear_bias:
        names += ["mlp.linear_fc1.bias", "mlp.linear_fc2.bias"]
    if letter == "E" and shape.moe and shape.moe.shared_ffn:
        names += ["mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"]
    return names


def submodel_name(name: str, plan: SubmodelPlan) -> str | None:
    """Name of parameter `name` in the sub-model of `plan` (layers renumbered), None when its layer is dropped."""
    layer = layer_of(name)
    if layer is None:
        return name
    if not plan.keeps_layer(layer):
        return None
    new = layer - sum(n < layer for n in plan.dropped_layers)
    return name.replace(f"decoder.layers.{layer}.", f"decoder.layers.{new}.", 1)
