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


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: Any) -> Path:
    """The directory of a run of two ranks (tests/train/two_ranks.py) that nobody disturbed, on the same text."""
    from tests.train.two_ranks import finish

    root = tmp_path_factory.mktemp("undisturbed")
    finish(root / "run", in_new_process(harness.write_data, root))
    return root / "run"
