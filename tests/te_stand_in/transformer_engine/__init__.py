"""A stand-in for Transformer Engine in plain PyTorch, so that megatron-core's own extension classes can be built and run without it.

A test that puts this package's parent directory on the path of a fresh process finds `transformer_engine` there, as if it were
installed. It offers what megatron-core's `extensions/transformer_engine.py` uses in full precision and nothing else: an argument that it does
not know is a TypeError. Shapes are checked as strictly as by Transformer Engine, whose kernels take no part of a weight.
"""

from __future__ import annotations

from transformer_engine import common as common
from transformer_engine import pytorch as pytorch

__version__ = "2.9.0"
