"""Routing with expert and rank weights: 0/1 weights are the small model's own router, soft ones have true gradients, zeros are never NaN.

The small model is megatron's `topk_routing_with_score_function` on the kept experts' logits, so this file holds for both releases.
Run: pytest tests/elastic/test_routing.py
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
)

from megatron_elastic.elastic.routing import RoutingRule, balance_terms, fill_dropped, live_deviations, masked_logits, route

EXPERTS, GROUPS, TOKENS = 12, 3, 57
KEPT = {3: [0, 1, 2, 4, 5, 6, 8, 9, 10], 2: [0, 1, 4, 5, 8, 9]}
"""Experts kept in each of the groups -> their numbers: a prefix of each group."""
SCORES = {
    "post-softmax": {"score": "softmax"},
    "pre-softmax": {"score": "softmax", "pre_softmax": True},
    "sigmoid": {"score": "sigmoid"},
}
LIMITS = {"free": {}, "groups": {"groups": GROUPS, "group_topk": 2}}
RULES = {
    f"{score}-{limit}-{scaling}": RoutingRule(topk=4, scaling_factor=scaling, **SCORES[score], **LIMITS[limit])
    for score, limit, scaling in itertools.product(SCORES, LIMITS, (None, 2.5))
}

HARD_CASES = [
    (name, topk, per_group)
    for name, rule in RULES.items()
    for topk in (4, 3, 2, 1)
    for per_group in (4, 3, 2)
    if not (rule.groups and topk < rule.topk)  # group-limited routing has no topk axis
    and not (topk == 1 and rule.score == "softmax" and not rule.pre_softmax)  # megatron refuses a softmax over one expert
]


def draws(seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [tokens, experts], a bias that changes choices [experts], and what a loss weighs the gates with [tokens, experts]."""
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.randn(TOKENS, EXPERTS, generator=rng, dtype=dtype) * scale).requires_grad_()
    return logits, torch.randn(EXPERTS, generator=rng) * 0.3, torch.randn(TOKENS, EXPERTS, generator=rng, dtype=dtype)


def megatron(logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """megatron's own router under the same rule."""
    return topk_routing_with_score_function(
        logits,
        rule.topk,
        use_pre_softmax=rule.pre_softmax,
        num_groups=rule.groups,
        group_topk=rule.group_topk,
        scaling_factor=rule.scaling_factor,
        score_function=rule.score,
        expert_bias=bias,
    )


def one_hot(kept: list[int]) -> torch.Tensor:
    """1 for kept experts, 0 for others."""
    return torch.zeros(EXPERTS).index_fill(0, torch.tensor(kept), 1.0)


def prefix(size: int, kept: int) -> torch.Tensor:
    """`kept` ones, then zeros."""
    return (torch.arange(size) < kept).float()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("name", RULES)
def test_without_weights_it_is_megatrons_bit_for_bit(name: str, topk: int, with_bias: bool) -> None:
    rule = replace(RULES[name], topk=topk)
    if rule.groups:
        rule = replace(rule, group_topk=1 if topk == 1 else 2)
    logits, bias, _ = draws()
    bias = bias if with_bias and rule.score == "sigmoid" else None
    for ours, theirs in zip(route(logits, rule, expert_bias=bias), megatron(logits, rule, bias), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("name", "topk", "per_group"), HARD_CASES)
def test_hard_weights_are_the_small_models_router(name: str, topk: int, per_group: int, with_bias: bool) -> None:
    rule = RULES[name]
    kept = KEPT.get(per_group, list(range(EXPERTS)))
    logits, bias, loss = draws()
    bias = bias if with_bias and rule.score == "sigmoid" else None
    probs, routing_map = route(
        logits, rule, expert_bias=bias, expert_weights=one_hot(kept), rank_weights=None if topk == rule.topk else prefix(rule.topk, topk)
    )
    (gradient,) = torch.autograd.grad((probs * loss).sum(), logits)
    small, small_map = megatron(logits[:, kept], replace(rule, topk=topk), None if bias is None else bias[kept])
    (small_gradient,) = torch.autograd.grad((small * loss[:, kept]).sum(), logits)
    assert torch.equal(routing_map[:, kept], small_map)
    assert int(routing_map.sum()) == TOKENS * topk == int(small_map.sum())
    torch.testing.assert_close(probs[:, kept], small, rtol=2e-6, atol=1e-7)
    assert not probs[~routing_map].any()
    torch.testing.assert_close(gradient, small_gradient, rtol=1e-5, atol=1e-6)
    dropped = [expert for expert in range(EXPERTS) if expert not in kept]
    assert not gradient[:, dropped].any()


@pytest.mark.parametrize("name", RULES)
def test_soft_weights_have_true_gradients(name: str) -> None:
    rule = RULES[name]
    logits, bias, loss = draws(1, torch.float64)
    bias = bias.double() if rule.score == "sigmoid" else None
    rng = torch.Generator().manual_seed(2)
    experts = torch.rand(EXPERTS, generator=rng, dtype=torch.float64).clamp(min=0.2)
    experts[3] = 0.0
    ranks = None if rule.groups else torch.tensor([1.0, 0.9, 0.35, 0.0], dtype=torch.float64)
    inputs = [experts.requires_grad_(), *([] if ranks is None else [ranks.requires_grad_()]), logits]

    def value(given: list[torch.Tensor]) -> torch.Tensor:
        weights = {"expert_weights": given[0], "rank_weights": None if ranks is None else given[1]}
        return (route(given[-1], rule, expert_bias=bias, **weights)[0] * loss).sum()

    gradients = torch.autograd.grad(value(inputs), inputs)
    assert gradients[0][3] == 0, "a dropped expert has no gradient"
    assert ranks is None or gradients[1][3] == 0, "a dropped rank has no gradient"
    for which, gradient in enumerate(gradients):
        for at in range(min(gradient.numel(), EXPERTS)):
            if inputs[which].flatten()[at] == 0:
                continue
            step = torch.zeros(inputs[which].numel(), dtype=torch.float64)
            step[at] = 1e-6
            step = step.view_as(inputs[which])
            moved = [[x + sign * step if i == which else x for i, x in enumerate(inputs)] for sign in (1, -1)]
            slope = (value(moved[0]) - value(moved[1])).item() / 2e-6
            assert float(gradient.flatten()[at]) == pytest.approx(slope, rel=1e-5, abs=1e-7), (which, at)


@pytest.mark.parametrize("name", RULES)
def test_extreme_logits_and_zero_weights_give_no_nan(name: str) -> None:
    rule = RULES[name]
    logits, bias, loss = draws(3)
    logits = (logits.detach().sign() * 1e4).requires_grad_()
    kept = KEPT[2]
    experts = (one_hot(kept) * 0.5).index_fill(0, torch.tensor([kept[1]]), 1e-39).requires_grad_()  # 1/1e-39 is infinite in fp32
    ranks = None if rule.groups else torch.tensor([1.0, 0.5, 1e-39, 0.0], requires_grad=True)
    probs, routing_map = route(
        logits, rule, expert_bias=bias if rule.score == "sigmoid" else None, expert_weights=experts, rank_weights=ranks
    )
    masked = masked_logits(logits, experts)
    scores, load = balance_terms(logits, rule, expert_weights=experts, rank_weights=ranks)
    total = (probs * loss).sum() + torch.logsumexp(masked, -1).sum() + (scores * load).sum()
    gradients = torch.autograd.grad(total, [logits, experts, *([] if ranks is None else [ranks])])
    for tensor in (probs, scores, load, *gradients):
        assert torch.isfinite(tensor).all()
    assert not routing_map[:, [expert for expert in range(EXPERTS) if expert not in kept or expert == kept[1]]].any()


@pytest.mark.parametrize("score", SCORES)
def test_no_token_reaches_a_dropped_expert_for_any_rank_of_logits(score: str) -> None:
    """The upstream implementation masks dim 1 of [s, b, experts]: the batch."""
    rule, weights = RoutingRule(topk=4, **SCORES[score]), one_hot(KEPT[2])
    logits = draws()[0].detach()
    flat = route(logits, rule, expert_weights=weights)
    assert not flat[1][:, weights == 0].any()
    assert int(flat[1].sum()) == TOKENS * 4
    for shape in ((19, 3, EXPERTS), (3, 19, EXPERTS), (3, 1, 19, EXPERTS)):
        for ours, expected in zip(route(logits.view(shape), rule, expert_weights=weights), flat, strict=True):
            assert torch.equal(ours, expected)


def test_fewer_live_experts_than_ranks_never_reach_a_dropped_one() -> None:
    rule, kept = RoutingRule(topk=4, score="sigmoid"), [0, 4]
    probs, routing_map = route(draws()[0], rule, expert_weights=one_hot(kept))
    assert routing_map.sum(0).tolist() == [TOKENS if expert in kept else 0 for expert in range(EXPERTS)]
    torch.testing.assert_close(probs.sum(-1), torch.ones(TOKENS))


def test_a_soft_decision_for_one_or_more_experts_runs_from_one_model_to_the_other() -> None:
    """megatron does not renormalise when one expert is chosen, so a fading second rank fades the renormalisation too."""
    rule, logits = RoutingRule(topk=2, score="sigmoid"), draws()[0].detach()
    one, two = megatron(logits, replace(rule, topk=1), None)[0], megatron(logits, rule, None)[0]
    nearly = [route(logits, rule, rank_weights=torch.tensor([1.0, v]))[0] for v in (1e-6, 1 - 1e-6)]
    torch.testing.assert_close(nearly[0], one, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(nearly[1], two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("topk", [4, 2])
@pytest.mark.parametrize("per_group", [4, 2])
@pytest.mark.parametrize("score", ["post-softmax", "sigmoid"])
def test_balance_terms_give_the_small_models_loss(score: str, per_group: int, topk: int) -> None:
    rule = RoutingRule(topk=4, **SCORES[score])
    kept = KEPT.get(per_group, list(range(EXPERTS)))
    logits = draws()[0]

    def loss(scores: torch.Tensor, load: torch.Tensor, k: int, experts: int) -> torch.Tensor:
        return switch_load_balancing_loss_func(scores, load.sum(0), TOKENS, k, experts, 0.1)

    ours = loss(*balance_terms(logits, rule, expert_weights=one_hot(kept), rank_weights=prefix(4, topk)), 4, EXPERTS)
    small_map, small_scores = compute_routing_scores_for_aux_loss(logits[:, kept], topk, rule.score)
    small = loss(small_scores, small_map, topk, len(kept))
    torch.testing.assert_close(ours, small)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (ours, small)))


def test_filled_counts_keep_the_mean_of_live_experts() -> None:
    counts = torch.tensor([[6.0, 3.0, 0.0, 0.0]])
    assert fill_dropped(counts, torch.tensor([1.0, 1.0, 0.0, 0.0])).tolist() == [[6.0, 3.0, 4.5, 4.5]]
    assert fill_dropped(counts, torch.ones(4)).tolist() == counts.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_deviations_of_live_experts_are_whole_tokens_that_add_up_to_nothing(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    live = 3 + seed
    counts = torch.zeros(128, dtype=torch.int64)
    counts[:live] = torch.randint(0, 300_000, (live,), generator=rng)
    deviations = live_deviations(counts, prefix(128, live))
    assert float(deviations.sum()) == 0
    assert not deviations[live:].any()
    assert float((deviations[:live] - (counts[:live] - counts[:live].double().mean())).abs().max()) < 1
    assert torch.equal(deviations, deviations.round())


def test_a_half_live_expert_is_expected_to_get_half_a_share() -> None:
    deviations: Any = live_deviations(torch.tensor([40, 40, 20, 0]), torch.tensor([1.0, 1.0, 0.5, 0.0]))
    assert deviations.tolist() == [0, 0, 0, 0]
