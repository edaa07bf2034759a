"""Put a model's components into another order without changing what it computes: a pure function of full tensors, read one at a time.

The layout table says which entries of a parameter belong to which component; every parameter that holds entries of an axis is put into the
same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.errors import CheckpointError
from megatron_elastic.formats import SORTED as FORMAT
from megatron_elastic.importance.dealing import Permutations, drop_order
from megatron_elastic.importance.ranking import Ranking
from megatron_elastic.layout import Dim, axis_groups, dims_of, layer_of
from megatron_elastic.shape import ModelShape

SORTED = "sorted"
"""The entry of a checkpoint's provenance that says how it was sorted (`sorted_record`)."""

SORTED_FILE = "sorted.json"
"""The same beside the weights of a Hugging Face directory, which have no provenance."""

Orders = Mapping[ElasticAxis, Tensor]
"""Axis -> the order of its components in one layer."""


def permute(tensors: Mapping[str, Tensor], shape: ModelShape, permutations: Permutations) -> Mapping[str, Tensor]:
    """The same model with its components in another order: a mapping that reads and permutes a tensor each time it is asked.

    tensors: our name -> full tensor of a model of `shape`. A tensor that no permutation touches is handed on as it is.
    Raises CheckpointError for a name that is not one of the model's.
    """
    return _Permuted(tensors, shape, permutations)


class _Permuted(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], shape: ModelShape, permutations: Permutations) -> None:
        self._tensors, self._shape, self._permutations = tensors, shape, permutations

    def __getitem__(self, name: str) -> Tensor:
        tensor, layer = self._tensors[name], layer_of(name)
        orders = {
            axis: by_layer[None if None in by_layer else layer]
            for axis, by_layer in self._permutations.items()
            if None in by_layer or layer in by_layer
        }
        return _permuted(tensor, dims_of(name, self._shape, axis_groups(None)), orders)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _permuted(tensor: Tensor, dims: tuple[Dim, ...], orders: Orders) -> Tensor:
    """A tensor with the entries of each of its dims in their new order."""
    each = orders.get(ElasticAxis.MOE_FFN)
    if each is not None and each.dim() == 2 and any(ElasticAxis.MOE_FFN in dim.axes for dim in dims):
        # Every expert has an order of its own; filled expert by expert, so that no third copy of the stack exists.
        moved = torch.empty_like(tensor)
        for new, old in enumerate(_places(dims[0], orders).tolist()):
            moved[new] = _permuted(tensor[old], dims[1:], {**orders, ElasticAxis.MOE_FFN: each[old]})
        return moved
    for number, dim in enumerate(dims):
        if any(axis in orders for axis in dim.axes):
            tensor = tensor.index_select(number, _places(dim, orders))
    return tensor


def _places(dim: Dim, orders: Orders) -> Tensor:
    """New entry -> old entry of a dim."""
    parts, start = [], 0
    for number, (segment, size, _) in enumerate(dim.blocks()):
        components = torch.arange(size // segment.unit)
        if segment.axis is not None and segment.axis in orders:
            components = _block(_flat(segment.axis, orders[segment.axis]), number // len(dim.segments), dim.repeat)
        within = torch.arange(size // len(components))
        if segment.unit_axis is not None and segment.unit_axis in orders:
            within = orders[segment.unit_axis]
        parts.append((start + components[:, None] * len(within) + within).reshape(-1))
        start += size
    return torch.cat(parts)


def _flat(axis: ElasticAxis, order: Tensor) -> Tensor:
    """One order of all components, from that of each SSM group for the state."""
    if axis is not ElasticAxis.MAMBA_STATE:
        return order
    groups, state = order.shape
    return (order + torch.arange(groups)[:, None] * state).reshape(-1)


def _block(order: Tensor, repeat: int, repeats: int) -> Tensor:
    """The part of an order that stands in one of a dim's repeats, counted from where that begins."""
    size = len(order) // repeats
    part = order[repeat * size : (repeat + 1) * size] - repeat * size
    assert bool(((part >= 0) & (part < size)).all()), "a component would leave its fixed group"
    return part


def sorted_record(ranking: Ranking, space: ElasticSpace) -> dict[str, Any]:
    """What a sorted checkpoint says about itself: the ranking and its criteria, the groups its axes were dealt over, the order of dropping layers."""
    groups = {spec.axis.value: spec.groups for spec in space.axes if spec.axis not in (ElasticAxis.TOPK, ElasticAxis.LAYERS)}
    return {
        "ranking": ranking.fingerprint,
        "criteria": {axis.value: name for axis, name in ranking.criteria.items()},
        "groups": groups,
        "drop_order": list(drop_order(ranking)),
    }


def write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Write sorted.json into a Hugging Face directory."""
    (directory / SORTED_FILE).write_text(json.dumps({**FORMAT.stamp, **record}, indent=2) + "\n", encoding="utf-8")


def read_record(directory: Path) -> dict[str, Any] | None:
    """What `write_record` wrote; None without a sorted.json. Raises CheckpointError for one that cannot be understood."""
    file = directory / SORTED_FILE
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        FORMAT.check(data, str(file))
        return {key: data[key] for key in ("ranking", "criteria", "groups", "drop_order")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be understood ({error!r}); sort the model again") from None


def unsorted_axes(space: ElasticSpace, provenance: Mapping[str, Any]) -> tuple[ElasticAxis, ...]:
    """The elastic axes whose components a parent does not have in the order of their importance over these groups.

    provenance: the parent's. `topk` and `layers` have no components to sort.
    """
    record = provenance.get(SORTED)
    groups = {} if record is None else record["groups"]
    return tuple(
        spec.axis
        for spec in space.axes
        if spec.axis not in (ElasticAxis.TOPK, ElasticAxis.LAYERS) and groups.get(spec.axis.value) != spec.groups
    )
