"""masked = sliced = extracted, forward and backward, for each axis and jointly; the full budget is the parent, bit for bit.

Run: pytest tests/elastic/test_parity.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.elastic.decision import Mode, hard_decision, soft_decision
from megatron_elastic.export.extract import extract, stack_experts, unstack_experts
from megatron_elastic.layout import axis_groups, dims_of, kept_widths
from megatron_elastic.models.hybrid import build_hybrid
from megatron_elastic.models.weights import gather_tensors, scatter_tensors
from megatron_elastic.platform.versions import canonical_name
from megatron_elastic.runs import select
from megatron_elastic.shape import resize
from megatron_elastic.testing.tiny import randomize_, tiny_shape
from tests.elastic.family import CHOICES, build_family, forward_backward, narrowed, relative, run, tiny_space

TOLERANCE = 1e-5
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied_embeddings": True},
    "biases": {"layer_pattern": "M*-M-*", "linear_bias": True},
}
EXPERT_AXES = (ElasticAxis.MOE_FFN, ElasticAxis.SHARED_FFN, ElasticAxis.EXPERTS)
CASES = [
    (variant, axis, choice)
    for variant in VARIANTS
    for axis in (*ElasticAxis, None)
    for choice in (1, 2)
    if not (variant == "biases" and axis in EXPERT_AXES)
]


@pytest.fixture(scope="module")
def parallel_module(_one_process: Any) -> Any:
    """The context of one process."""
    return _one_process


@pytest.fixture(scope="module")
def families(parallel_module: Any) -> dict[str, Any]:
    """A family of each variant, shared by the tests of this module, which leave it as they found it."""
    return {name: build_family(parallel_module, **changes) for name, changes in VARIANTS.items()}


@pytest.fixture(params=VARIANTS)
def family(request: Any, families: dict[str, Any]) -> Any:
    """Each family in turn."""
    return families[request.param]


def _extracted(family: Any, plan: SubmodelPlan, parallel: Any) -> Any:
    model, space, _, shape = family
    small = build_hybrid(resize(shape, plan), parallel)
    scatter_tensors(small, unstack_experts(dict(extract(stack_experts(gather_tensors(model)).items(), shape, space, plan))))
    return small


@pytest.mark.parametrize(("variant", "axis", "choice"), CASES)
def test_masked_sliced_and_extracted_agree(
    families: dict[str, Any], parallel_module: Any, variant: str, axis: ElasticAxis | None, choice: int
) -> None:
    family = families[variant]
    model, space, handle, shape = family
    plan = narrowed(space, axis, choice)
    whole = forward_backward(model)[0]
    masked, masked_grads = run(model, handle, plan, "mask")
    sliced, sliced_grads = run(model, handle, plan, "slice")
    assert relative(sliced, whole) > 1e-2, "the plan changes nothing: the test proves nothing"
    assert relative(masked, sliced) < TOLERANCE
    extracted, small_grads = forward_backward(_extracted(family, plan, parallel_module))
    assert relative(sliced, extracted) < TOLERANCE
    groups, kept = axis_groups(space), kept_widths(space, plan)
    full_small = stack_experts(small_grads)
    for name, gradient in extract(stack_experts(_complete(model, sliced_grads)).items(), shape, space, plan):
        assert relative(gradient, full_small[name]) < 10 * TOLERANCE, name
    for name, gradient in stack_experts(_complete(model, masked_grads)).items():
        other = stack_experts(_complete(model, sliced_grads))[name]
        assert relative(gradient, other) < 10 * TOLERANCE or float((gradient - other).norm()) < 1e-6, name
        inside = gradient
        for dim, entries in enumerate(dims_of(name, shape, groups)):
            inside = select(inside, dim, entries.runs(kept))
        # same sum of squares inside as everywhere: nothing outside the plan has a gradient
        assert float(gradient.square().sum() - inside.square().sum()) == pytest.approx(0, abs=1e-6 * float(gradient.square().sum()) + 1e-12)
        assert int((other != 0).sum()) <= inside.numel()


def _complete(model: Any, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of all parameters, zeros where there was none."""
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    return {name: grads.get(name, torch.zeros_like(parameter)) for name, parameter in named.items()}


@pytest.mark.parametrize("mode", ["mask", "slice"])
def test_full_budget_is_the_parent_bit_for_bit(family: Any, mode: str) -> None:
    model, space, handle, shape = family
    handle.remove()
    logits, grads = forward_backward(model)
    again = elasticize(model, space, handle_parallel(model), shape)
    handle.__dict__.update(again.__dict__)  # the shared fixture keeps working
    for plan in (None, space.parent):
        elastic, elastic_grads = run(model, handle, plan, mode)
        assert torch.equal(elastic, logits)
        assert grads.keys() == elastic_grads.keys()
        assert all(torch.equal(grads[name], elastic_grads[name]) for name in grads)


def handle_parallel(model: Any) -> Any:
    """The one-process context, from the model's own groups."""
    from megatron_elastic.parallel import ParallelContext

    sizes = dict(tensor=1, pipeline=1, expert=1, expert_tensor=1, context=1, data=1, rank=0, world_size=1, tensor_rank=0, pipeline_rank=0)
    return ParallelContext(
        **sizes, expert_rank=0, expert_tensor_rank=0, data_rank=0, backend="gloo", groups=model.pg_collection, owns_processes=False
    )


def test_one_hot_probabilities_are_the_hard_plan(family: Any) -> None:
    model, space, handle, shape = family
    pi = {spec.axis: torch.eye(len(spec.choices))[1] for spec in space.axes}
    soft, _ = run(model, handle, soft_decision(space, pi, shape.num_layers), "mask")
    hard, _ = run(model, handle, narrowed(space, None, 1), "mask")
    assert relative(soft, hard) < 1e-6
    parent, _ = run(
        model, handle, soft_decision(space, {s.axis: torch.eye(len(s.choices))[0] for s in space.axes}, shape.num_layers), "mask"
    )
    assert relative(parent, run(model, handle, None, "mask")[0]) < 1e-6


def test_gradient_of_every_probability_matches_finite_differences(parallel_module: Any) -> None:
    model, space, handle, shape = build_family(parallel_module)
    pi = {s.axis: torch.softmax(torch.arange(len(s.choices), 0, -1).float(), 0).requires_grad_() for s in space.axes}

    def loss() -> torch.Tensor:
        with handle.use(soft_decision(space, pi, shape.num_layers)):
            tokens = torch.arange(24)[None] * 5 % 131
            return (model(tokens, torch.arange(24)[None], None).double() * torch.linspace(-1, 1, 136)).mean()

    loss().backward()
    for axis, value in pi.items():
        assert value.grad is not None and value.grad.abs().max() > 0, axis
        if axis is ElasticAxis.EXPERTS:
            continue  # its weight also enters the selection, where it has no gradient by design
        direction = torch.zeros_like(value)
        direction[0], direction[-1] = 1.0, -1.0
        step = 1e-2
        with torch.no_grad():
            value += step * direction
            above = loss()
            value -= 2 * step * direction
            below = loss()
            value += step * direction
        numeric, analytic = float((above - below) / (2 * step)), float((value.grad * direction).sum())
        assert analytic == pytest.approx(numeric, rel=0.05, abs=1e-5), axis


def test_remove_leaves_no_trace(parallel_module: Any) -> None:
    shape = tiny_shape()
    model = build_hybrid(shape, parallel_module, expert_bias_rate=0.25)
    randomize_(model)
    before = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
    logits, grads = forward_backward(model)
    handle = elasticize(model, tiny_space(shape), parallel_module, shape)
    assert model.config.moe_router_bias_update_rate == 0.0
    run(model, handle, narrowed(tiny_space(shape), None), "slice")
    handle.remove()
    assert [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()] == before
    assert model.config.moe_router_bias_update_rate == 0.25
    again, again_grads = forward_backward(model)
    assert torch.equal(logits, again) and all(torch.equal(grads[n], again_grads[n]) for n in grads)


def test_smaller_choices_are_subsets(family: Any) -> None:
    _, space, _, shape = family
    groups = axis_groups(space)
    for spec in space.axes:
        kept_before: dict[str, set[int]] = {}
        for choice in range(len(spec.choices)):
            kept = kept_widths(space, narrowed(space, spec.axis, choice))
            for layer, letter in enumerate(shape.layer_pattern):
                for name in _row_names(layer, letter):
                    runs = dims_of(name, shape, groups)[0].runs(kept)
                    entries = {n for start, length in runs for n in range(start, start + length)}
                    assert entries <= kept_before.get(name, entries)
                    kept_before[name] = entries


def _row_names(layer: int, letter: str) -> list[str]:
    rest = {"M": "mixer.in_proj.weight", "*": "self_attention.linear_qkv.weight", "-": "mlp.linear_fc1.weight", "E": "mlp.router.weight"}
    return [f"decoder.layers.{layer}.{rest[letter]}"]


def test_every_axis_is_covered() -> None:
    assert set(CHOICES) == set(ElasticAxis)


def test_no_token_reaches_a_dropped_expert(parallel_module: Any) -> None:
    model, space, handle, _ = build_family(parallel_module)
    router = model.decoder.layers[1].mlp.router
    with torch.no_grad():
        router.expert_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 50.0, 0.0, 0.0, 0.0, 50.0]))  # dropped ones are the most wanted
    for mode in Mode:
        decision = hard_decision(space, narrowed(space, ElasticAxis.EXPERTS), mode, 6)
        with handle.use(decision):
            hidden = torch.randn(5, 2, 40)  # [s, b, h] as megatron calls it
            probs, routed = router(hidden)
        dropped = [2, 3, 6, 7]  # two groups of four experts, the first two of each kept
        assert not routed[:, dropped].any() and not probs[:, dropped].any()
        assert (routed.sum(-1) == 3).all() and torch.isfinite(probs).all()
