"""The proof that a family and its members are the same models: masked = sliced = the written model, read back by whoever reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from megatron_elastic.export.member import homogenise
from megatron_elastic.export.read_back import TransformersModel
from megatron_elastic.export.sources import Source, describe, is_hugging_face, open_source
from megatron_elastic.layout import full_shapes
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import resize

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
    largest_logit: the largest absolute logit of the family in mask mode. notes: where it is compared with something else than the plan, why.
    """

    reader: Reader
    masked_sliced: float
    masked_extracted: float
    loss: float | None
    extracted_loss: float | None
    largest_logit: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def allowed(self) -> float:
        """Largest difference of two logits that counts as the same model."""
        return TOLERANCE * max(1.0, self.largest_logit)

    @property
    def holds(self) -> bool:
        """Whether all agree; what is not a number agrees with nothing."""
        return self.masked_sliced <= self.allowed and self.masked_extracted <= self.allowed


@dataclass(frozen=True, slots=True)
class Written:
    """A written model, and what of the family it has to agree with.

    plan: of its shape. dtype: what the family's weights are rounded to first, None: nothing, since it is stored as they are. notes: in words,
    where that is not the plan and the weights as they are.
    """

    source: Source
    plan: SubmodelPlan
    dtype: torch.dtype | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _OfFamily:
    """What the family says of a plan: its masked and sliced logits [batch, length, vocabulary], and its loss (None without text)."""

    masked: torch.Tensor
    sliced: torch.Tensor
    loss: float | None


def as_written(family: Source, plan: SubmodelPlan, member: Path) -> Written:
    """Look at how the member of `plan` was written, without its weights.

    `extract --homogenise` gives it the widths of a wider plan, and `extract --dtype` rounds its weights: both are members of the family all the
    same. Raises CheckpointError for any other shape, or a family without axes, and what `open_source` raises.
    """
    if family.space is None:
        raise CheckpointError(f"{describe(family)} holds no family; verify the run of an elastic stage")
    source, notes = open_source(member), []
    if wrong := _differences(source.shape, resize(family.shape, plan)):
        plan = homogenise(family.space, plan)
        if _differences(source.shape, resize(family.shape, plan)):
            raise CheckpointError(f"{describe(source)} does not have the sizes of its plan: {wrong[0]}; extract it again")
        notes.append("written with one width an axis, and compared with that wider member")
    dtype = _rounded_to(family, source)
    if dtype is not None:
        notes.append(f"stored in {str(dtype).removeprefix('torch.')}, and compared with the family's weights rounded to that")
    return Written(source, plan, dtype, tuple(notes))


def _differences(stored: ModelShape, wanted: ModelShape) -> list[str]:
    """Tensors that have other sizes in two shapes; rows that only fill up the vocabulary do not count."""
    there, here = (full_shapes(replace(shape, padded_vocab_size=None)) for shape in (stored, wanted))
    names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    return [f"{name} is {_size(there.get(name))}, not {_size(here.get(name))}" for name in names]


def _size(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _rounded_to(family: Source, member: Source) -> torch.dtype | None:
    """The one type of a member's weights, where it cannot hold those of the family. Biases that select experts are never rounded."""
    theirs, ours = ({kind for name, kind in source.dtypes.items() if not name.endswith("expert_bias")} for source in (member, family))
    rounds = len(theirs) == 1 and any(torch.promote_types(kind, dtype) != dtype for kind in ours for dtype in theirs)
    return theirs.pop() if rounds else None


class Verifier:
    """A family, loaded once for each type its members are stored in, against its members as they were written.

    tokens: [batch, length] ids the logits are compared on; documents: ids of texts for losses, scored in windows of `sequence_length`.
    """

    def __init__(
        self,
        source: Source,
        parallel: ParallelContext,
        tokens: torch.Tensor,
        documents: Sequence[NDArray[np.integer]],
        sequence_length: int,
    ) -> None:
        self._source, self._parallel, self._tokens = source, parallel, tokens
        self._documents, self._sequence_length = documents, sequence_length
        self._loaded: tuple[torch.dtype | None, Any, ElasticHandle] | None = None
        self._measured: tuple[SubmodelPlan, torch.dtype | None, _OfFamily] | None = None

    @torch.no_grad()
    def check(self, plan: SubmodelPlan, member: Path) -> Agreement:
        """Compare one plan with its written model: a megatron checkpoint read by this package, a Hugging Face directory by transformers.

        Raises what `as_written` raises, and CheckpointError for a directory that transformers cannot read.
        """
        written = as_written(self._source, plan, member)
        family = self._of_family(written.plan, written.dtype)
        reader, extracted, extracted_loss = self._read_back(written.source)
        return Agreement(
            reader=reader,
            masked_sliced=float((family.masked - family.sliced).abs().max()),
            masked_extracted=float((family.masked - extracted).abs().max()),
            loss=family.loss,
            extracted_loss=extracted_loss,
            largest_logit=float(family.masked.abs().max()),
            notes=written.notes,
        )

    def _of_family(self, plan: SubmodelPlan, dtype: torch.dtype | None) -> _OfFamily:
        """Kept for the next member: most are the same plan's in the other format."""
        if self._measured is None or self._measured[:2] != (plan, dtype):
            model, handle = self._family(dtype)
            with handle.use(plan, "mask"):
                masked = self._logits(model)
            with handle.use(plan, "slice"):
                sliced = self._logits(model)
            self._measured = (plan, dtype, _OfFamily(masked, sliced, self._loss(model, handle, plan)))
        return self._measured[2]

    def _family(self, dtype: torch.dtype | None) -> tuple[Any, ElasticHandle]:
        """The whole model and its handle, every weight rounded to `dtype` (None: as it is)."""
        if self._loaded is None or self._loaded[0] != dtype:
            self._loaded = None  # two are not held at once
            model = load_model(self._source, self._parallel)
            with torch.no_grad():
                for parameter in model.parameters() if dtype is not None else ():
                    parameter.copy_(parameter.to(dtype))
            assert self._source.space is not None
            self._loaded = (dtype, model, elasticize(model, self._source.space, self._parallel, self._source.shape))
        return self._loaded[1:]

    def _read_back(self, member: Source) -> tuple[Reader, torch.Tensor, float | None]:
        """The logits and the loss of a written model."""
        if is_hugging_face(member.path):
            theirs = TransformersModel(member.path, max(self._sequence_length, self._tokens.shape[1]))
            cut = [torch.from_numpy(window.astype(np.int64)) for window in windows(self._documents, self._sequence_length)]
            return "transformers", theirs.logits(self._tokens), theirs.loss(cut) if cut else None
        ordinary = load_model(member, self._parallel)
        return "megatron", self._logits(ordinary), self._loss(ordinary, None, None)

    def _logits(self, model: Any) -> torch.Tensor:
        """On the CPU, where those of other readers are."""
        tokens = self._tokens.to(self._parallel.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None].expand_as(tokens)
        return model(tokens, positions, None)[..., : self._source.shape.vocab_size].cpu()

    def _loss(self, model: Any, handle: ElasticHandle | None, plan: SubmodelPlan | None) -> float | None:
        if not self._documents:
            return None
        evaluator = Evaluator(model, handle, self._source.shape, self._parallel)
        return evaluator.losses({"": plan}, self._documents, self._sequence_length)[""]
