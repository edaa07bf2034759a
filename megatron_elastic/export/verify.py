"""The proof that a family and its members are the same models: masked = sliced = the written model, read back by whoever reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.errors import CheckpointError
from megatron_elastic.export.evaluate import Evaluator, windows
from megatron_elastic.export.load import load_model
from megatron_elastic.export.read_back import TransformersModel
from megatron_elastic.export.sources import Source, describe, is_hugging_face, open_source
from megatron_elastic.parallel import ParallelContext

TOLERANCE = 1e-4
"""Largest difference of two logits that still counts as the same model (fp32), for logits up to 1; in proportion to the largest above.

Rounding grows with the numbers that are rounded: SmolLM2's logits of 30 move by 1e-4 when its weights move by half of their last bit.
"""
Reader = Literal["megatron", "transformers"]
"""Who has read a written model back."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far apart the ways to run one plan are: largest absolute differences of logits, and losses (nats per token).

    reader: who read the written model back. loss: of the family in slice mode; extracted_loss: of the written model; None without text.
    largest_logit: the largest absolute logit of the family in mask mode.
    """

    reader: Reader
    masked_sliced: float
    masked_extracted: float
    loss: float | None
    extracted_loss: float | None
    largest_logit: float = 1.0

    @property
    def holds(self) -> bool:
        """Whether all agree; what is not a number agrees with nothing."""
        allowed = TOLERANCE * max(1.0, self.largest_logit)
        return self.masked_sliced <= allowed and self.masked_extracted <= allowed


class Verifier:
    """A family, loaded once, against its members as they were written.

    tokens: [batch, length] ids the logits are compared on; documents: ids of texts for losses, scored in windows of `sequence_length`.
    Raises CheckpointError for a source without a family.
    """

    def __init__(
        self,
        source: Source,
        parallel: ParallelContext,
        tokens: torch.Tensor,
        documents: Sequence[NDArray[np.integer]],
        sequence_length: int,
    ) -> None:
        if source.space is None:
            raise CheckpointError(f"{describe(source)} holds no family; verify the run of an elastic stage")
        self._source, self._parallel, self._tokens = source, parallel, tokens
        self._documents, self._sequence_length = documents, sequence_length
        self._model = load_model(source, parallel)
        self._handle: ElasticHandle = elasticize(self._model, source.space, parallel, source.shape)

    @torch.no_grad()
    def check(self, plan: SubmodelPlan, member: Path) -> Agreement:
        """Compare one plan with its written model: a megatron checkpoint read by this package, a Hugging Face directory by transformers."""
        with self._handle.use(plan, "mask"):
            masked = self._logits(self._model)
        with self._handle.use(plan, "slice"):
            sliced = self._logits(self._model)
        reader, extracted, extracted_loss = self._read_back(member)
        return Agreement(
            reader=reader,
            masked_sliced=float((masked - sliced).abs().max()),
            masked_extracted=float((masked - extracted).abs().max()) if masked.shape == extracted.shape else float("inf"),
            loss=self._loss(self._model, self._handle, plan),
            extracted_loss=extracted_loss,
            largest_logit=float(masked.abs().max()),
        )

    def _read_back(self, member: Path) -> tuple[Reader, torch.Tensor, float | None]:
        """The logits and the loss of a written model."""
        if is_hugging_face(member):
            theirs = TransformersModel(member, max(self._sequence_length, self._tokens.shape[1]))
            cut = [torch.from_numpy(window.astype(np.int64)) for window in windows(self._documents, self._sequence_length)]
            return "transformers", theirs.logits(self._tokens), theirs.loss(cut) if cut else None
        source = open_source(member)
        ordinary = load_model(source, self._parallel)
        return "megatron", self._logits(ordinary), self._loss(ordinary, None, None)

    def _logits(self, model: Any) -> torch.Tensor:
        positions = torch.arange(self._tokens.shape[1])[None].expand_as(self._tokens)
        return model(self._tokens, positions, None)[..., : self._source.shape.vocab_size]

    def _loss(self, model: Any, handle: ElasticHandle | None, plan: SubmodelPlan | None) -> float | None:
        if not self._documents:
            return None
        evaluator = Evaluator(model, handle, self._source.shape, self._parallel)
        return evaluator.losses({"": plan}, self._documents, self._sequence_length)[""]
