"""Random states and recomputation, by name only: neither is used."""

from __future__ import annotations


class CudaRNGStatesTracker:
    """megatron-core subclasses it."""


def activation_recompute_forward() -> None:
    """Of recomputed layers."""
