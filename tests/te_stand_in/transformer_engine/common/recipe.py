"""Names that megatron-core subclasses; the stand-in computes in full precision."""

from __future__ import annotations


class DelayedScaling:
    """A recipe of 8-bit training."""
