"""A plan near a cost in a space too large to enumerate: greedy steps by price, then coordinate descent, then exchanges.

Every step costs all moves of one coordinate at once. What two moves do together is estimated as the sum of what each does; the pairs
that look best are then costed exactly, so that nothing rests on the estimate. Plain Python and numpy, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_elastic.plan_coordinates import Coordinates, Cost, Floats, Indices

EXACT_PAIRS = 512
"""Pairs of moves that are costed exactly in a step: all of them for up to 32 moves."""
LEAST_GAIN = 1e-9
"""Merit below which an exchange is rounding, not gain."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Changes of a plan at one or two coordinates. rows: the plans they lead to [moves, coordinates]; costs: theirs; gains: of merit."""

    rows: Indices
    costs: Floats
    gains: Floats


@dataclass(frozen=True, slots=True)
class Search:
    """The plans in which `inner` is nested and that are nested in `outer`, each with a merit that adds up over coordinates.

    outer, inner: the choices of those two plans; merits: for each coordinate the merit of every choice.
    """

    coordinates: Coordinates
    cost: Cost
    outer: Indices
    inner: Indices
    merits: Sequence[Floats]

    def find(self, target: float, tolerance: float) -> Indices:
        """A plan of high merit whose cost deviates from `target` by at most `tolerance` (relative); the nearest that is found if none is.

        Costs must grow with every width. From the plan of the highest merit on: single moves towards the target, the cheapest in merit
        for what they gain first; if they end outside the tolerance, descent on the distance by one or two moves at a time; inside, every
        exchange of one or two moves that stays inside and raises the merit.
        """
        allowed = [slice(low, high + 1) for low, high in zip(self.outer, self.inner, strict=True)]
        best = [int(self.outer[c]) + int(np.argmax(merit[allowed[c]])) for c, merit in enumerate(self.merits)]
        row = self._approach(np.array(best, dtype=np.int64), target, tolerance)
        row = self._descend(row, target, tolerance)
        return self._improve(row, target, tolerance)

    def cost_at(self, row: Indices) -> float:
        """The cost of one plan."""
        return float(self.coordinates.costs(self.cost, row[None])[0])

    def _approach(self, row: Indices, target: float, tolerance: float) -> Indices:
        """Single moves towards the target, several at a time while it is far, never beyond its tolerance."""
        now = self.cost_at(row)
        sign = 1.0 if now > target else -1.0
        near, far = target * (1 + sign * tolerance), target * (1 - sign * tolerance)
        while sign * (now - near) > 0:
            moves, where = self._singles(row)
            shift, gap = sign * (now - moves.costs), sign * (now - near)
            useful = np.flatnonzero((shift > 0) & (shift <= sign * (now - far)))
            price = -moves.gains[useful] / np.minimum(shift[useful], gap)
            useful = useful[np.argsort(price, kind="stable")]
            useful = useful[np.sort(np.unique(where[useful], return_index=True)[1])]  # the cheapest move of each coordinate
            if not len(useful):
                break
            # Half the gap at a time: prices change as the plan does, and moves together do more than each alone.
            count = max(1, int(np.searchsorted(np.cumsum(shift[useful]), gap / 2)))
            row, now = self._take(row, moves, where, useful, count, sign, far)
        return row

    def _take(
        self, row: Indices, moves: Moves, where: Indices, order: Indices, count: int, sign: float, far: float
    ) -> tuple[Indices, float]:
        """Make the first `count` moves of `order`, or fewer if they go beyond `far`; the plan and its cost."""
        while True:
            chosen, after = order[:count], row.copy()
            after[where[chosen]] = moves.rows[chosen, where[chosen]]
            cost = self.cost_at(after)
            if count == 1 or sign * (cost - far) >= 0:
                return after, cost
            count //= 2

    def _descend(self, row: Indices, target: float, tolerance: float) -> Indices:
        """Coordinate descent on the distance from the target, by one or two moves at a time, until it is within the tolerance."""
        now = self.cost_at(row)
        while abs(now / target - 1) > tolerance:
            singles, where = self._singles(row)
            if not len(singles.rows):
                break
            shifts = singles.costs - now
            distance = np.abs(now - target + shifts[:, None] + shifts[None, :])
            found = _joined(singles, self._pairs(row, singles, where, distance))
            misses = np.abs(found.costs / target - 1)
            inside = misses <= tolerance
            best = int(np.argmax(np.where(inside, found.gains, -np.inf))) if inside.any() else int(misses.argmin())
            if misses[best] >= abs(now / target - 1):
                break
            row, now = found.rows[best], float(found.costs[best])
        return row

    def _improve(self, row: Indices, target: float, tolerance: float) -> Indices:
        """Exchanges of one or two moves that raise the merit and stay within the tolerance, the best first, until there is none."""
        now = self.cost_at(row)
        while abs(now / target - 1) <= tolerance:
            singles, where = self._singles(row)
            if not len(singles.rows):
                break
            shifts = singles.costs - now
            together = singles.gains[:, None] + singles.gains[None, :]
            fits = np.abs(now - target + shifts[:, None] + shifts[None, :]) <= tolerance * target
            found = _joined(singles, self._pairs(row, singles, where, np.where(fits & (together > LEAST_GAIN), -together, np.inf)))
            gains = np.where(np.abs(found.costs / target - 1) <= tolerance, found.gains, -np.inf)
            best = int(gains.argmax())
            if gains[best] <= LEAST_GAIN:
                break
            row, now = found.rows[best], float(found.costs[best])
        return row

    def _singles(self, row: Indices) -> tuple[Moves, Indices]:
        """Every change of one coordinate, and which coordinate it changes."""
        where, to = [], []
        for c, (low, high) in enumerate(zip(self.outer, self.inner, strict=True)):
            others = [k for k in range(int(low), int(high) + 1) if k != row[c]]
            where += [c] * len(others)
            to += others
        at = np.array(where, dtype=np.int64)
        rows = np.tile(row, (len(at), 1))
        rows[np.arange(len(at)), at] = to
        gains = np.array([self.merits[c][k] - self.merits[c][row[c]] for c, k in zip(where, to, strict=True)])
        return Moves(rows, self.coordinates.costs(self.cost, rows), gains), at

    def _pairs(self, row: Indices, singles: Moves, where: Indices, penalty: Floats) -> Moves:
        """The changes of two coordinates with the least `penalty` [moves, moves] (infinite for those that are out of the question)."""
        first, second = np.triu_indices(len(where), 1)
        possible = (where[first] != where[second]) & np.isfinite(penalty[first, second])
        first, second = first[possible], second[possible]
        if len(first) > EXACT_PAIRS:
            least = np.argpartition(penalty[first, second], EXACT_PAIRS)[:EXACT_PAIRS]
            first, second = first[least], second[least]
        rows = np.tile(row, (len(first), 1))
        for one in (first, second):
            rows[np.arange(len(one)), where[one]] = singles.rows[one, where[one]]
        return Moves(rows, self.coordinates.costs(self.cost, rows), singles.gains[first] + singles.gains[second])


def _joined(one: Moves, other: Moves) -> Moves:
    return Moves(np.concatenate([one.rows, other.rows]), np.concatenate([one.costs, other.costs]), np.concatenate([one.gains, other.gains]))
