"""Loss, perplexity and bits per byte of a model, or of plans of a family, on text.

The protocol. Documents are independent. Each is cut into windows of `sequence_length` tokens that do not overlap; a window sees nothing
of the one before it. Every token of a document but its first, which has nothing before it, is scored exactly once, as the next token of the
one before it: window k reads tokens kL to (k+1)L - 1 and scores tokens kL + 1 to (k+1)L. The loss is the sum of -ln p over all scored tokens
divided by their number (nats per token, never a mean of means); perplexity is exp(loss). Bits per byte are loss / ln 2 x tokens / bytes, the
rate of the tokenizer being that of the whole documents (Gao et al., arXiv 2101.00027, section 3.1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_elastic.axes import ElasticSpace, SubmodelPlan
from megatron_elastic.cost import total_params, widths_of
from megatron_elastic.distill.losses import OutputLossTerms
from megatron_elastic.elastic.attach import ElasticHandle
from megatron_elastic.errors import CheckpointError, ConfigError
from megatron_elastic.export.texts import Text
from megatron_elastic.formats import EVAL
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import parent_plan
from megatron_elastic.train.data import MicroBatch, pack_samples, share_of_context
from megatron_elastic.train.forward import batch_loss, hidden_states

MODEL, PARENT = "model", "parent"
"""Names of an ordinary model, and of the whole model of a family."""
WINDOWS_TOGETHER = 4
"""Whole windows that are computed as one row."""
LARGEST_LOSS = 700.0
"""Nats per token; exp of more is no number."""

Plans = Mapping[str, SubmodelPlan | None]
"""Name -> plan; None: the model as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one model made of one text."""

    parameters: int
    """Parameters of the model, padded vocabulary included."""
    tokens: int
    """Tokens that were scored."""
    loss: float
    """Cross-entropy, nats per token."""
    bits_per_byte: float | None
    """None where the bytes of the text are not known."""
    to_parent: float
    """Perplexity over that of the whole model."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)


def plans_to_score(plans: Mapping[str, SubmodelPlan], space: ElasticSpace) -> dict[str, SubmodelPlan | None]:
    """The whole model of a family first, then `plans`; a plan that keeps everything is the whole model, and is computed with it."""
    return {PARENT: None, **{name: None if plan == space.parent else plan for name, plan in plans.items()}}


def check_sequence_length(sequence_length: int, shape: ModelShape) -> None:
    """Raise ConfigError when windows of so many tokens are not for this model."""
    if not 1 <= sequence_length <= shape.max_sequence_length:
        raise ConfigError(
            f"--sequence-length {sequence_length} must be between 1 and the model's max_sequence_length {shape.max_sequence_length}"
        )


def windows(documents: Iterable[NDArray[np.integer]], sequence_length: int) -> Iterator[NDArray[np.integer]]:
    """Each window with the token after it: at most sequence_length + 1 ids, of which all but the first are scored."""
    for ids in documents:
        for start in range(0, len(ids) - 1, sequence_length):
            yield ids[start : start + sequence_length + 1]


def packed_rows(documents: Iterable[NDArray[np.integer]], sequence_length: int) -> Iterator[MicroBatch]:
    """Rows of at most WINDOWS_TOGETHER x sequence_length tokens, each of whole windows that do not see each other."""
    row: list[NDArray[np.integer]] = []
    for window in windows(documents, sequence_length):
        if sum(len(other) - 1 for other in row) + len(window) - 1 > WINDOWS_TOGETHER * sequence_length:
            yield pack_samples([_sample(other) for other in row], 0)
            row = []
        row.append(window)
    if row:
        yield pack_samples([_sample(other) for other in row], 0)


def _sample(window: NDArray[np.integer]) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(window.astype(np.int64))
    length = len(ids) - 1
    return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": torch.ones(length), "position_ids": torch.arange(length)}


@dataclass(frozen=True, slots=True)
class Evaluator:
    """A whole model in evaluation mode on one process; handle: None for a model that is not elastic."""

    model: Any
    handle: ElasticHandle | None
    shape: ModelShape
    parallel: ParallelContext

    @torch.no_grad()
    def losses(
        self, plans: Plans, documents: Sequence[NDArray[np.integer]], sequence_length: int, advance: Callable[[int], None] | None = None
    ) -> dict[str, float]:
        """Name -> nats per token of `documents`, by the protocol above.

        advance: told how many more tokens have been scored under all plans. At least one document has two tokens.
        """
        terms = OutputLossTerms(vocab_size=self.shape.vocab_size, kl_weight=0.0, ce_weight=1.0)
        sums, scored = dict.fromkeys(plans.values(), 0.0), 0  # by plan: names that share one are computed once
        for row in packed_rows(documents, sequence_length):
            batch = share_of_context(row, self.parallel)
            for plan in sums:
                with nullcontext() if self.handle is None else self.handle.use(plan):
                    loss = batch_loss(self.model, hidden_states(self.model, batch), batch, terms, None, None, self.parallel)
                sums[plan] += float(loss.ce)
            scored += batch.row_tokens
            if advance is not None:
                advance(batch.row_tokens)
        return {name: sums[plan] / scored for name, plan in plans.items()}

    def score(self, plans: Plans, text: Text, sequence_length: int, advance: Callable[[int], None] | None = None) -> dict[str, Score]:
        """Name -> score on a text. The first of `plans` is the whole model.

        Raises CheckpointError when a loss is none that a trained model gives.
        """
        losses = self.losses(plans, text.documents, sequence_length, advance)
        for name, loss in losses.items():
            if not loss < LARGEST_LOSS:
                raise CheckpointError(
                    f"{name}: its loss on {text.name!r} is {loss} nats per token, which no trained model gives; its weights are damaged or not "
                    "of this architecture"
                )
        parent, rate = next(iter(losses.values())), text.tokens_per_byte
        return {
            name: Score(
                parameters=self._parameters(plans[name]),
                tokens=text.num_scored,
                loss=loss,
                bits_per_byte=None if rate is None else loss / math.log(2) * rate,
                to_parent=math.exp(loss - parent),
            )
            for name, loss in losses.items()
        }

    def _parameters(self, plan: SubmodelPlan | None) -> int:
        chosen = parent_plan(self.shape) if plan is None else plan
        return int(total_params(self.shape, widths_of(chosen, self.shape.num_layers)))


def write_scores(file: Path, source: Path, sequence_length: int, results: Sequence[tuple[Text, Mapping[str, Score]]]) -> None:
    """Write what was measured on each text as JSON. Raises ConfigError when the file cannot be written."""
    content = {
        **EVAL.stamp,
        "source": str(source),
        "sequence_length": sequence_length,
        "texts": [
            {
                "text": text.name,
                "documents": len(text.documents),
                "tokens": text.num_scored,
                "tokens_per_byte": text.tokens_per_byte,
                "cut": text.cut,
                "budgets": {name: _plain(score) for name, score in scores.items()},
            }
            for text, scores in results
        ],
    }
    try:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {str(file)!r} cannot be written: {error.strerror}; name another file") from None


def _plain(score: Score) -> dict[str, Any]:
    return {
        "parameters": score.parameters,
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "perplexity_to_parent": score.to_parent,
    }
