"""The frozen parent runs ahead of the student over as few windows as its memory allows.

Run: pytest tests/distill/test_windows.py
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic.distill.windows import windows


@pytest.mark.parametrize(
    ("microbatches", "state", "bound", "multiple", "sizes"),
    [
        (8, 100, 1e9, 1, [8]),
        (8, 100, 799, 1, [4, 4]),
        (8, 100, 399, 1, [3, 3, 2]),
        (8, 100, 1, 1, [1] * 8),
        (8, 100, 399, 2, [2] * 4),
        (8, 100, 799, 2, [4, 4]),
        (12, 100, 999, 4, [8, 4]),
        (8, 100, 1, 4, [4, 4]),
    ],
)
def test_sizes(microbatches: int, state: int, bound: float, multiple: int, sizes: list[int]) -> None:
    assert windows(microbatches, state, bound, multiple) == sizes


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 1000), st.integers(1, 50_000))
def test_windows_are_few_equal_and_small_enough(rounds: int, multiple: int, state: int, bound: int) -> None:
    sizes = windows(rounds * multiple, state, bound, multiple)
    assert sum(sizes) == rounds * multiple and all(size > 0 and size % multiple == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= multiple
    assert max(sizes) * state <= max(bound, multiple * state)
    if len(sizes) > 1:
        assert -(-rounds // (len(sizes) - 1)) * multiple * state > bound, "fewer windows would fit"
