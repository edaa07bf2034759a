"""Recipes of 8-bit training, by name only."""

from __future__ import annotations

from transformer_engine.common import recipe as recipe
