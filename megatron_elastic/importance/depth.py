"""Which layers a model can do without: greedy removal by what it does to the predictions.

A removed layer is the identity. Every step removes the layer whose removal, on top of those before it, changes the next word's distribution least:
KL(whole model || without them), nats per token. Nemotron Elastic (arXiv 2511.16664) ranks layers by the normalised squared error of the logits, one
at a time; here again after every removal, because layers stand in for each other, and by the divergence, because that is what distillation
starts from and a squared error is mostly that of words nobody expects (benchmarks/README.md compares). Candidates are tried in the order of their
block influence, 1 - cosine of a layer's input and output (ShortGPT, arXiv 2403.03853), then of what they did before; one is given up as soon as
it is worse than the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.distill.losses import OutputLossTerms
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.elastic.decision import Decision
from megatron_elastic.errors import DataError
from megatron_elastic.importance.observe import PartObserver
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import build_space
from megatron_elastic.train.data import MicroBatch, share_of_context
from megatron_elastic.train.forward import batch_loss
from megatron_elastic.train.schedule import map_microbatches

IN_FLIGHT = 4
"""Microbatches in flight for each rank of a pipeline."""


@dataclass(frozen=True, slots=True)
class DepthOrder:
    """drop_order: layers (from 0), first dropped first, all of them. errors: divergence from the whole model, nats per token, after each removal but
    the last, which leaves no layer. influence: 1 - cosine of every layer's input and output, in the order of the layers."""

    drop_order: tuple[int, ...]
    errors: tuple[float, ...]
    influence: tuple[float, ...]

    def scores(self) -> Tensor:
        """fp64 [layers]: each layer's place in the drop order, so that ascending scores are that order."""
        return torch.tensor(self.drop_order).argsort().double()


def depth_order(
    parts: Sequence[Any],
    shape: ModelShape,
    parallel: ParallelContext,
    rows: Sequence[MicroBatch],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> DepthOrder:
    """The order in which layers of a model are dropped, on every rank. A collective of all processes.

    parts, rows: as for `collect`; about layers^2 / 2 forwards over the rows at most, so let them be few. progress: candidates tried, of how
    many. Raises DataError when no token counts or the predictions are no numbers.
    """
    layers = shape.num_layers
    shares = [share_of_context(row, parallel) for row in rows]
    space = build_space(shape, {ElasticAxis.LAYERS: tuple(range(layers, 0, -1))}, drop_order=tuple(range(layers)))
    influence = _influence(parts, shape, parallel, shares)
    handle = elasticize(parts, space, parallel, shape)
    try:
        reference = _Reference(parts, shape.vocab_size, parallel, shares)

        def error(dropped: frozenset[int], limit: float) -> float:
            with handle.use(_without(space, dropped)):
                return reference.error(limit)

        order, errors = _greedy(error, influence, progress)
    finally:
        handle.remove()
    return DepthOrder(order, errors, tuple(influence))


def _without(space: ElasticSpace, dropped: frozenset[int]) -> Decision:
    """The whole model without some layers, which no drop order need name."""
    return Decision(space, skipped=dropped)


def _greedy(
    error: Callable[[frozenset[int], float], float], influence: Sequence[float], progress: Callable[[int, int], None] | None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Drop order and errors. error: (dropped layers, limit) -> their error, or any number above the limit when it is above."""
    layers = len(influence)
    known, dropped, errors = list(influence), [], []
    done, total = 0, layers * (layers + 1) // 2 - 1
    while len(dropped) < layers - 1:
        best, chosen = float("inf"), -1
        for layer in sorted(set(range(layers)) - set(dropped), key=lambda number: (known[number], number)):
            known[layer] = error(frozenset([*dropped, layer]), best)
            if known[layer] < best:
                best, chosen = known[layer], layer
            done += 1
            if progress is not None:
                progress(done, total)
        if chosen < 0:
            raise DataError(
                f"without layers {dropped} and any other the predictions are no numbers; look at the model with `megatron-elastic eval`"
            )
        dropped.append(chosen)
        errors.append(best)
    (last,) = set(range(layers)) - set(dropped)
    return (*dropped, last), tuple(errors)


class _Reference:
    """The whole model's final hidden states, on the last stage, and how far the predictions of other states of the model are from its own."""

    def __init__(self, parts: Sequence[Any], vocab_size: int, parallel: ParallelContext, shares: Sequence[MicroBatch]) -> None:
        self._parts, self._parallel, self._shares = parts, parallel, shares
        self._terms = OutputLossTerms(vocab_size=vocab_size, kl_weight=1.0, ce_weight=0.0)
        self._size = IN_FLIGHT * parallel.pipeline if parallel.pipeline > 1 else 1
        self._tokens = self._sum([(share.loss_mask > 0).sum() for share in shares])
        if self._tokens == 0:
            raise DataError("there are no tokens to order layers on: the loss mask leaves none; use other data or more tokens")
        self._states = [states for start in self._starts for states in self._run(start)]
        own = sum(self._divergence(start, self._states[start : start + self._size]) for start in self._starts)
        if not math.isfinite(own):
            raise DataError(
                f"the predictions of the whole model diverge from themselves by {own}; look at the model with `megatron-elastic eval`"
            )

    @property
    def _starts(self) -> range:
        return range(0, len(self._shares), self._size)

    def error(self, limit: float) -> float:
        """Divergence of the model's predictions as it is now, nats per token; above `limit` it may be that of the first rows alone."""
        found = 0.0
        for start in self._starts:
            found += self._divergence(start, self._run(start)) / self._tokens
            if found > limit:  # the same number on every rank
                break
        return found

    def _run(self, start: int) -> list[Tensor]:
        """Final states [tokens of this rank, 1, hidden] of the microbatches from `start` on; [] but on the last stage."""
        window = self._shares[start : start + self._size]
        return map_microbatches(self._parts, self._parallel, window, lambda batch, hidden: hidden)

    @torch.no_grad()
    def _divergence(self, start: int, states: Sequence[Tensor]) -> float:
        """KL(whole model || states) over all ranks' tokens of some microbatches that count."""
        return self._sum([self._kl(number, hidden) for number, hidden in enumerate(states, start)])

    def _kl(self, number: int, hidden: Tensor) -> Tensor:
        last, whole = self._parts[-1], self._states[number]
        return batch_loss(last, hidden, self._shares[number], self._terms, last, whole, self._parallel).kl

    def _sum(self, values: Sequence[Tensor]) -> float:
        """Over all ranks, of which those of a tensor-parallel group know the same and the stages before the last do not count. A collective."""
        total = torch.zeros((), dtype=torch.float64, device=self._parallel.device)
        if self._parallel.is_last_stage and self._parallel.tensor_rank == 0:
            total += sum(value.double() for value in values)
        dist.all_reduce(total, group=self._parallel.world)
        return float(total)


def _influence(parts: Sequence[Any], shape: ModelShape, parallel: ParallelContext, shares: Sequence[MicroBatch]) -> list[float]:
    """1 - cosine of the input and output of every layer, a mean over the tokens that count."""
    device = next(parts[0].parameters()).device
    sums = torch.zeros(shape.num_layers, 2, dtype=torch.float64, device=device)
    size = IN_FLIGHT * parallel.pipeline if parallel.pipeline > 1 else 1
    watchers = [PartObserver(part, shape, parallel, None, None) for part in parts]
    with ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher.watching())
            stack.enter_context(_watching_layers(watcher, sums, counts=parallel.sequence_parallel or parallel.tensor_rank == 0))
        for start in range(0, len(shares), size):
            window = shares[start : start + size]
            for watcher in watchers:
                watcher.open([(share, 0) for share in window])
            map_microbatches(parts, parallel, window, lambda batch, hidden: None)
    dist.all_reduce(sums, group=parallel.world)
    return (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()


@contextmanager
def _watching_layers(watcher: PartObserver, sums: Tensor, *, counts: bool) -> Iterator[None]:
    """Add (1 - cosine, 1) of every token that counts to the row of its layer."""

    def seen(layer: int, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        before = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        after = output[0] if isinstance(output, tuple) else output
        if counts:
            change = 1 - torch.cosine_similarity(before[:, 0].double(), after[:, 0].double(), dim=-1)
            counted = watcher.token_rows() >= 0
            sums[layer] += torch.stack([(change * counted).sum(), counted.sum().double()])

    hooks = [layer.register_forward_hook(partial(seen, layer.layer_number - 1), with_kwargs=True) for layer in watcher.part.decoder.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
