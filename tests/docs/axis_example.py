"""What the page on axes promises, in a copy of the project that lacks the axis: python -m tests.docs.axis_example, in the copy.

Without the axis: it is refused by name, and all other axes work together. Then the blocks of the page are applied, and the axis' own parity
tests pass. megatron-core takes seconds to import; it is imported once, and each of the two packages runs in a fork.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.page_edits import edits_of

AXIS = "mamba_state"
PARITY = "tests/elastic/test_parity.py::test_masked_sliced_and_extracted_agree"
JOINTLY = "tests/elastic/test_parity.py::test_mamba_state_head_dim_and_heads_jointly_per_layer"


def main() -> int:
    """The exit code: 0 when all of it holds."""
    from megatron_elastic.platform import prepare_platform

    prepare_platform()
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt
    import megatron.core.ssm.mamba_mixer  # noqa: F401 - slow to import, and the same for both forks

    assert "megatron_elastic.axes" not in sys.modules, "the forks would not read the package anew"
    root = Path.cwd()
    failed = _in_fork(_without_the_axis)
    for edit in edits_of(root / "docs" / "how-to-add-an-axis.md"):
        edit.apply(root)
    return failed or _in_fork(_with_the_axis)


def _without_the_axis() -> int:
    from megatron_elastic.axes import ElasticAxis, SubmodelPlan
    from megatron_elastic.errors import PlanError
    from megatron_elastic.space import parent_plan
    from megatron_elastic.testing.tiny import tiny_shape

    plan = parent_plan(tiny_shape()).to_dict()
    assert isinstance(plan["widths"], dict) and AXIS not in plan["widths"]
    with pytest.raises(PlanError, match=f"unknown axis '{AXIS}'; axes are {', '.join(ElasticAxis)}"):
        SubmodelPlan.from_dict(plan | {"widths": plan["widths"] | {AXIS: 4}})
    return _tests(f"{PARITY}[hybrid-None-1]")


def _with_the_axis() -> int:
    return _tests(f"{PARITY}[hybrid-{AXIS}-1]", f"{PARITY}[hybrid-None-1]", JOINTLY)


def _tests(*names: str) -> int:
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *names]))


def _in_fork(function: Callable[[], int]) -> int:
    """What `function` returns in a fork of this process; 1 when it raises."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            code = function()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
