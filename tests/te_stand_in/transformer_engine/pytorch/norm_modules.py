"""RMSNorm and LayerNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from transformer_engine.pytorch.base import gamma


class _Norm(nn.Module):
    has_bias = False

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        size = normalized_shape if hidden_size is None else hidden_size  # the older name of the same
        assert size is not None
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = 0.0 if zero_centered_gamma else 1.0
        self.weight = nn.Parameter(torch.full((size,), start, dtype=params_dtype, device=device))
        if self.has_bias:
            self.bias = nn.Parameter(torch.zeros(size, dtype=params_dtype, device=device))
        for parameter in self.parameters():
            vars(parameter)["sequence_parallel"] = sequence_parallel


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * gamma."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same."""
        return F.rms_norm(x, self.weight.shape, gamma(self.weight, zero_centered=self.zero_centered_gamma), self.eps)


class LayerNorm(_Norm):
    """(x - mean(x)) / sqrt(var(x) + eps) * gamma + bias."""

    has_bias = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same."""
        return F.layer_norm(x, self.weight.shape, gamma(self.weight, zero_centered=self.zero_centered_gamma), self.bias, self.eps)
