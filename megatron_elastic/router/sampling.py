"""Draws of budgets and Gumbel noise, as functions of (seed, stage, step, group).

The same run takes the same decisions on every parallel layout and after a resume: no generator has a state to carry, and no global
RNG is read or moved. Numbers come straight from BLAKE2b (torch's CPU generator keeps only 32 bits of a seed, so that hashing into
one would give different steps the same noise now and then).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

import torch

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace
from megatron_elastic.errors import ConfigError

_UNIFORM_BITS = 52  # the most for which (n + 1/2) / 2^bits is exact, so that a uniform is never 0 or 1


def _bits(bits: int, *key: str | int) -> int:
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


def uniform(*key: str | int) -> float:
    """A number strictly between 0 and 1 that depends on `key` only."""
    return (_bits(_UNIFORM_BITS, *key) + 0.5) / 2.0**_UNIFORM_BITS


def derived_generator(*key: str | int) -> torch.Generator:
    """A fresh CPU generator seeded by `key`, for initial weights."""
    return torch.Generator().manual_seed(_bits(32, *key))


def draw_budget(seed: int, stage: str, step: int, group: int, probabilities: Mapping[str, float]) -> str:
    """The budget of a group of samples: a name of `probabilities` (they sum to 1; the order of the mapping matters).

    Raises ConfigError when no budget can be drawn.
    """
    possible = {name: value for name, value in probabilities.items() if value > 0}
    if not possible:
        raise ConfigError(f"budget_probabilities {dict(probabilities)}: no budget has a positive probability")
    left = uniform("budget", seed, stage, step, group) * math.fsum(possible.values())
    for name, value in possible.items():
        left -= value
        if left < 0:
            return name
    return next(reversed(possible))  # rounding of the running difference


def gumbel_noise(seed: int, stage: str, step: int, group: int, space: ElasticSpace) -> dict[ElasticAxis, torch.Tensor]:
    """Standard Gumbel noise [places, choices], fp32 on the CPU, for every elastic axis; an axis' noise does not depend on the others."""

    def noise(spec: AxisSpec) -> torch.Tensor:
        count = spec.places * len(spec.choices)
        draws = [-math.log(-math.log(uniform("gumbel", seed, stage, step, group, spec.axis.value, i))) for i in range(count)]
        return torch.tensor(draws, dtype=torch.float32).unflatten(0, (spec.places, len(spec.choices)))

    return {spec.axis: noise(spec) for spec in space.axes}


def relaxed_choice(logits: torch.Tensor, noise: torch.Tensor, tau: float, scale: float) -> torch.Tensor:
    """pi [places, choices] = softmax((scale * logits + noise) / tau): Gumbel-softmax (arXiv 1611.01144) on scaled logits."""
    return ((scale * logits + noise.to(logits)) / tau).softmax(-1)


def straight_through(pi: torch.Tensor) -> torch.Tensor:
    """The most probable choice of each place as exact zeros and ones [places, choices], with the gradient of pi (arXiv 1611.01144, 2.2)."""
    hard = torch.zeros_like(pi).scatter(-1, pi.argmax(-1, keepdim=True), 1.0)
    # hard - pi.detach() + pi, in the order that adds an exact zero: a one must stay a one, or kept components are scaled.
    return hard + (pi - pi.detach())


def group_of_sample(sample_index: int, samples_per_decision: int) -> int:
    """The group of a sample, numbered inside its global batch (from 0)."""
    return sample_index // samples_per_decision
