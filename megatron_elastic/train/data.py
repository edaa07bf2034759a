"""Batches for training on megatron-core's GPTDataset: packed documents, the same samples for every layout, resumable.

A sample is `sequence_length` consecutive tokens of the shuffled documents. Documents of a sample, and samples of a microbatch, are
packed into one row and never see each other: positions restart and `cu_seqlens` marks the boundaries for attention, scan and
convolution.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_elastic.corpus.info import DataInfo, check_held_out, open_data
from megatron_elastic.errors import ConfigError
from megatron_elastic.fit import replica_problems
from megatron_elastic.models.context import context_indices
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import packed_documents

__all__ = [
    "DataInfo",
    "Datasets",
    "MicroBatch",
    "batches",
    "check_held_out",
    "build_datasets",
    "fixed_batches",
    "open_data",
    "pack_samples",
    "packed_seq_params",
    "share_of_context",
]


class DatasetTokenizer:
    """What GPTDataset asks of a tokenizer."""

    def __init__(self, info: DataInfo) -> None:
        self.vocab_size = info.vocab_size
        self.eod = info.eod
        self.pad = -1  # no id is padding; a padded tail is recognised by this value and masked from the loss
        self.special_tokens_dict: dict[str, int] = {"eod": info.eod}
        self.unique_identifiers = OrderedDict(vocab_size=info.vocab_size, eod=info.eod)


@dataclass(frozen=True, slots=True)
class Datasets:
    """The two splits of one stage."""

    train: GPTDataset
    """Samples to train on, at least as many as asked for; text is repeated when it runs out."""
    valid: GPTDataset
    """Held-out samples, one pass over the text."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that are computed together, packed into one row of samples x sequence_length tokens; T of them are this rank's.

    T is the whole row but for context parallelism (`share_of_context`). Datasets make them on the CPU.
    """

    tokens: Tensor
    """Token ids, int64 [1, T]."""
    labels: Tensor
    """The next token of each, int64 [1, T]."""
    loss_mask: Tensor
    """1 where the loss counts, float32 [1, T]."""
    position_ids: Tensor
    """Position inside the document, int64 [1, T]."""
    cu_seqlens: Tensor
    """Where documents of the whole row begin, and its length, int32 [documents + 1]."""
    max_seqlen: int
    """Tokens of the longest document."""
    first_sample: int
    """Position of its first sample in the global batch: decisions are drawn for groups of these."""
    row_tokens: int
    """Tokens of the whole row."""

    @property
    def context(self) -> int:
        """Context-parallel ranks that share the row."""
        return self.row_tokens // self.tokens.numel()


def share_of_context(batch: MicroBatch, parallel: ParallelContext) -> MicroBatch:
    """What of a row this rank computes, on its device; every row passes here on its way to a model.

    A context-parallel rank has two chunks of it, so that causal attention costs all ranks the same.
    """
    shares = {name: getattr(batch, name) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    if parallel.context > 1:
        mine = context_indices(batch.row_tokens, parallel.context_rank, parallel.context)
        shares = {name: whole[:, mine] for name, whole in shares.items()}
    shares["cu_seqlens"] = batch.cu_seqlens
    return replace(batch, **{name: tensor.to(parallel.device) for name, tensor in shares.items()})


def build_datasets(
    info: DataInfo, *, sequence_length: int, train_samples: int, valid_samples: int, seed: int, cache_dir: Path, parallel: ParallelContext
) -> Datasets:
    """The datasets of a stage. A collective: every rank calls it; rank 0 builds the indices that the others read.

    train_samples: samples of the *whole* stage (the shuffle depends on it, so a resumed run passes the same number).
    valid_samples: held-out samples that will be asked for. cache_dir: where indices are kept; one half-written is built again.
    Raises DataError on every rank when the held-out text is too short.
    """
    check_held_out(info, valid_samples, sequence_length)
    # megatron-core names indices after the path of the text; with other text at that path they would point past its end.
    text = f"{info.train.sha256[:8]}{info.valid.sha256[:8]}"
    cache = cache_dir / f"{text}-{sequence_length}-{train_samples}-{seed}"
    complete = cache / "complete"
    if parallel.is_main:
        if cache.exists() and not complete.exists():
            shutil.rmtree(cache)
    dist.barrier()
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend_per_split=[([info.prefix("train")], None), ([info.prefix("valid")], None), None],
        tokenizer=DatasetTokenizer(info),  # pyright: ignore[reportArgumentType] - what a dataset reads of a tokenizer
        path_to_cache=str(cache),
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=False,
        create_attention_mask=False,
        mmap_bin_files=True,
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, [train_samples, None, 0], lambda: True, config).build()
    dist.barrier()
    if parallel.is_main:
        complete.touch()
    return Datasets(train, valid)


def check_replicas(global_batch_size: int, micro_batch_size: int, data_size: int) -> None:
    """Raise ConfigError when a step cannot be divided over the replicas."""
    for problem in replica_problems(global_batch_size, micro_batch_size, data_size):
        raise ConfigError(problem)


def batches(
    dataset: GPTDataset, *, global_batch_size: int, micro_batch_size: int, data_rank: int, data_size: int, consumed_samples: int = 0
) -> Iterator[MicroBatch]:
    """This rank's microbatches in megatron-core's sampler order, from sample `consumed_samples` to the last whole global batch.

    Microbatch j of a step that begins at sample s holds samples s + (j * data_size + data_rank) * micro_batch_size and on, so a step's
    samples are the same for every data_size. consumed_samples: a multiple of global_batch_size.
    Raises ConfigError when a step cannot be divided over the replicas.
    """
    check_replicas(global_batch_size, micro_batch_size, data_size)
    assert consumed_samples % global_batch_size == 0, (consumed_samples, global_batch_size)
    return _batches(dataset, global_batch_size, micro_batch_size, data_rank, data_size, consumed_samples)


def _batches(
    dataset: GPTDataset, global_batch: int, micro_batch: int, data_rank: int, data_size: int, consumed: int
) -> Iterator[MicroBatch]:
    for start in range(consumed, len(dataset) - global_batch + 1, global_batch):
        for first in range(data_rank * micro_batch, global_batch, data_size * micro_batch):
            yield pack_samples([dataset[start + first + n] for n in range(micro_batch)], first)


def fixed_batches(dataset: GPTDataset, samples: int, *, micro_batch_size: int, data_rank: int, data_size: int) -> list[MicroBatch]:
    """This rank's share of the first `samples` samples, the same set for every layout and every call.

    Every rank gets the same number of microbatches; samples that fill up the last ones have a zero loss mask.
    """
    together = micro_batch_size * data_size
    shares = []
    for start in range(0, samples, together):
        first = start + data_rank * micro_batch_size
        rows = []
        for number in range(first, first + micro_batch_size):
            row = dict(dataset[min(number, samples - 1)])
            if number >= samples:
                row["loss_mask"] = torch.zeros_like(row["loss_mask"])
            rows.append(row)
        shares.append(pack_samples(rows, first))
    return shares


def packed_seq_params(batch: MicroBatch) -> PackedSeqParams:
    """megatron-core's description of the documents of `batch`, for attention, scan and convolution."""
    return packed_documents(batch.cu_seqlens, batch.max_seqlen, batch.row_tokens, context=batch.context)


def pack_samples(samples: list[dict[str, Tensor]], first_sample: int) -> MicroBatch:
    """One row of samples, each with tokens, labels, loss_mask and position_ids [its tokens]; a document begins wherever the position is 0."""
    tokens, labels, loss_mask, positions = (
        torch.cat([sample[key] for sample in samples]) for key in ("tokens", "labels", "loss_mask", "position_ids")
    )
    starts = torch.nonzero(positions == 0).flatten()
    bounds = torch.cat([starts, starts.new_tensor([positions.numel()])])
    return MicroBatch(
        tokens=tokens[None],
        labels=labels[None],
        loss_mask=loss_mask[None],
        position_ids=positions[None],
        cu_seqlens=bounds.to(torch.int32),
        max_seqlen=int(bounds.diff().max()),
        first_sample=first_sample,
        row_tokens=positions.numel(),
    )
