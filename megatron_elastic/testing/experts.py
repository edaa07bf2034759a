"""Experts as a model has them, a tensor each, and as checkpoints have them, stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_elastic.layout import stacked_name

if TYPE_CHECKING:
    import torch


def stack_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Named tensors with one tensor per expert (`experts.local_experts.K.*`, as a model has them) in the stacked form of checkpoints."""
    import torch

    stacked: dict[str, dict[int, torch.Tensor]] = {}
    result = {}
    for name, tensor in tensors.items():
        full, expert = stacked_name(name)
        if expert is None:
            result[name] = tensor
        else:
            stacked.setdefault(full, {})[expert] = tensor
    return result | {name: torch.stack([parts[n] for n in range(len(parts))]) for name, parts in stacked.items()}


def unstack_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `stack_experts`."""
    result = {}
    for name, tensor in tensors.items():
        if ".experts.experts." in name:
            result |= {name.replace(".experts.experts.", f".experts.local_experts.{n}."): part for n, part in enumerate(tensor)}
        else:
            result[name] = tensor
    return result
