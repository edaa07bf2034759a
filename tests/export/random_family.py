"""A family with random weights as a checkpoint, written without a model: what looks at families needs no training."""

from __future__ import annotations

from pathlib import Path

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.checkpoint.named import write_named
from megatron_elastic.layout import full_shapes
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import random_tensor
from tests.elastic.family import narrowed, tiny_space


def write_family(directory: Path, shape: ModelShape, seed: int = 0) -> dict[str, SubmodelPlan]:
    """Write the checkpoint `directory`; returns its budgets' plans: the parent, the middle and the narrowest choice of every axis."""
    import torch

    space = tiny_space(shape)
    generator = torch.Generator().manual_seed(seed)
    tensors = ((name, random_tensor(name, size, generator)) for name, size in full_shapes(shape).items())
    plans = {name: narrowed(space, None, choice) for name, choice in (("full", 0), ("medium", 1), ("small", -1))}
    write_named(directory, tensors, shape, space=space, plans=plans)
    return plans
