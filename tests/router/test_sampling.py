"""Draws are functions of (seed, stage, step, group): repeatable, independent, of the right distribution, moving no global RNG."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.router import sampling

HIDDEN, FFN = AxisSpec(ElasticAxis.HIDDEN, (8, 6, 4), 1), AxisSpec(ElasticAxis.FFN, (16, 8), 8)
PARENT = SubmodelPlan.of({ElasticAxis.HIDDEN: 8, ElasticAxis.FFN: 16})
SPACE = ElasticSpace((HIDDEN, FFN), PARENT)
PROBABILITIES = {"full": 0.5, "medium": 0.3, "small": 0.2}
PINNED = ["full", "full", "medium", "medium", "small", "full", "medium", "medium"]
PINNED_UNIFORM = 0.9839754855474988
PINNED_NOISE = [-0.1666175276041031, 2.1652467250823975, -1.2369730472564697]


def test_draws_are_pinned_across_versions():
    """A run must take the same decisions after an upgrade: these values are part of the format."""
    drawn = [sampling.draw_budget(7, "short", step, 0, PROBABILITIES) for step in range(8)]
    assert drawn == PINNED
    assert sampling.uniform("x", 1) == PINNED_UNIFORM


def test_draws_have_the_probabilities():
    counts = Counter(sampling.draw_budget(1, "s", step, group, PROBABILITIES) for step in range(1000) for group in range(4))
    for name, probability in PROBABILITIES.items():
        assert counts[name] / 4000 == pytest.approx(probability, abs=0.03)
    assert {sampling.draw_budget(1, "s", step, 0, {"a": 0.0, "b": 1.0}) for step in range(50)} == {"b"}


def test_every_part_of_the_key_matters():
    base = sampling.gumbel_noise(1, "s", 2, 3, SPACE)[ElasticAxis.HIDDEN]
    for other in [(9, "s", 2, 3), (1, "t", 2, 3), (1, "s", 9, 3), (1, "s", 2, 9), (1, "s", 3, 2)]:
        assert not torch.equal(sampling.gumbel_noise(*other, SPACE)[ElasticAxis.HIDDEN], base)
    assert torch.equal(sampling.gumbel_noise(1, "s", 2, 3, SPACE)[ElasticAxis.HIDDEN], base)
    alone = ElasticSpace((FFN,), PARENT)
    assert torch.equal(
        sampling.gumbel_noise(1, "s", 2, 3, alone)[ElasticAxis.FFN], sampling.gumbel_noise(1, "s", 2, 3, SPACE)[ElasticAxis.FFN]
    )


def test_each_layer_has_noise_of_its_own_and_the_first_that_of_a_homogeneous_axis():
    layers = AxisSpec(ElasticAxis.FFN, (16, 8), 8, (1, 3, 4), per_layer=True)
    noise = sampling.gumbel_noise(1, "s", 2, 3, ElasticSpace((layers,), PARENT))[ElasticAxis.FFN]
    assert tuple(noise.shape) == (3, 2) and len(set(noise.flatten().tolist())) == 6
    assert torch.equal(noise[:1], sampling.gumbel_noise(1, "s", 2, 3, SPACE)[ElasticAxis.FFN])


def test_noise_is_pinned_across_versions():
    """As the draws above: a run must see the same noise after an upgrade."""
    assert sampling.gumbel_noise(1, "s", 2, 3, SPACE)[ElasticAxis.HIDDEN][0].tolist() == pytest.approx(PINNED_NOISE, rel=1e-6)


def test_straight_through_is_hard_forward_and_soft_backward():
    logits = torch.tensor([[0.1, 0.7, -0.2], [2.0, 1.0, 1.5]], requires_grad=True)
    hard = sampling.straight_through(logits.softmax(-1))
    assert hard.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], "exact zeros and ones"
    weights = torch.tensor([[0.3, -1.0, 2.0], [1.0, 4.0, -3.0]])
    (gradient,) = torch.autograd.grad((hard * weights).sum(), logits)
    (soft,) = torch.autograd.grad((logits.softmax(-1) * weights).sum(), logits)
    torch.testing.assert_close(gradient, soft)
    tiny = torch.full((4000, 3), 1 / 3) + torch.rand(4000, 3, generator=torch.Generator().manual_seed(0)) * 0.1
    assert set(sampling.straight_through(tiny).flatten().tolist()) == {0.0, 1.0}


def test_noise_is_gumbel():
    noise = torch.cat([sampling.gumbel_noise(0, "s", step, 0, SPACE)[ElasticAxis.HIDDEN][0] for step in range(3000)])
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.05)
    assert float(noise.var()) == pytest.approx(torch.pi**2 / 6, rel=0.06)


def test_choices_follow_the_softmax_of_scaled_logits():
    logits, scale = torch.tensor([0.3, -0.2, 0.1]), 2.0
    wins = Counter(
        int(sampling.relaxed_choice(logits, sampling.gumbel_noise(4, "s", step, 0, SPACE)[ElasticAxis.HIDDEN][0], 0.05, scale).argmax())
        for step in range(3000)
    )
    for choice, probability in enumerate((scale * logits).softmax(0).tolist()):
        assert wins[choice] / 3000 == pytest.approx(probability, abs=0.03)


def test_no_global_generator_moves():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    sampling.draw_budget(1, "s", 0, 0, PROBABILITIES)
    sampling.gumbel_noise(1, "s", 0, 0, SPACE)
    sampling.derived_generator("x", 1)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_relaxed_choice_formula_and_gradient():
    logits = torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64, requires_grad=True)
    noise = torch.tensor([0.1, 0.9, -0.3])
    pi = sampling.relaxed_choice(logits, noise, 0.7, 3.0)
    torch.testing.assert_close(pi, ((3.0 * logits + noise.double()) / 0.7).softmax(0))
    assert torch.autograd.gradcheck(lambda x: sampling.relaxed_choice(x, noise, 0.7, 3.0), (logits,))


def test_groups():
    assert [sampling.group_of_sample(i, 4) for i in (0, 3, 4, 11)] == [0, 0, 1, 2]
