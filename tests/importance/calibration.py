"""Calibration of a tiny model with random weights on some layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_elastic.importance.collect import Collected, collect
from megatron_elastic.models.build import build_model
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import randomize_
from tests.importance.rows import rows

ROWS = 6


def random_parts(shape: ModelShape, parallel: ParallelContext) -> list[Any]:
    """This rank's parts of the model of `shape`, weights moved off their start, the same model on every layout."""
    parts = [build_model(shape, parallel, part=part) for part in range(parallel.virtual_pipeline)]
    for part in parts:
        randomize_(part)
        for name, bias in part.named_buffers():
            if name.endswith("expert_bias"):  # so small that no expert is chosen for it alone
                bias.mul_(0.5)
    return parts


def calibrated(rank: int, world: int, shape: ModelShape, layout: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Collected] | None:
    """Criterion -> what rank 0 found on a layout; every rank must have found the same."""
    parallel = ParallelContext.initialize(**layout)
    try:
        parts = random_parts(shape, parallel)
        found = {
            name: collect(parts, shape, parallel, rows(shape.vocab_size, ROWS, parallel), criterion=name, experts="reap") for name in names
        }
        everyone: list[Any] = [None] * world
        torch.distributed.all_gather_object(everyone, {name: plain(one) for name, one in found.items()})
        for name, tensors in everyone[0].items():
            for key, tensor in tensors.items():
                assert all(torch.equal(tensor, other[name][key]) for other in everyone), (name, key)
        return found if rank == 0 else None
    finally:
        parallel.destroy()


def plain(found: Collected) -> dict[str, torch.Tensor]:
    """Every tensor of what was found, by a name."""
    tensors = {f"{axis.value}/{layer}": values for axis, by_layer in found.scores.items() for layer, values in by_layer.items()}
    if found.experts is not None:
        for what in ("saliency", "tokens", "gates"):
            tensors |= {f"{what}/{layer}": values for layer, values in getattr(found.experts, what).items()}
    return tensors


def narrower(shape: ModelShape, pattern: str) -> ModelShape:
    """`shape` with other layers."""
    return replace(shape, layer_pattern=pattern)
