"""Proves that training's forward gives every parent the hidden states its documents have alone, also when they are cut over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_elastic.models.build import build_model
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.testing.tiny import randomize_, tiny_dense, tiny_moe, tiny_shape
from megatron_elastic.train.data import MicroBatch
from megatron_elastic.train.forward import hidden_states

PARENTS = {"hybrid": tiny_shape(), "dense": tiny_dense(), "experts": tiny_moe()}
LENGTHS = (1, 9, 7, 5)


def packed_batch(lengths: tuple[int, ...], first: int = 0) -> MicroBatch:
    """Documents of these lengths, cut from one stream of tokens at `first`."""
    stream = torch.randint(0, 131, (1, 64), generator=torch.Generator().manual_seed(5))
    total = sum(lengths)
    tokens = stream[:, first : first + total]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return MicroBatch(tokens, tokens.roll(-1, 1), torch.ones(1, total), positions, starts, max(lengths), 0, total)


def model_of(parent: str, parallel: ParallelContext) -> Any:
    model = build_model(PARENTS[parent], parallel)
    randomize_(model, 3)
    return model.eval()


@pytest.mark.parametrize("parent", PARENTS)
@torch.no_grad()
def test_documents_do_not_see_each_other(parallel: ParallelContext, parent: str) -> None:
    model = model_of(parent, parallel)
    whole = hidden_states(model, packed_batch(LENGTHS))
    assert whole.shape == (sum(LENGTHS), 1, 40)
    alone = [hidden_states(model, packed_batch((n,), sum(LENGTHS[:k]))) for k, n in enumerate(LENGTHS)]
    torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole, hidden_states(model, packed_batch((sum(LENGTHS),))), atol=0.1)


@pytest.mark.parametrize("parent", PARENTS)
@torch.no_grad()
def test_hidden_states_are_those_before_the_models_logits(parallel: ParallelContext, parent: str) -> None:
    model, batch = model_of(parent, parallel), packed_batch((22,))
    logits = hidden_states(model, batch)[:, 0] @ model.output_layer.weight.T
    torch.testing.assert_close(logits, model(batch.tokens, None, None)[0], rtol=1e-4, atol=1e-4)


def hidden_on_two_ranks(rank: int, world: int, parent: str) -> Tensor:
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    parallel = ParallelContext.initialize(tensor=2)
    with torch.no_grad():
        whole = gather_from_sequence_parallel_region(hidden_states(model_of(parent, parallel), packed_batch(LENGTHS)), group=parallel.tp)
    parallel.destroy()
    return whole


@pytest.mark.dist
@pytest.mark.parametrize("parent", PARENTS)
def test_tensor_parallel_documents_do_not_see_each_other(parallel: ParallelContext, ranks: Any, parent: str) -> None:
    with torch.no_grad():
        expected = hidden_states(model_of(parent, parallel), packed_batch(LENGTHS))
    for whole in ranks(hidden_on_two_ranks, 2, parent):
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
