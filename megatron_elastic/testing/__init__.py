"""Helpers for tests: tiny models, and several ranks without the cost of starting them for every test."""

from __future__ import annotations

from megatron_elastic.testing.pool import RankError, RankPool, run_distributed

__all__ = ["RankError", "RankPool", "run_distributed"]
