"""Bytes that serving a sub-model takes on all its devices together: weights, caches, activations. No torch for a plan.

Weights and caches are multilinear in the choices, so expected widths give their expectation. The activation peak is a maximum over
moments and layers, which is not: for a soft decision (`Widths.soft`) the exact expectation over its choices is taken instead.

Convention of narrow weights (that of NVIDIA's published FP8 and NVFP4 checkpoints, made by ModelOpt): the matrices of attention,
MLPs, experts and Mamba's two projections are narrow; embedding, output layer, router, convolution, norms, biases and Mamba's
per-head numbers stay bf16. FP8 has one fp32 scale a matrix; NVFP4 has one too, and an E4M3 scale for 16 weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import ConfigError
from megatron_elastic.polynomials import (
    Number,
    Parameter,
    Polynomial,
    Widths,
    added,
    by_part,
    evaluate,
    lengths,
    multiplied,
    scan_lengths,
    term,
    value_at,
)
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import AXES

Format = Literal["fp32", "bf16", "fp8", "nvfp4"]
"""How numbers are stored."""

BYTES: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp8": 1, "nvfp4": 0.5625}
"""Bytes of a number in each format, with the scales of NVFP4's blocks of 16."""

SCALE_BYTES = 4
"""The fp32 scale of a narrow matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTarget:
    """What `elastic.cost: memory` counts: the bytes of serving a sub-model, weights, caches and the peak of a prefill."""

    weight_format: Format = "bf16"
    """Format of the weights; with fp8 and nvfp4 embedding, output layer, router, convolution and norms stay bf16."""
    cache_format: Format = "bf16"
    """Format of keys and values in the cache."""
    state_format: Literal["fp32", "bf16"] = "fp32"
    """Format of Mamba's recurrent state between tokens."""
    activation_format: Literal["fp32", "bf16"] = "bf16"
    """Format of activations and of the convolution's state."""
    sequence_length: int | None = None
    """Tokens of every cached sequence; null: those of the sequences that FLOPs are counted for."""
    batch: int = 1
    """Sequences that have a cache at the same time."""
    prefill_tokens: int | None = None
    """Tokens that go through the model at once; null: those of one sequence."""

    def problems(self) -> list[str]:
        """Everything wrong with these numbers, one line each."""
        numbers = {"sequence_length": self.sequence_length, "batch": self.batch, "prefill_tokens": self.prefill_tokens}
        return [f"elastic.memory.{name} {n} must be above 0" for name, n in numbers.items() if n is not None and n < 1]


def memory_bytes(shape: ModelShape, widths: Widths, target: MemoryTarget, sequence_length: int) -> Number:
    """Bytes of weights, caches and activations together. sequence_length: used where `target` names none."""
    length = target.sequence_length or sequence_length
    return (
        weight_bytes(shape, widths, target.weight_format)
        + kv_cache_bytes(shape, widths, target.batch, length, target.cache_format)
        + ssm_state_bytes(shape, widths, target.batch, target.state_format)
        + conv_state_bytes(shape, widths, target.batch, target.activation_format)
        + activation_bytes(shape, widths, target.prefill_tokens or length, target.activation_format)
    )


def weight_bytes(shape: ModelShape, widths: Widths, weight_format: str = "bf16") -> Number:
    """Bytes of the weights, scales included. Raises ConfigError for an unknown format.

    NVFP4's last block of a row is counted for the weights it holds, not as a whole block.
    """
    return evaluate(shape, widths, _weight_bytes(shape, _known(weight_format)))


def kv_cache_bytes(shape: ModelShape, widths: Widths, batch: int, sequence_length: int, cache_format: str = "bf16") -> Number:
    """Bytes of keys and values of `batch` sequences of `sequence_length` tokens; axis `heads` leaves them whole."""
    if not shape.has("attention"):
        return 0
    _, *cached = lengths(shape, "attention", "self_attention.linear_qkv.weight")
    each = term(batch * sequence_length * BYTES[_known(cache_format)])
    return evaluate(shape, widths, {"attention": multiplied(each, added(*cached))})


def ssm_state_bytes(shape: ModelShape, widths: Widths, batch: int, state_format: str = "fp32") -> Number:
    """Bytes of Mamba's recurrent states [heads, head_dim, state] of `batch` sequences, whatever their length."""
    if not shape.has("mamba"):
        return 0
    return evaluate(shape, widths, {"mamba": multiplied(term(batch * BYTES[_known(state_format)]), *scan_lengths(shape))})


def conv_state_bytes(shape: ModelShape, widths: Widths, batch: int, conv_format: str = "bf16") -> Number:
    """Bytes of the last inputs of Mamba's convolutions [x, B and C channels, taps] of `batch` sequences, as megatron-core keeps them."""
    if not shape.has("mamba"):
        return 0
    assert shape.mamba is not None
    convolved = added(*lengths(shape, "mamba", "mixer.conv1d.bias"))
    return evaluate(shape, widths, {"mamba": multiplied(term(batch * shape.mamba.conv * BYTES[_known(conv_format)]), convolved)})


def activation_bytes(shape: ModelShape, widths: Widths, tokens: int, activation_format: str = "bf16") -> Number:
    """Peak bytes of the activations of a forward pass over `tokens` tokens that keeps nothing for a backward pass.

    It is the largest of these moments over the layers that are computed; every moment has the residual stream beside
    - attention: its normed input with queries, keys and values; or those with the context (scores are never stored);
    - MLP: normed input and first projection; that projection and the activated neurons; activated neurons and output;
    - experts: the same for the shared expert, while the normed input waits; then, beside the shared expert's output, normed input and
      the copies of it that are sent to `topk` experts; copies and first projections; those and the activated neurons; these and the
      experts' outputs;
    - Mamba: normed input and input projection; that projection, the convolution's output, the scan's output and one fp32 state a chunk.
    Not counted: numbers of which a token has few (router logits, norm statistics), the logits of the last token, and workspaces.

    For a soft decision: the expectation of that maximum over its choices, exact when axes (and the layers of a per-layer axis) are
    drawn independently; differentiable in the probabilities.
    """
    moments = _moments(shape, tokens, BYTES[_known(activation_format)])
    if widths.soft is not None:
        from megatron_elastic.expected_peak import expected_peak  # needs torch, which plans do without

        return expected_peak(shape, widths.soft, moments)
    peak: Number = value_at(moments[""][0], widths.axes)
    for part in moments:
        for survival, here in _sublayers(shape, widths, part):
            for moment in moments[part]:
                peak = _larger(peak, survival * value_at(moment, here))
    return peak


def _sublayers(shape: ModelShape, widths: Widths, part: str) -> Iterator[tuple[Number, Mapping[ElasticAxis, Number]]]:
    """The different sublayers of one kind: (whether it is computed, its widths); one for all layers where no axis is per layer."""
    layers = shape.layers_with(part) if part else ()
    axes = {axis: width for axis, width in widths.axes.items() if AXES[axis].part in ("", part)}
    if layers and not any(isinstance(width, tuple) for width in axes.values()):
        yield functools.reduce(_larger, [widths.survival[layer] for layer in layers]), axes
        return
    for place, layer in enumerate(layers):
        yield widths.survival[layer], {axis: width[place] if isinstance(width, tuple) else width for axis, width in axes.items()}


def _known(name: str) -> str:
    if name not in BYTES:
        raise ConfigError(f"weight format {name!r} is unknown; use {', '.join(BYTES)}")
    return name


@lru_cache(maxsize=64)
def _weight_bytes(shape: ModelShape, weight_format: str) -> dict[str, Polynomial]:
    def count(parameter: Parameter) -> Polynomial:
        if weight_format in ("fp32", "bf16"):
            return multiplied(term(BYTES[weight_format]), parameter.size)
        if not parameter.part or not parameter.is_linear or ".router." in parameter.name:
            return multiplied(term(BYTES["bf16"]), parameter.size)
        scales = multiplied(term(SCALE_BYTES), *parameter.dims[:-2])
        return added(multiplied(term(BYTES[weight_format]), parameter.size), scales)

    return by_part(shape, count)


@lru_cache(maxsize=64)
def _moments(shape: ModelShape, tokens: int, number_bytes: float) -> dict[str, tuple[Polynomial, ...]]:
    """Sublayer -> bytes of `tokens` tokens at each moment of it that `activation_bytes` lists; "": between layers."""
    hidden = term(1, ElasticAxis.HIDDEN)
    found: dict[str, tuple[Polynomial, ...]] = {"": (added(hidden, hidden),)}
    if shape.has("attention"):
        projected = added(*lengths(shape, "attention", "self_attention.linear_qkv.weight"))
        context = added(*lengths(shape, "attention", "self_attention.linear_proj.weight", 1))
        found["attention"] = (added(hidden, hidden, projected), added(hidden, projected, context))
    if shape.has("mlp"):
        found["mlp"] = _mlp_moments(shape, hidden, hidden, added(*lengths(shape, "mlp", "mlp.linear_fc2.weight", 1)))
    if shape.has("moe"):
        found["moe"] = _moe_moments(shape)
    if shape.has("mamba"):
        projected = added(*lengths(shape, "mamba", "mixer.in_proj.weight"))
        convolved = lengths(shape, "mamba", "mixer.conv1d.bias")
        found["mamba"] = (added(hidden, hidden, projected), added(hidden, projected, *convolved, convolved[0]))
    scaled = {part: tuple(multiplied(term(tokens * number_bytes), moment) for moment in moments) for part, moments in found.items()}
    if shape.has("mamba"):
        assert shape.mamba is not None
        states = multiplied(term(math.ceil(tokens / shape.mamba.chunk) * BYTES["fp32"]), *scan_lengths(shape))
        scaled["mamba"] = (scaled["mamba"][0], added(scaled["mamba"][1], states))
    return scaled


def _mlp_moments(shape: ModelShape, waiting: Polynomial, normed: Polynomial, neurons: Polynomial) -> tuple[Polynomial, ...]:
    """An MLP's moments beside `waiting`; `normed` is its input and as large as its output."""
    first = added(neurons, neurons) if shape.gated else neurons
    return added(waiting, normed, first), added(waiting, first, neurons), added(waiting, neurons, normed)


def _moe_moments(shape: ModelShape) -> tuple[Polynomial, ...]:
    assert shape.moe is not None
    hidden = term(1, ElasticAxis.HIDDEN)
    shared: tuple[Polynomial, ...] = ()
    waiting = hidden
    if shape.moe.shared_ffn is not None:
        both = added(hidden, hidden)  # the residual stream, and the normed input that the router still reads
        activated = added(*lengths(shape, "moe", "mlp.shared_experts.linear_fc2.weight", 1))
        shared = (*_mlp_moments(shape, both, {}, activated)[:2], added(both, activated, hidden))
        waiting = added(hidden, hidden)  # the residual stream, and the shared expert's output
    copies = multiplied(term(1, ElasticAxis.TOPK), hidden)
    neurons = multiplied(term(1, ElasticAxis.TOPK), added(*lengths(shape, "moe", "mlp.experts.experts.linear_fc2.weight", 2)))
    return (*shared, added(waiting, hidden, copies), *_mlp_moments(shape, waiting, copies, neurons))


def _larger(one: Number, other: Number) -> Number:
    """The larger of two numbers, or of each pair of two grids."""
    import numpy as np  # here: `--help` must not wait for it

    return np.maximum(one, other)
