"""The elastic router is the small model's router: gates, map, gradients, auxiliary and z losses; its token counts move only live experts.

The small model is a megatron router of its own with the kept rows and columns. A stand-in for the decision hands the weights over.
Run: pytest tests/elastic/test_router_module.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_elastic.elastic.router_module import ElasticAlltoAllDispatcher, ElasticTopKRouter, router_problems
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform import router as mended_router
from megatron_elastic.platform.versions import Generation, forget_router_losses, megatron_generation, moe_spec

HIDDEN, EXPERTS, TOPK = 20, 12, 4
KEPT_HIDDEN, KEPT, KEPT_TOPK = 12, [0, 1, 4, 5, 8, 9], 2
PRE_SOFTMAX = {"moe_router_pre_softmax": True}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5}
SCORES = {"post-softmax": {}, "pre-softmax": PRE_SOFTMAX, "sigmoid": {"moe_router_score_function": "sigmoid"}, "sigmoid-bias": SIGMOID}
GROUPED = {"moe_router_num_groups": 3, "moe_router_group_topk": 2}
LOSSES = {
    "none": {},
    "z": {"moe_z_loss_coeff": 0.3},
    "aux": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.7},
    "sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.7},
    "global": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.7},
    "all": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.7, 0.5, 0.3],
        "moe_z_loss_coeff": 0.3,
    },
}


@pytest.fixture(autouse=True)
def _forget_losses() -> Any:
    """megatron's tracker of auxiliary losses is as long as the first model of the process is deep; these routers have one layer."""
    yield
    forget_router_losses()


@dataclass
class StubSite:
    """What the router is told of the decision."""

    experts: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    cols: tuple[tuple[int, int], ...] | None = None
    layer_gate: torch.Tensor | None = None

    def expert_weights(self, like: torch.Tensor) -> torch.Tensor | None:
        """Weights of the experts."""
        return self.experts

    def rank_weights(self, like: torch.Tensor) -> torch.Tensor | None:
        """Weights of the ranks."""
        return self.ranks

    def gate(self, like: torch.Tensor) -> torch.Tensor | None:
        """Weight of the layer's output."""
        return self.layer_gate

    def kept(self) -> tuple[None, tuple[tuple[int, int], ...] | None]:
        """Kept columns of the router's weight."""
        return None, self.cols


def config_of(hidden: int = HIDDEN, experts: int = EXPERTS, topk: int = TOPK, **changes: Any) -> TransformerConfig:
    """A config of which only the router's fields matter."""
    values = {"moe_router_load_balancing_type": "none", "moe_router_dtype": "fp32", "use_cpu_initialization": True, **changes}
    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=topk,
        add_bias_linear=False,
        **values,
    )


def router_of(config: TransformerConfig, site: StubSite | None = None) -> TopKRouter:
    """A router with weights of its own, elastic if it has a site."""
    router = TopKRouter(config, pg_collection=get_default_pg_collection())
    router.set_layer_number(1)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=rng))
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.randn(router.expert_bias.shape, generator=rng) * 0.3)
    if site is not None:
        router.__class__ = ElasticTopKRouter
        router.site, router.linear_site = site, site  # pyright: ignore
    return router


def small_of(parent: TopKRouter, kept: list[int], hidden: int, topk: int, **changes: Any) -> TopKRouter:
    """The small model's router, with its part of the parent's weights."""
    small = router_of(config_of(hidden, len(kept), topk, **changes))
    with torch.no_grad():
        small.weight.copy_(parent.weight[kept, :hidden])
        if small.expert_bias is not None and parent.expert_bias is not None:
            small.expert_bias.copy_(parent.expert_bias[kept])
    return small


def one_hot(kept: list[int], size: int = EXPERTS) -> torch.Tensor:
    """1 for kept components, 0 for others."""
    return torch.zeros(size).index_fill(0, torch.tensor(kept), 1.0)


def hidden_states(seed: int = 0) -> torch.Tensor:
    """[sequence, batch, hidden]."""
    return torch.randn(19, 3, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _megatron(_one_process: Any) -> None:
    """Process groups, which routers ask for."""


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The auxiliary losses megatron attaches, in order."""
    seen: list[float] = []
    real = megatron_router.MoEAuxLossAutoScaler

    def apply(activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        seen.append(loss.item())
        return real.apply(activation, loss)

    for module in (megatron_router, mended_router):
        monkeypatch.setattr(module, "MoEAuxLossAutoScaler", SimpleNamespace(apply=apply))
    return seen


def routed(router: TopKRouter, x: torch.Tensor, loss: torch.Tensor, padding: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Gates, map, and the gradients of weight and input."""
    router.zero_grad()
    x = x.clone().requires_grad_()
    probs, routing_map = router(x, padding_mask=padding)
    (probs * loss).sum().backward()
    assert router.weight.grad is not None
    return probs.detach(), routing_map, router.weight.grad, x.grad


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per-token"])
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("score", SCORES)
def test_it_is_the_small_models_router_with_its_losses(score: str, kind: str, per_token: bool, padded: bool, losses: list[float]) -> None:
    changes = {**SCORES[score], **LOSSES[kind], "calculate_per_token_loss": per_token}
    site = StubSite(one_hot(KEPT), one_hot(list(range(KEPT_TOPK)), TOPK), ((0, KEPT_HIDDEN),))
    router = router_of(config_of(**changes), site)
    small = small_of(router, KEPT, KEPT_HIDDEN, KEPT_TOPK, **changes)
    x = hidden_states()[..., :KEPT_HIDDEN]
    loss = torch.randn(57, EXPERTS, generator=torch.Generator().manual_seed(2))
    padding = torch.zeros(19, 3, dtype=torch.bool).index_fill(0, torch.tensor([17, 18]), value=True) if padded else None
    if padded and small.enable_expert_bias:
        small.enable_expert_bias = False  # megatron's own count cannot take a padding mask; the bias itself is used all the same
    small_probs, small_map, small_weight, small_x = routed(small, x, loss[:, KEPT], padding)
    expected, losses[:] = list(losses), []
    probs, routing_map, weight, x_grad = routed(router, x, loss, padding)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(losses) == {"none": 0, "all": 4}.get(kind, 1)
    assert torch.equal(routing_map[:, KEPT], small_map)
    assert int(routing_map.sum()) == 57 * KEPT_TOPK
    torch.testing.assert_close(probs[:, KEPT], small_probs)
    torch.testing.assert_close(weight[KEPT][:, :KEPT_HIDDEN], small_weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x_grad, small_x, rtol=1e-4, atol=1e-5)
    weight = weight.clone()
    weight[torch.tensor(KEPT).unsqueeze(-1), :KEPT_HIDDEN] = 0
    assert not weight.any(), "gradient outside the plan"


@pytest.mark.parametrize("score", SCORES)
def test_group_limited_routing_with_losses_is_the_small_models(score: str, losses: list[float]) -> None:
    changes = {**SCORES[score], **LOSSES["all"], **GROUPED}
    router = router_of(config_of(**changes), StubSite(one_hot(KEPT)))
    small = small_of(router, KEPT, HIDDEN, TOPK, **changes)
    loss = torch.randn(57, EXPERTS, generator=torch.Generator().manual_seed(2))
    small_probs, small_map, small_weight, _ = routed(small, hidden_states(), loss[:, KEPT])
    expected, losses[:] = list(losses), []
    probs, routing_map, weight, _ = routed(router, hidden_states(), loss)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert torch.equal(routing_map[:, KEPT], small_map)
    torch.testing.assert_close(probs[:, KEPT], small_probs)
    torch.testing.assert_close(weight[KEPT], small_weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", SCORES)
def test_without_a_decision_it_is_megatrons_bit_for_bit(score: str) -> None:
    changes = {**SCORES[score], **LOSSES["all"], **GROUPED}
    loss = torch.randn(57, EXPERTS, generator=torch.Generator().manual_seed(2))
    plain, elastic = router_of(config_of(**changes)), router_of(config_of(**changes), StubSite())
    for theirs, ours in zip(routed(plain, hidden_states(), loss), routed(elastic, hidden_states(), loss), strict=True):
        assert torch.equal(theirs, ours)
    if plain.local_tokens_per_expert is not None and elastic.local_tokens_per_expert is not None:
        assert torch.equal(plain.local_tokens_per_expert, elastic.local_tokens_per_expert)


@pytest.mark.parametrize("score", SCORES)
def test_no_token_reaches_a_dropped_expert_whatever_the_rank_of_the_logits(score: str) -> None:
    weights = one_hot(KEPT)
    router: Any = router_of(config_of(**SCORES[score]), StubSite(weights))
    logits = router.gating(hidden_states()).detach()
    assert logits.shape == (19, 3, EXPERTS)
    three, two = router.routing(logits), router.routing(logits.view(-1, EXPERTS))
    for each, other in zip(three, two, strict=True):
        assert torch.equal(each, other)
    assert not three[1][:, weights == 0].any()
    assert int(three[1].sum()) == 57 * TOPK


@pytest.mark.parametrize("score", SCORES)
def test_losses_have_no_say_in_the_size(score: str) -> None:
    """Gradients of soft weights are those without auxiliary losses; the router's own are not."""
    found = []
    for kind in ("none", "all"):
        site = StubSite(torch.linspace(1, 0.1, EXPERTS).requires_grad_(), torch.tensor([1.0, 0.8, 0.5, 0.2], requires_grad=True))
        router = router_of(config_of(**SCORES[score], **LOSSES[kind]), site)
        loss = torch.randn(57, EXPERTS, generator=torch.Generator().manual_seed(2))
        weight = routed(router, hidden_states(), loss)[2]
        assert site.experts is not None
        assert site.ranks is not None
        found.append((site.experts.grad, site.ranks.grad, weight))
    (experts, ranks, weight), (experts_all, ranks_all, weight_all) = found
    torch.testing.assert_close(experts, experts_all)
    torch.testing.assert_close(ranks, ranks_all)
    assert float((weight - weight_all).abs().max()) > 1e-3


def test_the_global_loss_averages_mixed_budgets_as_if_dropped_experts_had_their_mean() -> None:
    router: Any = router_of(config_of(**SIGMOID, **LOSSES["global"]), StubSite(one_hot(KEPT), one_hot([0, 1], TOPK)))
    router(hidden_states())
    tokens = router.global_tokens_per_expert
    assert float(tokens.sum()) == pytest.approx(57 * TOPK)
    torch.testing.assert_close(tokens[one_hot(KEPT) == 0], tokens[KEPT].mean().expand(EXPERTS - len(KEPT)))


def test_mixed_budgets_move_the_bias_by_live_deviations_only() -> None:
    config = config_of(**SIGMOID, moe_router_bias_update_rate=0.01)
    site = StubSite()
    router: Any = router_of(config, site)
    before = router.expert_bias.clone()
    budgets = [None, KEPT, KEPT[:4], [0, 1, 2, 4, 5, 6, 8, 9, 10]]
    reference = torch.zeros(EXPERTS)
    for seed, kept in enumerate(budgets):
        site.experts = None if kept is None else one_hot(kept)
        counts = router(hidden_states(seed))[1].sum(0).float()
        live = list(range(EXPERTS)) if kept is None else kept
        reference[live] += counts[live] - counts[live].mean()
    _update_router_expert_bias([router], config)
    moved = router.expert_bias - before
    clear = reference.abs() > len(budgets)  # whole tokens are dealt, so up to one for each microbatch is a draw
    assert int(clear.sum()) >= 8
    assert torch.equal(moved[clear].sign(), -reference[clear].sign())


def test_megatrons_own_count_would_ruin_the_full_model_and_ours_does_not() -> None:
    """Many steps of small budgets only: dropped experts stay exactly where they are, kept ones do not drift down together."""
    config = config_of(**SIGMOID, moe_router_bias_update_rate=0.01)
    drift = {}
    for counting in ("ours", "megatron"):
        router: Any = router_of(config, StubSite(one_hot(KEPT)))
        before = router.expert_bias.clone()
        for seed in range(10):
            routing_map = router(hidden_states(seed))[1]
            if counting == "megatron":
                router.local_tokens_per_expert.copy_(routing_map.sum(0))
            _update_router_expert_bias([router], config)
            router.local_tokens_per_expert.zero_()
        drift[counting] = router.expert_bias - before
    dropped = one_hot(KEPT) == 0
    assert not drift["ours"][dropped].any()
    assert float(drift["megatron"][dropped].min()) > 0.09
    assert float(drift["ours"][KEPT].mean().abs()) < 0.03 < float(-drift["megatron"][KEPT].mean())


def test_evaluation_counts_no_tokens() -> None:
    router: Any = router_of(config_of(**SIGMOID), StubSite(one_hot(KEPT)))
    with torch.no_grad():
        router(hidden_states())
    assert not router.local_tokens_per_expert.any()


def moe_outputs(parallel: ParallelContext, topk: int, rank_weights: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Output and input gradient of a mixture of experts, elastic in k if it is given weights of ranks."""
    changes = {**SIGMOID, "moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 28, "expert_model_parallel_size": parallel.expert}
    spec: Any = moe_spec(MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    submodules: Any = {"submodules": spec.submodules} if isinstance(spec, ModuleSpec) else {}
    moe: Any = (MoELayer if submodules else spec)(
        **submodules, config=config_of(topk=topk, **changes), layer_number=1, pg_collection=get_default_pg_collection()
    )
    rng = torch.Generator().manual_seed(parallel.rank)
    x = torch.randn(11, 2, HIDDEN, generator=rng).requires_grad_()
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            seeded = rng.manual_seed(3) if "router" in name else rng
            parameter.copy_(torch.randn(parameter.shape, generator=seeded) * 0.3)
    if rank_weights is not None:
        moe.router.__class__, moe.token_dispatcher.__class__ = ElasticTopKRouter, ElasticAlltoAllDispatcher
        moe.router.site = moe.router.linear_site = StubSite(ranks=rank_weights)
    output = moe(x)[0]
    output.tanh().sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


def elastic_k_errors(rank: int, world_size: int, layout: dict[str, Any]) -> list[float]:
    """Largest difference between an elastic k and a model with that k, in output and input gradient, on a rank of the pool."""
    parallel = ParallelContext.initialize(**layout)
    try:
        elastic, small = moe_outputs(parallel, 3, torch.tensor([1.0, 1.0, 0.0])), moe_outputs(parallel, 2, None)
        return [float((a - b).abs().max()) for a, b in zip(elastic, small, strict=True)]
    finally:
        parallel.destroy()


def test_fewer_experts_for_a_token_are_dispatched_and_combined(_one_process: Any) -> None:
    elastic, small = moe_outputs(_one_process, 3, torch.tensor([1.0, 1.0, 0.0])), moe_outputs(_one_process, 2, None)
    for ours, theirs in zip(elastic, small, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.dist
def test_fewer_experts_for_a_token_are_dispatched_over_expert_parallel_ranks(ranks: Callable[..., list[Any]]) -> None:
    for errors in ranks(elastic_k_errors, 2, {"expert": 2}):
        assert max(errors) < 1e-5


REFUSALS = {
    "moe_router_fusion": ({"moe_router_fusion": True}, "set it to False"),
    "moe_expert_capacity_factor": ({"moe_expert_capacity_factor": 1.5}, "set it to None"),
    "moe_router_force_load_balancing": ({"moe_router_force_load_balancing": True}, "set it to False"),
    "moe_input_jitter_eps": ({"moe_input_jitter_eps": 0.01}, "set it to None"),
    "moe_router_load_balancing_type": ({"moe_router_load_balancing_type": "sinkhorn"}, "use one of none, aux_loss"),
    "moe_router_dtype": ({"moe_router_dtype": None, "params_dtype": torch.bfloat16}, "use 'fp32'"),
    "moe_router_group_topk": (GROUPED, "take topk out of elastic.axes"),
}


@pytest.mark.parametrize("field", REFUSALS)
def test_what_has_no_elastic_form_is_refused_by_name(field: str) -> None:
    changes, remedy = REFUSALS[field]
    config = config_of()
    for name, value in changes.items():
        setattr(config, name, value)
    found = router_problems(config, kept_topk_elastic=True)
    assert len(found) == 1
    assert found[0].startswith(field)
    assert remedy in found[0]


def test_what_only_the_newer_release_knows_is_refused_there() -> None:
    config: Any = config_of()
    config.moe_router_score_function = "sqrtsoftplus"
    problems = 1
    if megatron_generation() is Generation.V0_19:
        config.moe_router_force_biased = 1.0
        problems = 2
    assert len(router_problems(config, kept_topk_elastic=False)) == problems


def test_every_supported_router_is_accepted() -> None:
    for score in SCORES.values():
        for losses in LOSSES.values():
            assert router_problems(config_of(**score, **losses), kept_topk_elastic=True) == []
            assert router_problems(config_of(**score, **losses, **GROUPED), kept_topk_elastic=False) == []
    assert router_problems(config_of(moe_router_dtype=None), kept_topk_elastic=True) == []
