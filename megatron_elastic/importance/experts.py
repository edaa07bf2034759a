"""What routed experts do: who is chosen, with what gate, and how much of its output reaches the residual stream.

REAP (Lasby et al., arXiv 2510.13999): the mean over an expert's tokens of gate x L2 norm of its unweighted output. Tokens and gates are the
model's own router's: its score function, selection bias, groups and renormalisation. (Gates derived again by a softmax of the logits, as
the public code does, are other gates and other tokens for a router of sigmoids.) megatron multiplies an expert's activations with the gate
before the second linear, which has no bias; so the norm of what that linear gives *is* gate x norm of the unweighted output.

The tokens of an expert come from all ranks that share the experts, so the rows they belong to travel the way they do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_elastic.errors import DataError, UnsupportedError
from megatron_elastic.importance.criteria import ExpertCriterion
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape

LEAST_TOKENS = 32
"""Tokens of an expert below which its score is little more than chance; said in a warning."""


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """What was counted, for each layer with experts, in fp64 [experts].

    saliency: sums of gate x norm; tokens: how often each was chosen; gates: sums of its gates. total: tokens of the text.
    """

    saliency: Mapping[int, Tensor]
    tokens: Mapping[int, Tensor]
    gates: Mapping[int, Tensor]
    total: int

    def scores(self, criterion: ExpertCriterion) -> dict[int | None, Tensor]:
        """Layer -> scores [experts]. An expert without tokens scores 0. Not for `random`."""
        if criterion is ExpertCriterion.REAP:
            return {layer: sums / self.tokens[layer].clamp(min=1) for layer, sums in self.saliency.items()}
        sums = self.tokens if criterion is ExpertCriterion.FREQUENCY else self.gates
        return {layer: values / self.total for layer, values in sums.items()}

    def warnings(self, least: int = LEAST_TOKENS) -> list[str]:
        """`rare_experts` of what was counted."""
        return rare_experts(self.tokens, self.total, least)


def rare_experts(tokens: Mapping[int, Tensor], total: int, least: int = LEAST_TOKENS) -> list[str]:
    """One line for each layer with experts that fewer than `least` of `total` tokens chose: which, and how many tokens each had.

    tokens: layer -> how often each was chosen [experts].
    """
    found = []
    for layer, chosen in tokens.items():
        counts = chosen.long().tolist()
        rare = {expert: count for expert, count in enumerate(counts) if count < least}
        if rare:
            shown = ", ".join(f"expert {expert}: {count}" for expert, count in sorted(rare.items(), key=lambda item: item[1])[:6])
            more = f" and {len(rare) - 6} more" if len(rare) > 6 else ""
            found.append(
                f"layer {layer}: {len(rare)} of {len(counts)} experts were chosen by fewer than {least} of {total} tokens "
                f"({shown}{more}); their order is chance, rank on more --tokens"
            )
    return found


class ExpertObserver:
    """Counts what the experts of this rank do. shape: of the model. Raises UnsupportedError for experts whose output is not gate x output."""

    def __init__(self, shape: ModelShape, parallel: ParallelContext, device: torch.device | None = None) -> None:
        self._parallel, self._layers = parallel, shape.layers_with("moe")
        sizes = [shape.at(layer).moe for layer in self._layers]
        most = max((size.experts for size in sizes if size is not None and isinstance(size.experts, int)), default=0)
        self._experts = {layer: size.experts for layer, size in zip(self._layers, sizes, strict=True) if size is not None}
        self._sums = torch.zeros(len(self._layers), 3, most, dtype=torch.float64, device=device)
        self._rows: dict[int, list[Tensor]] = {}

    @staticmethod
    def check(moe: Any, layer: int) -> None:
        """Raise UnsupportedError when the second linear's output is not gate x the expert's output."""
        if moe.config.moe_apply_probs_on_input or moe.config.add_bias_linear:
            raise UnsupportedError(
                f"layer {layer}: moe_apply_probs_on_input and biases of experts hide the unweighted output that REAP is made of; "
                "rank the model without them"
            )

    def first_expert(self, layer: int) -> int:
        """Number of the first expert of `layer` on this rank."""
        experts = self._experts[layer]
        assert isinstance(experts, int)
        return self._parallel.expert_rank * (experts // self._parallel.expert)

    def routed(self, moe: Any, layer: int, probs: Tensor, routing_map: Tensor, rows: Tensor) -> None:
        """Observe a router's answer: gates and map [tokens, experts] for the rows [tokens] of this rank's tokens (-1: left out). A collective."""
        sent = copy.copy(moe.token_dispatcher)  # what it remembers of this trip must not reach the way back of the hidden states
        marks = (rows + 1).float().view(-1, 1, 1)
        with torch.no_grad():
            marks, gates = sent.dispatch_preprocess(marks, routing_map, probs.detach())
            marks, gates = sent.token_dispatch(marks, gates)
            marks, per_expert, gates = sent.dispatch_postprocess(marks, gates)
        counts = per_expert.tolist()
        self._rows[layer] = list((marks.view(-1).round().long() - 1).split(counts))
        if self._parallel.expert_tensor_rank == 0:  # the others have the same tokens
            sums = self._sums[self._layers.index(layer)]
            for number, (mine, gate) in enumerate(zip(self._rows[layer], gates.view(-1).split(counts), strict=True)):
                expert, counted = self.first_expert(layer) + number, mine >= 0
                sums[1, expert] += counted.sum()
                sums[2, expert] += (gate.double() * counted).sum()

    def rows_of(self, layer: int, local_expert: int) -> Tensor:
        """The row of each token [tokens] of an expert of this rank, in the order in which they reach it."""
        return self._rows[layer][local_expert]

    def answered(self, layer: int, local_expert: int, output: Tensor) -> None:
        """Observe the second linear's output [tokens, hidden]; a share of it where an expert is divided over ranks. A collective of those."""
        whole = output.detach().float()
        if self._parallel.expert_tensor > 1:
            whole = whole.clone()
            dist.all_reduce(whole, group=self._parallel.groups.expt_tp)
        if self._parallel.expert_tensor_rank == 0:
            norms = whole.view(-1, whole.shape[-1]).norm(dim=-1).double()
            expert = self.first_expert(layer) + local_expert
            self._sums[self._layers.index(layer), 0, expert] += (norms * (self.rows_of(layer, local_expert) >= 0)).sum()

    def record(self, total: int) -> ExpertRecord:
        """What all ranks observed. A collective. total: tokens that count. Raises DataError naming the first layer with NaN outputs."""
        dist.all_reduce(self._sums, group=self._parallel.world)
        sums = self._sums.cpu()
        for layer, values in zip(self._layers, sums, strict=True):
            if not bool(torch.isfinite(values).all()):
                raise DataError(
                    f"layer {layer}, experts: their outputs are NaN or infinite; look at the model with `megatron-elastic eval`"
                )

        def named(number: int) -> dict[int, Tensor]:
            return {layer: sums[n, number, : self._experts[layer]].clone() for n, layer in enumerate(self._layers)}

        return ExpertRecord(named(0), named(1), named(2), total)
