"""Write a member as a Hugging Face directory that transformers loads as any other model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_elastic.checkpoint.new_directory import new_directory
from megatron_elastic.export.member import Member
from megatron_elastic.export.nested import Nested, write_nested
from megatron_elastic.hf.assets import copy_files
from megatron_elastic.hf.card import Card, model_card
from megatron_elastic.hf.config import CONFIG, MEANINGLESS, read_config
from megatron_elastic.hf.families import Family
from megatron_elastic.hf.rules import to_theirs
from megatron_elastic.hf.write import SHARD_BYTES, write_weights
from megatron_elastic.importance.sort import write_record

_NOT_KEPT = ("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "name_or_path", "quantization_config", "torch_dtype")
"""Keys of the parent's config that are not true of a member, or would run code that did not come along."""


def write_hugging_face(
    directory: Path,
    member: Member,
    family: Family,
    card: Card,
    *,
    assets: Path | None,
    nested: Nested | None = None,
    order: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, sharded safetensors, tokenizer and generation config, and a model card, holding one tensor at a time.

    family: says the member's shape (`Family.write` raises UnsupportedError for one it cannot say). assets: the parent's files, None: there are none.
    nested: for a parent that holds a family, which becomes its elastic.json.
    order: how the model is sorted (`importance.sort.sorted_record`), which becomes its sorted.json; None: it is not.
    Raises CheckpointError when `directory` exists or the disk is full; nothing is left under the final name then.
    """
    entries = {}
    shapes = family.names.shapes(member.shape)
    for name, dtype in member.dtypes.items():
        entries |= {theirs: (dtype, shapes[theirs]) for theirs in family.names.names(name, member.shape)}
    config = config_of(member, family, assets)
    with new_directory(directory) as temporary:
        write_weights(temporary, to_theirs(family.names, member.shape, member.tensors()), entries, shard_bytes=shard_bytes)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if assets is not None:
            copy_files(assets, temporary)
        (temporary / "README.md").write_text(model_card(card), encoding="utf-8")
        if order is not None:
            write_record(temporary, order)
        if nested is not None:
            write_nested(temporary, nested)


def config_of(member: Member, family: Family, assets: Path | None) -> dict[str, Any]:
    """The config.json of a member: what decides the model from its shape, the parent's habits (words that begin and end a text) kept."""
    parent = {} if assets is None else read_config(assets)
    habits = {key: value for key, value in parent.items() if key in MEANINGLESS and key not in _NOT_KEPT}
    embedding = member.dtypes["embedding.word_embeddings.weight"]
    dtype = str(embedding).removeprefix("torch.")
    return {**habits, **family.write(member.shape), "torch_dtype": dtype}
