"""What offline commands start from, whatever its format: a run, a megatron checkpoint, a Hugging Face directory or a GGUF file.

A source gives the full tensors under our names, one at a time, with the shape, the family and the files that go with the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_elastic.axes import ElasticSpace, SubmodelPlan
from megatron_elastic.checkpoint import NamedTensors, find_model_checkpoint
from megatron_elastic.checkpoint.files import CHECKPOINTS, DESCRIPTION, find_assets
from megatron_elastic.errors import CheckpointError, ConfigError, PlanError, raise_all
from megatron_elastic.export.nested import read_nested
from megatron_elastic.hf.assets import check_tokenizer, read_origin
from megatron_elastic.hf.config import CONFIG, read_config
from megatron_elastic.hf.families import Family, family_of_config, family_of_shape
from megatron_elastic.hf.gguf import find_gguf
from megatron_elastic.hf.rules import NameMap, OurTensors
from megatron_elastic.hf.weights import HfWeights
from megatron_elastic.importance.sort import SORTED, read_record
from megatron_elastic.layout import full_shapes
from megatron_elastic.shape import ModelShape

_UNUSED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors of older checkpoints that are computed anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model on the disk.

    tensors: our name -> full tensor, read when it is asked for; dtypes: our name -> type, without reading.
    space: the family that the model holds, None for an ordinary one; plans: its budgets.
    provenance: where it comes from, as its writer said. assets: the directory of its tokenizer, config.json and so on, if it has one.
    """

    path: Path
    shape: ModelShape
    tensors: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    space: ElasticSpace | None
    plans: Mapping[str, SubmodelPlan]
    provenance: Mapping[str, Any]
    assets: Path | None


def open_source(path: Path, *, padded_vocab_size: int | None = None) -> Source:
    """The model at `path`: a run (its latest checkpoint), a megatron checkpoint or a Hugging Face directory, recognised by content.

    padded_vocab_size: rows of the embedding of a Hugging Face model, zeros after the words it has; None: no padding.
    No weight is read. Raises CheckpointError for anything missing, damaged or contradictory, ConfigError and UnsupportedError for a Hugging Face
    model that is not supported.
    """
    if is_hugging_face(path):
        return _hugging_face(path, padded_vocab_size)
    if reason := _no_model(path):
        raise CheckpointError(f"{str(path)!r} {reason}")
    return _megatron(path)


def is_hugging_face(path: Path) -> bool:
    """Whether `path` is a Hugging Face directory rather than a run or a checkpoint."""
    return (path / CONFIG).is_file()


def _no_model(path: Path) -> str | None:
    """Why there is no model at `path`, which is no Hugging Face directory; None where there may be a megatron checkpoint."""
    if not path.exists():
        return "does not exist; give a run, a megatron checkpoint or a Hugging Face directory"
    if path.is_dir() and ((path / DESCRIPTION).is_file() or (path / CHECKPOINTS).is_dir()):
        return None
    if find_gguf(path) is not None:
        return f"is a GGUF file; first bring it in: megatron-elastic import {path} --out DIR"
    if path.is_file():
        return "is a file; give the directory of a run, a megatron checkpoint or a Hugging Face model"
    return f"holds weights but no {CONFIG}; get that file, too" if any(path.glob("*.safetensors")) else None


def _megatron(path: Path) -> Source:
    checkpoint = find_model_checkpoint(path)
    tensors = NamedTensors(checkpoint)
    info = tensors.info
    return Source(
        path=checkpoint,
        shape=info.shape,
        tensors=tensors,
        dtypes={name: tensors.dtype_of(name) for name in tensors},
        space=info.space,
        plans=info.plans,
        provenance=info.provenance,
        assets=find_assets(checkpoint),
    )


def _hugging_face(path: Path, padded_vocab_size: int | None) -> Source:
    config = read_config(path)
    family = family_of_config(config)
    shape = replace(family.read(config), padded_vocab_size=padded_vocab_size)
    raise_all(ConfigError, shape.problems(), "model")
    check_tokenizer(path, shape.vocab_size)
    weights = HfWeights(path)
    names = family.names.spelled(weights)
    tied = [name for name in weights if name == "lm_head.weight"] if shape.tied_embeddings else []
    stored = {name: weights.shape_of(name) for name in weights if name not in tied}
    tensors = OurTensors(names, shape, weights, stored, lambda name: _UNUSED.fullmatch(name) is not None)
    for name in tied:
        _check_tied(weights, name, names.names("embedding.word_embeddings.weight", shape)[0])
    nested, origin, record = read_nested(path, shape), read_origin(path), read_record(path)
    provenance = {"parent": origin.name, "license": origin.license} if nested is None else nested.provenance
    return Source(
        path=path,
        shape=shape,
        tensors=tensors,
        dtypes=_dtypes(names, shape, weights),
        space=None if nested is None else nested.space,
        plans={} if nested is None else nested.plans,
        provenance={**provenance, **({} if record is None else {SORTED: record})},
        assets=path,
    )


def _check_tied(weights: HfWeights, name: str, embedding: str) -> None:
    if not torch.equal(weights[name], weights[embedding]):
        raise CheckpointError(
            f"{CONFIG} ties the output layer to the embedding (tie_word_embeddings), but {name} is not {embedding}; set it to false"
        )


def _dtypes(names: NameMap, shape: ModelShape, weights: HfWeights) -> dict[str, torch.dtype]:
    """Our name -> type of the tensors it is joined from. Raises CheckpointError when they are of several."""
    found = {}
    for name in full_shapes(shape):
        kinds = {weights.dtype_of(theirs) for theirs in names.names(name, shape)}
        if len(kinds) > 1:
            theirs = names.names(name, shape)
            raise CheckpointError(f"{theirs[0]} to {theirs[-1]} are of several types ({', '.join(map(str, kinds))}); convert them to one")
        found[name] = kinds.pop()
    return found


def describe(source: Source) -> str:
    """One word for what a source is, for messages."""
    kind = "Hugging Face directory" if is_hugging_face(source.path) else "checkpoint"
    return f"{kind} {str(source.path)!r}"


def choose_plans(plans: Mapping[str, SubmodelPlan], budget: str | None, source: Path) -> dict[str, SubmodelPlan]:
    """The plans of a family, or that of one budget. Raises PlanError when there is none of that name, or a name that is no file's."""
    if not plans:
        raise PlanError(f"{str(source)!r} holds no plans: no elastic stage has saved a checkpoint there yet")
    if budget is not None and budget not in plans:
        raise PlanError(f"budget {budget!r} is not one of the family's: {', '.join(plans)}")
    # Members are written to directories of their names.
    if others := [name for name in plans if Path(name).name != name or name in ("", "..") or not name.isprintable()]:
        raise PlanError(f"budget {others[0]!r} of {str(source)!r} cannot be the name of a directory; name it otherwise")
    return dict(plans) if budget is None else {budget: plans[budget]}


def family_to_write(source: Source, shape: ModelShape, wanted: str | None = None) -> tuple[Family, list[str]]:
    """The Hugging Face family to write a member of `shape` as: the wanted one, else the source's own, else the first that can say the shape.

    With it comes why it is not the source's own, [] where it is. Raises UnsupportedError when the wanted one cannot say the shape, or none can.
    """
    if wanted is not None or source.assets is None:
        return family_of_shape(shape, wanted, holds_family=source.space is not None), []
    own = family_of_config(read_config(source.assets))
    problems = own.problems(shape)
    return (
        (family_of_shape(shape, holds_family=source.space is not None), [f"a {own.model_type} config cannot say {'; '.join(problems)}"])
        if problems
        else (own, [])
    )
