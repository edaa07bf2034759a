"""Training: data, step, loop, callbacks."""

from __future__ import annotations

from megatron_elastic.platform import prepare_platform

# Modules of this package import megatron-core at their top, which needs a prepared machine.
prepare_platform()
