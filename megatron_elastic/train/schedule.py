"""megatron-core's schedules (none, 1F1B, interleaved), given microbatches and taking back what the last stage computed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_elastic.parallel import ParallelContext
from megatron_elastic.train.data import MicroBatch
from megatron_elastic.train.forward import hidden_states

T = TypeVar("T")
StepLoss = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]
"""From a microbatch and its final hidden states to (sum over tokens, number of tokens, what to report)."""


def train_microbatches(
    chunks: Sequence[Any],
    parallel: ParallelContext,
    batches: Sequence[MicroBatch],
    forward: Callable[[Any, MicroBatch], torch.Tensor],
    loss: StepLoss,
) -> list[dict[str, Any]]:
    """Forward and backward over `batches`; gradients are added up and neither reduced nor divided.

    chunks: this rank's parts of the model, in DDP. forward: from a part (not wrapped) and a microbatch to its hidden states.
    Returns what `loss` reported for each microbatch on the last stage, nothing elsewhere.
    """

    def step(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)
        return forward(chunk.module, batch), partial(loss, batch)

    return _schedule(chunks, parallel)(
        forward_step_func=step, forward_only=False, **_options(chunks, batches), num_microbatches=len(batches)
    )


@torch.no_grad()
def map_microbatches(
    parts: Sequence[Any], parallel: ParallelContext, batches: Sequence[MicroBatch], compute: Callable[[MicroBatch, torch.Tensor], T]
) -> list[T]:
    """compute(batch, final hidden states) for each microbatch, forward only and without dropout or counters, on the last stage; [] elsewhere."""

    def step(iterator: Any, part: Any) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)
        return hidden_states(part, batch), lambda hidden, **_: compute(batch, hidden)

    # The interleaved schedule runs whole rounds of the pipeline: the last microbatch fills up, and its copies are left out again.
    whole = [*batches, *[batches[-1]] * (-len(batches) % parallel.pipeline if len(parts) > 1 else 0)]
    training = [part.training for part in parts]
    for part in parts:
        part.eval()
    try:
        found = _schedule(parts, parallel)(
            forward_step_func=step,
            forward_only=True,
            collect_non_loss_data=True,
            **_options(parts, whole),
            num_microbatches=len(whole),
        )
        return found[: len(batches)]
    finally:
        for part, was in zip(parts, training, strict=True):
            part.train(was)


def _schedule(parts: Sequence[Any], parallel: ParallelContext) -> Callable[..., Any]:
    return get_forward_backward_func(parallel.pipeline, len(parts) if len(parts) > 1 else None)


def _options(parts: Sequence[Any], batches: Sequence[MicroBatch]) -> dict[str, Any]:
    """Every part reads the microbatches for itself; what travels between stages has the shape of a whole row."""
    iterators = [iter(batches) for _ in parts]
    return {
        "model": list(parts),
        "data_iterator": iterators if len(parts) > 1 else iterators[0],
        "seq_length": batches[0].row_tokens,
        "micro_batch_size": 1,
    }
