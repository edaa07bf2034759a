"""Hard plans in both modes and soft decisions on two context-parallel ranks equal one process: logits, and every gradient summed over the ranks.

Run: pytest tests/elastic/test_context_parallel.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.elastic.decision import soft_decision
from megatron_elastic.errors import ConfigError
from megatron_elastic.models.build import build_model
from megatron_elastic.models.context import natural_order
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.space import build_space
from megatron_elastic.testing.tiny import tiny_shape
from tests.elastic.family import build_family, narrowed, relative, staggered
from tests.models.context_rows import TOTAL, share_gradients
from tests.models.test_context import ONE_GROUP

FAMILIES: dict[str, dict[str, Any]] = {
    "hybrid": {"parent": "hybrid"},
    "hybrid, one SSM group": {"parent": "hybrid", "mamba": ONE_GROUP},
    "dense": {"parent": "dense"},
    "dense, layer norm": {"parent": "dense", "gated": False},
    "moe": {"parent": "moe"},
}
Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _plans(space: ElasticSpace) -> list[SubmodelPlan]:
    return [narrowed(space, None, 1), narrowed(space, None, 2), staggered(space, None), staggered(space, None, 1)]


def _probabilities(space: ElasticSpace) -> dict[ElasticAxis, torch.Tensor]:
    """Different at every place, the widest choice below a threshold of 0.05 at every second."""
    generator = torch.Generator().manual_seed(8)
    found = {}
    for spec in space.axes:
        values = torch.rand(spec.places, len(spec.choices), generator=generator) + 0.2
        values[::2, 0] = 0.03
        found[spec.axis] = (values / values.sum(-1, keepdim=True)).requires_grad_()
    return found


def family_runs(parallel: ParallelContext, family: dict[str, Any]) -> list[Found]:
    """`share_gradients` without a decision, under every plan in both modes, and under soft decisions with and without a threshold."""
    model, space, handle, shape = build_family(parallel, per_layer=True, **family)
    found = [share_gradients(model, parallel)]
    for plan in _plans(space):
        for mode in ("slice", "mask"):
            with handle.use(plan, mode):
                found.append(share_gradients(model, parallel))
    for threshold in (0.0, 0.05):
        leaves = {axis: value.detach().requires_grad_() for axis, value in _probabilities(space).items()}
        with handle.use(soft_decision(space, leaves, shape.num_layers, threshold)):
            found.append(share_gradients(model, parallel, {f"probabilities of {axis}": leaf for axis, leaf in leaves.items()}))
    return found


def context_runs(rank: int, world_size: int, family: dict[str, Any]) -> list[Found]:
    """`family_runs` on a rank of the pool."""
    parallel = ParallelContext.initialize(context=world_size)
    try:
        return family_runs(parallel, family)
    finally:
        parallel.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_compute_what_one_does(ranks: Callable[..., list[Any]], _one_process: Any, name: str) -> None:
    expected = family_runs(_one_process, FAMILIES[name])
    wrong = {}
    for number, ((logits, gradients), (first, summed), (second, _)) in enumerate(
        zip(expected, *ranks(context_runs, 2, FAMILIES[name]), strict=True)
    ):
        assert relative(torch.cat([first, second])[natural_order(TOTAL, 2)], logits) < 1e-5, number
        assert set(summed) == set(gradients)
        for key, gradient in gradients.items():
            if relative(summed[key], gradient) > 1e-5 and float((summed[key] - gradient).norm()) > 1e-6:
                wrong[number, key] = relative(summed[key], gradient), float(gradient.norm())
    assert wrong == {}
    leaves = [gradient for key, gradient in expected[-2][1].items() if key.startswith("probabilities")]
    assert leaves and all(float(gradient.norm()) > 0 for gradient in leaves)


def narrow_heads_problem(rank: int, world_size: int) -> str:
    """What `elasticize` says when two ranks would share a group of three kept heads."""
    parallel = ParallelContext.initialize(context=world_size)
    try:
        shape = tiny_shape(mamba=ONE_GROUP)
        space = build_space(shape, {ElasticAxis.MAMBA_HEADS: (16, 3)})
        with pytest.raises(ConfigError) as error:
            elasticize(build_model(shape, parallel), space, parallel, shape)
        return str(error.value)
    finally:
        parallel.destroy()


@pytest.mark.dist
def test_heads_that_two_ranks_cannot_share_are_refused(ranks: Callable[..., list[Any]]) -> None:
    for message in ranks(narrow_heads_problem, 2):
        assert "2 ranks cannot share the 3 heads of a group that elastic.axes.mamba_heads 3 keeps" in message
