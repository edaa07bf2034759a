"""Fusible operations, by name only: megatron-core's fused MLP, which we do not use, names them in its annotations."""

from __future__ import annotations


class FusibleOperation:
    """An operation."""


class Sequential:
    """Operations in a row."""
