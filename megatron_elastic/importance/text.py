"""The text a model is ranked on, as rows: the same rows in the same order for every layout, one sample each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_elastic.corpus.info import DataInfo
from megatron_elastic.errors import ConfigError, DataError
from megatron_elastic.export.evaluate import windows
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.train.data import MicroBatch, build_datasets, fixed_batches, pack_samples


def check_length(sequence_length: int, longest: int, parallel: ParallelContext) -> None:
    """Raise ConfigError for rows that the model (of at most `longest` tokens) or the layout cannot take."""
    if not 1 <= sequence_length <= longest:
        raise ConfigError(f"--sequence-length {sequence_length} must be between 1 and the model's max_sequence_length {longest}")
    chunks = (2 * parallel.context if parallel.context > 1 else 1) * (parallel.tensor if parallel.sequence_parallel else 1)
    if sequence_length % chunks:
        raise ConfigError(f"--sequence-length {sequence_length} is not a multiple of {chunks}, the chunks that the layout cuts a row into")


def rows_of_data(
    info: DataInfo, tokens: int, sequence_length: int, parallel: ParallelContext, *, seed: int, cache: Path | None
) -> list[MicroBatch]:
    """This replica's share of the first rows of the training split, shuffled by `seed`: whole rows that have `tokens` tokens or a few more.

    Every replica gets as many rows; those that fill up have no tokens that count. cache: where megatron-core's indices are kept, the same for all
    ranks; None (one process): nowhere. A collective. Raises DataError when the split is shorter than that: text would count several times.
    """
    samples = -(-tokens // sequence_length)
    if samples * sequence_length + 1 > info.train.tokens:
        raise DataError(
            f"--tokens {tokens}: the training split of {str(info.path)!r} has {info.train.tokens} tokens, too few for {samples} rows of "
            f"{sequence_length}; ask for fewer"
        )
    with tempfile.TemporaryDirectory() as scratch:
        dataset = build_datasets(
            info,
            sequence_length=sequence_length,
            train_samples=samples,
            valid_samples=0,
            seed=seed,
            cache_dir=Path(scratch) if cache is None else cache,
            parallel=parallel,
        ).train
        return fixed_batches(dataset, samples, micro_batch_size=1, data_rank=parallel.data_rank, data_size=parallel.data)


def rows_of_documents(documents: Iterable[NDArray[np.integer]], sequence_length: int) -> list[MicroBatch]:
    """Rows of at most `sequence_length` tokens, each of documents, or pieces of them, that do not see each other. For one process."""
    return [pack_samples([_sample(piece) for piece in pieces], number) for number, pieces in enumerate(_packed(documents, sequence_length))]


def _packed(documents: Iterable[NDArray[np.integer]], sequence_length: int) -> Iterator[list[NDArray[np.integer]]]:
    """Pieces with the token after each, as many together as fit in a row."""
    row: list[NDArray[np.integer]] = []
    for piece in windows(documents, sequence_length):
        if sum(len(other) - 1 for other in row) + len(piece) - 1 > sequence_length:
            yield row
            row = []
        row.append(piece)
    if row:
        yield row


def _sample(piece: NDArray[np.integer]) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(piece.astype(np.int64))
    length = len(ids) - 1
    return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": torch.ones(length), "position_ids": torch.arange(length)}


def first_rows(rows: list[MicroBatch], tokens: int, parallel: ParallelContext) -> list[MicroBatch]:
    """The first of this replica's rows that have `tokens` tokens over all replicas, at least one."""
    found, total = [], 0
    for row in rows:
        if found and total >= tokens:
            break
        found.append(row)
        total += row.row_tokens * parallel.data
    return found
