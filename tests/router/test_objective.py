"""The budget loss, the anchor, and expected widths: values, dead zone, gradients, and agreement with the exact cost of plans."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.cost import COSTS, cost_function, widths_of
from megatron_elastic.router.objective import anchor_loss, budget_loss, expected_widths
from megatron_elastic.shape import AttentionShape, MlpShape, ModelShape
from megatron_elastic.space import AxisChoices, build_space

SHAPE = ModelShape(
    layer_pattern="*-*-", hidden_size=24, vocab_size=40, attention=AttentionShape(heads=4, kv_groups=2, head_dim=6), mlp=MlpShape(ffn=64)
)
SPACE = build_space(
    SHAPE,
    {ElasticAxis.HIDDEN: (24, 16), ElasticAxis.FFN: (64, 48, 32), ElasticAxis.LAYERS: (4, 3, 2)},
    shard_groups=2,
    drop_order=(3, 0),
)


def _pi(seed: int = 0) -> dict[ElasticAxis, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.axis: torch.randn(spec.places, len(spec.choices), dtype=torch.float64, generator=generator).softmax(-1) for spec in SPACE.axes
    }


def test_budget_loss_and_its_dead_zone():
    cost = torch.tensor(130.0, dtype=torch.float64, requires_grad=True)
    loss = budget_loss(cost, 100.0, 0.05)
    loss.backward()
    assert (loss.item(), cost.grad.item()) == (pytest.approx(0.3), pytest.approx(0.01))
    below = torch.tensor(70.0, dtype=torch.float64, requires_grad=True)
    budget_loss(below, 100.0, 0.05).backward()
    assert below.grad.item() == pytest.approx(-0.01)
    for inside in (96.0, 104.9, 100.0):
        cost = torch.tensor(inside, dtype=torch.float64, requires_grad=True)
        loss = budget_loss(cost, 100.0, 0.05)
        loss.backward()
        assert (loss.item(), cost.grad.item()) == (0.0, 0.0)


def test_anchor():
    pi = {ElasticAxis.HIDDEN: torch.tensor([[0.7, 0.3]]), ElasticAxis.FFN: torch.tensor([[0.5, 0.2, 0.3]])}
    assert anchor_loss(pi).item() == pytest.approx(10 * ((0.09 + 0.09) / 2 + (0.25 + 0.04 + 0.09) / 3))
    assert anchor_loss({ElasticAxis.HIDDEN: torch.tensor([[1.0, 0.0]])}).item() == 0.0
    layers = {ElasticAxis.FFN: torch.tensor([[0.7, 0.3], [1.0, 0.0]])}
    assert anchor_loss(layers).item() == pytest.approx(10 * (0.09 + 0.09) / 4), "layers are averaged, not summed"


def test_expected_widths_are_expectations():
    pi = _pi()
    widths = expected_widths(SPACE, pi, SHAPE.num_layers)
    hidden, layers = pi[ElasticAxis.HIDDEN][0], pi[ElasticAxis.LAYERS][0]
    assert float(widths.axes[ElasticAxis.HIDDEN]) == pytest.approx(float(24 * hidden[0] + 16 * hidden[1]))
    assert widths.axes[ElasticAxis.HEADS] == 4
    assert [float(s) for s in widths.survival] == pytest.approx([float(layers[0] + layers[1]), 1.0, 1.0, float(layers[0])])


@pytest.mark.parametrize("kind", COSTS)
def test_one_hot_costs_what_the_plan_costs(kind):
    cost_fn = cost_function(SHAPE, kind, 16)
    for choice in itertools.product(*(range(len(spec.choices)) for spec in SPACE.axes)):
        pi = {
            spec.axis: torch.nn.functional.one_hot(torch.tensor([i]), len(spec.choices)).double()
            for spec, i in zip(SPACE.axes, choice, strict=True)
        }
        plan = SPACE.plan({spec.axis: spec.choices[i] for spec, i in zip(SPACE.axes, choice, strict=True)})
        assert float(cost_fn(expected_widths(SPACE, pi, 4))) == float(cost_fn(widths_of(plan, 4)))


def test_cost_of_the_expectation_is_the_expected_cost():
    """Axes are drawn independently and the count is multilinear, so both agree exactly."""
    cost_fn, pi = cost_function(SHAPE, "total_params", 16), _pi(2)
    mean = 0.0
    for choice in itertools.product(*(range(len(spec.choices)) for spec in SPACE.axes)):
        plan = SPACE.plan({spec.axis: spec.choices[i] for spec, i in zip(SPACE.axes, choice, strict=True)})
        probability = 1.0
        for spec, i in zip(SPACE.axes, choice, strict=True):
            probability *= float(pi[spec.axis][0, i])
        mean += probability * cost_fn(widths_of(plan, 4))
    assert float(cost_fn(expected_widths(SPACE, pi, 4))) == pytest.approx(mean, rel=1e-12)


def test_per_layer_widths_are_expectations_of_each_layer():
    choices = AxisChoices(choices=(64, 48, 32), per_layer=True)
    space = build_space(SHAPE, {ElasticAxis.HIDDEN: (24, 16), ElasticAxis.FFN: choices}, shard_groups=2)
    generator = torch.Generator().manual_seed(4)
    pi = {
        spec.axis: torch.randn(spec.places, len(spec.choices), dtype=torch.float64, generator=generator).softmax(-1) for spec in space.axes
    }
    widths = expected_widths(space, pi, 4).axes[ElasticAxis.FFN]
    assert isinstance(widths, tuple)
    assert [float(width) for width in widths] == pytest.approx(
        [float((row * torch.tensor([64.0, 48, 32])).sum()) for row in pi[ElasticAxis.FFN]]
    )
    cost_fn = cost_function(SHAPE, "total_params", 16)
    mean = sum(
        float(pi[ElasticAxis.HIDDEN][0, h] * pi[ElasticAxis.FFN][0, a] * pi[ElasticAxis.FFN][1, b])
        * cost_fn(widths_of(space.plan({ElasticAxis.HIDDEN: (24, 16)[h], ElasticAxis.FFN: (choices.choices[a], choices.choices[b])}), 4))
        for h, a, b in itertools.product(range(2), range(3), range(3))
    )
    assert float(cost_fn(expected_widths(space, pi, 4))) == pytest.approx(mean, rel=1e-12)


def test_gradient_of_the_budget_loss_reaches_every_axis():
    cost_fn = cost_function(SHAPE, "total_params", 16)
    pi = [value.requires_grad_() for value in _pi(1).values()]

    def loss(*values: torch.Tensor) -> torch.Tensor:
        by_axis = {spec.axis: value for spec, value in zip(SPACE.axes, values, strict=True)}
        return budget_loss(cost_fn(expected_widths(SPACE, by_axis, 4)), 3000.0, 0.01)

    assert torch.autograd.gradcheck(loss, pi)
    assert all(bool((grad != 0).all()) for grad in torch.autograd.grad(loss(*pi), pi))
