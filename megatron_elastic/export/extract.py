"""Cut the sub-model of a plan out of the parent's named tensors: a pure function, streamed tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megatron_elastic.axes import ElasticSpace, SubmodelPlan
from megatron_elastic.layout import axis_groups, dims_of, kept_widths, layer_of, submodel_name
from megatron_elastic.runs import select
from megatron_elastic.shape import ModelShape


def extract(
    tensors: Iterable[tuple[str, torch.Tensor]], shape: ModelShape, space: ElasticSpace, plan: SubmodelPlan
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the sub-model of `plan`, of shape `resize(shape, plan)`, from the parent's full tensors.

    Names are those of `layout`; layers are renumbered. A result may share its memory with the parent's tensor.
    Raises PlanError for a plan outside the space and CheckpointError for a tensor the parent does not have.
    """
    space.check(plan)
    groups = axis_groups(space)
    for name, tensor in tensors:
        new = submodel_name(name, plan)
        if new is None:
            continue
        kept = kept_widths(space, plan, layer_of(name))
        runs = enumerate(entries.runs(kept) for entries in dims_of(name, shape, groups))
        for dim, kept_runs in sorted(runs, key=lambda item: len(item[1])):  # one run is a view, so that several copy only what is kept
            tensor = select(tensor, dim, kept_runs)
        yield new, tensor.contiguous()
        del tensor  # it would be held while the next one is read
