"""From a microbatch to hidden states, and from hidden states to losses."""

from __future__ import annotations

from typing import Any

import torch

from megatron_elastic.distill.losses import OutputLoss, OutputLossTerms, chunked_output_loss
from megatron_elastic.recipe import DistillConfig
from megatron_elastic.train.data import MicroBatch, packed_seq_params


def hidden_states(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Final hidden states [tokens, 1, kept hidden] of a hybrid or GPT model (not wrapped) on a packed microbatch.

    Documents do not see each other, and rotary positions restart at each.
    """
    embedded = model.embedding(input_ids=batch.tokens, position_ids=batch.position_ids) if model.pre_process else None
    # Angles of the longest document's positions: megatron-core deals them out anew to every document of a packed batch.
    rotary = model.rotary_pos_emb(batch.max_seqlen, packed_seq=True) if model.position_embedding_type == "rope" else None
    return model.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed_seq_params(batch))


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
    model: Any, hidden: torch.Tensor, batch: MicroBatch, terms: OutputLossTerms, teacher: Any | None, teacher_hidden: torch.Tensor | None
) -> OutputLoss:
    """Loss sums of one microbatch; `hidden` may be narrower than the model (slice mode)."""
    states = hidden[:, 0]
    return chunked_output_loss(
        states,
        output_weight(model).narrow(1, 0, states.shape[1]),
        batch.labels[0],
        None if teacher_hidden is None else teacher_hidden[:, 0],
        None if teacher is None else output_weight(teacher),
        batch.loss_mask[0],
        terms,
    )
