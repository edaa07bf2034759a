"""The proof that a family and its extracted members are the same models: masked = sliced = the written checkpoint, read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.checkpoint import NamedTensors, open_checkpoint, write_named
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.errors import CheckpointError, PlanError
from megatron_elastic.export.extract import extract
from megatron_elastic.export.load import load_model
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import resize

TOLERANCE = 1e-4
"""Largest difference of two logits that still counts as the same model (fp32)."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far apart the three ways to run one plan are: largest absolute differences of logits, and losses per token.

    loss: of the family in slice mode; extracted_loss: of the checkpoint; both None without held-out text.
    """

    masked_sliced: float
    masked_extracted: float
    loss: float | None
    extracted_loss: float | None

    @property
    def holds(self) -> bool:
        """Whether the three agree; what is not a number agrees with nothing."""
        return self.masked_sliced <= TOLERANCE and self.masked_extracted <= TOLERANCE


def write_submodel(source: Path, plan: SubmodelPlan, directory: Path) -> ModelShape:
    """Extract a plan from a family's checkpoint to `directory`, tensor by tensor; returns the sub-model's shape.

    Raises CheckpointError for a checkpoint without a family or an existing `directory`, PlanError for a plan outside the space.
    """
    tensors = NamedTensors(source)
    space = tensors.info.space
    if space is None:
        raise CheckpointError(f"checkpoint {str(source)!r} holds no family; extract from the run of an elastic stage")
    shape = resize(tensors.info.shape, plan)
    provenance = {"extracted_from": str(source), "plan": plan.to_dict()}
    write_named(directory, extract(tensors.items(), tensors.info.shape, space, plan), shape, provenance=provenance)
    return shape


def choose_plans(plans: Mapping[str, SubmodelPlan], budget: str | None, source: Path) -> dict[str, SubmodelPlan]:
    """The plans of a family, or that of one budget. Raises PlanError when there is none of that name."""
    if not plans:
        raise PlanError(f"{str(source)!r} holds no plans: no elastic stage has saved a checkpoint there yet")
    if budget is not None and budget not in plans:
        raise PlanError(f"budget {budget!r} is not one of the family's: {', '.join(plans)}")
    return dict(plans) if budget is None else {budget: plans[budget]}


class Verifier:
    """A family, loaded once, against checkpoints of its members.

    tokens: [batch, length] ids the logits are compared on; text: held-out microbatches for losses, empty for none.
    """

    def __init__(self, source: Path, parallel: ParallelContext, tokens: torch.Tensor, text: list[Any]) -> None:
        info = open_checkpoint(source)
        if info.space is None:
            raise CheckpointError(f"checkpoint {str(source)!r} holds no family; verify the run of an elastic stage")
        self.shape, self.space, self.plans = info.shape, info.space, info.plans
        self._parallel, self._tokens, self._text = parallel, tokens, text
        self._model = load_model(source, parallel)
        self._handle: ElasticHandle = elasticize(self._model, info.space, parallel, info.shape)

    @torch.no_grad()
    def check(self, plan: SubmodelPlan, member: Path) -> Agreement:
        """Compare one plan with its written checkpoint, read back as an ordinary model."""
        with self._handle.use(plan, "mask"):
            masked = self._logits(self._model)
        with self._handle.use(plan, "slice"):
            sliced, loss = self._logits(self._model), self._loss(self._model)
        ordinary = load_model(member, self._parallel)
        extracted = self._logits(ordinary)
        return Agreement(
            masked_sliced=float((masked - sliced).abs().max()),
            masked_extracted=float((masked - extracted).abs().max()),
            loss=loss,
            extracted_loss=self._loss(ordinary),
        )

    def _logits(self, model: Any) -> torch.Tensor:
        positions = torch.arange(self._tokens.shape[1])[None].expand_as(self._tokens)
        return model(self._tokens, positions, None)[..., : self.shape.vocab_size]

    def _loss(self, model: Any) -> float | None:
        from megatron_elastic.distill.losses import OutputLossTerms
        from megatron_elastic.train.forward import batch_loss, hidden_states

        terms = OutputLossTerms(vocab_size=self.shape.vocab_size, kl_weight=0.0, ce_weight=1.0)
        losses = [batch_loss(model, hidden_states(model, batch), batch, terms, None, None, self._parallel) for batch in self._text]
        return float(sum(loss.ce for loss in losses) / sum(loss.num_tokens for loss in losses)) if losses else None
