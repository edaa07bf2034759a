"""Kept entries of tensors: views where runs are equal prefixes of equal groups, pieces otherwise, always the entries an index names.

Run: pytest tests/test_runs.py
"""

from __future__ import annotations

import pytest
import torch

from megatron_elastic.layout import Runs
from megatron_elastic.runs import add_selected, num_kept, select, select_matrix, spread

RUNS: dict[str, Runs | None] = {
    "whole": None,
    "one": ((0, 5),),
    "inner": ((3, 4),),
    "groups": ((0, 2), (4, 2), (8, 2)),
    "equal but shifted": ((1, 2), (5, 2), (9, 2)),
    "equal but short": ((0, 2), (4, 2)),
    "uneven": ((0, 2), (4, 3), (9, 3)),
}
SIZE = 12


def _index(runs: Runs | None) -> torch.Tensor:
    kept = ((0, SIZE),) if runs is None else runs
    return torch.tensor([n for start, length in kept for n in range(start, start + length)])


@pytest.mark.parametrize("rows", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("cols", RUNS.values(), ids=RUNS)
def test_matrix_parts(rows: Runs | None, cols: Runs | None) -> None:
    matrix = torch.arange(float(SIZE * SIZE)).view(SIZE, SIZE)
    expected = matrix[_index(rows)][:, _index(cols)]
    assert torch.equal(select_matrix(matrix, rows, cols), expected)
    assert torch.equal(select(select(matrix, 1, cols), 0, rows), expected)
    assert expected.shape == (num_kept(SIZE, rows), num_kept(SIZE, cols))
    value = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).t().contiguous().t()  # as a product may leave it
    target, reference = matrix.clone(), matrix.clone()
    add_selected(target, value, rows, cols)
    reference[_index(rows)[:, None], _index(cols)] += value
    assert torch.equal(target, reference)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_any_dim_with_its_gradient(dim: int, runs: Runs | None) -> None:
    shape = [3, 4, 5]
    shape[dim] = SIZE
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    part = select(tensor, dim, runs)
    expected = tensor.index_select(dim, _index(runs))
    assert torch.equal(part, expected)
    upstream = torch.randn(part.shape, generator=torch.Generator().manual_seed(2))
    grads = [torch.autograd.grad(result, tensor, upstream)[0] for result in (part, expected)] if runs else [upstream, upstream]
    assert torch.equal(*grads)


def test_one_run_is_a_view() -> None:
    matrix = torch.zeros(SIZE, SIZE)
    assert select_matrix(matrix, ((0, 5),), ((3, 4),)).data_ptr() == matrix[0, 3:].data_ptr()


@pytest.mark.parametrize("runs", [runs for runs in RUNS.values() if runs], ids=[name for name, runs in RUNS.items() if runs])
def test_spread_puts_entries_back_where_they_were(runs: Runs) -> None:
    whole = torch.arange(1.0, 2 * SIZE + 1).view(2, SIZE)
    result = spread(select(whole, 1, runs), runs, SIZE)
    expected = torch.zeros_like(whole)
    expected[:, _index(runs)] = whole[:, _index(runs)]
    assert torch.equal(result, expected)
