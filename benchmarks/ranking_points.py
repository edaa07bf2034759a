"""What a ranking is judged by: plans that keep a share of an axis, the perplexity of each, and how two criteria compare. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import parent_width

SHARES = (0.95, 0.9, 0.8, 0.7)
"""What is kept of hidden, ffn and layers, each alone and all together with heads."""
HEAD_SHARES = (2 / 3, 1 / 3)
EXPERT_SHARES = (0.75, 0.5)
WIDTH_UNIT = 8
"""hidden and ffn are kept in multiples of it, as matrix units want them."""
LEAST_SHARE_OF_POINTS, WORST_RATIO = 0.8, 1.05
"""What is aimed at: the default is at least as good as Minitron at this share of the points, and nowhere worse by more than this factor."""


@dataclass(frozen=True, slots=True)
class Point:
    """A plan by the share it keeps of some axes; name: what tables call it."""

    name: str
    shares: tuple[tuple[ElasticAxis, float], ...]

    def widths(self, shape: ModelShape) -> dict[ElasticAxis, int]:
        """Axis -> the width nearest to its share that the model can have: whole units of 8, heads and experts in whole groups."""
        return {axis: _nearest(shape, axis, share) for axis, share in self.shares}


def _nearest(shape: ModelShape, axis: ElasticAxis, share: float) -> int:
    parent = parent_width(shape, axis)
    assert isinstance(parent, int)
    if axis in (ElasticAxis.HIDDEN, ElasticAxis.FFN):
        unit = WIDTH_UNIT
    elif axis is ElasticAxis.HEADS:
        assert shape.attention is not None
        unit = shape.attention.kv_groups
    else:
        unit = 1
    return max(unit, round(share * parent / unit) * unit)


def width_points() -> tuple[Point, ...]:
    """Every point of a dense model: one axis at a time, then all four together."""
    alone = [Point(f"{axis.value} {share:.0%}", ((axis, share),)) for axis in (ElasticAxis.HIDDEN, ElasticAxis.FFN) for share in SHARES]
    heads = [Point(f"heads {share:.0%}", ((ElasticAxis.HEADS, share),)) for share in HEAD_SHARES]
    layers = [Point(f"layers {share:.0%}", ((ElasticAxis.LAYERS, share),)) for share in SHARES]
    every = (ElasticAxis.HIDDEN, ElasticAxis.FFN, ElasticAxis.HEADS, ElasticAxis.LAYERS)
    joint = [Point(f"all {share:.0%}", tuple((axis, share) for axis in every)) for share in SHARES]
    return (*alone, *heads, *layers, *joint)


def expert_points() -> tuple[Point, ...]:
    """The points of a mixture of experts."""
    return tuple(Point(f"experts {share:.0%}", ((ElasticAxis.EXPERTS, share),)) for share in EXPERT_SHARES)


def choices(points: Sequence[Point], shape: ModelShape) -> dict[ElasticAxis, tuple[int, ...]]:
    """Axis -> all widths that the points keep of it, widest first: the axes of a space that holds them all."""
    found: dict[ElasticAxis, set[int]] = {}
    for point in points:
        for axis, width in point.widths(shape).items():
            parent = parent_width(shape, axis)
            assert isinstance(parent, int)
            found.setdefault(axis, {parent}).add(width)
    return {axis: tuple(sorted(widths, reverse=True)) for axis, widths in found.items()}


Losses = Mapping[tuple[str, str, str], float]
"""(criterion, point, text) -> nats per token."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one criterion does against another at every point and text.

    at_least_as_good: share of them where its perplexity is not above the other's. worst: its largest perplexity over the other's, at
    `worst_at` (point, text). ratio: geometric mean of that ratio.
    """

    at_least_as_good: float
    worst: float
    worst_at: tuple[str, str]
    ratio: float

    @property
    def met(self) -> bool:
        """Whether both aims are met."""
        return self.at_least_as_good >= LEAST_SHARE_OF_POINTS and self.worst <= WORST_RATIO


def compare(losses: Losses, one: str, other: str) -> Verdict:
    """`one` against `other` where both were measured. Raises KeyError when they have no point in common."""
    common = {
        (point, text): loss - losses[other, point, text]
        for (name, point, text), loss in losses.items()
        if name == one and (other, point, text) in losses
    }
    if not common:
        raise KeyError(f"{one!r} and {other!r} have no point in common")
    worst_at = max(common, key=lambda where: common[where])
    return Verdict(
        at_least_as_good=sum(difference <= 0 for difference in common.values()) / len(common),
        worst=math.exp(common[worst_at]),
        worst_at=worst_at,
        ratio=math.exp(sum(common.values()) / len(common)),
    )


def over_parent(losses: Losses, name: str, parent: Mapping[str, float], points: Sequence[str]) -> float:
    """Geometric mean, over the points and texts, of a criterion's perplexity over the whole model's. parent: text -> its loss."""
    differences = [loss - parent[text] for (criterion, point, text), loss in losses.items() if criterion == name and point in points]
    return math.exp(sum(differences) / len(differences))


def tables(losses: Losses, parent: Mapping[str, float], points: Sequence[str], criteria: Sequence[str]) -> str:
    """One table a text: a line a point, a column a criterion, perplexities, the best of a line with a star; then the geometric means."""
    width = max(12, *(len(name) + 2 for name in criteria))
    first = max(len(point) for point in [*points, "geometric mean"])
    lines = []
    for text, loss in parent.items():
        lines.append(f"{text}, perplexity (the whole model: {math.exp(loss):.2f})")
        lines.append("".join([f"{'kept':{first}}", *(f"{name:>{width}}" for name in criteria)]))
        for point in points:
            found = {name: losses.get((name, point, text)) for name in criteria}
            best = min((value for value in found.values() if value is not None), default=math.inf)
            lines.append("".join([f"{point:{first}}", *(_cell(value, best, width) for value in found.values())]))
        lines.append("")
    lines.append("perplexity over the whole model's, all texts")
    means = [f"{over_parent(losses, name, parent, points):>{width - 1}.3f} " for name in criteria]
    return "\n".join([*lines, "".join([f"{'geometric mean':{first}}", *means])])


def _cell(loss: float | None, best: float, width: int) -> str:
    if loss is None:
        return f"{'-':>{width - 1}} "
    value = math.exp(min(loss, 700.0))
    text = f"{value:.2f}" if value < 1e5 else f"{value:.1e}"
    return f"{text:>{width - 1}}{'*' if loss == best else ' '}"
