"""Exact cost of a plan, or of a router's expected widths, from a ModelShape alone: parameters, FLOPs, bytes. No torch.

For a plan (integers) a count equals `sum(p.numel())` of the extracted model. For expected widths it is the expectation over plans,
because every term is multilinear in independent choices (`polynomials`). Bytes are in `memory`.

Conventions: a parameter count includes the padded vocabulary; active parameters count `topk` of the routed experts and all the
rest; FLOPs are those of one forward pass per token, a multiply-add being two, attention counted over the whole square of the
sequence (as torch's FlopCounterMode does) and the selective scan as the chunked algorithm of `platform.kernels` computes it.
Pointwise work counts as zero: norms (of queries and keys too), rotary embeddings, activations and gates, the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import ConfigError
from megatron_elastic.memory import MemoryTarget, memory_bytes, weight_bytes
from megatron_elastic.polynomials import (
    Number,
    Parameter,
    Polynomial,
    SoftChoices,
    Widths,
    added,
    by_part,
    evaluate,
    lengths,
    multiplied,
    scan_lengths,
    term,
    widths_of,
)
from megatron_elastic.shape import ModelShape

__all__ = [
    "COSTS",
    "MemoryTarget",
    "Number",
    "SoftChoices",
    "Widths",
    "active_params",
    "cost_function",
    "flops_per_token",
    "total_params",
    "weight_bytes",
    "widths_of",
]

COSTS = ("total_params", "active_params", "flops", "memory")
"""What `elastic.cost` can be."""


def total_params(shape: ModelShape, widths: Widths) -> Number:
    """Parameters of the sub-model."""
    return evaluate(shape, widths, _total(shape))


def active_params(shape: ModelShape, widths: Widths) -> Number:
    """Parameters that one token meets: `topk` routed experts a layer and everything else."""
    return evaluate(shape, widths, _active(shape))


def flops_per_token(shape: ModelShape, widths: Widths, sequence_length: int) -> Number:
    """Forward FLOPs per token of sequences of `sequence_length` (a multiple of the scan's chunk, or shorter than one)."""
    return evaluate(shape, widths, _flops(shape, sequence_length))


def cost_function(shape: ModelShape, kind: str, sequence_length: int, memory: MemoryTarget | None = None) -> Callable[[Widths], Number]:
    """The cost named by `elastic.cost` as a function of widths. Raises ConfigError for an unknown name.

    sequence_length: tokens of a sequence, for FLOPs, and for the caches unless `memory` names its own. memory: what kind "memory"
    counts (`MemoryTarget()` when None); other kinds do not read it.
    """
    target = memory or MemoryTarget()
    table: dict[str, Callable[[Widths], Number]] = {
        "total_params": lambda widths: total_params(shape, widths),
        "active_params": lambda widths: active_params(shape, widths),
        "flops": lambda widths: flops_per_token(shape, widths, sequence_length),
        "memory": lambda widths: memory_bytes(shape, widths, target, sequence_length),
    }
    if kind not in table:
        raise ConfigError(f"elastic.cost {kind!r} is unknown; use {', '.join(COSTS)}")
    return table[kind]


@lru_cache(maxsize=64)
def _total(shape: ModelShape) -> dict[str, Polynomial]:
    return by_part(shape, lambda parameter: parameter.size)


@lru_cache(maxsize=64)
def _active(shape: ModelShape) -> dict[str, Polynomial]:
    return by_part(shape, lambda parameter: parameter.active)


@lru_cache(maxsize=64)
def _flops(shape: ModelShape, sequence_length: int) -> dict[str, Polynomial]:
    def linear(parameter: Parameter) -> Polynomial:
        return added(parameter.active, parameter.active) if parameter.is_linear else {}

    costs = by_part(shape, linear)
    if shape.tied_embeddings:
        costs[""] = added(costs[""], term(2 * shape.vocab_rows, ElasticAxis.HIDDEN))
    if "attention" in costs:
        context = lengths(shape, "attention", "self_attention.linear_proj.weight", 1)
        costs["attention"] = added(costs["attention"], multiplied(term(4 * sequence_length), *context))
    if "mamba" in costs:
        costs["mamba"] = added(costs["mamba"], _scan_flops(shape, sequence_length))
    return costs


def _scan_flops(shape: ModelShape, sequence_length: int) -> Polynomial:
    """C B^T per group; (C B^T) x, the chunk's state and C h per head (Mamba-2's state-space duality, arXiv 2405.21060, section 6)."""
    assert shape.mamba is not None
    chunk = min(shape.mamba.chunk, sequence_length)
    inner, state = scan_lengths(shape)
    return added(
        multiplied(term(2 * chunk * shape.mamba.groups), state),
        multiplied(term(2 * chunk), inner),
        multiplied(term(4), inner, state),
    )
