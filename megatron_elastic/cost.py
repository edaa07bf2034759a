"""Exact cost of a plan, or of a router's expected widths, from a ModelShape alone. Plain arithmetic, no torch.

Every count is read off the layout table: a parameter has the product of its dims, a dim the sum of its segments, a segment
its unit times the width of its axis. Widths may be integers (a plan: the count is exact and equals `sum(p.numel())` of the
extracted model), floats, or 0-d tensors (the expectation under a router; exact because no parameter has one axis in two dims,
so every term is multilinear in independent axes).

Conventions: a parameter count includes the padded vocabulary; active parameters count `topk` of the routed experts and all the
rest; FLOPs are those of one forward pass per token, a multiply-add being two, attention counted over the whole square of the
sequence (as torch's FlopCounterMode does) and the selective scan as the chunked algorithm of `platform.kernels` computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.errors import ConfigError
from megatron_elastic.layout import BUFFERS, Dim, axis_groups, dims_of, full_shapes, layer_of
from megatron_elastic.shape import ModelShape, parent_width

Number = Any
"""int, float or 0-d tensor."""

BYTES_PER_WEIGHT: Mapping[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""Weight formats; NVFP4 is 4 bits and one E4M3 scale for 16 weights."""


@dataclass(frozen=True, slots=True)
class Widths:
    """What a cost is counted for.

    axes: width of every axis of the model; survival: for each layer the probability (1 or 0 for a plan) that it is computed.
    """

    axes: Mapping[ElasticAxis, Number]
    survival: Sequence[Number]


def widths_of(plan: SubmodelPlan, num_layers: int) -> Widths:
    """The widths of a hard plan."""
    return Widths(dict(plan.widths), [int(plan.keeps_layer(layer)) for layer in range(num_layers)])


def _dim_size(dim: Dim, shape: ModelShape, widths: Widths) -> Number:
    total: Number = 0
    for segment in dim.segments:
        if segment.axis is None:
            total = total + segment.size
        else:
            parent = parent_width(shape, segment.axis)
            assert parent is not None
            total = total + segment.size // parent * widths.axes[segment.axis]
    return total


@lru_cache(maxsize=64)
def _terms(shape: ModelShape) -> tuple[tuple[str, str, tuple[Dim, ...]], ...]:
    """(name, layer letter or "", dims) of every parameter of one layer of each kind and of what stands outside the layers."""
    one_each = replace(shape, layer_pattern="".join(sorted(set(shape.layer_pattern))))
    groups = axis_groups(None)
    terms = []
    for name in full_shapes(one_each):
        layer = layer_of(name)
        letter = "" if layer is None else one_each.layer_pattern[layer]
        if not name.endswith(BUFFERS):
            terms.append((name, letter, dims_of(name, one_each, groups)))
    return tuple(terms)


def _sum_over_parameters(shape: ModelShape, widths: Widths, count: Callable[[str, list[Number]], Number]) -> Number:
    """Sum of count(name, dim sizes) over parameters; what stands in a layer counts as often as such layers survive."""
    alive: dict[str, Number] = {"": 1} | {letter: _layers(shape, widths, letter) for letter in set(shape.layer_pattern)}
    total: Number = 0
    for name, letter, dims in _terms(shape):
        total = total + count(name, [_dim_size(dim, shape, widths) for dim in dims]) * alive[letter]
    return total


def _product(sizes: Sequence[Number]) -> Number:
    product: Number = 1
    for size in sizes:
        product = product * size
    return product


def total_params(shape: ModelShape, widths: Widths) -> Number:
    """Parameters of the sub-model."""
    return _sum_over_parameters(shape, widths, lambda name, sizes: _product(sizes))


def _active(name: str, sizes: list[Number], shape: ModelShape) -> list[Number]:
    if ".experts.experts." in name:
        assert shape.moe is not None
        return [shape.moe.topk, *sizes[1:]]
    return sizes


def active_params(shape: ModelShape, widths: Widths) -> Number:
    """Parameters that one token meets: `topk` routed experts a layer and everything else."""
    return _sum_over_parameters(shape, widths, lambda name, sizes: _product(_active(name, sizes, shape)))


def flops_per_token(shape: ModelShape, widths: Widths, sequence_length: int) -> Number:
    """Forward FLOPs per token of sequences of `sequence_length` (a multiple of the scan's chunk, or shorter than one)."""

    def linear(name: str, sizes: list[Number]) -> Number:
        if len(sizes) < 2 or name.startswith("embedding.") or ".conv1d." in name:
            return 0  # no matrix product
        return 2 * _product(_active(name, sizes, shape))

    total = _sum_over_parameters(shape, widths, linear)
    if shape.tied_embeddings:
        total = total + 2 * shape.vocab_rows * widths.axes[ElasticAxis.HIDDEN]
    if shape.attention and "*" in shape.layer_pattern:
        per_layer = 4 * sequence_length * widths.axes[ElasticAxis.HEADS] * shape.attention.head_dim
        total = total + per_layer * _layers(shape, widths, "*")
    if shape.mamba and "M" in shape.layer_pattern:
        total = total + _scan_flops(shape, widths, sequence_length) * _layers(shape, widths, "M")
    return total


def _layers(shape: ModelShape, widths: Widths, letter: str) -> Number:
    return sum(s for s, kind in zip(widths.survival, shape.layer_pattern, strict=True) if kind == letter)


def _scan_flops(shape: ModelShape, widths: Widths, sequence_length: int) -> Number:
    """C B^T per group; (C B^T) x, the chunk's state and C h per head (Mamba-2's state-space duality, arXiv 2405.21060, section 6)."""
    part = shape.mamba
    assert part is not None
    chunk = min(part.chunk, sequence_length)
    per_head = 2 * chunk * part.head_dim + 4 * part.state * part.head_dim
    return 2 * chunk * part.state * part.groups + per_head * widths.axes[ElasticAxis.MAMBA_HEADS]


def weight_bytes(shape: ModelShape, widths: Widths, weight_format: str = "bf16") -> Number:
    """Bytes of the sub-model's weights in `weight_format`. Raises ConfigError for an unknown format."""
    if weight_format not in BYTES_PER_WEIGHT:
        raise ConfigError(f"weight format {weight_format!r} is unknown; use {', '.join(BYTES_PER_WEIGHT)}")
    return total_params(shape, widths) * BYTES_PER_WEIGHT[weight_format]


COSTS = ("total_params", "active_params", "flops", "memory")
"""What `elastic.cost` can be."""


def cost_function(shape: ModelShape, kind: str, sequence_length: int) -> Callable[[Widths], Number]:
    """The cost named by `elastic.cost` as a function of widths. Raises ConfigError for an unknown name."""
    table: dict[str, Callable[[Widths], Number]] = {
        "total_params": lambda widths: total_params(shape, widths),
        "active_params": lambda widths: active_params(shape, widths),
        "flops": lambda widths: flops_per_token(shape, widths, sequence_length),
        "memory": lambda widths: weight_bytes(shape, widths),
    }
    if kind not in table:
        raise ConfigError(f"elastic.cost {kind!r} is unknown; use {', '.join(COSTS)}")
    return table[kind]
