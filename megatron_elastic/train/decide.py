"""Which size every group of samples runs in, and how the router learns from it.

A decision enters the model as detached leaf tensors on its device; at the end of a step the leaves' gradients are summed over all ranks once
and back-propagated once through the router, on every rank alike. The router is small and stays on the CPU, where all ranks, and all machines,
draw the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.elastic.decision import Decision, Mode, hard_decision, soft_decision
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.planning import Cost, plan_cost
from megatron_elastic.preflight import budget_plans, budget_targets, recipe_cost
from megatron_elastic.recipe import Recipe, StageConfig
from megatron_elastic.router.finalize import FamilyReport, examine, report_of
from megatron_elastic.router.network import BudgetRouter
from megatron_elastic.router.objective import anchor_loss, budget_loss, expected_widths
from megatron_elastic.router.sampling import draw_budget, gumbel_noise, relaxed_choice, straight_through
from megatron_elastic.router.schedules import logit_scale, temperature, tolerance

ON_THE_RESIDUAL_STREAM = (ElasticAxis.HIDDEN, ElasticAxis.LAYERS)
"""Axes whose mask points are on the residual stream; the others' are on what a rank has of a sublayer."""


@dataclass(frozen=True)
class GroupDecision:
    """The decision of one group of samples.

    plan: the hard plan, None when soft; cost_ratio: its cost over the target.
    probabilities: axis -> pi [places, choices] attached to the router, on the CPU, and leaves: the detached tensors the model saw, on its device
    (both empty when hard).
    """

    budget: str
    plan: SubmodelPlan | None
    cost_ratio: torch.Tensor | float
    probabilities: Mapping[ElasticAxis, torch.Tensor] = field(default_factory=dict)
    leaves: Mapping[ElasticAxis, torch.Tensor] = field(default_factory=dict)


def reduced_gradients(groups: list[GroupDecision], space: ElasticSpace, parallel: ParallelContext) -> torch.Tensor:
    """The gradients of all leaves of a step, summed over the world, flat, on the CPU: by group, then by axis. A collective, once a step.

    Layers, tokens and experts are divided over pipeline, data, context and expert ranks, so each has a part of the sum, and so have
    tensor-parallel ranks of what is masked inside a sublayer. `hidden` and `layers` are masked on the residual stream: without sequence
    parallelism every rank has all of it, and the whole gradient.
    """
    whole = 1.0 if parallel.sequence_parallel else 1.0 / parallel.tensor
    factor = {spec.axis: whole if spec.axis in ON_THE_RESIDUAL_STREAM else 1.0 for spec in space.axes}
    leaves = [(axis, leaf) for group in groups for axis, leaf in group.leaves.items()]
    gradients = [(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * factor[axis]).flatten() for axis, leaf in leaves]
    flat = torch.cat(gradients)
    dist.all_reduce(flat, group=parallel.world)
    return flat.cpu()


class Decider:
    """Draws budgets, asks the router, and trains it.

    targets: budget -> absolute cost, largest first; fixed: budget -> plan for those the router does not choose.
    router: None when every plan is fixed. device: of the model that the decisions are for.
    """

    def __init__(self, recipe: Recipe, space: ElasticSpace, device: torch.device) -> None:
        self.recipe, self.space, self.shape, self.device = recipe, space, recipe.model, device
        self.cost: Cost = recipe_cost(recipe)
        self.targets = budget_targets(recipe, self.cost)
        self.full = next(iter(self.targets))
        learned = recipe.router.choice == "learned"
        self.fixed: dict[str, SubmodelPlan] = recipe.pinned_plans() if learned else budget_plans(recipe, self.cost)
        self.router: BudgetRouter | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if set(self.targets) - set(self.fixed):
            self.router = BudgetRouter(space, self.targets, seed=recipe.seed, width=recipe.router.hidden)
            self.optimizer = torch.optim.Adam(self.router.parameters(), lr=0.0)

    def decide(self, stage: StageConfig, step: int, progress: float) -> list[GroupDecision]:
        """The decisions of a step, one for each group of samples; the same on every rank and every layout."""
        if progress >= self.recipe.router.learn_share:
            self.fixed = self.family().plans
        chances = stage.budget_probs or {name: 1 / len(self.targets) for name in self.targets}
        groups = []
        for group in range(stage.global_batch_size // self.recipe.router.samples_per_decision):
            budget = draw_budget(self.recipe.seed, stage.name, step, group, chances)
            groups.append(self._fixed(budget) if budget in self.fixed else self._soft(budget, stage, step, group, progress))
        return groups

    def _fixed(self, budget: str) -> GroupDecision:
        plan = self.fixed[budget]
        return GroupDecision(budget, plan, plan_cost(self.shape, plan, self.cost) / self.targets[budget])

    def learned_share(self, progress: float) -> float:
        """Share of the router's own learning that is done: what temperature, logit scale and tolerance run over."""
        return min(progress / self.recipe.router.learn_share, 1.0)

    def decision_of(self, group: GroupDecision) -> Decision | None:
        """What one microbatch of `group` runs; each has its own graph from the leaves, because each has its own backward."""
        if group.plan is not None:
            return hard_decision(self.space, group.plan, Mode.SLICE, self.shape.num_layers)
        return soft_decision(self.space, group.leaves, self.shape.num_layers, self.recipe.router.width_threshold)

    def _soft(self, budget: str, stage: StageConfig, step: int, group: int, progress: float) -> GroupDecision:
        assert self.router is not None
        settings = self.recipe.router
        noise = gumbel_noise(self.recipe.seed, stage.name, step, group, self.space)
        learned = self.learned_share(progress)
        tau, scale = temperature(learned, *settings.temperature), logit_scale(learned, *settings.logit_scale)
        logits = self.router.logits_of(budget)
        pi = {axis: relaxed_choice(value, noise[axis], tau, scale) for axis, value in logits.items()}
        if settings.straight_through:
            pi = {axis: straight_through(value) for axis, value in pi.items()}
        leaves = {axis: value.detach().to(self.device).requires_grad_() for axis, value in pi.items()}
        cost = self.cost(expected_widths(self.space, pi, self.shape.num_layers))
        return GroupDecision(budget, None, cost / self.targets[budget], pi, leaves)

    def learn(self, groups: list[GroupDecision], num_tokens: torch.Tensor, lr: float, progress: float, parallel: ParallelContext) -> float:
        """One step of the router: the distillation's gradient at the leaves, the budget loss, and the anchor of the full budget.

        num_tokens: of the global batch (0-d, on the CPU): the leaves' gradients are sums over tokens. Returns the gradient's norm before clipping.
        """
        if self.router is None or self.optimizer is None or progress >= self.recipe.router.learn_share:
            return 0.0
        learned = self.learned_share(progress)
        soft = [group.probabilities[axis] for group in groups for axis in group.leaves]
        settings = self.recipe.router
        anchor = anchor_loss({axis: logits.softmax(-1) for axis, logits in self._full_logits(learned).items()})
        loss = anchor / len(self.targets)
        if soft:
            gradients = reduced_gradients(groups, self.space, parallel)
            loss = loss + (torch.cat([pi.flatten() for pi in soft]) * (gradients / num_tokens)).sum()
            allowed = tolerance(learned, settings.tolerance[0], end=settings.tolerance[1])
            misses = [budget_loss(torch.as_tensor(group.cost_ratio), 1.0, allowed) for group in groups if group.leaves]
            loss = loss + settings.budget_weight * torch.stack(misses).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.router.parameters(), settings.clip_grad)
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        self.optimizer.step()
        return float(norm)

    def _full_logits(self, learned: float) -> dict[ElasticAxis, torch.Tensor]:
        assert self.router is not None
        scale = logit_scale(learned, *self.recipe.router.logit_scale)
        return {axis: scale * logits for axis, logits in self.router.logits_of(self.full).items()}

    def family(self) -> FamilyReport:
        """The hard plans of every budget: fixed, or what the router stands for now, with what is wrong with them."""
        allowed = self.recipe.router.tolerance[1]
        if self.router is None or set(self.targets) <= set(self.fixed):
            return report_of(self.fixed, self.shape, self.targets, self.cost, allowed)
        return examine(self.router, self.space, self.shape, self.targets, self.cost, fixed=self.fixed, tolerance=allowed)
