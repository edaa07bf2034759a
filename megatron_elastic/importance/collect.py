"""From a model and rows of text to the scores of all its widths and experts: the same numbers on every layout.

The model runs as it is, in evaluation mode: without elasticity, dropout, recompute or counters, so that everything is counted once. Only
`taylor` runs backward, through frozen weights. Tokens without a loss (padding) do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.distill.losses import OutputLossTerms
from megatron_elastic.errors import UnsupportedError
from megatron_elastic.importance.criteria import CRITERIA, CriterionName, ExpertCriterion, Statistics
from megatron_elastic.importance.experts import ExpertObserver, ExpertRecord
from megatron_elastic.importance.folding import ScoresByLayer, fold
from megatron_elastic.importance.magnitude import times_weights, weight_norms
from megatron_elastic.importance.observe import PartObserver
from megatron_elastic.importance.places import Place, places_of
from megatron_elastic.importance.ranking import score_shapes
from megatron_elastic.models.weights import generator_of
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.train.data import MicroBatch, share_of_context
from megatron_elastic.train.forward import batch_loss, hidden_states
from megatron_elastic.train.schedule import map_microbatches, train_microbatches

WINDOW = 4
"""Microbatches in flight for each rank of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What calibration found. scores: axis -> layer -> scores, as a `Ranking` holds them, without `layers`; criteria: axis -> name.

    experts: what they were seen to do; None when they were not watched. tokens: tokens that counted.
    """

    scores: ScoresByLayer
    criteria: Mapping[ElasticAxis, str]
    experts: ExpertRecord | None
    tokens: int


def collect(
    parts: Sequence[Any],
    shape: ModelShape,
    parallel: ParallelContext,
    rows: Sequence[MicroBatch],
    *,
    criterion: CriterionName | str = CriterionName.ENERGY,
    experts: ExpertCriterion | str = ExpertCriterion.REAP,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Scores of every axis of a model but `layers`, on every rank. A collective of all processes.

    parts: of this rank's model, not elastic and not in DDP. rows: this replica's rows, whole (context parallelism is cut here), as many on
    every replica; `minitron` takes each for one sample. seed: of `random`. progress: told how many of this replica's rows are done, of how many.
    Raises DataError for NaN activations, by their layer, and for rows without tokens; UnsupportedError naming modules that were not observed.
    """
    name, chosen = CriterionName(criterion), ExpertCriterion(experts)
    how = CRITERIA.get(name)
    device = next(parts[0].parameters()).device
    size = WINDOW * parallel.pipeline if parallel.pipeline > 1 else 1
    watched = shape.has("moe") and (chosen is not ExpertCriterion.RANDOM or (how is not None and how.needs != "weights"))
    observer = ExpertObserver(shape, parallel, device) if watched else None
    tokens = _count_tokens(rows, parallel)
    statistics = None
    if how is not None and how.needs != "weights":
        statistics = Statistics(places_of(shape, how.needs), how, rows=size * parallel.data, device=device)
    seen: set[Place] = set()
    if statistics is not None or watched:
        watchers = [PartObserver(part, shape, parallel, statistics, observer) for part in parts]
        _run(watchers, rows, parallel, shape, statistics, tokens, size, progress)
        seen = set[Place]().union(*(watcher.seen for watcher in watchers))
    scores: ScoresByLayer = {}
    if how is not None:
        if statistics is not None:
            observed = statistics.scores()
        else:
            observed, seen = weight_norms(parts, shape, parallel)
        _check_seen(seen, places_of(shape, how.needs), parallel)
        if how.times_weights:
            norms, read = weight_norms(parts, shape, parallel)
            _check_seen(read, norms, parallel)
            observed = times_weights(observed, norms)
        scores = fold(observed, shape)
    record = None if observer is None else observer.record(tokens)  # after the widths: what is no number is named where it begins
    if record is not None and chosen is not ExpertCriterion.RANDOM:
        scores[ElasticAxis.EXPERTS] = record.scores(chosen)
    return Collected(scores=with_random(scores, shape, seed), criteria=_criteria(shape, name, chosen), experts=record, tokens=tokens)


def _criteria(shape: ModelShape, name: CriterionName, experts: ExpertCriterion) -> dict[ElasticAxis, str]:
    axes = [axis for axis in ElasticAxis if axis is not ElasticAxis.LAYERS and score_shapes(shape, axis)]
    return {axis: (experts if axis is ElasticAxis.EXPERTS else name).value for axis in axes}


def with_random(scores: ScoresByLayer, shape: ModelShape, seed: int) -> ScoresByLayer:
    """All axes but `layers` in their order; those without scores get uniform ones, by (seed, axis, layer)."""
    full: ScoresByLayer = {}
    for axis in ElasticAxis:
        if axis is ElasticAxis.LAYERS:
            continue
        sizes = score_shapes(shape, axis)
        found = scores.get(axis) or {
            layer: torch.rand(wanted, generator=generator_of(seed, f"{axis.value}/{layer}"), dtype=torch.float64)
            for layer, wanted in sizes.items()
        }
        if found:
            full[axis] = found
    return full


def _count_tokens(rows: Sequence[MicroBatch], parallel: ParallelContext) -> int:
    """Tokens that count in the rows of all replicas."""
    return int(_tokens_of(rows, parallel, len(rows) * parallel.data).sum())


def _tokens_of(window: Sequence[MicroBatch], parallel: ParallelContext, size: int) -> Tensor:
    """fp64 [size]: how many tokens count in each row of a window of all replicas. A collective of the data-parallel group."""
    counts = torch.zeros(size, dtype=torch.float64)
    for number, row in enumerate(window):
        counts[number * parallel.data + parallel.data_rank] = (row.loss_mask > 0).sum()
    if parallel.data > 1:
        moved = counts.to(parallel.device)
        dist.all_reduce(moved, group=parallel.dp)
        counts = moved.cpu()
    return counts


def _run(
    watchers: Sequence[PartObserver],
    rows: Sequence[MicroBatch],
    parallel: ParallelContext,
    shape: ModelShape,
    statistics: Statistics[Place] | None,
    tokens: int,
    size: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Take all rows, with `tokens` that count, through the model, `size` at a time."""
    parts = [watcher.part for watcher in watchers]
    backward = statistics is not None and statistics.criterion.needs == "backward"
    with ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher.watching())
        stack.enter_context(_frozen(parts))
        for start in range(0, len(rows), size):
            window = rows[start : start + size]
            shares = [share_of_context(row, parallel) for row in window]
            numbers = [number * parallel.data + parallel.data_rank for number in range(len(shares))]
            for watcher in watchers:
                watcher.open(list(zip(shares, numbers, strict=True)))
            if backward:
                _backward(parts, shape, parallel, shares)
            else:
                map_microbatches(parts, parallel, shares, lambda batch, hidden: None)
            if statistics is not None and statistics.criterion.by_row:
                statistics.reduce(parallel.world, _tokens_of(window, parallel, size * parallel.data))
            if progress is not None:
                progress(start + len(window), len(rows))
    if statistics is not None and not statistics.criterion.by_row:
        statistics.reduce(parallel.world, torch.tensor([float(tokens)]))


class _Bare(torch.nn.Module):
    """A part where the schedule expects one in DDP."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.module = part


def _backward(parts: Sequence[Any], shape: ModelShape, parallel: ParallelContext, shares: Sequence[MicroBatch]) -> None:
    """Forward and backward of the summed cross-entropy."""
    terms = OutputLossTerms(vocab_size=shape.vocab_size, kl_weight=0.0, ce_weight=1.0)

    def loss(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        result = batch_loss(parts[-1], hidden, batch, terms, None, None, parallel)
        return result.total, result.num_tokens.to(torch.int), {}

    train_microbatches([_Bare(part) for part in parts], parallel, shares, hidden_states, loss)


@contextmanager
def _frozen(parts: Sequence[Any]) -> Iterator[None]:
    """Evaluation mode, and no gradients of weights."""
    training = [part.training for part in parts]
    learned = [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]
    try:
        for part in parts:
            part.eval()
            part.requires_grad_(requires_grad=False)
        yield
    finally:
        for part, was in zip(parts, training, strict=True):
            part.train(was)
        for parameter in learned:
            parameter.requires_grad_()


def _check_seen(seen: set[Place], wanted: Iterable[Place], parallel: ParallelContext) -> None:
    """Raise UnsupportedError when no rank observed something that the model has."""
    everyone: list[set[Place]] = [set()] * parallel.world_size
    dist.all_gather_object(everyone, seen)
    missing = [str(place) for place in wanted if place not in set().union(*everyone)]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise UnsupportedError(
            f"nothing was observed at {'; '.join(missing[:4])}{more}: the modules there are of no kind that can be ranked"
        )
