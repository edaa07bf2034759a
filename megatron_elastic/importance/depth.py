"""Which layers a model can do without: greedy removal by what it does to the logits.

A removed layer is the identity. Every step removes the layer whose removal, on top of those before it, changes the logits least: the sum of
squared differences over the sum of squared logits of the whole model (Nemotron Elastic, arXiv 2511.16664, ranks layers so, one at a time;
here again after every removal, because layers stand in for each other). Candidates are tried in the order of their block influence, 1 - cosine of a
layer's input and output (ShortGPT, arXiv 2403.03853), then of what they did before; one is given up as soon as it is worse than the best.

Logits are never made: they are linear in the final hidden states, |h W^T|^2 = h (W^T W) h^T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.elastic.decision import Decision
from megatron_elastic.errors import DataError
from megatron_elastic.importance.observe import PartObserver
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import build_space
from megatron_elastic.train.data import MicroBatch, share_of_context
from megatron_elastic.train.forward import output_weight
from megatron_elastic.train.schedule import map_microbatches

WEIGHT_ROWS = 4096
"""Words of the output weight that are multiplied at a time."""
IN_FLIGHT = 4
"""Microbatches in flight for each rank of a pipeline."""


@dataclass(frozen=True, slots=True)
class DepthOrder:
    """drop_order: layers (from 0), first dropped first, all of them. errors: normalised logit MSE after each removal but the last, which leaves
    no layer. influence: 1 - cosine of every layer's input and output, in the order of the layers."""

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
    many. Raises DataError when no token counts or the logits are no numbers.
    """
    layers = shape.num_layers
    shares = [share_of_context(row, parallel) for row in rows]
    space = build_space(shape, {ElasticAxis.LAYERS: tuple(range(layers, 0, -1))}, drop_order=tuple(range(layers)))
    influence = _influence(parts, shape, parallel, shares)
    handle = elasticize(parts, space, parallel, shape)
    try:
        reference = _Reference(parts, parallel, shares)

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
        dropped.append(chosen)
        errors.append(best)
    (last,) = set(range(layers)) - set(dropped)
    return (*dropped, last), tuple(errors)


class _Reference:
    """The whole model's final hidden states and what its logits weigh, on the last stage; how far other states of the model are from them."""

    def __init__(self, parts: Sequence[Any], parallel: ParallelContext, shares: Sequence[MicroBatch]) -> None:
        self._parts, self._parallel, self._shares = parts, parallel, shares
        self._size = IN_FLIGHT * parallel.pipeline if parallel.pipeline > 1 else 1
        self._gram = _gram(parts[-1], parallel) if parallel.is_last_stage else None
        self._states = [states for start in self._starts for states in self._run(start)]
        self._energy = sum(
            self._difference(start, self._of(start), [torch.zeros_like(one) for one in self._of(start)]) for start in self._starts
        )
        if not 0 < self._energy < float("inf"):
            raise DataError(f"the logits of the whole model have a squared norm of {self._energy:g} on this text: no tokens, or no numbers")

    @property
    def _starts(self) -> range:
        return range(0, len(self._shares), self._size)

    def error(self, limit: float) -> float:
        """Normalised squared error of the model's logits as it is now; above `limit` it may be that of the first rows alone."""
        found = 0.0
        for start in self._starts:
            found += self._difference(start, self._run(start), self._of(start)) / self._energy
            if found > limit:  # the same number on every rank
                break
        return found

    def _of(self, start: int) -> list[Tensor]:
        return self._states[start : start + self._size]

    def _run(self, start: int) -> list[Tensor]:
        """Final states [tokens, hidden] of the microbatches from `start` on; [] but on the last stage."""
        window = self._shares[start : start + self._size]
        return map_microbatches(self._parts, self._parallel, window, partial(_whole_states, self._parallel))

    def _difference(self, start: int, states: Sequence[Tensor], others: Sequence[Tensor]) -> float:
        """Squared norm of the difference of two states' logits over all ranks' tokens that count."""
        total = torch.zeros((), dtype=torch.float64, device=next(self._parts[0].parameters()).device)
        if self._gram is not None and self._parallel.tensor_rank == 0:  # the others have the same states
            for share, one, other in zip(self._shares[start : start + self._size], states, others, strict=True):
                difference = (one.double() - other.double())[share.loss_mask[0].to(one.device) > 0]
                total += ((difference @ self._gram) * difference).sum()
        dist.all_reduce(total, group=self._parallel.world)
        return float(total)


def _whole_states(parallel: ParallelContext, batch: MicroBatch, hidden: Tensor) -> Tensor:
    if parallel.sequence_parallel:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=parallel.tp)
    return hidden[:, 0]


@torch.no_grad()
def _gram(part: Any, parallel: ParallelContext) -> Tensor:
    """W^T W [hidden, hidden] of the output weight, in fp64; a collective of the tensor-parallel group. Padded words are weights like any other."""
    weight = output_weight(part)
    gram = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=weight.device)
    for piece in weight.split(WEIGHT_ROWS):
        gram += piece.double().T @ piece.double()
    if parallel.tensor > 1:
        dist.all_reduce(gram, group=parallel.tp)
    return gram


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
