"""Fused routing kernels, by name only: we refuse the fused router."""

from __future__ import annotations


def fused_topk_with_score_function() -> None:
    """Refused."""


def fused_compute_score_for_moe_aux_loss() -> None:
    """Refused."""


def fused_moe_aux_loss() -> None:
    """Refused."""
