"""A checkpoint as a model that computes."""

from __future__ import annotations

from pathlib import Path

from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_elastic.checkpoint import load_checkpoint, open_checkpoint
from megatron_elastic.models.build import build_model
from megatron_elastic.parallel import ParallelContext


def load_model(checkpoint: Path, parallel: ParallelContext) -> LanguageModule:
    """This rank's part of the model of a checkpoint, in fp32 and in evaluation mode; `open_checkpoint` tells its shape and its family.

    A collective: every rank calls it. Raises CheckpointError on every rank for a checkpoint that is missing, half-written or not ours.
    """
    shape = open_checkpoint(checkpoint).shape
    model = build_model(shape, parallel)
    load_checkpoint(checkpoint, model=model, shape=shape, parallel=parallel)
    return model.eval()
