"""Whether Transformer Engine is here is asked in one place, and a machine with a GPU but without it can still route tokens.

Run: pytest tests/platform/test_transformer_engine.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.platform.te import transformer_engine

PACKAGE = Path(__file__).parents[2] / "megatron_elastic"


def test_without_transformer_engine_there_is_none(parallel: Any) -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    assert (transformer_engine() is None) == (not HAVE_TE)


def test_nothing_else_imports_it() -> None:
    imports = re.compile(r"^\s*(from|import) (transformer_engine|megatron\.core\.extensions)", re.MULTILINE)
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if imports.search(path.read_text(encoding="utf-8"))}
    assert found == {"platform/te.py"}


@pytest.mark.parametrize("first", ["", "import torch; torch.cuda.is_available = lambda: True; "])
def test_the_router_finds_its_name_with_a_gpu_and_without(first: str) -> None:
    code = (
        f"{first}from megatron_elastic.platform import prepare_platform; prepare_platform()\n"
        "from megatron.core.transformer.moe import moe_utils; print('te_general_gemm' in vars(moe_utils))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "True"
