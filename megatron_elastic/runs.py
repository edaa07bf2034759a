"""Runs of kept entries applied to tensors: what slice mode and extraction share. Plain torch."""

from __future__ import annotations

import torch

from megatron_elastic.layout import Runs


def select(tensor: torch.Tensor, dim: int, runs: Runs | None) -> torch.Tensor:
    """The kept entries of one dim: a view for one run, a copy for several, the tensor itself for None."""
    if runs is None:
        return tensor
    pieces = [tensor.narrow(dim, start, length) for start, length in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def add_selected(target: torch.Tensor, value: torch.Tensor, rows: Runs | None, cols: Runs | None) -> None:
    """Add `value` [kept rows, kept cols] to the kept entries of `target` [rows, cols], in place."""
    row_at = 0
    for row, height in rows or ((0, target.shape[0]),):
        col_at = 0
        for col, width in cols or ((0, target.shape[1]),):
            target[row : row + height, col : col + width].add_(value[row_at : row_at + height, col_at : col_at + width])
            col_at += width
        row_at += height
