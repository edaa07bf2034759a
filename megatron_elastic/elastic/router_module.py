"""megatron's router of a mixture of experts, made elastic: fewer experts, fewer of them for each token, cut input channels.

The rules are `routing.route` and its neighbours; this module feeds them to megatron's own losses, counters and dispatcher. Without a
decision about experts or ranks the router is megatron's.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_elastic.elastic.linear import LinearSite
from megatron_elastic.elastic.modules import RouterSite
from megatron_elastic.elastic.routing import RoutingRule, balance_terms, live_deviations, masked_logits, route
from megatron_elastic.platform.router import TopKRouter
from megatron_elastic.runs import select_matrix, spread

SCORES = ("softmax", "sigmoid")
BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
OFF = (None, False)
REFUSED = {
    "moe_router_fusion": "the fused router knows no expert weights; set it to False",
    "moe_expert_capacity_factor": "its capacity is the parent's, and dropped tokens would be counted as routed; set it to None",
    "moe_router_force_load_balancing": "random logits reach dropped experts; set it to False",
    "moe_router_force_biased": "biased logits are for benchmarks only; set it to None",
    "moe_enable_routing_replay": "a recorded route may lead to a dropped expert; set it to False",
    "moe_input_jitter_eps": "parent and full budget, masked and sliced would see different noise; set it to None",
    "moe_router_topk_limited_devices": "its groups follow the parallel layout; set moe_router_num_groups and moe_router_group_topk instead",
}
"""Settings that are off in an elastic model, and why. A release without one of them has nothing to refuse."""


def router_problems(config: TransformerConfig, kept_topk_elastic: bool) -> list[str]:  # noqa: FBT001 - one flag, named by its callers
    """Every routing setting that has no elastic form, one line each: name, value, remedy.

    config: of a model with experts; kept_topk_elastic: whether the space has the topk axis.
    """
    found = []
    if config.moe_router_score_function not in SCORES:
        found.append(f"moe_router_score_function {config.moe_router_score_function!r} is not elastic; use one of {', '.join(SCORES)}")
    kinds = config.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in BALANCING:
            found.append(f"moe_router_load_balancing_type {kind!r} would balance over dropped experts; use one of {', '.join(BALANCING)}")
    for field in fields(config):
        if field.name in REFUSED and (value := getattr(config, field.name)) not in OFF:
            found.append(f"{field.name} {value!r}: {REFUSED[field.name]}")
    if config.moe_router_dtype != "fp32" and (config.moe_router_dtype is not None or config.params_dtype is not torch.float32):
        found.append(
            f"moe_router_dtype {config.moe_router_dtype!r} with {config.params_dtype} weights: elastic routing is fp32; use 'fp32'"
        )
    if kept_topk_elastic and config.moe_router_group_topk:
        found.append(
            f"moe_router_group_topk {config.moe_router_group_topk}: group-limited routing fixes the experts of a group, so the topk axis is "
            "refused; take topk out of elastic.axes"
        )
    if kept_topk_elastic and config.moe_token_dispatcher_type == "flex":
        found.append("moe_token_dispatcher_type 'flex' sends every token to moe_router_topk experts; use 'alltoall' with the topk axis")
    return found


class ElasticTopKRouter(TopKRouter):
    """Chooses among live experts, by weights where the decision is soft; dispatch keeps the parent's expert numbers."""

    site: RouterSite
    linear_site: LinearSite

    def gating(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - megatron's name
        """[..., kept hidden] -> logits [..., experts] in the parent's numbering; cut experts are not computed and `routing` never reads them."""
        rows, cols = self.linear_site.kept()
        if rows is None and cols is None:
            return super().gating(input)
        logits = router_gating_linear(input, select_matrix(self.weight, rows, cols).contiguous(), self.bias, torch.float32)
        return logits if rows is None else spread(logits, rows, self.weight.shape[0])

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """Gates and routing map [tokens, experts] for logits [s, b, experts], as megatron passes them, or [tokens, experts].

        padding_mask: True for padding, in the shape of the logits without their last dim. Load-balancing and z losses are those of the small
        model. They see the weights without gradient: they train the router of each size and have no say in which size is chosen. They
        count as much as the layer does: the losses of a layer that is dropped would train its router and all before it.
        """
        experts, ranks, gate = self.site.expert_weights(logits), self.site.rank_weights(logits), self.site.gate(logits)
        if experts is None and ranks is None and gate is None:
            return super().routing(logits, padding_mask)
        length, flat = logits.shape[0], logits.reshape(-1, logits.shape[-1])
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        flat = self._with_z_loss(flat, experts, gate, padding)
        probs, routing_map = route(flat, self._rule(), expert_bias=self.expert_bias, expert_weights=experts, rank_weights=ranks)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            probs = self._with_balance_losses(probs, flat, (experts, ranks, gate), padding, length)
        self._count_tokens(routing_map, experts, gate, padding)
        return probs, routing_map

    def _rule(self) -> RoutingRule:
        return RoutingRule(
            topk=self.topk,
            score="softmax" if self.score_function == "softmax" else "sigmoid",  # router_problems admits these two
            pre_softmax=self.config.moe_router_pre_softmax,
            groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
        )

    def _with_z_loss(
        self, flat: torch.Tensor, experts: torch.Tensor | None, gate: torch.Tensor | None, padding: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits [tokens, experts], unchanged, with megatron's z loss over live experts attached.

        megatron attaches the loss to the logits it was computed from. Masked ones are of no use to a sigmoid, so they take part with a factor of
        zero, which carries the loss and nothing else.
        """
        masked = _with_gradient_times(gate, flat if experts is None else masked_logits(flat, experts.detach()))
        carrier = self.apply_z_loss(masked, padding_mask=padding)
        return flat if carrier is masked else flat + 0.0 * carrier.masked_fill(carrier == -torch.inf, 0.0)

    def _with_balance_losses(
        self,
        probs: torch.Tensor,
        flat: torch.Tensor,
        weights: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        padding: torch.Tensor | None,
        length: int,
    ) -> torch.Tensor:
        """The gates [tokens, experts] with megatron's load-balancing losses of whichever kinds are switched on attached.

        weights: of experts, of ranks, and the layer's gate.
        """
        experts, ranks, gate = weights
        scores, load = balance_terms(
            flat,
            self._rule(),
            expert_weights=None if experts is None else experts.detach(),
            rank_weights=ranks,
        )
        scores = _with_gradient_times(gate, scores)
        if padding is not None:
            valid = (~padding).unsqueeze(-1)
            scores, load = scores * valid, load * valid
        padded = padding is not None
        probs = self._apply_aux_loss(probs, scores, load, with_padding_mask=padded)
        probs = self._apply_seq_aux_loss(probs, scores, load, length, len(flat) // length, with_padding_mask=padded)
        return self._apply_global_aux_loss(probs, scores, load, with_padding_mask=padded)

    def _count_tokens(
        self, routing_map: torch.Tensor, experts: torch.Tensor | None, gate: torch.Tensor | None, padding: torch.Tensor | None
    ) -> None:
        """Count this microbatch for megatron's update of the expert bias: live experts by what they got more than their share, dropped ones by 0.

        Plain counts of mixed budgets would drive dropped experts up and kept ones down until the full model is ruined. Shares are whole tokens
        of the whole microbatch, so one of the ranks that divide its tokens counts for all of them.
        """
        if self.local_tokens_per_expert is None or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            counts = (routing_map if padding is None else routing_map & ~padding.unsqueeze(-1)).sum(0)
            if experts is not None:
                if self.tp_cp_group.size() > 1:
                    torch.distributed.all_reduce(counts, group=self.tp_cp_group)
                    if self.tp_cp_group.rank():
                        return
                counts = live_deviations(counts, experts)
            self.local_tokens_per_expert += counts if gate is None else counts * gate


def _with_gradient_times(gate: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """`values`, whose gradient is multiplied by `gate` (None: 1). By a hook, because values of minus infinity allow no arithmetic."""
    if gate is None or not values.requires_grad:
        return values
    view, weight = values.view_as(values), gate.detach()
    view.register_hook(lambda gradient: gradient * weight)
    return view


class ElasticAlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends as many rows as the routing map has; megatron's sends k for each token, which an elastic k undercuts."""

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Routing map [tokens, experts] -> tokens of each local expert."""
        tokens_per_expert = super().preprocess(routing_map)
        self.num_out_tokens = routing_map.sum()
        self._maybe_update_cuda_sync_point("before_permutation_1")
        return tokens_per_expert
