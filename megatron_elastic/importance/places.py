"""Where the components of a model are observed: the one table of modules, axes and sides, and every place that a shape must have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.importance.criteria import Needs
from megatron_elastic.shape import LAYER_KINDS, ModelShape

Side = Literal["input", "output", "norm", "write"]


class Place(NamedTuple):
    """Where entries of an axis are observed.

    layer: global number from 0, None for the embedding. part: which of several there (a sublayer, an expert, B or C).
    """

    axis: ElasticAxis
    layer: int | None
    part: str = ""

    def __str__(self) -> str:
        if self.layer is None:
            return f"the embedding, {self.axis.value}"
        what = {ElasticAxis.HIDDEN: f"the norm before {self.part}", ElasticAxis.MOE_FFN: f"expert {self.part}"}.get(self.axis, "")
        return f"layer {self.layer}, {self.axis.value}" + (f" ({what})" if what else "")


EMBEDDING = "embedding"
"""The part of the hidden channels' place outside the layers: the embedding (criteria with a backward)."""


@dataclass(frozen=True, slots=True)
class Site:
    """Which side of a module an axis is observed at.

    module: its name inside a layer (of the whole model for `embedding`), with one group for an expert's number.
    side: its input, its output, what its own norm gives its linear ("norm"), or its write to the residual stream, bias included ("write").
    """

    module: str
    axis: ElasticAxis
    side: Side
    part: str = ""


WIDTHS = (
    Site(r"self_attention\.linear_proj", ElasticAxis.HEADS, "input"),
    Site(r"mlp\.linear_fc2", ElasticAxis.FFN, "input"),
    Site(r"mlp\.shared_experts\.linear_fc2", ElasticAxis.SHARED_FFN, "input"),
    Site(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc2", ElasticAxis.MOE_FFN, "input"),
    Site(r"mixer\.in_proj", ElasticAxis.MAMBA_HEADS, "output"),
    Site(r"mixer\.in_proj", ElasticAxis.MAMBA_STATE, "output"),
)
"""Every axis but hidden. The experts' inputs are already multiplied by their gates (megatron does that before the second linear)."""
READ = frozenset(site.axis for site in WIDTHS if site.side == "input")
"""The axes that are observed as the input of a linear, which is all that reads them."""
NORMS = (
    Site(r"self_attention\.linear_qkv", ElasticAxis.HIDDEN, "norm", "attention"),
    Site(r"mlp\.linear_fc1", ElasticAxis.HIDDEN, "norm", "mlp"),
    Site(r"pre_mlp_layernorm", ElasticAxis.HIDDEN, "output", "moe"),
    Site(r"mixer\.in_proj", ElasticAxis.HIDDEN, "norm", "mamba"),
)
"""Hidden channels, forward only: what the norm before every sublayer gives."""
WRITES = (
    Site(r"self_attention", ElasticAxis.HIDDEN, "write", "attention"),
    Site(r"mlp", ElasticAxis.HIDDEN, "write", "mlp"),
    Site(r"mlp", ElasticAxis.HIDDEN, "write", "moe"),
    Site(r"mixer", ElasticAxis.HIDDEN, "write", "mamba"),
    Site(r"embedding", ElasticAxis.HIDDEN, "write", EMBEDDING),
)
"""Hidden channels with a gradient: every write to the residual stream, where the axis is masked, so that activation x gradient is the
slope of the loss along the channel's mask."""


def sites_of(module: str, sites: tuple[Site, ...], layer: int | None, shape: ModelShape, first_expert: int) -> Iterator[tuple[Site, Place]]:
    """What is observed at the module of that name (inside `layer`, or of the model where it is None), and where that is.

    first_expert: number of this rank's first expert.
    """
    for site in sites:
        match = re.fullmatch(site.module, module)
        if match is None or (site.part == EMBEDDING) != (layer is None):
            continue
        part = str(first_expert + int(match[1])) if site.axis is ElasticAxis.MOE_FFN else site.part
        sublayers = (part,) if layer is None else LAYER_KINDS[shape.layer_pattern[layer]]
        if site.axis is ElasticAxis.HIDDEN and part not in sublayers:  # an identity stands in the place of a sublayer
            continue
        yield site, Place(site.axis, layer, part)


def places_of(shape: ModelShape, needs: Needs) -> dict[Place, int]:
    """Every place of a model -> how many entries are observed there: channels of heads rather than heads, and so on.

    needs: of the criterion; with a backward the embedding is one of the places.
    """
    places: dict[Place, int] = {}
    for layer, letter in enumerate(shape.layer_pattern):
        for part in LAYER_KINDS[letter]:
            places[Place(ElasticAxis.HIDDEN, layer, part)] = shape.hidden_size
            places |= {Place(axis, layer, name): size for axis, name, size in _inside(shape.at(layer), part)}
    if needs == "backward":
        places[Place(ElasticAxis.HIDDEN, None, EMBEDDING)] = shape.hidden_size
    return places


def _inside(shape: Any, part: str) -> Iterator[tuple[ElasticAxis, str, int]]:
    """(axis, part, entries) of one sublayer; `shape` is that of its layer."""
    if part == "attention":
        yield ElasticAxis.HEADS, "", shape.attention.heads * shape.attention.head_dim
    elif part == "mlp":
        yield ElasticAxis.FFN, "", shape.mlp.ffn
    elif part == "mamba":
        yield ElasticAxis.MAMBA_HEADS, "", shape.mamba.heads * shape.mamba.head_dim
        for name in ("B", "C"):
            yield ElasticAxis.MAMBA_STATE, name, shape.mamba.groups * shape.mamba.state
    else:
        for expert in range(shape.moe.experts):
            yield ElasticAxis.MOE_FFN, str(expert), shape.moe.ffn
        if shape.moe.shared_ffn is not None:
            yield ElasticAxis.SHARED_FFN, "", shape.moe.shared_ffn
