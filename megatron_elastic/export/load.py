"""A model on the disk as a model that computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_elastic.export.sources import Source, open_source
from megatron_elastic.layout import stacked_name
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import Shard, shards
from megatron_elastic.parallel import ParallelContext

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule


def load_model(source: Path | Source, parallel: ParallelContext) -> LanguageModule:
    """This rank's part of a model, in fp32 and in evaluation mode; each of its tensors is read once, one at a time.

    source: a run, a megatron checkpoint or a Hugging Face directory; or what `open_source` found there.
    Raises what `open_source` raises, and CheckpointError for files that have changed since it was opened.
    """
    source = open_source(source) if isinstance(source, Path) else source
    model = build_model(source.shape, parallel)
    waiting: dict[str, list[tuple[int | None, Shard]]] = {}
    for shard in shards(model):
        stacked, expert = stacked_name(shard.name)
        waiting.setdefault(stacked, []).append((expert, shard))
    with torch.no_grad():
        for name, parts in waiting.items():
            full = source.tensors[name]
            for expert, shard in parts:
                shard.tensor.copy_(shard.take(full if expert is None else full[expert]))
    return model.eval()
