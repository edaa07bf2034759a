"""Distillation and language-model losses, fused with the output projection and chunked over tokens.

Only [chunk, vocabulary] logits exist at a time, for student and teacher; gradients are formed in the same pass over the chunks, so
nothing of size [tokens, vocabulary] is kept for the backward. Under tensor parallelism a rank computes the logits of its own words only.
Losses are sums over tokens: the caller divides by the number of tokens of the global batch, never by a micro batch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron_elastic.distill.vocabulary import VocabularyShard
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
    """Every input of the loss but the student's tensors; grad_enabled: whether the caller records gradients."""

    targets: torch.Tensor | None
    teacher_hidden: torch.Tensor | None
    teacher_weight: torch.Tensor | None
    loss_mask: torch.Tensor
    terms: OutputLossTerms
    group: dist.ProcessGroup | None
    grad_enabled: bool

    def problems(self, student_hidden: torch.Tensor, student_weight: torch.Tensor) -> list[str]:
        """Everything that does not fit together, one line each."""
        found = self.terms.problems()
        for who, hidden, weight in (("student", student_hidden, student_weight), ("teacher", self.teacher_hidden, self.teacher_weight)):
            if (hidden is None) != (weight is None):
                found.append(f"the {who} needs both hidden states and an output weight")
            elif hidden is not None and weight is not None and hidden.shape[1:] != weight.shape[1:]:
                found.append(f"the {who}'s hidden states {list(hidden.shape)} do not fit its output weight {list(weight.shape)}")
        found += self._vocabulary_problems(student_weight)
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

    def _vocabulary_problems(self, student_weight: torch.Tensor) -> list[str]:
        """Why the rows of the output weights are not this rank's share of one vocabulary, one line each."""
        found, rows, words = [], student_weight.shape[0], self.terms.vocab_size
        ranks = 1 if self.group is None else self.group.size()
        each = "" if ranks == 1 else f" on each of {ranks} ranks"
        if self.teacher_weight is not None and self.teacher_weight.shape[0] != rows:
            found.append(
                f"the teacher's vocabulary has {self.teacher_weight.shape[0]} rows{each}, the student's {rows}; "
                "distillation needs one vocabulary: use a teacher with the same tokenizer and padding, divided over the same ranks"
            )
        if not 0 < words <= rows * ranks:
            found.append(f"model.vocab_size {words} does not fit the {rows} rows of the output layer{each}")
        # One rank's rows hold every word: either the other ranks have nothing but padding, or each has the whole weight.
        elif self.group is not None and ranks > 1 and words <= rows and _same_on_all(student_weight[0], self.group):
            found.append(
                f"every one of the {ranks} tensor-parallel ranks holds the whole output weight of {rows} rows; "
                "the loss needs each rank's own share: pass the weight as it is divided, not gathered"
            )
        return found


def _same_on_all(values: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether every rank of the group has these numbers; a collective."""
    extremes = torch.stack([values.detach(), -values.detach()])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    return torch.equal(extremes[0], -extremes[1])


# Products with an output weight in a narrower type: bf16 values are exact in fp32, so widening the weight gives the fp32 logits of what
# is stored. Done block by block, because the whole weight in fp32 would be twice the size of the weight itself.


def _widened(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of `weight` in `dtype` with their place: all of them at once when they have that type already."""
    step = max(weight.shape[0], 1) if weight.dtype == dtype else WIDENED_WORDS
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
    if weight.shape[0] == 0:
        return grad.new_zeros(grad.shape[0], weight.shape[1])
    return reduce(torch.Tensor.add_, (grad[:, block] @ rows for block, rows in _widened(weight, grad.dtype)))


# The two losses below are this rank's words' part of a sum over the vocabulary; the gradients they add are those of the whole loss in
# this rank's logits, because log_q and log_p are normalised over all words.


def _cross_entropy(
    log_q: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, weight: float, shard: VocabularyShard, grad: torch.Tensor | None
) -> torch.Tensor:
    """Masked sum of -log q(target) over the targets of this rank; adds weight times its gradient in the logits to `grad`."""
    places, here = shard.locate(torch.where(mask > 0, targets, 0))  # ids under the mask may be anything, such as -100
    if shard.words == 0:
        return mask.new_zeros(())
    mine = torch.where(here, mask, 0)
    if grad is not None and weight:
        grad += log_q.exp() * (weight * mask)[:, None]
        grad.scatter_add_(-1, places[:, None], -(weight * mine)[:, None])
    return -(log_q.gather(-1, places[:, None]).squeeze(-1) * mine).sum()


def _distillation(
    log_q: torch.Tensor, log_p: torch.Tensor, mask: torch.Tensor, terms: OutputLossTerms, grad: torch.Tensor | None
) -> torch.Tensor:
    """Masked sum over this rank's words of T^2 KL(p || q), q and p softmaxes of logits / T; adds kl_weight times its gradient to `grad`."""
    p, t = log_p.exp(), terms.temperature
    if grad is not None and terms.kl_weight:
        # The gradient of KL is (q - p) / T; T^2 keeps its size comparable between temperatures (arXiv 1503.02531, section 2).
        grad += (log_q.exp() - p) * (terms.kl_weight * t * mask)[:, None]
    return t * t * ((p * (log_p - log_q)).sum(-1) * mask).sum()


def _chunk_losses(
    logits: torch.Tensor, rows: slice, mask: torch.Tensor, inputs: _Inputs, shard: VocabularyShard, grad: torch.Tensor | None
) -> torch.Tensor:
    """This rank's words' part of (kl, ce) of the tokens `rows`, 0 without their inputs. Overwrites `logits`, adds to `grad` [tokens, words]."""
    terms = inputs.terms
    kl = ce = mask.new_zeros(())
    log_q = log_p = None
    normalised = [logits]
    if inputs.teacher_hidden is not None and inputs.teacher_weight is not None:
        log_p = _logits(_masked(inputs.teacher_hidden[rows], mask), inputs.teacher_weight[: shard.words]).div_(terms.temperature)
        log_q = logits if terms.temperature == 1.0 else logits / terms.temperature
        normalised += [log_p] if log_q is logits else [log_p, log_q]
    shard.log_softmax_(*normalised)  # from here on, `logits` are log probabilities
    if inputs.targets is not None:
        ce = _cross_entropy(logits, inputs.targets[rows], mask, terms.ce_weight, shard, grad)
    if log_q is not None and log_p is not None:
        kl = _distillation(log_q, log_p, mask, terms, grad)
    return torch.stack([kl, ce])


class _ChunkedOutputLoss(torch.autograd.Function):
    """Forms the gradients chunk by chunk in forward, and scales them in backward: no logits are computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, inputs: _Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype, terms = _math_dtype(hidden), inputs.terms
        want_hidden, want_weight = (needed and inputs.grad_enabled for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if want_weight else None
        # Padded rows are left out of the product: the same as logits of -inf, without computing them.
        shard = VocabularyShard.of(terms.vocab_size, weight.shape[0], inputs.group)
        words = weight[: shard.words]
        sums = torch.zeros(2, dtype=dtype, device=hidden.device)
        for start in range(0, hidden.shape[0], terms.chunk_tokens):
            rows = slice(start, start + terms.chunk_tokens)
            mask = inputs.loss_mask[rows].to(dtype)
            states = _masked(hidden[rows], mask)
            logits = _logits(states, words)
            grad = torch.zeros_like(logits) if want_hidden or want_weight else None
            sums += _chunk_losses(logits, rows, mask, inputs, shard, grad)
            if grad is not None and grad_hidden is not None:
                grad_hidden[rows] = _back_to_states(grad, words)
            if grad is not None and grad_weight is not None:
                grad_weight[: shard.words].addmm_(grad.T, states)
        if grad_hidden is not None:
            shard.sum(grad_hidden)  # each rank has its own words' part
        kl, ce = (value.clone() for value in shard.sum(sums))
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
    *,
    group: dist.ProcessGroup | None = None,
) -> OutputLoss:
    """The loss of `terms`, summed over tokens with weight `loss_mask` [tokens].

    student_hidden [tokens, d], student_weight [rows, d]: differentiable; a view's gradient reaches its base as usual.
    targets [tokens]: word ids below vocab_size, any value where the mask is 0. teacher_hidden [tokens, D], teacher_weight [rows, D]:
    no gradient. A term whose inputs are given is reported even at weight 0. The mathematics is fp32 (fp64 for fp64 inputs).

    group: the tensor-parallel ranks; with more than one, the weights are this rank's rows, in rank order, of the padded output weight
    (NVIDIA/Megatron-LM#7452: a whole weight there adds log(ranks) to the loss and is refused), and everything else is whole and the
    same on every rank, ids included. The results are whole and the same on every rank, and so is the gradient of student_hidden: it is
    summed over the group here, once for all tokens in the type of student_hidden. The caller must not sum it again, neither by
    copy_to_tensor_model_parallel_region nor by a gather over the sequence whose backward sums instead of splitting: gradients that are
    as many times too large as there are ranks show in no loss (NVIDIA-NeMo/Automodel#3776).

    Raises ConfigError when vocabularies, shapes or weights do not fit together.
    """
    inputs = _Inputs(targets, teacher_hidden, teacher_weight, loss_mask, terms, group, torch.is_grad_enabled())
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
