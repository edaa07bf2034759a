"""Rows of text for tests of rankings: packed documents of awkward lengths, some tokens without a loss."""

from __future__ import annotations

import torch

from megatron_elastic.parallel import ParallelContext
from megatron_elastic.train.data import MicroBatch, pack_samples

SEQUENCE = 24


def row(vocab: int, number: int) -> MicroBatch:
    """Row `number`: three documents, about a fifth of its tokens without a loss."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, vocab, (SEQUENCE + 1,), generator=draw)
    lengths = [5, 11, SEQUENCE - 16][number % 3 :] + [5, 11, SEQUENCE - 16][: number % 3]
    mask = (torch.rand(SEQUENCE, generator=draw) > 0.2).float()
    positions = torch.cat([torch.arange(length) for length in lengths])
    return pack_samples([{"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": positions}], number)


def rows(vocab: int, count: int, parallel: ParallelContext) -> list[MicroBatch]:
    """This replica's share of the first `count` rows."""
    return [row(vocab, number) for number in range(parallel.data_rank, count, parallel.data)]
