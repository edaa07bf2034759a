"""Batches: packed documents with exact boundaries, the same samples at every layout, exact resume, deterministic held-out samples."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from megatron_elastic.corpus.write import CorpusOptions, write_data
from megatron_elastic.errors import ConfigError, DataError
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.train.data import Datasets, MicroBatch, batches, build_datasets, fixed_batches, open_data, packed_seq_params

LENGTH, STEP = 32, 8
EOD = 256


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Short texts, so that a sample holds several."""
    root = tmp_path_factory.mktemp("data")
    (root / "texts").mkdir()
    for number in range(80):
        (root / "texts" / f"{number}.txt").write_text(f"{number} " * (3 + number % 7), encoding="utf-8")
    write_data(CorpusOptions(sources=(str(root / "texts"),), holdout=0.3), root / "out")
    return root / "out"


def build(data: Path, cache: Path, parallel: ParallelContext, **changes: int) -> Datasets:
    sizes = {"sequence_length": LENGTH, "train_samples": 200, "valid_samples": 5, "seed": 1} | changes
    return build_datasets(open_data(data), cache_dir=cache, parallel=parallel, **sizes)


def step_samples(data: Datasets, micro: int, size: int, start: int = 0, steps: int = 2) -> list[torch.Tensor]:
    """The samples [STEP, LENGTH] of the first steps, put back in order from all replicas."""
    per_rank = STEP // (micro * size)
    options = {"global_batch_size": STEP, "micro_batch_size": micro, "data_size": size, "consumed_samples": start}
    found = [torch.full((STEP, LENGTH), -1) for _ in range(steps)]
    for rank in range(size):
        for number, batch in enumerate(islice(batches(data.train, data_rank=rank, **options), steps * per_rank)):
            found[number // per_rank][batch.first_sample : batch.first_sample + micro] = batch.tokens.reshape(micro, LENGTH)
    return found


def _share(data: Datasets, rank: int) -> Iterator[MicroBatch]:
    return batches(data.train, global_batch_size=STEP, micro_batch_size=2, data_rank=rank, data_size=2)


def test_a_steps_samples_do_not_depend_on_the_layout(data, parallel, tmp_path):
    built = build(data, tmp_path, parallel)
    one = step_samples(built, micro=8, size=1)
    direct = [torch.stack([built.train[STEP * step + n]["tokens"] for n in range(STEP)]) for step in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(one, direct, strict=True)) and not torch.equal(*one)
    firsts = [[batch.first_sample for batch in islice(_share(built, rank), 4)] for rank in range(2)]
    assert firsts == [[0, 4, 0, 4], [2, 6, 2, 6]]  # megatron-core's sampler deals microbatches out in turn
    for micro, size in ((1, 1), (2, 1), (2, 2), (1, 4), (4, 2)):
        assert all(torch.equal(a, b) for a, b in zip(one, step_samples(built, micro, size), strict=True))


def test_resume_continues_exactly(data, parallel, tmp_path):
    built = build(data, tmp_path, parallel)
    whole = step_samples(built, micro=2, size=2, steps=5)
    resumed = step_samples(build(data, tmp_path, parallel), micro=2, size=2, start=3 * STEP, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(whole[3:], resumed, strict=True))


def check_documents(batch: MicroBatch) -> None:
    """Boundaries are exactly the starts of samples and what follows an end-of-document id."""
    tokens, bounds = batch.tokens[0], batch.cu_seqlens.tolist()
    after_eod = {int(place) + 1 for place in torch.nonzero(tokens == EOD).flatten()}
    assert set(bounds) == {place for place in after_eod if place < len(tokens)} | set(range(0, len(tokens) + 1, LENGTH))
    assert bounds == sorted(bounds) and bounds[0] == 0 and bounds[-1] == len(tokens)
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    assert min(lengths) > 0 and batch.max_seqlen == max(lengths)
    assert batch.position_ids[0].tolist() == [place for length in lengths for place in range(length)]


def test_documents_are_bounded(data, parallel, tmp_path):
    built = build(data, tmp_path, parallel)
    found = list(islice(batches(built.train, global_batch_size=4, micro_batch_size=4, data_rank=0, data_size=1), 6))
    assert any(len(batch.cu_seqlens) > 6 for batch in found)
    for batch in found:
        check_documents(batch)
        assert batch.cu_seqlens.dtype == torch.int32 and batch.tokens.shape == batch.labels.shape == (1, 4 * LENGTH)
        rows, labels = batch.tokens.reshape(4, LENGTH), batch.labels.reshape(4, LENGTH)
        assert torch.equal(rows[:, 1:], labels[:, :-1]) and batch.loss_mask.min() == 1
        packed = packed_seq_params(batch)
        assert packed.qkv_format == "thd" and packed.cu_seqlens_q is batch.cu_seqlens and packed.max_seqlen_kv == batch.max_seqlen


def test_documents_do_not_see_each_other(data, parallel, tmp_path):
    """A packed row gives every document the logits it has alone, through attention, convolution and scan."""
    from megatron_elastic.models.build import build_model
    from megatron_elastic.testing.tiny import randomize_, tiny_shape

    shape = tiny_shape(vocab_size=257, padded_vocab_size=264)
    model = build_model(shape, parallel)
    randomize_(model)
    model.eval()
    built = build(data, tmp_path, parallel)
    batch = next(batches(built.train, global_batch_size=2, micro_batch_size=2, data_rank=0, data_size=1))
    assert len(batch.cu_seqlens) > 3
    with torch.no_grad():
        packed = model(batch.tokens, batch.position_ids, None, packed_seq_params=packed_seq_params(batch))
        bounds = batch.cu_seqlens.tolist()
        for start, end in zip(bounds, bounds[1:], strict=False):
            alone = MicroBatch(
                *(row[:, start:end] for row in (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)),
                torch.tensor([0, end - start], dtype=torch.int32), end - start, 0, end - start,
            )  # fmt: skip
            logits = model(alone.tokens, alone.position_ids, None, packed_seq_params=packed_seq_params(alone))
            torch.testing.assert_close(packed[:, start:end], logits, rtol=1e-4, atol=1e-4)


def test_held_out_samples_are_the_same_for_every_layout(data, parallel, tmp_path):
    valid = build(data, tmp_path, parallel).valid
    wanted = torch.stack([valid[n]["tokens"] for n in range(5)])
    for micro, size in ((1, 1), (2, 1), (2, 2), (4, 2)):
        shares = [fixed_batches(valid, 5, micro_batch_size=micro, data_rank=rank, data_size=size) for rank in range(size)]
        assert len({len(share) for share in shares}) == 1
        counted = [
            (batch.first_sample, row)
            for share in shares
            for batch in share
            for row, mask in zip(batch.tokens.reshape(-1, LENGTH), batch.loss_mask.reshape(-1, LENGTH), strict=True)
            if mask.sum() == LENGTH
        ]
        counted.sort(key=lambda pair: pair[0])
        assert torch.equal(torch.stack([row for _, row in counted]), wanted)
        assert sum(float(batch.loss_mask.sum()) for share in shares for batch in share) == 5 * LENGTH


def test_messages(data, parallel, tmp_path):
    built = build(data, tmp_path, parallel)
    with pytest.raises(
        ConfigError, match="global_batch_size 8 is not a multiple of micro_batch_size 3 x 2 data-parallel replicas; use a multiple of 6"
    ):
        batches(built.train, global_batch_size=8, micro_batch_size=3, data_rank=0, data_size=2)
    with pytest.raises(DataError, match="eval.samples 5000 of 32 tokens are more than the .* lower eval.samples or hold out more"):
        build(data, tmp_path, parallel, valid_samples=5000)


def test_half_built_and_outdated_indices_are_built_again(data, parallel, tmp_path):
    first = step_samples(build(data, tmp_path / "cache", parallel), micro=8, size=1)
    (cache,) = (tmp_path / "cache").iterdir()
    (cache / "complete").unlink()
    for file in cache.glob("*shuffle_index.npy"):
        file.write_bytes(b"half")
    again = step_samples(build(data, tmp_path / "cache", parallel), micro=8, size=1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    moved = tmp_path / "out"
    shutil.copytree(data, moved)
    build(moved, tmp_path / "cache", parallel)
    write_data(CorpusOptions(sources=(str(data.parent / "texts"),), holdout=0.9), moved, overwrite=True)
    other = build(moved, tmp_path / "cache", parallel)
    assert all((other.train[n]["tokens"] <= EOD).all() for n in range(200))


def samples_on_ranks(rank: int, world_size: int, data: str, cache: str) -> list[torch.Tensor]:
    parallel = ParallelContext.initialize()
    built = build(Path(data), Path(cache), parallel)
    options = {"global_batch_size": STEP, "micro_batch_size": 2, "data_rank": parallel.data_rank, "data_size": parallel.data}
    found = [batch.tokens for batch in islice(batches(built.train, **options), 2)]
    parallel.destroy()
    return found


@pytest.mark.dist
def test_two_ranks_share_a_step(ranks, data, parallel, tmp_path):
    first, second = ranks(samples_on_ranks, 2, str(data), str(tmp_path / "two"))
    (one,) = step_samples(build(data, tmp_path / "one", parallel), micro=8, size=1, steps=1)
    together = torch.stack([first[0], second[0], first[1], second[1]]).reshape(STEP, LENGTH)
    assert torch.equal(together, one)
