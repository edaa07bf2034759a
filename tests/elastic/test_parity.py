"""masked = sliced = extracted, forward and backward, for each axis and jointly, homogeneous and per layer, on every kind of parent; the
full budget is the parent, bit for bit.

Run: pytest tests/elastic/test_parity.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.elastic.decision import Mode, hard_decision
from megatron_elastic.export.extract import extract
from megatron_elastic.layout import axis_groups, dims_of, kept_widths, layer_of
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors, scatter_tensors
from megatron_elastic.platform.versions import canonical_name
from megatron_elastic.runs import select
from megatron_elastic.space import resize
from megatron_elastic.testing.experts import stack_experts, unstack_experts
from megatron_elastic.testing.tiny import randomize_, tiny_moe
from tests.elastic.family import (
    PARENTS,
    build_family,
    forward_backward,
    layer_axes,
    narrowed,
    relative,
    run,
    staggered,
    text,
    tiny_space,
)

TOLERANCE = 1e-5
VARIANTS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "hybrid-tied": {"tied_embeddings": True},
    "hybrid-biases": {"layer_pattern": "M*-M-*", "linear_bias": True, "gated": True, "activation": "silu"},
    "dense": {"parent": "dense"},
    "dense-layernorm": {"parent": "dense", "gated": False, "tied_embeddings": True},
    "moe": {"parent": "moe"},
}
UNGROUPED = {"routing_groups": None, "groups_per_token": None}
SOFTMAX = UNGROUPED | {"score": "softmax", "expert_bias": False, "scaling_factor": None}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": SOFTMAX,
    "pre-softmax": SOFTMAX | {"pre_softmax": True},
    "no-bias": UNGROUPED | {"expert_bias": False, "shared_ffn": None},
    "groups-without-bias": {"expert_bias": False},
}
PER_LAYER = ("hybrid", "dense", "moe")


def _changes(variant: str) -> dict[str, Any]:
    """Arguments of `build_family`."""
    if variant not in ROUTERS:
        return VARIANTS[variant]
    moe = tiny_moe().moe
    assert moe is not None
    return {"parent": "moe", "moe": replace(moe, **ROUTERS[variant])}


def _space(variant: str, per_layer: bool = False) -> ElasticSpace:
    """The space of a variant; needs no model."""
    changes = dict(_changes(variant))
    shape = PARENTS[changes.pop("parent", "hybrid")](**changes)
    return tiny_space(shape, layer_axes(shape) if per_layer else ())


CASES = [(variant, axis) for variant in VARIANTS for axis in [*(spec.axis for spec in _space(variant).axes), None]]
ROUTER_CASES = [
    (variant, axis)
    for variant in ROUTERS
    for axis in (ElasticAxis.EXPERTS, ElasticAxis.TOPK, None)
    if axis is None or _space(variant).spec(axis)
]
LAYER_CASES = [
    (variant, axis)
    for variant in PER_LAYER
    for axis in [*(spec.axis for spec in _space(variant, per_layer=True).axes if spec.places > 1), None]
]


@pytest.fixture(scope="module")
def parallel_module(_one_process: Any) -> Any:
    """The context of one process."""
    return _one_process


class Families:
    """Families by variant, built when first asked for; tests leave them as they found them."""

    def __init__(self, parallel: Any) -> None:
        self.parallel, self.built = parallel, {}

    def __call__(self, variant: str, per_layer: bool = False) -> Any:
        """(model, space, handle, shape) of a variant."""
        key = (variant, per_layer)
        if key not in self.built:
            self.built[key] = build_family(self.parallel, per_layer=per_layer, **_changes(variant))
        return self.built[key]


@pytest.fixture(scope="module")
def families(parallel_module: Any) -> Families:
    """Families of this module."""
    return Families(parallel_module)


@pytest.fixture(params=[*VARIANTS, *ROUTERS])
def family(request: Any, families: Families) -> Any:
    """Each family in turn."""
    return families(request.param)


def _extracted(family: Any, plan: SubmodelPlan, parallel: Any) -> Any:
    model, space, _, shape = family
    small = build_model(resize(shape, plan), parallel)
    scatter_tensors(small, unstack_experts(dict(extract(stack_experts(gather_tensors(model)).items(), shape, space, plan))))
    return small


def _check(family: Any, plan: SubmodelPlan, parallel: Any) -> None:
    """Masked, sliced and extracted agree in logits and in every gradient, and nothing outside the plan has one."""
    model, space, handle, shape = family
    with torch.no_grad():
        whole = model(*text(), None)
    masked, masked_grads = run(model, handle, plan, "mask")
    sliced, sliced_grads = run(model, handle, plan, "slice")
    assert relative(sliced, whole) > 1e-3, "the plan changes nothing: the test proves nothing"
    assert relative(masked, sliced) < TOLERANCE
    extracted, small_grads = forward_backward(_extracted(family, plan, parallel))
    assert relative(sliced, extracted) < TOLERANCE
    groups, small = axis_groups(space), stack_experts(small_grads)
    by_mask, by_slice = (stack_experts(_complete(model, grads)) for grads in (masked_grads, sliced_grads))
    for name, gradient in extract(by_slice.items(), shape, space, plan):
        _assert_close(gradient, small.get(name, torch.zeros_like(gradient)), name)
    for name, gradient in by_mask.items():
        _assert_close(gradient, by_slice[name], name)
        inside = gradient
        for dim, entries in enumerate(dims_of(name, shape, groups)):
            inside = select(inside, dim, entries.runs(kept_widths(space, plan, layer_of(name))))
        # same sum of squares inside as everywhere: nothing outside the plan has a gradient
        assert float(gradient.square().sum() - inside.square().sum()) == pytest.approx(0, abs=1e-6 * float(gradient.square().sum()) + 1e-12)
        assert int((by_slice[name] != 0).sum()) <= inside.numel()


def _assert_close(gradient: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert relative(gradient, expected) < 10 * TOLERANCE or float((gradient - expected).norm()) < 1e-6, name


@pytest.mark.parametrize("choice", [1, 2])
@pytest.mark.parametrize(("variant", "axis"), CASES)
def test_masked_sliced_and_extracted_agree(
    families: Families, parallel_module: Any, variant: str, axis: ElasticAxis | None, choice: int
) -> None:
    family = families(variant)
    _check(family, narrowed(family[1], axis, choice), parallel_module)


@pytest.mark.parametrize(("variant", "axis"), ROUTER_CASES)
def test_every_router_agrees(families: Families, parallel_module: Any, variant: str, axis: ElasticAxis | None) -> None:
    family = families(variant)
    _check(family, narrowed(family[1], axis), parallel_module)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(("variant", "axis"), LAYER_CASES)
def test_per_layer_widths_agree(families: Families, parallel_module: Any, variant: str, axis: ElasticAxis | None, start: int) -> None:
    family = families(variant, per_layer=True)
    plan = staggered(family[1], axis, start)
    assert not plan.homogeneous, "all layers have one width: the test proves nothing"
    _check(family, plan, parallel_module)


def test_mamba_state_head_dim_and_heads_jointly_per_layer(families: Families, parallel_module: Any) -> None:
    family = families("hybrid", per_layer=True)
    model, space, handle, _ = family
    mamba = (ElasticAxis.MAMBA_STATE, ElasticAxis.MAMBA_HEAD_DIM, ElasticAxis.MAMBA_HEADS)
    for start in range(3):
        widths = {}
        for number, axis in enumerate(mamba):
            spec = space.spec(axis)
            widths[axis] = tuple(spec.choices[(start + number + place) % len(spec.choices)] for place in range(spec.places))
        plan = space.plan(widths)
        for mode in Mode:
            logits = run(model, handle, plan, mode)[0]
            assert relative(logits, forward_backward(_extracted(family, plan, parallel_module))[0]) < TOLERANCE


def _complete(model: Any, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of all parameters, zeros where there was none."""
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    return {name: grads.get(name, torch.zeros_like(parameter)) for name, parameter in named.items()}


@pytest.mark.parametrize("mode", ["mask", "slice"])
def test_full_budget_is_the_parent_bit_for_bit(family: Any, parallel_module: Any, mode: str) -> None:
    model, space, handle, shape = family
    handle.remove()
    logits, grads = forward_backward(model)
    again = elasticize(model, space, parallel_module, shape)
    handle.__dict__.update(again.__dict__)  # the shared fixture keeps working
    for plan in (None, space.parent):
        elastic, elastic_grads = run(model, handle, plan, mode)
        assert torch.equal(elastic, logits)
        assert grads.keys() == elastic_grads.keys()
        assert all(torch.equal(grads[name], elastic_grads[name]) for name in grads)


def test_remove_leaves_no_trace(family: Any, parallel_module: Any) -> None:
    shape = family[3]
    model = build_model(shape, parallel_module, expert_bias_rate=0.25)
    randomize_(model)
    before = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
    logits, grads = forward_backward(model)
    space = tiny_space(shape)
    handle = elasticize(model, space, parallel_module, shape)
    assert model.config.moe_router_bias_update_rate == 0.0 or model.config.num_moe_experts is None
    run(model, handle, narrowed(space, None), "slice")
    handle.remove()
    assert [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()] == before
    again, again_grads = forward_backward(model)
    assert torch.equal(logits, again) and all(torch.equal(grads[n], again_grads[n]) for n in grads)


def test_smaller_choices_are_subsets(family: Any) -> None:
    model, space, _, shape = family
    names = list(stack_experts({canonical_name(name): p for name, p in model.named_parameters()}))
    groups = axis_groups(space)
    for spec in space.axes:
        kept_before: dict[tuple[str, int], set[int]] = {}
        for choice in spec.choices:
            kept = kept_widths(space, space.plan({spec.axis: choice}), None) | (
                {spec.axis: (choice, spec.parent)} if choice != spec.parent else {}
            )
            for name in names:
                for dim, entries in enumerate(dims_of(name, shape, groups)):
                    runs = entries.runs(kept)
                    now = {n for start, length in runs for n in range(start, start + length)}
                    assert now <= kept_before.get((name, dim), now)
                    kept_before[name, dim] = now


def test_every_axis_is_covered(families: Families) -> None:
    covered = {spec.axis for variant in ("hybrid", "dense", "moe") for spec in families(variant)[1].axes if len(spec.choices) > 1}
    assert covered == set(ElasticAxis)


def test_no_token_reaches_a_dropped_expert(parallel_module: Any) -> None:
    model, space, handle, _ = build_family(parallel_module)
    router = model.decoder.layers[1].mlp.router
    plan = space.plan({ElasticAxis.EXPERTS: 4})
    with torch.no_grad():
        router.expert_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 50.0, 0.0, 0.0, 0.0, 50.0]))  # dropped ones are the most wanted
    for mode in Mode:
        decision = hard_decision(space, plan, mode, 6)
        with handle.use(decision):
            hidden = torch.randn(5, 2, 40)  # [s, b, h] as megatron calls it
            probs, routed = router(hidden)
        dropped = [2, 3, 6, 7]  # two groups of four experts, the first two of each kept
        assert not routed[:, dropped].any() and not probs[:, dropped].any()
        assert (routed.sum(-1) == 3).all() and torch.isfinite(probs).all()
