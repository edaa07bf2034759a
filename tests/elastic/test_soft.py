"""Soft decisions: one-hot is the hard plan, gradients reach every probability and match finite differences at every mask point, nothing is
NaN where a weight is zero, and a threshold computes only what is wanted.

Run: pytest tests/elastic/test_soft.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.elastic.decision import soft_decision
from megatron_elastic.elastic.linear import LinearSite
from megatron_elastic.elastic.modules import masked_layer_norm, rms_norm
from tests.elastic.family import PARENTS, build_family, narrowed, relative, run

Probabilities = dict[ElasticAxis, torch.Tensor]


VARIANTS: dict[str, dict[str, Any]] = {
    **{parent: {"parent": parent} for parent in PARENTS},
    "dense, layer norm": {"parent": "dense", "gated": False},
    "moe, softmax": {"parent": "moe", "score": "softmax"},
}


@pytest.fixture(scope="module")
def families(_one_process: Any) -> dict[str, Any]:
    """One family with every axis per layer for each kind of parent, norm and router."""
    return {name: build_family(_one_process, per_layer=True, **changes) for name, changes in VARIANTS.items()}


@pytest.fixture(params=VARIANTS)
def family(request: Any, families: dict[str, Any]) -> Any:
    """Each in turn."""
    return families[request.param]


def one_hot(space: ElasticSpace, choice: int) -> Probabilities:
    """Probability 1 for one choice everywhere (the last where there are fewer)."""
    return {spec.axis: torch.eye(len(spec.choices))[min(choice, len(spec.choices) - 1)].repeat(spec.places, 1) for spec in space.axes}


def mixed(space: ElasticSpace) -> Probabilities:
    """Different positive probabilities at every place, which sum to 1, as leaves."""
    generator = torch.Generator().manual_seed(8)
    return {spec.axis: torch.randn(spec.places, len(spec.choices), generator=generator).softmax(-1).requires_grad_() for spec in space.axes}


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_one_hot_probabilities_are_the_hard_plan(family: Any, choice: int) -> None:
    model, space, handle, shape = family
    soft, soft_grads = run(model, handle, soft_decision(space, one_hot(space, choice), shape.num_layers), "mask")
    hard, hard_grads = run(model, handle, narrowed(space, None, choice), "mask")
    assert relative(soft, hard) < 1e-6
    for name, gradient in hard_grads.items():
        assert relative(soft_grads[name], gradient) < 1e-5 or float(gradient.norm()) < 1e-6, name


def _loss(family: Any, pi: Probabilities, threshold: float = 0.0) -> torch.Tensor:
    model, space, handle, shape = family
    with handle.use(soft_decision(space, pi, shape.num_layers, threshold)):
        tokens = torch.arange(24)[None] * 7 % 131
        logits = model(tokens, torch.arange(24)[None], None).double()
    return (logits * torch.linspace(-1, 1, logits.shape[-1]).double()).mean()


def _routes(family: Any, pi: Probabilities) -> tuple[float, list[torch.Tensor]]:
    """The loss, and which experts every token went to."""
    routes: list[torch.Tensor] = []
    routers = [module for module in family[0].modules() if isinstance(module, TopKRouter)]
    hooks = [router.register_forward_hook(lambda module, args, output: routes.append(output[1])) for router in routers]
    with torch.no_grad():
        loss = float(_loss(family, pi))
    for hook in hooks:
        hook.remove()
    return loss, routes


def _slope(family: Any, pi: Probabilities, axis: ElasticAxis, direction: torch.Tensor) -> float:
    """Central difference of the loss along `direction`, with a step at whose ends every token goes to the same experts.

    The choice of experts has no gradient by design, and no slope either while it does not change.
    """
    for step in (3e-3, 1e-3, 3e-4, 1e-4):
        (above, routes), (below, others) = (_routes(family, pi | {axis: pi[axis] + sign * step * direction}) for sign in (1, -1))
        if all(torch.equal(a, b) for a, b in zip(routes, others, strict=True)):
            return (above - below) / (2 * step)
    raise AssertionError(f"{axis}: some token changes its experts at any step")


def test_gradient_of_every_probability_matches_finite_differences(family: Any) -> None:
    pi = mixed(family[1])
    _loss(family, pi).backward()
    for axis, value in pi.items():
        assert value.grad is not None and torch.isfinite(value.grad).all(), axis
        for place in range(len(value)):
            direction = torch.zeros_like(value)
            direction[place, 0], direction[place, -1] = 1.0, -1.0
            analytic = float((value.grad * direction).sum())
            assert analytic != 0.0, (axis, place)
            assert analytic == pytest.approx(_slope(family, pi, axis, direction), rel=0.02, abs=5e-5), (axis, place)


def test_weights_of_zero_give_finite_gradients(family: Any) -> None:
    model, space, handle, shape = family
    pi = {axis: value.requires_grad_() for axis, value in one_hot(space, 2).items()}
    _loss(family, pi).backward()
    assert all(value.grad is not None and torch.isfinite(value.grad).all() for value in pi.values())
    _, grads = run(model, handle, soft_decision(space, one_hot(space, 2), shape.num_layers), "mask")
    assert all(torch.isfinite(gradient).all() for gradient in grads.values())


def test_a_threshold_computes_only_what_is_wanted(family: Any) -> None:
    model, space, handle, shape = family
    # the widest choice is out of the question at every place, the others are open
    pi = {}
    for spec in space.axes:
        values = torch.full((spec.places, len(spec.choices)), 0.5)
        if len(spec.choices) > 2:
            values[:, 0] = 0.0
        else:
            values[:, 0] = 1.0 - 0.5 * (len(spec.choices) - 1)
        pi[spec.axis] = values
    full, _ = run(model, handle, soft_decision(space, pi, shape.num_layers), "mask")
    decision = soft_decision(space, pi, shape.num_layers, threshold=1e-3)
    cut, grads = run(model, handle, decision, "mask")
    assert relative(cut, full) < 1e-5
    with handle.use(decision):
        sites = [module.site for module in model.modules() if isinstance(vars(module).get("site"), LinearSite)]
        assert all(site.kept() != (None, None) for site in sites), "every linear computes less"
    assert all(torch.isfinite(gradient).all() for gradient in grads.values())


def test_soft_norms_are_those_of_the_unweighted_stream_under_squared_weights() -> None:
    """Formulas in fp64: the stream holds x = w y, and a norm gives w times the norm of y, mean and variance under w^2 (d = sum of w^2)."""
    generator = torch.Generator().manual_seed(4)
    y, gain, bias = (torch.randn(*size, dtype=torch.float64, generator=generator) for size in ((5, 12), (12,), (12,)))
    w = torch.rand(12, dtype=torch.float64, generator=generator)
    x, alive, eps = w * y, w.square().sum(), 1e-5
    mean = (w.square() * y).sum(-1, keepdim=True) / alive
    variance = (w.square() * (y - mean).square()).sum(-1, keepdim=True) / alive
    expected = w * ((y - mean) / (variance + eps).sqrt() * gain + bias)
    torch.testing.assert_close(masked_layer_norm(x, w, gain, bias, eps), expected, rtol=1e-5, atol=1e-6)  # computed in fp32
    mean_square = x.square().sum(-1, keepdim=True) / alive
    torch.testing.assert_close(rms_norm(x, w.square().mean(), gain, eps), x / (mean_square + eps).sqrt() * gain, rtol=1e-5, atol=1e-6)
