"""Some of these tests import megatron-core at their top, so the machine is prepared before they are collected."""

from __future__ import annotations

from megatron_elastic.platform import prepare_platform

prepare_platform()
