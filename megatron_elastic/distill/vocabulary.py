"""The words one rank of a tensor-parallel group holds, and the reductions over the whole vocabulary.

Every sum or maximum over words is here and nowhere else. Logits stay where they were computed: only numbers per token travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's real words: ids `first` to `first + words - 1` of a vocabulary of `size`; rows of padding are not counted.

    words may be 0, when a rank's rows are all padding. group: who holds the other words; None when nobody does.
    """

    size: int
    first: int
    words: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, size: int, rows: int, group: dist.ProcessGroup | None) -> VocabularyShard:
        """The words of this rank's `rows` of an output weight whose rows are divided over `group` in rank order."""
        if group is None or group.size() == 1:
            return cls(size, 0, size, None)
        first = group.rank() * rows
        return cls(size, first, min(max(size - first, 0), rows), group)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the group's ranks, in place; the same bits on every rank."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def log_softmax_(self, *logits: torch.Tensor) -> None:
        """Log softmax over the whole vocabulary, in place, of tensors [tokens, words] that share two all-reduces of a number per token each."""
        tops = torch.stack([_top(values) for values in logits])
        if self.group is not None:
            dist.all_reduce(tops, dist.ReduceOp.MAX, self.group)
        for values, top in zip(logits, tops, strict=True):
            values.sub_(top[:, None])
        sums = self.sum(torch.stack([values.exp().sum(-1) for values in logits]))
        for values, log_sum in zip(logits, sums.log(), strict=True):
            values.sub_(log_sum[:, None])

    def locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Place of each word id [tokens] in this rank's logits (0 for another rank's words), and whether it is here.

        An id outside the vocabulary stops every rank alike with torch's own index error: a look-up table is what costs no synchronisation.
        """
        places = torch.arange(-self.first, self.size - self.first, device=ids.device).index_select(0, ids)
        here = (places >= 0) & (places < self.words)
        return torch.where(here, places, 0), here


def _top(values: torch.Tensor) -> torch.Tensor:
    """Largest logit of each token; -inf where this rank holds no word."""
    return values.amax(-1) if values.shape[-1] else values.new_full(values.shape[:1], -torch.inf)
