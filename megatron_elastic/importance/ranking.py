"""A ranking: how important every component of a model is, axis by axis, and the one file that holds it.

The file is a safetensors file of the scores, `AXIS` or `AXIS/LAYER`; everything else is JSON in its metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dacite
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.checkpoint.files import shape_differences
from megatron_elastic.config import to_plain
from megatron_elastic.errors import CheckpointError, raise_all
from megatron_elastic.formats import RANKING
from megatron_elastic.layout import full_shapes, layer_of
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import layers_of_axis, parent_width

Scores = Mapping[ElasticAxis, Mapping[int | None, Tensor]]
"""Axis -> global layer number (None: of the whole model) -> scores, higher is more important; `score_shapes` says their sizes."""

_METADATA = "ranking"
"""The entry of the file's metadata that holds everything but the scores."""
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Ranking:
    """How important the components of a model are.

    shape: the model's. criteria: axis -> name of the criterion that scored it. scores: fp32 or fp64, see `Scores`; those of `layers` are
    ascending in the order in which layers are dropped.
    provenance: plain data; `model` is {path, fingerprint} of the model that was ranked (`fingerprint_of`), beside it whatever its maker says
    (data, tokens, versions).
    """

    shape: ModelShape
    criteria: Mapping[ElasticAxis, str]
    scores: Scores
    provenance: Mapping[str, Any]

    def problems(self) -> list[str]:
        """Everything wrong with it, one line each: scores that are missing, not numbers, or of other sizes than the model's."""
        if not self.scores:
            return ["it has no scores"]
        found = [f"axis {axis.value!r} has scores but no criterion" for axis in self.scores if axis not in self.criteria]
        for axis, by_layer in self.scores.items():
            wanted = score_shapes(self.shape, axis)
            found += [] if wanted else [f"axis {axis.value!r} is none that this model ranks"]
            for layer in wanted.keys() | by_layer.keys():
                key = _key(axis, layer)
                if layer not in by_layer:
                    found.append(f"{key} is missing")
                elif layer not in wanted:
                    found.append(f"{key} is not one of the model's")
                elif tuple(by_layer[layer].shape) != wanted[layer]:
                    found.append(f"{key} has shape {list(by_layer[layer].shape)}, not {list(wanted[layer])}")
                elif bad := int((~torch.isfinite(by_layer[layer])).sum()):
                    found.append(f"{key} has {bad} scores that are NaN or infinite")
        model = self.provenance.get("model")
        return found + ([] if isinstance(model, Mapping) and "fingerprint" in model else ["it does not say which model it ranks"])

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that differ for another ranking: of its scores and of the weights that were ranked."""
        digest = hashlib.sha256(str(self.provenance["model"]["fingerprint"]).encode())
        for key, scores in sorted(_tensors(self).items()):
            digest.update(key.encode() + scores.numpy().tobytes())
        return digest.hexdigest()[:_DIGITS]


def score_shapes(shape: ModelShape, axis: ElasticAxis) -> dict[int | None, tuple[int, ...]]:
    """Layer (None: of the whole model) -> sizes of the scores of `axis`; empty when the model does not have it, or nothing is ranked on it (topk).

    One score a component; moe_ffn [experts, neurons], mamba_state [groups, state]; mamba_head_dim [head_dim], one order for all heads of a layer.
    """
    if axis is ElasticAxis.TOPK or parent_width(shape, axis) is None:
        return {}
    return {layer: _sizes(shape if layer is None else shape.at(layer), axis) for layer in layers_of_axis(shape, axis) or (None,)}


def _sizes(shape: ModelShape, axis: ElasticAxis) -> tuple[int, ...]:
    width = parent_width(shape, axis)
    assert isinstance(width, int)
    if axis is ElasticAxis.MOE_FFN:
        assert shape.moe is not None and isinstance(shape.moe.experts, int)
        return (shape.moe.experts, width)
    if axis is ElasticAxis.MAMBA_STATE:
        assert shape.mamba is not None
        return (shape.mamba.groups, width)
    return (width,)


def _key(axis: ElasticAxis, layer: int | None) -> str:
    return axis.value if layer is None else f"{axis.value}/{layer}"


def _tensors(ranking: Ranking) -> dict[str, Tensor]:
    """Scores under their names in the file, those that are not fp64 as fp32."""
    found = {_key(axis, layer): scores for axis, by_layer in ranking.scores.items() for layer, scores in by_layer.items()}
    wanted = {key: scores.dtype if scores.dtype == torch.float64 else torch.float32 for key, scores in found.items()}
    return {key: scores.detach().cpu().to(wanted[key]).contiguous() for key, scores in found.items()}


def write_ranking(file: Path, ranking: Ranking) -> None:
    """Write a ranking, whole or not at all. Raises CheckpointError for one with problems, a file that exists, or a disk that does not take it."""
    raise_all(CheckpointError, ranking.problems(), f"ranking {str(file)!r}")
    if file.exists():
        raise CheckpointError(f"{str(file)!r} exists; choose another path or delete it")
    content = {
        **RANKING.stamp,
        "shape": to_plain(ranking.shape),
        "criteria": dict(ranking.criteria),
        "provenance": dict(ranking.provenance),
    }
    temporary = file.parent / f".tmp-{file.name}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(save(_tensors(ranking), {_METADATA: json.dumps(content)}))
        os.replace(temporary, file)
    except OSError as error:
        raise CheckpointError(f"{str(file)!r} cannot be written: {error.strerror}; free space there or choose another path") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_ranking(file: Path) -> Ranking:
    """The ranking in a file. Raises CheckpointError for a file that is missing, foreign, of another version, or whose scores are not its model's."""
    if not file.is_file():
        raise CheckpointError(f"no ranking at {str(file)!r}; write one with `megatron-elastic rank`")
    try:
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata() or {}
            if _METADATA not in metadata:
                raise CheckpointError(
                    f"{str(file)!r} is a safetensors file, but not a ranking; give one that `megatron-elastic rank` wrote"
                )
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}
        content: dict[str, Any] = json.loads(metadata[_METADATA])
        RANKING.check(content, f"ranking {str(file)!r}")
        scores: dict[ElasticAxis, dict[int | None, Tensor]] = {}
        for key, tensor in tensors.items():
            axis, _, layer = key.partition("/")
            scores.setdefault(ElasticAxis(axis), {})[int(layer) if layer else None] = tensor
        ranking = Ranking(
            shape=dacite.from_dict(ModelShape, content["shape"], dacite.Config(strict=True, cast=[tuple])),
            criteria={ElasticAxis(axis): name for axis, name in content["criteria"].items()},
            scores=scores,
            provenance=content["provenance"],
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, dacite.DaciteError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read as a ranking: {error}; rank the model again") from None
    raise_all(CheckpointError, ranking.problems(), f"ranking {str(file)!r}")
    return ranking


def check_model(ranking: Ranking, file: Path, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError when a ranking is of another model, or of other weights, than `tensors` (our names -> full tensors)."""
    differences = shape_differences(replace(ranking.shape, padded_vocab_size=None), replace(shape, padded_vocab_size=None))
    if differences:
        raise CheckpointError(f"ranking {str(file)!r} is of another model: {', '.join(differences)}")
    ranked = ranking.provenance["model"]
    if ranked["fingerprint"] != fingerprint_of(tensors, shape):
        raise CheckpointError(
            f"ranking {str(file)!r} is of other weights ({ranked.get('path', 'a model without a path')}); rank this model and use that file"
        )


def fingerprint_of(tensors: Mapping[str, Tensor], shape: ModelShape) -> str:
    """16 hexadecimal digits that differ for other weights, and for the same weights in another order, from a sample of them.

    The sample is a line along every dim of what stands outside the layers and of the first layer of each kind, so every axis has its part in it.
    It is the same for a model's Hugging Face and megatron files (bf16 is exact in fp32), whatever rows its vocabulary is padded to.
    tensors: our name -> full tensor; of those that are sampled one is held at a time.
    """
    first = {shape.layer_pattern.index(letter) for letter in shape.layer_pattern}
    digest = hashlib.sha256()
    for name in full_shapes(shape):
        layer = layer_of(name)
        if layer is not None and layer not in first:
            continue
        tensor = tensors[name]
        if name in _VOCABULARY:
            tensor = tensor[: shape.vocab_size]
        digest.update(name.encode())
        for dim in range(tensor.dim()):
            line = tensor[tuple(slice(None) if other == dim else 0 for other in range(tensor.dim()))]
            digest.update(line.detach().cpu().to(torch.float32).contiguous().numpy().tobytes())
        del tensor  # it would be held while the next one is read
    return digest.hexdigest()[:_DIGITS]
