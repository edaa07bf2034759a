"""Criteria: from what a component does on text, or from its weights, to how important it is. Pure functions, and the sums they stream into.

A criterion measures every entry of [tokens, entries] by itself; the measures are summed over tokens, and the sums become a score. So the memory
is that of the scores, and ranks that see different tokens or different entries add their sums up (`Statistics.reduce`).

| name | measure | score |
|---|---|---|
| energy | a^2 | root of the mean over tokens, times the norm of the column of the weight that reads a, where one does: the size of what a component writes |
| activation | abs(a) | mean over tokens |
| minitron | abs(a) | mean over each row of tokens, squared, summed over the rows, root (NVIDIA Model-Optimizer's published statistic) |
| taylor | abs(a da), da the gradient of the summed cross-entropy | mean over tokens (Molchanov et al., arXiv 1906.10771, with activations) |
| magnitude | w^2, for a weight that reads the component | root of the sum |
| random | | uniform |

For every criterion `hidden` is the sum over the norms before all sublayers. The final norm is left out, as Model-Optimizer does: its large weights
would outvote the layers, and measured worse (benchmarks/README.md).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_elastic.errors import DataError

Key = TypeVar("Key", bound=Hashable)
Needs = Literal["forward", "backward", "weights"]
"""What an observation takes: a forward, a forward and a backward, or weights alone."""


class CriterionName(StrEnum):
    """What widths are ranked by."""

    ENERGY = "energy"
    ACTIVATION = "activation"
    MINITRON = "minitron"
    TAYLOR = "taylor"
    MAGNITUDE = "magnitude"
    RANDOM = "random"


class ExpertCriterion(StrEnum):
    """What routed experts are ranked by."""

    REAP = "reap"
    """Mean over an expert's tokens of gate x norm of its output (Lasby et al., arXiv 2510.13999)."""
    FREQUENCY = "frequency"
    """Share of tokens that choose it."""
    GATE = "gate"
    """Sum of its gates, for each token of the text."""
    RANDOM = "random"
    """Uniform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """How entries are measured and their sums scored.

    needs: what an observation takes. measure: (activation, gradient or None), each
    [tokens, entries], to fp32 of the same shape. by_row: whether the sums of every row of tokens are kept apart until the row is complete.
    absorb: (sums [rows, entries], tokens [rows]) to what the rows add to the total [entries]. finish: (total, tokens of all rows) to scores.
    times_weights: whether what a linear reads is worth its score times the norm of the weight's column.
    """

    name: CriterionName
    needs: Needs
    measure: Callable[[Tensor, Tensor | None], Tensor]
    absorb: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[Tensor, float], Tensor]
    by_row: bool = False
    times_weights: bool = False


def _absolute(activation: Tensor, gradient: Tensor | None) -> Tensor:
    return activation.float().abs()


def _first_order(activation: Tensor, gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return (activation.float() * gradient.float()).abs()


def _square(activation: Tensor, gradient: Tensor | None) -> Tensor:
    return activation.float().square()


def _total(sums: Tensor, tokens: Tensor) -> Tensor:
    return sums.sum(0)


def _squared_means(sums: Tensor, tokens: Tensor) -> Tensor:
    return (sums / tokens.clamp(min=1)[:, None]).square().sum(0)


def _mean(total: Tensor, tokens: float) -> Tensor:
    return total / tokens


def _root(total: Tensor, tokens: float) -> Tensor:
    return total.sqrt()


def _root_mean(total: Tensor, tokens: float) -> Tensor:
    return (total / tokens).sqrt()


CRITERIA: Mapping[CriterionName, Criterion] = {
    criterion.name: criterion
    for criterion in (
        Criterion(name=CriterionName.ENERGY, needs="forward", measure=_square, absorb=_total, finish=_root_mean, times_weights=True),
        Criterion(name=CriterionName.ACTIVATION, needs="forward", measure=_absolute, absorb=_total, finish=_mean),
        Criterion(name=CriterionName.MINITRON, needs="forward", measure=_absolute, absorb=_squared_means, finish=_root, by_row=True),
        Criterion(name=CriterionName.TAYLOR, needs="backward", measure=_first_order, absorb=_total, finish=_mean),
        Criterion(name=CriterionName.MAGNITUDE, needs="weights", measure=_square, absorb=_total, finish=_root),
    )
}
"""Every criterion that observes something; `random` observes nothing."""


def selection(rows: Tensor, count: int) -> Tensor:
    """fp32 [count, tokens] with a one where a token belongs to a row; rows [tokens]: row of each token, -1 for one that is left out."""
    return (rows[None] == torch.arange(count, device=rows.device)[:, None]).float()


class Statistics(Generic[Key]):
    """The sums of one criterion at many places, on one rank and then on all.

    sizes: place -> entries of the whole model there. rows: how many rows are observed between two calls of `reduce`; 1 where the criterion does
    not tell them apart. Sums over one observation are fp32, everything they are added to is fp64.
    """

    def __init__(self, sizes: Mapping[Key, int], criterion: Criterion, *, rows: int = 1, device: torch.device | None = None) -> None:
        self.criterion, self.rows = criterion, rows if criterion.by_row else 1
        starts = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
        self._slices = {place: slice(start, start + size) for (place, size), start in zip(sizes.items(), starts[:-1], strict=True)}
        self._sums = torch.zeros(self.rows, starts[-1], dtype=torch.float64, device=device)
        self._total = torch.zeros(starts[-1], dtype=torch.float64, device=device)
        self._tokens = 0.0

    def add(self, place: Key, activation: Tensor, rows: Tensor, *, gradient: Tensor | None = None, first: int = 0) -> None:
        """Observe activation [tokens, entries] at a place; gradient: the same shape, where the criterion needs it.

        rows: the row of each token, -1 for a token that does not count (padding). first: number of the first of these entries; a
        tensor-parallel rank has some of them.
        """
        known = rows if self.criterion.by_row else rows.clamp(max=0)
        sums = selection(known, self.rows) @ self.criterion.measure(activation, gradient)
        start = self._slices[place].start + first
        self._sums[:, start : start + sums.shape[1]] += sums.double()

    def reduce(self, group: ProcessGroup | None, tokens: Tensor) -> None:
        """Add up what the ranks of a group observed (None: this one alone), and close the rows. A collective.

        Every token and entry was observed by exactly one rank. tokens [rows]: how many tokens of each row count, over all ranks; [1] where rows
        are not told apart.
        """
        if group is not None and group.size() > 1:
            dist.all_reduce(self._sums, group=group)
        self._total += self.criterion.absorb(self._sums, tokens.to(self._sums))
        self._tokens += float(tokens.sum())
        self._sums.zero_()

    def scores(self) -> dict[Key, Tensor]:
        """Place -> scores [entries], fp64 on the CPU, of everything that was reduced; the same on every rank.

        Raises DataError naming the first place (in their order) whose activations were no numbers, and when there were no tokens.
        """
        if self._tokens == 0 and self.criterion.needs != "weights":
            raise DataError("there are no tokens to rank on: the loss mask leaves none; use other data or more tokens")
        scores = self.criterion.finish(self._total, self._tokens).cpu()
        found = {place: scores[where] for place, where in self._slices.items()}
        if bad := next((place for place, values in found.items() if not bool(torch.isfinite(values).all())), None):
            raise DataError(
                f"{bad}: its {'weights' if self.criterion.needs == 'weights' else 'activations'} are NaN or infinite, and so would the "
                "ranking be; look at the model with `megatron-elastic eval`"
            )
        return found
