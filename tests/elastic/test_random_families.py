"""masked = sliced = extracted, and soft one-hot = hard, for random parents, spaces, group counts and plans; a failure shrinks to the axis.

Run: pytest tests/elastic/test_random_families.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.cost import total_params, widths_of
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.elastic.decision import Decision, soft_decision
from megatron_elastic.errors import ConfigError
from megatron_elastic.export.extract import extract
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors, scatter_tensors
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import resize
from megatron_elastic.testing.experts import stack_experts, unstack_experts
from megatron_elastic.testing.tiny import randomize_
from tests.shape_strategies import plans, spaces

random_families = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck), derandomize=True)
"""Always the same families: a failure in CI is a failure here."""


@st.composite
def families(draw: st.DrawFn, letters: str) -> tuple[ModelShape, ElasticSpace, SubmodelPlan]:
    """A parent of some kinds of layer, a space of it, and a plan."""
    shape, space = draw(spaces(letters))
    return shape, space, draw(plans(space))


def _logits(model: Any, shape: ModelShape) -> torch.Tensor:
    tokens = torch.arange(14).view(2, 7) * 3 % shape.vocab_size
    with torch.no_grad():
        return model(tokens, torch.arange(7)[None].expand(2, -1), None)


def _one_hot(space: ElasticSpace, plan: SubmodelPlan, num_layers: int) -> Decision:
    pi = {}
    for spec in space.axes:
        rows = [[float(choice == width) for choice in spec.choices] for width in space.choices_of(plan, spec.axis)]
        pi[spec.axis] = torch.tensor(rows)
    return soft_decision(space, pi, num_layers)


def _check(parallel: Any, shape: ModelShape, space: ElasticSpace, plan: SubmodelPlan) -> None:
    try:
        model: Any = build_model(shape, parallel)
        small = build_model(resize(shape, plan), parallel) if len(plan.dropped_layers) < shape.num_layers else None
    except ConfigError:
        assume(False)
        return
    randomize_(model, seed=7)
    model.eval()
    whole = _logits(model, shape)
    handle = elasticize(model, space, parallel, shape)
    assert torch.equal(_logits(model, shape), whole)
    found = {}
    for mode in ("mask", "slice"):
        with handle.use(plan, mode):
            found[mode] = _logits(model, shape)
    with handle.use(_one_hot(space, plan, shape.num_layers)):
        found["soft"] = _logits(model, shape)
    if small is not None:
        assert sum(p.numel() for p in small.parameters()) == total_params(shape, widths_of(plan, shape.num_layers))
        scatter_tensors(small, unstack_experts(dict(extract(stack_experts(gather_tensors(model)).items(), shape, space, plan))))
        small.eval()
        found["extracted"] = _logits(small, shape)
    scale = float(found["slice"].norm()) + 1e-6
    for name, logits in found.items():
        assert float((logits - found["slice"]).norm()) < 2e-5 * scale, name


@pytest.mark.parametrize("letters", ["M", "*-", "E", "M*-E", "T", "TX"])
def test_any_plan_of_any_family(_one_process: Any, letters: str) -> None:
    @random_families
    @given(families(letters))
    def check(family: tuple[ModelShape, ElasticSpace, SubmodelPlan]) -> None:
        _check(_one_process, *family)

    check()


def test_every_axis_is_drawn() -> None:
    drawn: set[ElasticAxis] = set()
    for letters in ("M*-E", "TX"):

        @random_families
        @given(families(letters))
        def collect(family: tuple[ModelShape, ElasticSpace, SubmodelPlan]) -> None:
            drawn.update(spec.axis for spec in family[1].axes if len(spec.choices) > 1)

        collect()
    assert drawn == set(ElasticAxis)
