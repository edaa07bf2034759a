"""The table: which entries of every parameter belong to which axis.

Each dim of a parameter is a row of segments, repeated `repeat` times; a segment is (size, axis, groups). A grouped prefix of
an axis then selects *runs* of entries. Everything that cuts or masks reads this table: slice mode, extraction, cost tests.

Names are those of the full model on one process in Transformer Engine's module tree; routed experts are stacked along a
leading dim, as megatron's `torch_dist` checkpoints store them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
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
    unit_axis, unit: when the entries of one component belong to a second axis (the channels of each Mamba head): that axis, and its
    width in the parent.
    """

    size: int
    axis: ElasticAxis | None = None
    groups: int = 1
    unit_axis: ElasticAxis | None = None
    unit: int = 1

    @property
    def axes(self) -> tuple[ElasticAxis, ...]:
        """The axes its entries belong to."""
        return tuple(axis for axis in (self.axis, self.unit_axis) if axis is not None)


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a parameter: `repeat` times the row of segments (repeat > 1 interleaves, as linear_qkv does per KV group)."""

    segments: tuple[Segment, ...]
    repeat: int = 1

    @property
    def size(self) -> int:
        """Entries of the whole dim."""
        return sum(segment.size for segment in self.segments)

    @property
    def axes(self) -> tuple[ElasticAxis, ...]:
        """The axes its entries belong to, each once."""
        return tuple(dict.fromkeys(axis for segment in self.segments for axis in segment.axes))

    def blocks(self, shards: int = 1) -> Iterator[tuple[Segment, int, int]]:
        """The segments of one of `shards` equal shards in their order: (segment, its entries here, its groups here).

        shards: divides the repeats where there are several (`fit.attention_problems` refuses the layouts that would cut a KV group).
        """
        assert self.repeat == 1 or self.repeat % shards == 0, f"{shards} shards of {self.repeat} repeats"
        repeat, parts = (self.repeat // shards, 1) if self.repeat > 1 else (1, shards)
        for _ in range(repeat):
            for segment in self.segments:
                yield segment, segment.size // self.repeat // parts, segment.groups // self.repeat // parts

    def runs(self, kept: Mapping[ElasticAxis, tuple[int, int]], shards: int = 1) -> Runs:
        """Runs of kept entries of one of `shards` equal shards; a shard holds whole groups, so all shards are alike.

        kept: axis -> (kept width, parent's width); an axis that is missing is whole.
        """
        runs: list[tuple[int, int]] = []
        start = 0
        for segment, size, whole_groups in self.blocks(shards):
            width, parent = kept.get(segment.axis, (1, 1)) if segment.axis else (1, 1)
            unit_width, unit = kept.get(segment.unit_axis, (1, 1)) if segment.unit_axis else (1, 1)
            block = size // (whole_groups if width != parent else 1)
            for group in range(start, start + size, block):
                end = group + block * width // parent
                if unit_width == unit:
                    _append(runs, group, end - group)
                else:
                    for component in range(group, end, unit):
                        _append(runs, component, unit_width)
            start += size
        return tuple(runs)


def _append(runs: list[tuple[int, int]], start: int, length: int) -> None:
    if runs and sum(runs[-1]) == start:
        runs[-1] = (runs[-1][0], runs[-1][1] + length)
    elif length:
        runs.append((start, length))


def kept_widths(space: ElasticSpace, plan: SubmodelPlan, layer: int | None) -> dict[ElasticAxis, tuple[int, int]]:
    """axis -> (kept width, parent's width) for the axes on which `plan` is narrower than the parent in global layer `layer`.

    layer None: outside the layers, where only the axes of the whole model have a width.
    """
    kept = {}
    for spec in space.axes:
        if spec.axis in (axis for axis, _ in plan.widths) and (not spec.layers or layer in spec.layers):
            width = space.choices_of(plan, spec.axis)[spec.place_of(layer)]
            if width != spec.parent:
                kept[spec.axis] = (width, spec.parent)
    return kept


Groups = Callable[[ElasticAxis], int]
"""axis -> its number of groups (1 when it is not elastic)."""


def _size(value: int | tuple[int, ...] | None) -> int:
    assert isinstance(value, int), "dims are those of one layer: ModelShape.at(layer)"
    return value


def _hidden(shape: ModelShape, groups: Groups) -> Dim:
    return Dim((Segment(shape.hidden_size, ElasticAxis.HIDDEN, 1),))


def _vocab(shape: ModelShape, groups: Groups) -> Dim:
    return Dim((Segment(shape.vocab_rows),))


def _ffn(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.mlp is not None
    return Dim((Segment(_size(shape.mlp.ffn), ElasticAxis.FFN, groups(ElasticAxis.FFN)),))


def _moe_ffn(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.moe is not None
    return Dim((Segment(_size(shape.moe.ffn), ElasticAxis.MOE_FFN, groups(ElasticAxis.MOE_FFN)),))


def _shared_ffn(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.moe is not None
    return Dim((Segment(_size(shape.moe.shared_ffn), ElasticAxis.SHARED_FFN, groups(ElasticAxis.SHARED_FFN)),))


def _experts(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.moe is not None
    return Dim((Segment(_size(shape.moe.experts), ElasticAxis.EXPERTS, groups(ElasticAxis.EXPERTS)),))


def _fc1(neurons: DimRule) -> DimRule:
    """Rows of a first linear: the neurons, twice when the MLP is gated (the half that is activated, then the other)."""

    def rows(shape: ModelShape, groups: Groups) -> Dim:
        segments = neurons(shape, groups).segments
        return Dim(segments * 2 if shape.gated else segments)

    return rows


def _context(shape: ModelShape, groups: Groups) -> Dim:
    part = shape.attention
    assert part is not None
    return Dim((Segment(_size(part.heads) * part.head_dim, ElasticAxis.HEADS, groups(ElasticAxis.HEADS)),))


def _qkv(shape: ModelShape, groups: Groups) -> Dim:
    part = shape.attention
    assert part is not None
    one = part.kv_groups * part.head_dim
    return Dim((*_context(shape, groups).segments, Segment(one), Segment(one)), part.kv_groups)


def _head_channels(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.attention is not None
    return Dim((Segment(shape.attention.head_dim),))


def _mamba_heads(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.mamba is not None
    return Dim((Segment(_size(shape.mamba.heads), ElasticAxis.MAMBA_HEADS, groups(ElasticAxis.MAMBA_HEADS)),))


def _mamba_inner(shape: ModelShape, groups: Groups) -> Dim:
    part = shape.mamba
    assert part is not None
    heads, channels = _size(part.heads), _size(part.head_dim)
    return Dim((Segment(heads * channels, ElasticAxis.MAMBA_HEADS, groups(ElasticAxis.MAMBA_HEADS), ElasticAxis.MAMBA_HEAD_DIM, channels),))


def _mamba_state(shape: ModelShape, groups: Groups) -> Dim:
    part = shape.mamba
    assert part is not None
    return Dim((Segment(part.groups * _size(part.state), ElasticAxis.MAMBA_STATE, part.groups),))


def _mamba_conv(shape: ModelShape, groups: Groups) -> Dim:
    state = _mamba_state(shape, groups).segments
    return Dim((*_mamba_inner(shape, groups).segments, *state, *state))


def _mamba_in(shape: ModelShape, groups: Groups) -> Dim:
    inner, heads = _mamba_inner(shape, groups).segments, _mamba_heads(shape, groups).segments
    return Dim((*inner, *_mamba_conv(shape, groups).segments, *heads))


def _taps(shape: ModelShape, groups: Groups) -> Dim:
    assert shape.mamba is not None
    return Dim((Segment(shape.mamba.conv),))


def _one(shape: ModelShape, groups: Groups) -> Dim:
    return Dim((Segment(1),))


DimRule = Callable[[ModelShape, Groups], Dim]
Condition = Callable[[ModelShape], bool]


def _always(shape: ModelShape) -> bool:
    return True


def _layer_norm(shape: ModelShape) -> bool:
    return shape.normalization == "LayerNorm"


def _qk_norm(shape: ModelShape) -> bool:
    return shape.attention is not None and shape.attention.qk_norm


def _qk_layer_norm(shape: ModelShape) -> bool:
    return _qk_norm(shape) and _layer_norm(shape)


def _qkv_bias(shape: ModelShape) -> bool:
    return shape.attention is not None and shape.attention.qkv_bias


def _shared(shape: ModelShape) -> bool:
    return shape.moe is not None and shape.moe.shared_ffn is not None


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """The dims of the parameters `names` (after `decoder.layers.N.` for rows of a sublayer), which models have that meet `when`.

    part: the sublayer as `LAYER_KINDS` names it, "" for parameters outside the layers.
    """

    part: str
    names: tuple[str, ...]
    dims: tuple[DimRule, ...]
    when: Condition = _always


TABLE: tuple[LayoutRow, ...] = (
    LayoutRow("", ("embedding.word_embeddings.weight",), (_vocab, _hidden)),
    LayoutRow("", ("output_layer.weight",), (_vocab, _hidden), lambda shape: not shape.tied_embeddings),
    LayoutRow("", ("decoder.final_norm.weight",), (_hidden,), lambda shape: not shape.is_gpt),
    LayoutRow("", ("decoder.final_norm.bias",), (_hidden,), lambda shape: not shape.is_gpt and _layer_norm(shape)),
    LayoutRow("", ("decoder.final_layernorm.weight",), (_hidden,), lambda shape: shape.is_gpt),
    LayoutRow("", ("decoder.final_layernorm.bias",), (_hidden,), lambda shape: shape.is_gpt and _layer_norm(shape)),
    LayoutRow("mamba", ("mixer.in_proj.layer_norm_weight",), (_hidden,)),
    LayoutRow("mamba", ("mixer.in_proj.weight",), (_mamba_in, _hidden)),
    LayoutRow("mamba", ("mixer.conv1d.weight",), (_mamba_conv, _one, _taps)),
    LayoutRow("mamba", ("mixer.conv1d.bias",), (_mamba_conv,)),
    LayoutRow("mamba", ("mixer.A_log", "mixer.D", "mixer.dt_bias"), (_mamba_heads,)),
    LayoutRow("mamba", ("mixer.norm.weight",), (_mamba_inner,)),
    LayoutRow("mamba", ("mixer.out_proj.weight",), (_hidden, _mamba_inner)),
    LayoutRow("attention", ("self_attention.linear_qkv.layer_norm_weight",), (_hidden,)),
    LayoutRow("attention", ("self_attention.linear_qkv.layer_norm_bias",), (_hidden,), _layer_norm),
    LayoutRow("attention", ("self_attention.linear_qkv.weight",), (_qkv, _hidden)),
    LayoutRow("attention", ("self_attention.linear_qkv.bias",), (_qkv,), _qkv_bias),
    LayoutRow("attention", ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"), (_head_channels,), _qk_norm),
    LayoutRow("attention", ("self_attention.q_layernorm.bias", "self_attention.k_layernorm.bias"), (_head_channels,), _qk_layer_norm),
    LayoutRow("attention", ("self_attention.linear_proj.weight",), (_hidden, _context)),
    LayoutRow("attention", ("self_attention.linear_proj.bias",), (_hidden,), lambda shape: shape.linear_bias),
    LayoutRow("mlp", ("mlp.linear_fc1.layer_norm_weight",), (_hidden,)),
    LayoutRow("mlp", ("mlp.linear_fc1.layer_norm_bias",), (_hidden,), _layer_norm),
    LayoutRow("mlp", ("mlp.linear_fc1.weight",), (_fc1(_ffn), _hidden)),
    LayoutRow("mlp", ("mlp.linear_fc1.bias",), (_fc1(_ffn),), lambda shape: shape.linear_bias),
    LayoutRow("mlp", ("mlp.linear_fc2.weight",), (_hidden, _ffn)),
    LayoutRow("mlp", ("mlp.linear_fc2.bias",), (_hidden,), lambda shape: shape.linear_bias),
    LayoutRow("moe", ("pre_mlp_layernorm.weight",), (_hidden,)),
    LayoutRow("moe", ("pre_mlp_layernorm.bias",), (_hidden,), _layer_norm),
    LayoutRow("moe", ("mlp.router.weight",), (_experts, _hidden)),
    LayoutRow("moe", ("mlp.router.expert_bias",), (_experts,), lambda shape: shape.moe is not None and shape.moe.expert_bias),
    LayoutRow("moe", ("mlp.experts.experts.linear_fc1.weight",), (_experts, _fc1(_moe_ffn), _hidden)),
    LayoutRow("moe", ("mlp.experts.experts.linear_fc2.weight",), (_experts, _hidden, _moe_ffn)),
    LayoutRow("moe", ("mlp.shared_experts.linear_fc1.weight",), (_fc1(_shared_ffn), _hidden), _shared),
    LayoutRow("moe", ("mlp.shared_experts.linear_fc2.weight",), (_hidden, _shared_ffn), _shared),
)

BUFFERS = ("mlp.router.expert_bias",)
"""Names (after the layer prefix) that are saved with the model but are not parameters."""

LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
"""An expert's number in the names of a model, where each has tensors of its own."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def axis_groups(space: ElasticSpace | None) -> Groups:
    """The groups function of a space; every axis has one group without a space."""
    table = {spec.axis: spec.groups for spec in space.axes} if space else {}
    return lambda axis: table.get(axis, 1)


def layer_of(name: str) -> int | None:
    """Global layer number (from 0) of a parameter, None outside the layers."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def stacked_name(name: str) -> tuple[str, int | None]:
    """The name of the full tensor that a model's tensor is part of, and which expert of the stack it is; None: it is no expert's."""
    match = LOCAL_EXPERT.search(name)
    return (name, None) if match is None else (LOCAL_EXPERT.sub(".experts.experts.", name), int(match[1]))


def dims_of(name: str, shape: ModelShape, groups: Groups) -> tuple[Dim, ...]:
    """The dims of the full parameter `name`, whether this model has it or not. Raises CheckpointError for a name that no row knows."""
    match = _LAYER.fullmatch(name)
    layer = None if match is None else int(match[1])
    if layer is None or layer < shape.num_layers:
        parts = ("",) if layer is None else LAYER_KINDS[shape.layer_pattern[layer]]
        own = shape if layer is None else shape.at(layer)
        for row in TABLE:
            if row.part in parts and (name if match is None else match[2]) in row.names:
                return tuple(rule(own, groups) for rule in row.dims)
    letter = "" if layer is None or layer >= shape.num_layers else shape.layer_pattern[layer]
    where = f"a layer of {' and '.join(LAYER_KINDS[letter])}" if letter else "this model"
    raise CheckpointError(
        f"parameter {name!r} is not one of {where} with layer_pattern {shape.layer_pattern!r}; is it a checkpoint of another model?"
    )


def full_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every saved tensor of a model with its full shape: what stands outside the layers, then the layers in order."""
    groups = axis_groups(None)
    rows = [("", None, row) for row in TABLE if not row.part]
    for layer, letter in enumerate(shape.layer_pattern):
        rows += [(f"decoder.layers.{layer}.", layer, row) for row in TABLE if row.part in LAYER_KINDS[letter]]
    found = {}
    for prefix, layer, row in rows:
        own = shape if layer is None else shape.at(layer)
        if row.when(own):
            found |= {prefix + name: tuple(rule(own, groups).size for rule in row.dims) for name in row.names}
    return found


def submodel_name(name: str, plan: SubmodelPlan) -> str | None:
    """Name of parameter `name` in the sub-model of `plan` (layers renumbered), None when its layer is dropped."""
    layer = layer_of(name)
    if layer is None:
        return name
    if not plan.keeps_layer(layer):
        return None
    new = layer - sum(n < layer for n in plan.dropped_layers)
    return name.replace(f"decoder.layers.{layer}.", f"decoder.layers.{new}.", 1)
