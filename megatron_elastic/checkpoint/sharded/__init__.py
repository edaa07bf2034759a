"""Save and load a training run with megatron-core's dist_checkpointing, at any parallel layout."""

from __future__ import annotations

from megatron_elastic.platform import prepare_platform

# The modules of this package import megatron-core at their top, which needs a prepared machine.
prepare_platform()
