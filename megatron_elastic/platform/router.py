"""megatron-core's router with auxiliary losses that count the same on every layout.

With the loss per token, gradients are divided by the tokens of the global batch in the end, so an auxiliary loss is multiplied by the tokens
of its microbatch. 0.16.1 takes the rank's own tokens for that, although a router's gradient is summed over the tensor- and context-parallel
ranks that share a microbatch: with N of them its losses count 1/N (NVIDIA/Megatron-LM#5047, #3768; mended in 0.19).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter as MegatronRouter

from megatron_elastic.platform.versions import Generation, megatron_generation


class _MendedRouter(MegatronRouter):
    """The router of 0.16.1 whose losses are multiplied by the tokens of the whole microbatch."""

    def attach_and_log_load_balancing_loss(
        self, activation: torch.Tensor, *args: Any, valid_token_count: int | torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """As megatron's; valid_token_count: this rank's tokens without padding."""
        tokens = activation.shape[0] if valid_token_count is None else valid_token_count
        return super().attach_and_log_load_balancing_loss(activation, *args, valid_token_count=tokens * self.tp_cp_group.size(), **kwargs)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """As megatron's: logits [tokens, experts], unchanged, with the z loss attached; padding_mask: True for padding."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.calculate_per_token_loss or not (self.training and torch.is_grad_enabled()):
            return super().apply_z_loss(logits, padding_mask)
        # A mean over this rank's tokens, times their number: the sum over ranks is that over the microbatch without another factor.
        loss = z_loss_func(logits, coefficient, padding_mask=padding_mask)
        tokens = logits.shape[0] if padding_mask is None else (~padding_mask).sum()
        save_to_aux_losses_tracker("z_loss", loss / coefficient, self.layer_number, self.config.num_layers)
        return MoEAuxLossAutoScaler.apply(logits, loss * tokens)  # pyright: ignore[reportReturnType]


TopKRouter: type[MegatronRouter] = _MendedRouter if megatron_generation() is Generation.V0_16 else MegatronRouter
"""The router that models are built with."""
