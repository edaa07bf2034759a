"""Which experts a token goes to and with what gates, when experts and ranks have weights: pure functions of tensors.

Two weights bend megatron's rule (`topk_routing_with_score_function`), each a number in [0, 1] per component, 0 or 1 for a hard plan:

- expert weights w [experts]: a softmax router sees logits + log w; a sigmoid router selects by score + bias + log w and its gates are
  score x w. An expert of weight 0 is never chosen.
- rank weights v [k]: the weight of the j-th chosen expert in selection order (highest first, v_1 = 1). The gates of later ranks fade
  with v; a rank of weight 0 sends its token nowhere.

With 0/1 weights the result is that of the small model's own router in the parent's expert numbers; without weights it is megatron's, bit
for bit. A weight of zero has no gradient, here and in everything downstream: nothing was computed that could tell its worth.
Scores and gates are fp32 whatever the logits are (fp64 stays fp64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRule:
    """How a model routes, in megatron's terms."""

    topk: int
    """Experts chosen for each token."""
    score: Literal["softmax", "sigmoid"]
    """Score function."""
    pre_softmax: bool = False
    """Softmax over all experts before the choice (gates are not renormalised), rather than over the chosen after it."""
    groups: int | None = None
    """Equal groups of experts, for group-limited routing."""
    group_topk: int | None = None
    """Groups a token may use; None for no limit."""
    scaling_factor: float | None = None
    """Multiplies the gates; None for 1."""


def route(
    logits: torch.Tensor,
    rule: RoutingRule,
    *,
    expert_bias: torch.Tensor | None = None,
    expert_weights: torch.Tensor | None = None,
    rank_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates [tokens, experts] in the logits' dtype, and who goes where [tokens, experts] as booleans.

    logits: [..., experts], leading dims flattened; expert_bias: [experts], moves the choice of a sigmoid router and not its gates;
    expert_weights: [experts]; rank_weights: [rule.topk]. None for all ones. Gradients reach logits and both weights.
    """
    flat = _wide(logits)
    scores, wanted = _scores(flat, rule, expert_weights)
    with torch.no_grad():
        if rule.score == "sigmoid" and expert_bias is not None:
            wanted = wanted + expert_bias
        if expert_weights is not None:  # a softmax of very negative logits is 0 for live experts too
            wanted = wanted.masked_fill(~is_live(expert_weights), -torch.inf)
        chosen = _choose(wanted, rule)
        alive = _alive(wanted, chosen, rank_weights)
    gates = _gates(scores.gather(-1, chosen), rule, rank_weights)
    probs = _scattered(gates.masked_fill(~alive, 0.0).to(logits.dtype), chosen, flat)
    return probs, _scattered(alive, chosen, flat)


def balance_terms(
    logits: torch.Tensor,
    rule: RoutingRule,
    *,
    expert_weights: torch.Tensor | None = None,
    rank_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What megatron's load-balancing losses are made of: normalised scores and load, both [tokens, experts] in fp32.

    As `compute_routing_scores_for_aux_loss`: neither bias nor groups take part. The load counts a token's live ranks, gives dropped experts
    the mean of the live ones (`fill_dropped`), and adds up to rule.topk for each token. Megatron's loss E/(k T^2) sum_e P_e f_e over all
    E experts and k ranks, fed with these, is then the small model's over its own experts and ranks: dropped experts have P_e = 0. The load has
    no gradient, as megatron's counts have none.
    """
    flat = _wide(logits)
    if rule.score == "softmax":
        scores = torch.softmax(masked_logits(flat, expert_weights), -1)
    else:
        weighted = torch.sigmoid(flat) if expert_weights is None else torch.sigmoid(flat) * expert_weights
        scores = weighted / (weighted.sum(-1, keepdim=True) + 1e-20)
    with torch.no_grad():
        wanted = scores if expert_weights is None else scores.masked_fill(~is_live(expert_weights), -torch.inf)
        chosen = wanted.topk(rule.topk, -1).indices
        shares = torch.ones_like(chosen, dtype=flat.dtype)
        if rank_weights is not None:
            shares = shares * rank_weights
        load = _scattered(shares.masked_fill(wanted.gather(-1, chosen) == -torch.inf, 0.0), chosen, flat)
        if expert_weights is not None:
            load = fill_dropped(load, expert_weights)
        return scores, load * (rule.topk / load.sum(-1, keepdim=True))


def fill_dropped(counts: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
    """Counts [..., experts] in which what an expert lacks of weight 1 is filled up with the mean count of a live expert."""
    return counts + (1 - expert_weights) * counts.sum(-1, keepdim=True) / expert_weights.sum()


def live_deviations(counts: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
    """How many tokens each expert [experts] has above its fair share among the live ones, in whole tokens that add up to 0.

    Megatron moves an expert's bias by the sign of (mean - count) over a step's microbatches, and a sign knows no rounding error: dropped
    experts must have exactly 0 and the mean must be exactly 0. So the tokens are dealt over the live experts as integers, in proportion to
    their weights; those with the largest remainders get one more.
    """
    total, weights = counts.sum().double(), expert_weights.double()
    fair = total * weights / weights.sum()
    whole = fair.floor()
    by_remainder = (fair - whole).argsort(descending=True, stable=True)
    rank = torch.empty_like(by_remainder).scatter(0, by_remainder, torch.arange(len(fair), device=fair.device))
    return (counts - whole - (rank < total - whole.sum()).double()).float()


def is_live(weights: torch.Tensor) -> torch.Tensor:
    """Which components are not dropped. Below the smallest normal number the slope of the logarithm is infinite: that is dropped too."""
    return weights >= torch.finfo(weights.dtype).tiny


def masked_logits(logits: torch.Tensor, expert_weights: torch.Tensor | None) -> torch.Tensor:
    """logits [..., experts] + log w: minus infinity for a dropped expert."""
    return logits if expert_weights is None else logits + _log(expert_weights)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """[tokens, experts] in fp32, or fp64 where the logits are."""
    flat = logits.reshape(-1, logits.shape[-1])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def _kept(weights: torch.Tensor) -> torch.Tensor:
    """The weights, exactly 0 and without gradient where a component is dropped."""
    return torch.where(is_live(weights), weights, 0.0)


def _log(weights: torch.Tensor) -> torch.Tensor:
    """log w; where, then log: minus infinity for a dropped component and never a NaN gradient."""
    live = is_live(weights)
    return torch.where(live, torch.where(live, weights, 1.0).log(), -torch.inf)


def _scores(flat: torch.Tensor, rule: RoutingRule, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What gates are made of and what experts are chosen by, both [tokens, experts]; the latter without gradient."""
    if rule.score == "softmax":
        scores = masked_logits(flat, weights)
        scores = torch.softmax(scores, -1) if rule.pre_softmax else scores
        return scores, scores.detach()
    scores = torch.sigmoid(flat)
    if weights is None:
        return scores, scores.detach()
    return scores * _kept(weights), scores.detach() + _log(weights.detach())


def _choose(wanted: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """The k experts of each token [tokens, k], the most wanted first; `wanted` is minus infinity for dropped experts.

    Group-limited (megatron's `group_limited_topk`): only the group_topk groups with the largest sums of their best k/group_topk experts
    compete. A dropped expert takes no part in a sum, as long as each group keeps that many.
    """
    if rule.groups and rule.group_topk:
        grouped = wanted.unflatten(-1, (rule.groups, -1))
        sums = grouped.topk(rule.topk // rule.group_topk, -1).values.sum(-1)
        allowed = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, sums.topk(rule.group_topk, -1).indices, value=True)
        wanted = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    return wanted.topk(rule.topk, -1).indices


def _alive(wanted: torch.Tensor, chosen: torch.Tensor, ranks: torch.Tensor | None) -> torch.Tensor:
    """Which of the chosen [tokens, k] are real: not a dropped expert (fewer than k are left), not a dropped rank."""
    real = wanted.gather(-1, chosen) != -torch.inf  # what is not a number goes on, so that the loss shows it
    return real if ranks is None else real & is_live(ranks)


def _gates(picked: torch.Tensor, rule: RoutingRule, ranks: torch.Tensor | None) -> torch.Tensor:
    """Gates [tokens, k] from the scores of the chosen in selection order."""
    if rule.score == "softmax" and not rule.pre_softmax:
        gates = torch.softmax(picked if ranks is None else picked + _log(ranks), -1)
    else:
        gates = picked if ranks is None else picked * _kept(ranks)
        if rule.score == "sigmoid" and rule.topk > 1:
            total = gates.sum(-1, keepdim=True) + 1e-20
            if ranks is not None:
                # A model that chooses one expert does not renormalise; v_2 is how much of the decision chooses more.
                several = _kept(ranks)[1]
                total = (1 - several) + several * total
            gates = gates / total
    return gates * rule.scaling_factor if rule.scaling_factor else gates


def _scattered(values: torch.Tensor, chosen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values [tokens, k] at the chosen experts of a zero tensor [tokens, experts]."""
    return torch.zeros(like.shape, dtype=values.dtype, device=like.device).scatter(-1, chosen, values)
