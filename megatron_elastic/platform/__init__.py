"""What differs between machines and megatron-core releases: CPU support, SSM kernels, versions.

Nothing here imports torch or megatron-core at import time. A package whose modules import `megatron.core` at their top calls
`prepare_platform()` in its own `__init__`, so that megatron-core finds a prepared machine.
"""

from __future__ import annotations

from megatron_elastic.platform.cpu import prepare_platform
from megatron_elastic.platform.versions import Generation, megatron_generation

__all__ = ["Generation", "megatron_generation", "prepare_platform"]
