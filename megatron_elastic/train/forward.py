"""From a microbatch to hidden states, and from hidden states to losses."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_elastic.distill.losses import OutputLoss, OutputLossTerms, chunked_output_loss
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.recipe import DistillConfig
from megatron_elastic.train.data import MicroBatch, packed_seq_params


def hidden_states(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Hidden states [tokens of this rank, 1, kept hidden] after one part of a hybrid or GPT model (not wrapped) on a packed microbatch.

    The first part reads the batch, the others what megatron's schedule gave them. Documents do not see each other, and rotary positions
    restart at each.
    """
    embedded = model.embedding(input_ids=batch.tokens, position_ids=batch.position_ids) if model.pre_process else None
    rotary = _rotary(model, batch) if model.position_embedding_type == "rope" else None
    return model.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed_seq_params(batch))


def _rotary(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Angles [positions, 1, 1, channels] of the longest document, which megatron-core deals out anew to every document of a packed batch.

    With context parallelism those of this rank's tokens: megatron-core would take each document for one that is itself cut over the ranks.
    """
    angles = model.rotary_pos_emb(batch.max_seqlen, packed_seq=True)
    return angles if batch.context == 1 else angles[batch.position_ids[0]]


def output_weight(model: Any) -> torch.Tensor:
    """The output projection [vocabulary rows, hidden]."""
    return model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else model.output_layer.weight


def loss_terms(vocab_size: int, distill: DistillConfig, *, elastic: bool) -> OutputLossTerms:
    """The loss of a stage: the recipe's when it is elastic, cross-entropy alone for a parent."""
    return OutputLossTerms(
        vocab_size=vocab_size,
        kl_weight=distill.kl_weight if elastic else 0.0,
        ce_weight=distill.ce_weight if elastic else 1.0,
        temperature=distill.temperature,
        chunk_tokens=distill.chunk_tokens,
    )


def batch_loss(
    model: Any,
    hidden: torch.Tensor,
    batch: MicroBatch,
    terms: OutputLossTerms,
    teacher: Any | None,
    teacher_hidden: torch.Tensor | None,
    parallel: ParallelContext,
) -> OutputLoss:
    """Loss sums of one microbatch over this rank's tokens, equal on all tensor-parallel ranks.

    model, teacher: the parts with an output layer. hidden [tokens, 1, kept hidden]: may be narrower than the model (slice mode); with
    sequence parallelism this rank's tokens of it.
    """
    states = _whole_rows(hidden, parallel)
    return chunked_output_loss(
        states,
        output_weight(model).narrow(1, 0, states.shape[1]),
        batch.labels[0],
        None if teacher_hidden is None else _whole_rows(teacher_hidden, parallel),
        None if teacher is None else output_weight(teacher),
        batch.loss_mask[0],
        terms,
        group=parallel.tp,
    )


def _whole_rows(hidden: torch.Tensor, parallel: ParallelContext) -> torch.Tensor:
    """[tokens, hidden] of all tokens that a tensor-parallel group has; the loss gives every rank the whole gradient."""
    if parallel.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=parallel.tp)
    return hidden[:, 0]
