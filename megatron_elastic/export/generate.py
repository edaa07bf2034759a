"""Continue a text with a model, or with any plan of a family, to look at it by eye.

Every token is computed from the whole text before it: there is no cache of keys, values or states, so that there is nothing to get
wrong. It is for short texts; serve an extracted model elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron_elastic.errors import ConfigError
from megatron_elastic.export.sampling import Sampling, next_token

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """How a text is continued.

    tokens: at most so many. end: the id that ends a document. vocab_size: words of the model; ids from it on are padding.
    drawable: only ids below it are taken (the words of the tokenizer, which may be fewer than the model's).
    sampling: how tokens are drawn; None takes the most probable. seed: of the draws, which depend on nothing else.
    """

    tokens: int
    end: int
    vocab_size: int
    drawable: int
    sampling: Sampling | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows a prompt.

    ids: the tokens, without the one that ends the document; ended: whether it came.
    prompt_loss: cross-entropy (nats) per token of the prompt after its first; None for a prompt of one token.
    """

    ids: tuple[int, ...]
    ended: bool
    prompt_loss: float | None


@torch.no_grad()
def generate(model: LanguageModule, prompt: Sequence[int], options: GenerateOptions) -> Continuation:
    """Continue the ids of `prompt` with a model in evaluation mode, one document by itself (nothing is padded).

    A family computes what `handle.use(plan)` around this call says. Needs a whole model: no tensor or pipeline parallelism.
    Raises ConfigError for a prompt without tokens: a document has nothing before its first.
    """
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one token")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(options.seed)
    ids, ended, prompt_loss = list(prompt), False, None
    for number in range(options.tokens):
        logits = _logits(model, ids, device, options.vocab_size)
        if number == 0 and len(prompt) > 1:
            prompt_loss = float(F.cross_entropy(logits[:-1], torch.tensor(ids[1:])))
        token = next_token(logits[-1, : options.drawable], options.sampling, generator)
        if token == options.end:
            ended = True
            break
        ids.append(token)
    return Continuation(tuple(ids[len(prompt) :]), ended, prompt_loss)


def _logits(model: LanguageModule, ids: Sequence[int], device: torch.device, vocab_size: int) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one document, in fp32, on the CPU: the same seed draws the same on every machine."""
    tokens = torch.tensor(ids, device=device)[None]
    positions = torch.arange(len(ids), device=device)[None]
    return model(tokens, positions, None)[0, :, :vocab_size].float().cpu()
