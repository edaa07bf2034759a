"""Rankings by chance, for tests of what is done with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.importance.ranking import Ranking, score_shapes
from megatron_elastic.layout import full_shapes
from megatron_elastic.models.weights import generator_of
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import random_tensor

RANKED = tuple(axis for axis in ElasticAxis if axis is not ElasticAxis.TOPK)


def ranking_of(shape: ModelShape, score: Callable[[str, tuple[int, ...]], Tensor], fingerprint: str = "0", **provenance: Any) -> Ranking:
    """Every axis of a model scored by score("AXIS/LAYER", sizes)."""
    sizes = {axis: found for axis in RANKED if (found := score_shapes(shape, axis))}
    scores = {axis: {layer: score(f"{axis}/{layer}", size) for layer, size in by_layer.items()} for axis, by_layer in sizes.items()}
    model = {"path": "somewhere", "fingerprint": fingerprint}
    return Ranking(shape, dict.fromkeys(sizes, "random"), scores, {"model": model, "tokens": 7, **provenance})


def random_ranking(shape: ModelShape, seed: int = 0, fingerprint: str = "0") -> Ranking:
    """Every axis of a model ranked by chance, without ties."""

    def score(key: str, size: tuple[int, ...]) -> Tensor:
        return torch.rand(size, generator=generator_of(seed, key))

    return ranking_of(shape, score, fingerprint)


def random_tensors(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of a model, with values a trained one could have."""
    return {name: random_tensor(name, size, generator_of(seed, name)) for name, size in full_shapes(shape).items()}
