"""An elastic model in bf16: its three forms agree to less than a rounding, it stays near fp32 arithmetic on the same weights, the full budget
is the parent bit for bit, and gradients of weights and decisions add up in fp32.

Run: pytest tests/elastic/test_bf16.py
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.elastic.decision import soft_decision
from megatron_elastic.elastic.linear import elastic_matmul
from megatron_elastic.export.extract import extract
from megatron_elastic.layout import axis_groups, dims_of
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors, scatter_tensors
from megatron_elastic.platform.versions import canonical_name
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import resize
from megatron_elastic.testing.experts import stack_experts, unstack_experts
from megatron_elastic.testing.tiny import randomize_
from tests.elastic.family import PARENTS, forward_backward, narrowed, relative, run, tiny_space

ROUNDOFF = 2**-8
"""The largest relative error of rounding to bf16, which keeps 8 bits."""
SAME = ROUNDOFF
"""Between the forms of one plan: they multiply the same bf16 numbers, sum in fp32 and round at the same places. Only the order of a sum may
differ, which now and then makes a value round the other way: together less than one rounding of everything."""
NEAR = 8 * ROUNDOFF
"""To fp32 arithmetic on the same weights: a value is rounded some tens of times on its way through four to six layers, at random."""


class Family(NamedTuple):
    """A model made elastic."""

    model: Any
    space: ElasticSpace
    handle: ElasticHandle
    shape: ModelShape


def build(parallel: Any, parent: str, dtype: torch.dtype = torch.bfloat16, like: Family | None = None) -> Family:
    """A randomised family, or one with the weights of another."""
    shape = PARENTS[parent]()
    model = build_model(shape, parallel, params_dtype=dtype)
    randomize_(model, seed=5)
    if like is not None:
        scatter_tensors(model, gather_tensors(like.model))
    space = tiny_space(shape)
    return Family(model, space, elasticize(model, space, parallel, shape), shape)


def pair(parallel: Any, parent: str) -> tuple[Family, Family]:
    """A bf16 family, and one in fp32 with its weights. Experts are biased apart by more than their scores can differ: one token that rounds
    to another expert would outweigh all other rounding."""
    family = build(parallel, parent)
    for name, buffer in family.model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(1.1 * torch.randperm(len(buffer), generator=torch.Generator().manual_seed(2)))
    return family, build(parallel, parent, torch.float32, like=family)


def extracted(family: Family, plan: SubmodelPlan, parallel: Any) -> Any:
    """The ordinary bf16 model of a plan."""
    small = build_model(resize(family.shape, plan), parallel, params_dtype=torch.bfloat16)
    tensors = stack_experts(gather_tensors(family.model)).items()
    scatter_tensors(small, unstack_experts(dict(extract(tensors, family.shape, family.space, plan))))
    return small


def soft(family: Family, *, leaves: bool = True) -> tuple[dict[ElasticAxis, torch.Tensor], Any]:
    """fp32 probabilities, falling from wide to narrow, and their decision."""
    pi = {
        spec.axis: torch.softmax(torch.arange(len(spec.choices), 0, -1).float(), 0).repeat(spec.places, 1).requires_grad_(leaves)
        for spec in family.space.axes
    }
    return pi, soft_decision(family.space, pi, family.shape.num_layers)


@pytest.fixture(scope="module")
def families(_one_process: Any) -> dict[str, Family]:
    """A bf16 family of each parent, shared by tests that leave it as they found it."""
    return {name: build(_one_process, name) for name in PARENTS}


NORMED = (ElasticAxis.HIDDEN, ElasticAxis.MAMBA_HEADS, ElasticAxis.MAMBA_HEAD_DIM)
"""The axes whose mask mode corrects a norm."""


@pytest.mark.parametrize(("parent", "axis"), [*[("hybrid", axis) for axis in NORMED], *[(parent, None) for parent in PARENTS]])
@pytest.mark.parametrize("choice", [1, 2])
def test_masked_sliced_and_extracted_are_the_same(
    families: dict[str, Family], _one_process: Any, parent: str, axis: ElasticAxis | None, choice: int
) -> None:
    family = families[parent]
    plan = narrowed(family.space, axis, choice)
    masked, masked_grads = run(family.model, family.handle, plan, "mask")
    sliced, sliced_grads = run(family.model, family.handle, plan, "slice")
    assert masked.dtype == sliced.dtype == torch.bfloat16
    assert relative(sliced.float(), forward_backward(family.model)[0].float()) > 2 * NEAR, (
        "the plan changes nothing: the test proves nothing"
    )
    assert relative(masked.float(), sliced.float()) < SAME
    small, small_grads = forward_backward(extracted(family, plan, _one_process))
    assert relative(small.float(), sliced.float()) < SAME
    assert total_relative(masked_grads, sliced_grads) < NEAR
    norms = [math.sqrt(sum(float(grad.float().square().sum()) for grad in grads.values())) for grads in (sliced_grads, small_grads)]
    assert norms[0] == pytest.approx(norms[1], rel=NEAR)


def total_relative(grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all gradients over the norm of the expected ones; a missing one is zero."""
    error = size = 0.0
    for name in grads.keys() | expected.keys():
        a, b = (side[name].double() if name in side else torch.zeros(()) for side in (grads, expected))
        error, size = error + float((a - b).square().sum()), size + float(b.square().sum())
    return math.sqrt(error / size)


@pytest.mark.parametrize("parent", PARENTS)
def test_it_is_near_fp32_arithmetic_on_the_same_weights(_one_process: Any, parent: str) -> None:
    family, exact = pair(_one_process, parent)
    for plan in (None, narrowed(family.space, None, 1), narrowed(family.space, None, 2)):
        logits, grads = run(exact.model, exact.handle, plan, "slice")
        for mode in ("mask", "slice"):
            rounded, rounded_grads = run(family.model, family.handle, plan, mode)
            assert 0 < relative(rounded.float(), logits) < NEAR
            assert total_relative(rounded_grads, grads) < NEAR
    pi, decision = soft(family)
    exact_pi, exact_decision = soft(exact)
    rounded, exact_logits = run(family.model, family.handle, decision, "mask")[0], run(exact.model, exact.handle, exact_decision, "mask")[0]
    assert relative(rounded.float(), exact_logits) < NEAR
    # The leaves see sums over all tokens and layers; with rounding at random these are as near as the logits, or a few times as far for
    # an axis in which large contributions of both signs cancel.
    for axis, leaf in pi.items():
        gradient, exact_gradient = leaf.grad, exact_pi[axis].grad
        assert gradient is not None and exact_gradient is not None and gradient.dtype == torch.float32
        assert gradient.abs().max() > 0 and relative(gradient, exact_gradient) < 4 * NEAR, axis


@pytest.mark.parametrize("parent", PARENTS)
def test_full_budget_is_the_parent_bit_for_bit(_one_process: Any, parent: str) -> None:
    shape = PARENTS[parent]()
    model = build_model(shape, _one_process, params_dtype=torch.bfloat16)
    randomize_(model, seed=5)
    logits, grads = forward_backward(model)
    space = tiny_space(shape)
    handle = elasticize(model, space, _one_process, shape)
    for plan in (None, space.parent):
        for mode in ("mask", "slice"):
            elastic, elastic_grads = run(model, handle, plan, mode)
            assert torch.equal(elastic, logits) and grads.keys() == elastic_grads.keys()
            assert all(torch.equal(grads[name], elastic_grads[name]) for name in grads)


def test_what_megatron_makes_in_fp32_stays_in_fp32(families: dict[str, Family]) -> None:
    model = families["hybrid"].model
    kinds = {name.rsplit(".", 1)[1]: set() for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        kinds[name.rsplit(".", 1)[1]].add(parameter.dtype)
    assert {kind for kind, dtypes in kinds.items() if torch.float32 in dtypes} == {"A_log", "D"}
    assert all(dtypes == ({torch.float32} if kind in ("A_log", "D") else {torch.bfloat16}) for kind, dtypes in kinds.items())
    router = model.decoder.layers[1].mlp.router
    assert router.expert_bias.dtype == torch.float32
    hidden = torch.randn(5, 2, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    for decision in (None, soft(families["hybrid"])[1]):
        with families["hybrid"].handle.use(decision):
            assert router(hidden)[0].dtype == torch.float32, "gates of experts"


@pytest.mark.parametrize(("rows", "cols"), [(None, None), (((1, 2), (6, 3)), ((0, 4), (5, 3)))])
def test_weight_gradients_add_up_in_an_fp32_main_grad(rows: Any, cols: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(11, 9, generator=generator).bfloat16())
    vars(weight)["main_grad"] = torch.zeros(11, 9)
    kept_rows, kept_cols = (range(11), range(9)) if rows is None else ([1, 2, 6, 7, 8], [0, 1, 2, 3, 5, 6, 7])
    expected = torch.zeros(11, 9, dtype=torch.float64)
    in_bf16 = torch.zeros(11, 9, dtype=torch.bfloat16)
    for number in range(300):
        # One large gradient, then many whose sum matters and each of which is less than half a step of the first in bf16.
        x = torch.randn(4, len(kept_cols), generator=generator).abs().bfloat16() * (1.0 if number == 0 else 0.002)
        upstream = torch.randn(4, len(kept_rows), generator=generator).abs().bfloat16()
        elastic_matmul(x, weight, rows, cols).backward(upstream)
        product = (upstream.t().double() @ x.double()).bfloat16()
        index = torch.meshgrid(torch.tensor(list(kept_rows)), torch.tensor(list(kept_cols)), indexing="ij")
        expected[index] += product.double()
        in_bf16[index] += product
        weight.grad = None
    # A product that is summed in another order may round the other way: at most one step of each small gradient.
    assert weight.main_grad.dtype == torch.float32
    assert relative(weight.main_grad.double(), expected) < 1e-3 < relative(in_bf16.double(), expected)


def test_microbatches_of_different_plans_add_up_in_fp32(_one_process: Any) -> None:
    family, exact = pair(_one_process, "hybrid")
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(family.model.config, config, family.model)
    expected: dict[str, torch.Tensor] = {}
    chunk.zero_grad_buffer()
    for choice in (1, None, 2, "soft"):
        for one in (family, exact):
            plan = (
                soft(one, leaves=False)[1]
                if choice == "soft"
                else one.space.parent
                if choice is None
                else narrowed(one.space, None, choice)
            )
            with one.handle.use(plan):
                grads = forward_backward(one.model)[1] if one is exact else _accumulate(one.model)
            for name, grad in grads.items():
                expected[name] = expected.get(name, torch.zeros(())) + grad
    found = {canonical_name(name): parameter.main_grad for name, parameter in family.model.named_parameters()}
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    assert {parameter.dtype for parameter in family.model.parameters()} == {torch.float32, torch.bfloat16}
    assert total_relative(found, expected) < NEAR


def _accumulate(model: Any) -> dict[str, torch.Tensor]:
    """`forward_backward` without clearing what earlier microbatches left; DDP's hooks put the gradients into `main_grad`."""
    keep, model.zero_grad = model.zero_grad, lambda: None
    try:
        forward_backward(model)
    finally:
        model.zero_grad = keep
    return {}


def test_gradients_of_a_decision_meet_in_fp32(families: dict[str, Family]) -> None:
    family = families["hybrid"]
    pi, decision = soft(family)
    hidden = dims_of("embedding.word_embeddings.weight", family.shape, axis_groups(family.space))[1]
    like = torch.zeros(1, dtype=torch.bfloat16)
    total = torch.zeros(())
    for number in range(300):  # layers that use the same weights: one large gradient, and many below half a step of it in bf16
        vector = decision.vector(hidden, None, 1, like)
        assert vector is not None and vector.dtype == torch.bfloat16
        total = total + vector.sum() * (1.0 if number == 0 else 2**-10)
    total.backward()
    gradient = pi[ElasticAxis.HIDDEN].grad
    assert gradient is not None
    # Choice i has the weights of its first n_i channels, each with gradient 1 + 299 * 2^-10.
    spec = family.space.spec(ElasticAxis.HIDDEN)
    assert spec is not None
    expected = torch.tensor([spec.choices]) * (1 + 299 * 2**-10)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=0)
