"""Runs of kept entries applied to tensors: what slice mode and extraction share. Plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_elastic.layout import Runs


def select(tensor: torch.Tensor, dim: int, runs: Runs | None) -> torch.Tensor:
    """The kept entries of one dim: a view for one run, a copy for several, the tensor itself for None."""
    if runs is None:
        return tensor
    if len(runs) == 1:
        return tensor.narrow(dim, *runs[0])
    group = _equal_groups(runs, tensor.shape[dim])
    if group:
        return tensor.unflatten(dim, (len(runs), group)).narrow(dim + 1, 0, runs[0][1]).flatten(dim, dim + 1)
    return torch.cat([tensor.narrow(dim, start, length) for start, length in runs], dim)


def select_matrix(matrix: torch.Tensor, rows: Runs | None, cols: Runs | None) -> torch.Tensor:
    """The kept part [kept rows, kept cols] of a matrix [rows, cols]: a view when both are one run."""
    if rows is not None and len(rows) > 1:
        return select(select(matrix, 1, cols), 0, rows)  # rows are copied last, so that only kept columns are copied
    return select(select(matrix, 0, rows), 1, cols)


def add_selected(target: torch.Tensor, value: torch.Tensor, rows: Runs | None, cols: Runs | None) -> None:
    """Add `value` [kept rows, kept cols] to the kept entries of `target` [rows, cols], in place."""
    for target_rows, value_rows in _matching(target, value, 0, rows):
        for target_part, value_part in _matching(target_rows, value_rows, target_rows.dim() - 1, cols):
            target_part.add_(value_part)


def spread(kept: torch.Tensor, runs: Runs, size: int) -> torch.Tensor:
    """The last dim of `kept` [..., kept entries] back at its places among `size` entries, zeros between: the inverse of `select`."""
    pieces, at, end = [], 0, 0
    for start, length in runs:
        pieces += [kept.new_zeros((*kept.shape[:-1], start - end)), kept[..., at : at + length]]
        at, end = at + length, start + length
    return torch.cat([*pieces, kept.new_zeros((*kept.shape[:-1], size - end))], -1)


def num_kept(size: int, runs: Runs | None) -> int:
    """How many of `size` entries the runs keep; None: all."""
    return size if runs is None else sum(length for _, length in runs)


def _equal_groups(runs: Runs, size: int) -> int | None:
    """Entries of one group when the runs are equal prefixes of equal groups that fill `size` entries: one view holds them all."""
    group, rest = divmod(size, len(runs))
    return group if not rest and all(run == (n * group, runs[0][1]) for n, run in enumerate(runs)) else None


def _matching(target: torch.Tensor, value: torch.Tensor, dim: int, runs: Runs | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the kept entries of one dim of `target` with views of the entries of `value` that belong to them, as few as possible."""
    if runs is None:
        yield target, value
        return
    group = _equal_groups(runs, target.shape[dim])
    if group:
        kept = runs[0][1]
        yield target.unflatten(dim, (len(runs), group)).narrow(dim + 1, 0, kept), value.unflatten(dim, (len(runs), kept))
        return
    at = 0
    for start, length in runs:
        yield target.narrow(dim, start, length), value.narrow(dim, at, length)
        at += length
