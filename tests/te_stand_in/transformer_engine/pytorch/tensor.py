"""Quantised tensors, by name only: megatron-core asks whether a tensor is one."""

from __future__ import annotations


class QuantizedTensor:
    """No tensor is one."""
