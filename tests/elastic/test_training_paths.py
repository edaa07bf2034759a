"""Gradients that go through megatron's DDP: several microbatches under different plans add up in `main_grad`, parameters that no plan
used get zeros, and an overlapped reduction ends.

Run: pytest tests/elastic/test_training_paths.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_elastic.elastic.decision import soft_decision
from megatron_elastic.elastic.linear import elastic_matmul
from megatron_elastic.platform.versions import canonical_name
from tests.elastic.family import build_family, forward_backward, narrowed, relative, staggered


@pytest.mark.parametrize(("parent", "overlap"), [("hybrid", False), ("hybrid", True), ("dense", True), ("moe", True)])
def test_microbatches_of_different_plans_add_up(_one_process: Any, parent: str, overlap: bool) -> None:
    reference, space, reference_handle, shape = build_family(_one_process, parent, per_layer=True)
    model, _, handle, _ = build_family(_one_process, parent, per_layer=True)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=overlap, grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(model.config, config, model)
    pi = {spec.axis: torch.full((spec.places, len(spec.choices)), 1 / len(spec.choices)) for spec in space.axes}
    plans = [narrowed(space, None, 1), space.parent, staggered(space, None), narrowed(space, None, 2), "soft"]
    expected: dict[str, torch.Tensor] = {}
    for plan in plans:
        decision = soft_decision(space, pi, shape.num_layers) if isinstance(plan, str) else plan
        with reference_handle.use(decision):
            for name, grad in forward_backward(reference)[1].items():
                expected[name] = expected.get(name, torch.zeros_like(grad)) + grad
    chunk.zero_grad_buffer()
    for number, plan in enumerate(plans):
        chunk.is_last_microbatch = number == len(plans) - 1
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group.is_last_microbatch = chunk.is_last_microbatch
        with handle.use(soft_decision(space, pi, shape.num_layers) if isinstance(plan, str) else plan):
            logits = _logits(model)
        weight = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(3))
        (logits.tanh() * weight).sum().backward()
    chunk.finish_grad_sync()
    for name, parameter in model.named_parameters():
        assert relative(parameter.main_grad, expected[canonical_name(name)]) < 1e-5, name


def _logits(model: Any) -> torch.Tensor:
    from tests.elastic.family import text

    tokens, positions = text()
    return model(tokens, positions, None)


def test_a_dropped_layer_gets_zero_gradients(_one_process: Any) -> None:
    model, space, handle, _ = build_family(_one_process)
    with handle.use(narrowed(space, None)):
        grads = forward_backward(model)[1]
    dropped = [
        canonical_name(name)
        for name, _ in model.named_parameters()
        if name.startswith(("decoder.layers.3.", "decoder.layers.4.", "decoder.layers.1."))
    ]
    assert dropped and all(name in grads and not grads[name].any() for name in dropped)


def test_elastic_matmul_against_autograd_in_fp64() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(11, 9, dtype=torch.float64, generator=generator, requires_grad=True)
    rows, cols = ((1, 2), (6, 3)), ((0, 4), (5, 3))
    index_rows, index_cols = torch.tensor([1, 2, 6, 7, 8]), torch.tensor([0, 1, 2, 3, 5, 6, 7])
    expected = x @ weight[index_rows][:, index_cols].t()
    actual = elastic_matmul(x, weight, rows, cols)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(actual, (x, weight), upstream), torch.autograd.grad(expected, (x, weight), upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
