"""Experts that are not split as the rest of the model is (expert_tensor differs from tensor, without expert parallelism) get the gradient of
one process on megatron-core 0.19. On 0.16.1 their gradients are never summed over the tensor-parallel ranks, and the layout is refused.

Run: pytest tests/models/test_expert_gradients.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_elastic.errors import UnsupportedError
from megatron_elastic.models.build import build_model
from megatron_elastic.models.config import model_configs
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import Generation, megatron_generation
from megatron_elastic.testing.tiny import randomize_, tiny_moe, tiny_shape

TOKENS = 16
SHAPES = {"hybrid": tiny_shape(), "gpt": tiny_moe()}


def _forward(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    ids = next(data)
    losses = model(ids, torch.arange(TOKENS)[None], None, labels=ids.roll(-1, 1))
    return losses, lambda losses: (losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {})


def expert_gradients(parallel: ParallelContext, shape: str) -> dict[str, Tensor]:
    """The gradients of the routed experts after megatron's schedule, DDP and finalization, for one text."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = build_model(SHAPES[shape], parallel)
    randomize_(model, 3)
    model.config.finalize_model_grads_func = finalize_model_grads
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    ids = torch.randint(SHAPES[shape].vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iter([ids]),
        model=[chunk],
        num_microbatches=1,
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    parameters: dict[str, Any] = dict(model.named_parameters())
    return {name: p.main_grad.clone() for name, p in parameters.items() if ".mlp.experts." in name}


def on_ranks(rank: int, world: int, shape: str, layout: dict[str, int]) -> dict[str, Tensor]:
    parallel = ParallelContext.initialize(**layout)
    found = expert_gradients(parallel, shape)
    parallel.destroy()
    return found


@pytest.mark.dist
@pytest.mark.skipif(megatron_generation() is Generation.V0_16, reason="0.16.1 never sums these gradients; refused, see below")
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_experts_beside_split_layers_get_the_gradient_of_one_process(parallel: ParallelContext, ranks: Any, shape: str) -> None:
    expected = expert_gradients(parallel, shape)
    for found in ranks(on_ranks, 2, shape, {"tensor": 2, "expert_tensor": 1}):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name)


@pytest.mark.skipif(megatron_generation() is not Generation.V0_16, reason="0.19 sums these gradients, see above")
@pytest.mark.parametrize("shape", SHAPES)
def test_on_the_older_release_they_are_refused(parallel: ParallelContext, shape: str) -> None:
    with pytest.raises(UnsupportedError, match="megatron-core 0.16.1 never sums .* set expert_tensor to 2 or raise parallel.expert"):
        model_configs(SHAPES[shape], replace(parallel, tensor=2, sequence_parallel=True, expert_tensor=1))
