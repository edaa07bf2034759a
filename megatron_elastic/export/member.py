"""A member of a family (or a whole model) on its way out: its shape, and its tensors one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_elastic.axes import ElasticSpace, SubmodelPlan
from megatron_elastic.errors import CheckpointError
from megatron_elastic.export.extract import extract
from megatron_elastic.export.sources import Source, describe, is_hugging_face
from megatron_elastic.hf.rules import check_finite
from megatron_elastic.layout import submodel_name
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import resize


@dataclass(frozen=True, slots=True)
class Member:
    """A model that is about to be written. dtypes: our name -> type; tensors: reads and cuts every tensor, anew each time it is called."""

    shape: ModelShape
    dtypes: Mapping[str, torch.dtype]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


def cut(source: Source, plan: SubmodelPlan | None, *, space: ElasticSpace | None = None, dtype: torch.dtype | None = None) -> Member:
    """The member of `plan`, or the whole model for None.

    space: the axes that the plan is about; None: the source's own family. dtype: of every tensor, None: as they are stored (the
    selection bias of experts always stays as it is: half precision would change which experts are chosen).
    Raises CheckpointError for a plan of a source without a family, PlanError for one that is outside the space; reading the tensors raises
    CheckpointError for weights that are NaN or infinite, or become it.
    """
    kinds = {name: kind if dtype is None or name.endswith("expert_bias") else dtype for name, kind in source.dtypes.items()}

    def whole() -> Iterator[tuple[str, Tensor]]:
        for name, kind in kinds.items():
            yield name, _read(source, name, kind)

    if plan is None:
        return Member(source.shape, kinds, whole)
    space = space or source.space
    if space is None:
        raise CheckpointError(f"{describe(source)} holds no family; give --recipe, or extract from the run of an elastic stage")
    space.check(plan)
    renamed = {submodel_name(name, plan): kind for name, kind in kinds.items()}
    return Member(
        resize(source.shape, plan),
        {name: kind for name, kind in renamed.items() if name is not None},
        lambda: extract(whole(), source.shape, space, plan),
    )


def _read(source: Source, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor of a source as `dtype`. Raises CheckpointError when it is not finite, or not any more."""
    tensor = source.tensors[name]
    if not is_hugging_face(source.path):  # which look at theirs themselves
        check_finite(name, tensor)
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if not bool(torch.isfinite(converted).all()):
        raise CheckpointError(f"{name}: a weight of {float(tensor.abs().max()):.3g} does not fit into {dtype}; choose --dtype bfloat16")
    return converted


def homogenise(space: ElasticSpace, plan: SubmodelPlan) -> SubmodelPlan:
    """The narrowest plan with one width an axis that holds `plan`: on every axis the width of its widest layer that is kept.

    It uses weights of the parent that the plan leaves out, so it is another model, at least as wide, and costs what it costs.
    Raises PlanError for a plan outside the space.
    """
    space.check(plan)
    widths = {}
    for axis, width in plan.widths:
        spec = space.spec(axis)
        if spec is not None and isinstance(width, tuple):
            kept = [each for each, layer in zip(width, spec.layers, strict=True) if plan.keeps_layer(layer)]
            width = max(kept or width)  # as `resize` has it where no layer is kept
        widths[axis] = width
    return SubmodelPlan.of(widths, plan.dropped_layers)
