"""Numbers for people: counts, costs and the scale of an axis. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

_SCALES = ((1e9, "B", "billions"), (1e6, "M", "millions"), (1e3, "K", "thousands"))


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis' unit: values are divided by `divisor` and the axis is called `label`."""

    divisor: float
    label: str


def count(number: float) -> str:
    """A count with two decimals and its unit: 1.36M."""
    for size, letter, _ in _SCALES:
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number:.0f}"


def amount(number: float, kind: str) -> str:
    """A cost with the unit of its kind (`cost.COSTS`)."""
    if kind == "flops":
        return f"{_significant(number / 1e9)} GFLOPs"
    return f"{_significant(number / 2**30)} GiB" if kind == "memory" else count(number)


def _significant(number: float) -> str:
    return f"{number:.2f}" if number >= 1 else f"{number:.3g}"


def count_scale(largest: float, name: str) -> Scale:
    """The scale of an axis of counts up to `largest`, for example "tokens (millions)"."""
    for size, _, word in _SCALES:
        if largest >= size:
            return Scale(size, f"{name} ({word})")
    return Scale(1.0, name)


def cost_scale(largest: float, kind: str) -> Scale:
    """The scale of an axis of costs of `kind` up to `largest`."""
    if kind == "flops":
        size, letter = (1e9, "G") if largest >= 1e9 else (1e6, "M")
        return Scale(size, f"forward {letter}FLOPs per token")
    if kind == "memory":
        return Scale(2.0**30, "memory (GiB)") if largest >= 2**30 else Scale(2.0**20, "memory (MiB)")
    return count_scale(largest, kind.replace("_params", " parameters"))


def duration(seconds: float) -> str:
    """A time in its two largest units: 3 d 04 h, 1 h 02 min, 5 min 07 s, 12 s."""
    whole = round(seconds)
    for size, unit, part, name in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02d} {name}"
    return f"{whole} s"
