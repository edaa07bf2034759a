"""These tests import megatron-core at their top, so the machine is prepared before they are collected; and which of the layouts run today."""

from __future__ import annotations

import os
import time

import pytest

from megatron_elastic.platform import prepare_platform
from megatron_elastic.platform.versions import Generation, megatron_generation

prepare_platform()

DAY_SECONDS = 86_400


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a quarter of layout x model x mode, another one on the other release of megatron-core: a half a day, the other half tomorrow.

    Each quarter has soft and hard ones. With ALL_LAYOUTS=1 (`make test-parallel`) everything runs.
    """
    if os.environ.get("ALL_LAYOUTS") == "1":
        return
    quarter = (2 * int(time.time() // DAY_SECONDS) + (megatron_generation() is Generation.V0_19)) % 4
    layouts = [item for item in items if item.name.startswith("test_two_steps_equal_one_process[")]
    left_out = {item for number, item in enumerate(layouts) if (number // 2 + 2 * (number % 2)) % 4 != quarter}
    config.hook.pytest_deselected(items=sorted(left_out, key=items.index))
    items[:] = [item for item in items if item not in left_out]
