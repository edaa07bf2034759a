"""In fp64 a dense family at TP2 with sequence parallelism equals one process to 1e-10: logits, every weight's gradient, the leaves' gradients.

Run: pytest tests/parallel/test_fp64.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.elastic.decision import Decision, soft_decision
from megatron_elastic.models.weights import shards
from megatron_elastic.router.sampling import derived_generator
from tests.elastic.family import build_family, narrowed, relative, staggered, text

Result = tuple[list[torch.Tensor], list[dict[str, torch.Tensor]], dict[ElasticAxis, torch.Tensor]]


def leaves_of(space: ElasticSpace) -> dict[ElasticAxis, torch.Tensor]:
    """Random probabilities of every axis, as leaves."""
    return {
        spec.axis: torch.rand(spec.places, len(spec.choices), dtype=torch.float64, generator=derived_generator("pi", spec.axis.value))
        .softmax(-1)
        .requires_grad_()
        for spec in space.axes
    }


def forward_backward(parallel: Any) -> Result:
    """Logits and whole gradients of three decisions (slice, mask, soft), and the leaves' gradients summed over the ranks."""
    model, space, handle, shape = build_family(parallel, "dense", per_layer=True)
    model.double()
    leaves = leaves_of(space)
    decisions: list[tuple[Any, str]] = [(staggered(space, None), "slice"), (narrowed(space, None, 1), "mask")]
    decisions.append((soft_decision(space, leaves, shape.num_layers), "mask"))
    logits, gradients = [], []
    for decision, mode in decisions:
        model.zero_grad()
        with handle.use(decision, mode):
            output = model(*text(length=24), None, runtime_gather_output=True)
        assert isinstance(decision, Decision) or output.dtype == torch.float64
        weight = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        # The gathered logits are whole on every rank, and megatron's gather passes each rank the gradient of its own words.
        (output.tanh() * weight).sum().backward()
        logits.append(output.detach())
        gradients.append(whole_gradients(model, parallel))
    for leaf in leaves.values():
        assert leaf.grad is not None
        dist.all_reduce(leaf.grad)
    return logits, gradients, {axis: leaf.grad for axis, leaf in leaves.items() if leaf.grad is not None}


def whole_gradients(model: Any, parallel: Any) -> dict[str, torch.Tensor]:
    """Full gradients by name; those of parameters that see a rank's own tokens are summed, as megatron does at the end of a step."""
    found = {}
    for shard in shards(model):
        gradient = shard.tensor.grad
        if gradient is None:
            continue
        if vars(shard.tensor).get("sequence_parallel"):
            dist.all_reduce(gradient, group=parallel.tp)
        pieces = [torch.empty_like(gradient) for _ in range(shard.size)]
        dist.all_gather(pieces, gradient.contiguous(), group=parallel.tp)
        found[shard.name] = shard.join(pieces)
    return found


def on_two_ranks(rank: int, world: int) -> Result:
    from megatron_elastic.parallel import ParallelContext

    parallel = ParallelContext.initialize(tensor=2)
    try:
        return forward_backward(parallel)
    finally:
        parallel.destroy()


@pytest.mark.dist
def test_fp64_at_tp2_equals_one_process(ranks: Callable[..., list[Any]], _one_process: Any) -> None:
    expected = forward_backward(_one_process)
    for found in ranks(on_two_ranks, 2):
        for logits, reference in zip(found[0], expected[0], strict=True):
            assert relative(logits, reference) < 1e-10
        for gradients, references in zip(found[1], expected[1], strict=True):
            assert gradients.keys() == references.keys()
            assert {name: error for name in gradients if (error := relative(gradients[name], references[name])) > 1e-10} == {}
        assert {axis: error for axis in expected[2] if (error := relative(found[2][axis], expected[2][axis])) > 1e-10} == {}
