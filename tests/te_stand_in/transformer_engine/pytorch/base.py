"""What all modules of the stand-in share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class TransformerEngineBaseModule(nn.Module):
    """Holds an `_extra_state` in its state dict, as Transformer Engine's modules do, empty without 8-bit training."""

    def get_extra_state(self) -> torch.Tensor:
        """Nothing, as bytes."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing to restore."""


def gamma(weight: torch.Tensor, *, zero_centered: bool) -> torch.Tensor:
    """What a norm multiplies by: its weight, or one more."""
    return weight + 1.0 if zero_centered else weight
