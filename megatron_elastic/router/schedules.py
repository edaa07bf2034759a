"""Schedules: pure functions of floats. `progress` is the share of the whole run that is done, from 0 to 1."""

from __future__ import annotations

import math

from megatron_elastic.errors import ConfigError


def _linear(progress: float, start: float, end: float) -> float:
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress {progress} is not between 0 and 1")
    return start + (end - start) * progress


def temperature(progress: float, start: float = 1.0, end: float = 0.05) -> float:
    """Gumbel-softmax temperature: geometric from `start` to `end`."""
    return math.exp(_linear(progress, math.log(start), math.log(end)))


def logit_scale(progress: float, start: float = 1.0, end: float = 10.0) -> float:
    """Factor on the router's logits: linear from `start` to `end`."""
    return _linear(progress, start, end)


def tolerance(progress: float, start: float = 0.05, *, end: float) -> float:
    """Relative deviation from the target that costs nothing: linear from `start` to the final tolerance `end`."""
    return _linear(progress, start, end)


def learning_rate(step: int, warmup_steps: int, total_steps: int, peak: float, minimum: float) -> float:
    """Learning rate of `step` (from 0) of a stage: linear warm-up, then half a cosine.

    Step `warmup_steps` has `peak`, the last step `minimum`; no step has zero. Raises ConfigError when the warm-up fills the stage.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ConfigError(f"warmup_steps {warmup_steps} must lie between 0 and the stage's {total_steps} steps; shorten the warm-up")
    if not 0 <= step < total_steps:
        raise ValueError(f"step {step} is not one of the stage's {total_steps} steps")
    if step <= warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / (total_steps - 1 - warmup_steps)
    return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * done))
