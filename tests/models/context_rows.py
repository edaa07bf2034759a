"""A packed row of awkward documents, and a model's pass over what a context-parallel rank holds of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_elastic.models.context import context_indices
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import canonical_name, packed_documents

LENGTHS = (7, 1, 13, 30, 5)
"""Of the documents: with two ranks (chunks of 14 tokens) boundaries fall inside chunks, and one document is longer than two chunks."""
TOTAL = sum(LENGTHS)
VOCAB = 131


def share_logits(model: Any, parallel: ParallelContext, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Logits [T / C, vocabulary] of this rank's tokens of a fixed row of documents of these lengths, in the rank's order."""
    total = sum(lengths)
    tokens = torch.randint(0, VOCAB, (1, total), generator=torch.Generator().manual_seed(11))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    mine = context_indices(total, parallel.context_rank, parallel.context)
    embedded = model.embedding(input_ids=tokens[:, mine], position_ids=positions[:, mine])
    rotary = None
    if model.position_embedding_type == "rope":
        angles = model.rotary_pos_emb(max(lengths), packed_seq=True)
        rotary = angles if parallel.context == 1 else angles[positions[0, mine]]
    boundaries = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = packed_documents(boundaries, max(lengths), total, context=parallel.context)
    hidden = model.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else model.output_layer.weight
    return hidden[:, 0] @ weight.narrow(1, 0, hidden.shape[-1]).t()


def share_gradients(
    model: Any, parallel: ParallelContext, leaves: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's logits, and the gradient of every parameter and leaf of a fixed loss, summed over the context-parallel group."""
    model.zero_grad()
    logits = share_logits(model, parallel)
    weight = torch.randn(TOTAL, logits.shape[-1], generator=torch.Generator().manual_seed(3))
    (logits.tanh() * weight[context_indices(TOTAL, parallel.context_rank, parallel.context)]).sum().backward()
    named = {canonical_name(name): p for name, p in model.named_parameters()} | (leaves or {})
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=parallel.cp)
    return logits.detach(), gradients
