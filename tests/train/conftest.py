"""What the tests of whole runs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train import harness
from tests.train.harness import in_new_process


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> Path:
    """The text of a module's runs."""
    return in_new_process(harness.write_data, tmp_path_factory.mktemp("text"))
