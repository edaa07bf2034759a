"""What a plan costs is counted, not believed: FLOPs by torch's own counter, saved activations in bytes, parameters by numel.

Run: pytest tests/elastic/test_measured.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.cost import active_params, flops_per_token, total_params, widths_of
from megatron_elastic.models.build import build_model
from megatron_elastic.space import resize
from tests.elastic.family import PARENTS, build_family, narrowed, staggered, tiny_space

LENGTH = 36
"""A multiple of the scan's chunk of 9."""


@pytest.fixture(scope="module")
def families(_one_process: Any) -> dict[tuple[str, bool], Any]:
    """A homogeneous and a per-layer family of each kind of parent."""
    return {(parent, per_layer): build_family(_one_process, parent, per_layer) for parent in PARENTS for per_layer in (False, True)}


@pytest.fixture(scope="module")
def family(families: dict[tuple[str, bool], Any]) -> Any:
    """The homogeneous hybrid."""
    return families["hybrid", False]


CASES = [(parent, axis) for parent, build in PARENTS.items() for axis in [*(spec.axis for spec in tiny_space(build()).axes), None]]


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


def _check_flops(family: Any, plan: SubmodelPlan) -> None:
    model, _, handle, shape = family
    counted = flops_per_token(shape, widths_of(plan, shape.num_layers), LENGTH)
    assert _counted(model, handle, plan, "slice") == 2 * LENGTH * counted


@pytest.mark.parametrize(("parent", "axis"), CASES)
@pytest.mark.parametrize("choice", [1, 2])
def test_flops_of_slice_mode_are_the_cost_models(families: Any, parent: str, axis: ElasticAxis | None, choice: int) -> None:
    family = families[parent, False]
    _check_flops(family, family[1].parent)
    _check_flops(family, narrowed(family[1], axis, choice))


@pytest.mark.parametrize("parent", PARENTS)
def test_flops_of_per_layer_plans_are_the_cost_models(families: Any, parent: str) -> None:
    for start in range(3):
        _check_flops(families[parent, True], staggered(families[parent, True][1], None, start))


@pytest.mark.parametrize("parent", PARENTS)
def test_mask_mode_computes_everything(families: Any, parent: str) -> None:
    model, space, handle, _ = families[parent, False]
    widths = {spec.axis: spec.choices[-1] for spec in space.axes if spec.axis is not ElasticAxis.TOPK}  # tokens go to fewer experts
    assert _counted(model, handle, space.plan(widths), "mask") == _counted(model, handle, space.parent, "slice")


def _check_parameters(family: Any, plan: SubmodelPlan, parallel: Any) -> None:
    _, _, _, shape = family
    model, widths = build_model(resize(shape, plan), parallel), widths_of(plan, shape.num_layers)
    assert sum(p.numel() for p in model.parameters()) == total_params(shape, widths)
    idle = 0
    for module in model.modules():
        if isinstance(module, MoELayer):
            experts = [sum(p.numel() for p in expert.parameters()) for expert in module.experts.local_experts]
            idle += sum(experts[module.router.topk :])
    assert active_params(shape, widths) == total_params(shape, widths) - idle


@pytest.mark.parametrize(("parent", "axis"), CASES)
def test_parameters_of_the_extracted_model(families: Any, _one_process: Any, parent: str, axis: ElasticAxis | None) -> None:
    _check_parameters(families[parent, False], narrowed(families[parent, False][1], axis), _one_process)


@pytest.mark.parametrize("parent", PARENTS)
def test_parameters_of_per_layer_models(families: Any, _one_process: Any, parent: str) -> None:
    for start in range(3):
        _check_parameters(families[parent, True], staggered(families[parent, True][1], None, start), _one_process)


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
