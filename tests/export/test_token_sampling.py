"""Tokens are drawn as a naive reference says: temperature, top-k, the boundary of top-p, ties, seeds; bad options are refused.

Run: pytest tests/export/test_token_sampling.py
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.errors import ConfigError
from megatron_elastic.export.sampling import Sampling, next_token, token_probabilities


def reference(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """The definition, one token at a time."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    weights = {token: math.exp((logits[token] - max(logits)) / temperature) for token in ranked}
    kept, held = [], 0.0
    for token in ranked:
        if top_p is not None and held >= top_p:
            break
        kept.append(token)
        held += weights[token] / sum(weights.values())
    return [weights[token] / sum(weights[k] for k in kept) if token in kept else 0.0 for token in range(len(logits))]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=12),  # few values: ties happen
    temperature=st.sampled_from([0.25, 1.0, 1.7]),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.sampled_from([1e-9, 0.3141, 0.75, 0.97]),
)
def test_probabilities_are_the_reference_s(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> None:
    found = token_probabilities(torch.tensor(logits), Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(
        found, torch.tensor(reference(logits, temperature, top_k, top_p), dtype=torch.float64), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.49, [1]), (0.5 - 1e-9, [1]), (0.5 + 1e-9, [1, 3]), (0.75 - 1e-9, [1, 3]), (0.75 + 1e-9, [0, 1, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_fewest_tokens_that_hold_it(top_p: float, kept: list[int]) -> None:
    chances = torch.tensor([0.1875, 0.5, 0.0625, 0.25], dtype=torch.float64)
    found = token_probabilities(chances.log(), Sampling(top_p=top_p))
    assert found.nonzero().flatten().tolist() == kept
    torch.testing.assert_close(found[kept], chances[kept] / chances[kept].sum())


def test_equal_tokens_count_by_their_ids() -> None:
    assert token_probabilities(torch.zeros(6), Sampling(top_k=2)).tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert token_probabilities(torch.zeros(4), Sampling(top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]


def test_draws_follow_the_probabilities() -> None:
    logits, options = torch.tensor([0.3, 1.2, -0.5, 0.9, -2.0]), Sampling(temperature=1.3, top_k=4, top_p=0.95)
    generator = torch.Generator().manual_seed(4)
    draws = torch.tensor([next_token(logits, options, generator) for _ in range(4000)])
    counted, wanted = torch.bincount(draws, minlength=5) / 4000, token_probabilities(logits, options)
    assert (counted.double() - wanted).abs().max() < 0.03 and counted[wanted == 0].sum() == 0


def test_a_seed_decides_and_nothing_else_moves() -> None:
    logits, options = torch.randn(50, generator=torch.Generator().manual_seed(0)), Sampling(temperature=2.0)
    before, state = logits.clone(), torch.get_rng_state()

    def draws(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [next_token(logits, options, generator) for _ in range(20)]

    assert draws(1) == draws(1) != draws(2)
    assert torch.equal(logits, before) and torch.equal(torch.get_rng_state(), state)


def test_greedy_takes_the_most_probable_and_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    assert next_token(torch.tensor([0.0, 3.0, 1.0, 3.0]), None, generator) == 1
    assert torch.equal(generator.get_state(), state)
    assert next_token(torch.tensor([0.0, 3.0, 1.0]), Sampling(top_k=1, temperature=50.0), generator) == 1


def test_bad_options_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(temperature=0.0, top_k=0, top_p=1.5)
    assert caught.value.problems == [
        "temperature 0.0 must be above 0; leave it out to take the most probable token",
        "top_k 0 must be at least 1",
        "top_p 1.5 must be above 0 and at most 1",
    ]
    for options in ({"temperature": math.nan}, {"temperature": math.inf}, {"top_p": math.nan}, {"top_p": 0.0}):
        with pytest.raises(ConfigError, match="must be above 0"):
            Sampling(**options)
