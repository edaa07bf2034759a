"""Weights of components and layers are sums over the choices that keep them, exact for one-hot decisions, with right gradients."""

from __future__ import annotations

import pytest
import torch

from megatron_elastic.decisions import prefix_weights, survival_weights

CHOICES, GROUPS = (24, 16, 12, 4), 4


def _pi(size: int) -> torch.Tensor:
    return torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).softmax(0)


def test_prefix_weights_are_sums_over_the_choices_that_keep_a_component():
    pi = _pi(4)
    expected = [sum(float(pi[i]) for i, n in enumerate(CHOICES) if n / GROUPS > c) for c in range(CHOICES[0] // GROUPS)]
    assert prefix_weights(CHOICES, GROUPS, pi).tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("index", range(4))
def test_one_hot_gives_exact_zeros_and_ones(index, dtype):
    one_hot = torch.nn.functional.one_hot(torch.tensor(index), 4).to(dtype)
    kept = CHOICES[index] // GROUPS
    expected = torch.tensor([1.0] * kept + [0.0] * (6 - kept), dtype=dtype)
    assert torch.equal(prefix_weights(CHOICES, GROUPS, one_hot), expected)


def test_a_single_choice_is_the_whole_group():
    assert torch.equal(prefix_weights((6,), 2, torch.ones(1)), torch.ones(3))


def test_survival_follows_the_drop_order():
    choices, order, pi = (5, 4, 2), (3, 0, 4), _pi(3)
    survival = survival_weights(choices, order, pi, 5)
    dropped = {5: [], 4: [3], 2: [3, 0, 4]}
    expected = [sum(float(p) for n, p in zip(choices, pi, strict=True) if layer not in dropped[n]) for layer in range(5)]
    assert survival.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("index", "expected"), [(0, [1, 1, 1, 1, 1]), (1, [1, 1, 1, 0, 1]), (2, [0, 1, 1, 0, 0])])
def test_one_hot_survival_is_exact(index, expected):
    one_hot = torch.nn.functional.one_hot(torch.tensor(index), 3).float()
    assert survival_weights((5, 4, 2), (3, 0, 4), one_hot, 5).tolist() == expected


def test_gradients():
    pi = _pi(4).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: prefix_weights(CHOICES, GROUPS, p), (pi,))
    assert torch.autograd.gradcheck(lambda p: survival_weights((6, 5, 3, 2), (5, 1, 0, 2), p, 6), (pi,))
