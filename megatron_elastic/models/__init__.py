"""Model builders and layer specs on megatron-core."""

from __future__ import annotations

from megatron_elastic.platform import prepare_platform

# Every module of this package imports megatron-core at its top, which needs a prepared machine.
prepare_platform()
