"""The next token from logits: a pure function of (logits, options, generator)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_elastic.errors import ConfigError, raise_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn. Raises ConfigError listing every value that is out of range.

    temperature: logits are divided by it before anything else. top_k: only so many of the most probable tokens; None: all.
    top_p: of those only the fewest, most probable first, that hold at least this probability together (nucleus sampling, Holtzman et al.,
    arXiv 1904.09751); None: all. Tokens of equal probability count in the order of their ids.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.temperature < float("inf"):
            problems.append(f"temperature {self.temperature} must be above 0; leave it out to take the most probable token")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k {self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"top_p {self.top_p} must be above 0 and at most 1")
        raise_all(ConfigError, problems, "sampling")


def token_probabilities(logits: torch.Tensor, options: Sampling) -> torch.Tensor:
    """What every token is drawn with, float64 [vocabulary], from logits [vocabulary]: 0 outside top_k and top_p, the rest renormalised."""
    ranked, order = (logits.double() / options.temperature).sort(descending=True, stable=True)
    if options.top_k is not None:
        ranked[options.top_k :] = -torch.inf
    chances = ranked.softmax(0)
    if options.top_p is not None:
        # A token is kept while those before it do not yet hold top_p; the first always is.
        before = torch.cat([chances.new_zeros(1), chances.cumsum(0)[:-1]])
        chances = torch.where(before < options.top_p, chances, 0.0)
    return torch.zeros_like(chances).scatter(0, order, chances / chances.sum())


def next_token(logits: torch.Tensor, options: Sampling | None, generator: torch.Generator) -> int:
    """The id of the next token from its logits [vocabulary].

    options: None takes the most probable token (the lowest id of several) and draws nothing from `generator`, which is on the device of
    `logits`.
    """
    if options is None:
        return int(logits.argmax())
    return int(torch.multinomial(token_probabilities(logits, options), 1, generator=generator))
