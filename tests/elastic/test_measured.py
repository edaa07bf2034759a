"""What a plan costs is counted, not believed: FLOPs by torch's own counter, saved activations in bytes, parameters by numel.

Run: pytest tests/elastic/test_measured.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.cost import active_params, flops_per_token, total_params, widths_of
from megatron_elastic.models.hybrid import build_hybrid
from megatron_elastic.shape import resize
from tests.elastic.family import build_family, narrowed

LENGTH = 36
"""A multiple of the scan's chunk of 9."""


@pytest.fixture(scope="module")
def family(_one_process: Any) -> Any:
    """One family for the module."""
    return build_family(_one_process)


def _forward(model: Any, handle: Any, plan: SubmodelPlan, mode: str = "slice") -> torch.Tensor:
    tokens = (torch.arange(2 * LENGTH) * 7 % 131).view(2, LENGTH)
    with handle.use(plan, mode):
        return model(tokens, torch.arange(LENGTH)[None].expand(2, -1), None)


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Torch's own formula for attention, under the name of the CPU kernel, which the counter does not know."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


_attention_flops._get_raw = True  # the counter hands over tensors, not shapes
CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def _counted(model: Any, handle: Any, plan: SubmodelPlan, mode: str) -> int:
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        _forward(model, handle, plan, mode)
    return counter.get_total_flops()


@pytest.mark.parametrize("axis", [*ElasticAxis, None])
@pytest.mark.parametrize("choice", [0, 1, 2])
def test_flops_of_slice_mode_are_the_cost_models(family: Any, axis: ElasticAxis | None, choice: int) -> None:
    model, space, handle, shape = family
    plan = narrowed(space, axis, choice)
    assert _counted(model, handle, plan, "slice") == 2 * LENGTH * flops_per_token(shape, widths_of(plan, 6), LENGTH)


def test_mask_mode_computes_everything(family: Any) -> None:
    model, space, handle, _ = family
    assert _counted(model, handle, narrowed(space, None), "mask") == _counted(model, handle, space.parent, "slice")


@pytest.mark.parametrize("axis", [*ElasticAxis, None])
def test_parameters_of_the_extracted_model(family: Any, _one_process: Any, axis: ElasticAxis | None) -> None:
    _, space, _, shape = family
    plan = narrowed(space, axis)
    model, widths = build_hybrid(resize(shape, plan), _one_process), widths_of(plan, 6)
    assert sum(p.numel() for p in model.parameters()) == total_params(shape, widths)
    experts = [p.numel() for name, p in model.named_parameters() if ".local_experts." in name]
    kept = dict(plan.widths)[ElasticAxis.EXPERTS]
    assert active_params(shape, widths) == total_params(shape, widths) - sum(experts) + sum(experts) // kept * 3


@pytest.mark.parametrize("axis", [ElasticAxis.HIDDEN, ElasticAxis.FFN, ElasticAxis.HEADS, ElasticAxis.MAMBA_HEADS, None])
def test_saved_activations_shrink(family: Any, axis: ElasticAxis | None) -> None:
    model, space, handle, _ = family
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = []
    for plan in (space.parent, narrowed(space, axis, 1), narrowed(space, axis, 2)):
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = _forward(model, handle, plan)  # kept alive, so that addresses are not used twice
        sizes.append(sum(saved.values()))
        del output
    assert sizes[0] > sizes[1] > sizes[2]
