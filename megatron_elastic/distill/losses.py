"""Distillation and language-model losses, fused with the output projection and chunked over tokens.

Only [chunk, vocabulary] logits exist at a time, for student and teacher; gradients are formed in the same pass over the chunks, so
nothing of size [tokens, vocabulary] is kept for the backward. Losses are sums over tokens: the caller divides by the number of
tokens of the global batch, never by a micro batch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron_elastic.errors import ConfigError, raise_all

WIDENED_WORDS = 8192
"""Words whose rows of a bf16 output weight exist in fp32 at a time."""


class OutputLoss(NamedTuple):
    """Sums over the unmasked tokens, 0-d tensors.

    total: kl_weight * kl + ce_weight * ce, differentiable; kl, ce: the terms, without gradient (0 when their inputs are absent);
    num_tokens: the sum of the loss mask.
    """

    total: torch.Tensor
    kl: torch.Tensor
    ce: torch.Tensor
    num_tokens: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputLossTerms:
    """The numbers of the loss kl_weight * T^2 * KL(teacher || student) + ce_weight * cross entropy; the same for a whole run."""

    vocab_size: int
    """Words; rows of an output weight beyond it are padding and count as logits of -inf."""
    kl_weight: float
    """Factor on the KL term."""
    ce_weight: float
    """Factor on the cross entropy with the targets."""
    temperature: float = 1.0
    """T: both models' logits are divided by it in the KL term."""
    chunk_tokens: int = 1024
    """Tokens whose logits exist at a time."""

    def problems(self) -> list[str]:
        """Everything wrong with these numbers, one line each."""
        found = [f"distill.temperature {self.temperature} must be positive"] if not self.temperature > 0 else []
        if self.chunk_tokens < 1:
            found.append(f"distill.chunk_tokens {self.chunk_tokens} must be at least 1")
        return found


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Every tensor of the loss but the student's; grad_enabled: whether the caller records gradients."""

    targets: torch.Tensor | None
    teacher_hidden: torch.Tensor | None
    teacher_weight: torch.Tensor | None
    loss_mask: torch.Tensor
    terms: OutputLossTerms
    grad_enabled: bool

    def problems(self, student_hidden: torch.Tensor, student_weight: torch.Tensor) -> list[str]:
        """Everything that does not fit together, one line each."""
        found = self.terms.problems()
        for who, hidden, weight in (("student", student_hidden, student_weight), ("teacher", self.teacher_hidden, self.teacher_weight)):
            if (hidden is None) != (weight is None):
                found.append(f"the {who} needs both hidden states and an output weight")
            elif hidden is not None and weight is not None and hidden.shape[1:] != weight.shape[1:]:
                found.append(f"the {who}'s hidden states {list(hidden.shape)} do not fit its output weight {list(weight.shape)}")
        rows = student_weight.shape[0]
        if self.teacher_weight is not None and self.teacher_weight.shape[0] != rows:
            found.append(
                f"the teacher's vocabulary has {self.teacher_weight.shape[0]} rows, the student's {rows}; "
                "distillation needs one vocabulary: use a teacher with the same tokenizer and padding"
            )
        if not 0 < self.terms.vocab_size <= rows:
            found.append(f"model.vocab_size {self.terms.vocab_size} does not fit the {rows} rows of the output layer")
        tensors = {"targets": self.targets, "teacher hidden states": self.teacher_hidden, "loss mask": self.loss_mask}
        found += [
            f"{name}: {tensor.shape[0]} tokens, but the student has {student_hidden.shape[0]}"
            for name, tensor in tensors.items()
            if tensor is not None and tensor.shape[0] != student_hidden.shape[0]
        ]
        if self.terms.kl_weight and self.teacher_hidden is None:
            found.append(f"distill.kl_weight {self.terms.kl_weight} needs a teacher; set it to 0 to train without one")
        if self.terms.ce_weight and self.targets is None:
            found.append(f"distill.ce_weight {self.terms.ce_weight} needs target tokens; set it to 0 to distil only")
        return found


# Products with an output weight in a narrower type: bf16 values are exact in fp32, so widening the weight gives the fp32 logits of what
# is stored. Done block by block, because the whole weight in fp32 would be twice the size of the weight itself.


def _widened(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of `weight` in `dtype` with their place: all of them at once when they have that type already."""
    step = weight.shape[0] if weight.dtype == dtype else WIDENED_WORDS
    for start in range(0, weight.shape[0], step):
        block = slice(start, start + step)
        yield block, weight[block].to(dtype)


def _logits(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """states [tokens, d] times weight [words, d] transposed, in the type of `states`."""
    logits = states.new_empty(states.shape[0], weight.shape[0])
    for block, rows in _widened(weight, states.dtype):
        torch.mm(states, rows.T, out=logits[:, block])
    return logits


def _back_to_states(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """grad [tokens, words] times weight [words, d], in the type of `grad`."""
    return reduce(torch.Tensor.add_, (grad[:, block] @ rows for block, rows in _widened(weight, grad.dtype)))


# The vocabulary is reduced in these three functions and nowhere else: what a vocabulary sharded over ranks has to replace.


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def _sum_over_words(values: torch.Tensor) -> torch.Tensor:
    return values.sum(-1)


def _pick(values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, words[:, None]).squeeze(-1)


def _cross_entropy(
    log_q: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, weight: float, grad: torch.Tensor | None
) -> torch.Tensor:
    """Masked sum of -log q(target); adds weight times its gradient in the logits to `grad`."""
    words = torch.where(mask > 0, targets, 0)  # ids under the mask may be anything, such as -100
    if grad is not None and weight:
        share = (weight * mask)[:, None]
        grad += log_q.exp() * share
        grad.scatter_add_(-1, words[:, None], -share)
    return -(_pick(log_q, words) * mask).sum()


def _distillation(
    log_q: torch.Tensor, log_p: torch.Tensor, mask: torch.Tensor, terms: OutputLossTerms, grad: torch.Tensor | None
) -> torch.Tensor:
    """Masked sum of T^2 KL(p || q), q and p softmaxes of logits / T; adds kl_weight times its gradient in the logits to `grad`."""
    p, t = log_p.exp(), terms.temperature
    if grad is not None and terms.kl_weight:
        # The gradient of KL is (q - p) / T; T^2 keeps its size comparable between temperatures (arXiv 1503.02531, section 2).
        grad += (log_q.exp() - p) * (terms.kl_weight * t * mask)[:, None]
    return t * t * (_sum_over_words(p * (log_p - log_q)) * mask).sum()


class _ChunkedOutputLoss(torch.autograd.Function):
    """Forms the gradients chunk by chunk in forward, and scales them in backward: no logits are computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, inputs: _Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype, terms = _math_dtype(hidden), inputs.terms
        want_hidden, want_weight = (needed and inputs.grad_enabled for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if want_weight else None
        # Padded rows are left out of the product: the same as logits of -inf, without computing them.
        words = weight[: terms.vocab_size]
        teacher_words = None if inputs.teacher_weight is None else inputs.teacher_weight[: terms.vocab_size]
        kl = ce = torch.zeros((), dtype=dtype, device=hidden.device)
        for start in range(0, hidden.shape[0], terms.chunk_tokens):
            rows = slice(start, start + terms.chunk_tokens)
            mask = inputs.loss_mask[rows].to(dtype)
            states = _masked(hidden[rows], mask)
            logits = _logits(states, words)
            grad = torch.zeros_like(logits) if want_hidden or want_weight else None
            log_q = _log_softmax(logits)
            if inputs.targets is not None:
                ce = ce + _cross_entropy(log_q, inputs.targets[rows], mask, terms.ce_weight, grad)
            if inputs.teacher_hidden is not None and teacher_words is not None:
                teacher_logits = _logits(_masked(inputs.teacher_hidden[rows], mask), teacher_words)
                log_p = _log_softmax(teacher_logits / terms.temperature)
                log_q = log_q if terms.temperature == 1.0 else _log_softmax(logits / terms.temperature)
                kl = kl + _distillation(log_q, log_p, mask, terms, grad)
            if grad is not None and grad_hidden is not None:
                grad_hidden[rows] = _back_to_states(grad, words)
            if grad is not None and grad_weight is not None:
                grad_weight[: terms.vocab_size].addmm_(grad.T, states)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(kl, ce)
        return terms.kl_weight * kl + terms.ce_weight * ce, kl, ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        scale = grad_outputs[0]
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else (grad_hidden * scale).to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * scale).to(ctx.weight_dtype),
            None,
        )


def _math_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _masked(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Hidden states with masked tokens zeroed, so that not even a NaN under the mask reaches a sum."""
    return torch.where(mask[:, None] > 0, hidden.to(mask.dtype), 0)


def chunked_output_loss(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    targets: torch.Tensor | None,
    teacher_hidden: torch.Tensor | None,
    teacher_weight: torch.Tensor | None,
    loss_mask: torch.Tensor,
    terms: OutputLossTerms,
) -> OutputLoss:
    """The loss of `terms`, summed over tokens with weight `loss_mask` [tokens].

    student_hidden [tokens, d], student_weight [rows, d]: differentiable; a view's gradient reaches its base as usual.
    targets [tokens]: word ids below vocab_size, any value where the mask is 0. teacher_hidden [tokens, D], teacher_weight [rows, D]:
    no gradient. A term whose inputs are given is reported even at weight 0. The mathematics is fp32 (fp64 for fp64 inputs).
    Raises ConfigError when vocabularies, shapes or weights do not fit together.
    """
    inputs = _Inputs(targets, teacher_hidden, teacher_weight, loss_mask, terms, torch.is_grad_enabled())
    raise_all(ConfigError, inputs.problems(student_hidden, student_weight), "output loss")
    total, kl, ce = _ChunkedOutputLoss.apply(student_hidden, student_weight, inputs)
    return OutputLoss(total, kl, ce, loss_mask.to(total.dtype).sum())


def reference_output_loss(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    targets: torch.Tensor | None,
    teacher_hidden: torch.Tensor | None,
    teacher_weight: torch.Tensor | None,
    loss_mask: torch.Tensor,
    terms: OutputLossTerms,
) -> OutputLoss:
    """The same loss from whole logits by torch's own functions and autograd: what `chunked_output_loss` is tested against."""
    dtype = _math_dtype(student_hidden)
    mask = loss_mask.to(dtype)

    def logits_of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = _masked(hidden, mask) @ weight.to(dtype).T
        padding = torch.arange(weight.shape[0], device=weight.device) >= terms.vocab_size
        return logits.masked_fill(padding, torch.finfo(dtype).min)

    logits = logits_of(student_hidden, student_weight)
    kl = ce = logits.new_zeros(())
    if targets is not None:
        ce = (functional.cross_entropy(logits, torch.where(mask > 0, targets, 0), reduction="none") * mask).sum()
    if teacher_hidden is not None and teacher_weight is not None:
        log_p = (logits_of(teacher_hidden, teacher_weight).detach() / terms.temperature).log_softmax(-1)
        log_q = (logits / terms.temperature).log_softmax(-1)
        per_token = functional.kl_div(log_q, log_p, reduction="none", log_target=True)[:, : terms.vocab_size].sum(-1)
        kl = terms.temperature**2 * (per_token * mask).sum()
    return OutputLoss(terms.kl_weight * kl + terms.ce_weight * ce, kl.detach(), ce.detach(), mask.sum())
