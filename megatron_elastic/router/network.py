"""The router: for every elastic axis a small network from a budget to logits over the axis' choices, at each of its places."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace
from megatron_elastic.errors import ConfigError, raise_all
from megatron_elastic.planning import order_budgets
from megatron_elastic.router.sampling import derived_generator

LEAKY_SLOPE = 0.1


class AxisNetwork(torch.nn.Module):
    """Budget [num_budgets] -> Linear(width) -> LeakyReLU(0.1) -> Linear -> logits [places, choices]; no biases (arXiv 2511.16664, section 3).

    The places of a per-layer axis share the inner layer. outer: [places * choices, width], place after place.
    """

    def __init__(self, num_budgets: int, width: int, spec: AxisSpec, init_std: float, generator: torch.Generator) -> None:
        """Weights are normal with standard deviation `init_std`, drawn from `generator` alone."""
        super().__init__()
        self.places = spec.places
        self.inner = torch.nn.Parameter(torch.empty(width, num_budgets, dtype=torch.float32))
        self.outer = torch.nn.Parameter(torch.empty(spec.places * len(spec.choices), width, dtype=torch.float32))
        with torch.no_grad():
            for weight in (self.inner, self.outer):
                weight.normal_(0.0, init_std, generator=generator)

    def forward(self, budget_input: torch.Tensor) -> torch.Tensor:
        """Logits [places, choices] for `budget_input` [num_budgets]."""
        hidden = functional.leaky_relu(functional.linear(budget_input, self.inner), LEAKY_SLOPE)
        return functional.linear(hidden, self.outer).unflatten(0, (self.places, -1))


class BudgetRouter(torch.nn.Module):
    """One `AxisNetwork` per elastic axis; fp32, a replica of it on every rank.

    Budgets are numbered from the largest target to the smallest. The fresh weights depend on (seed, axis) only: not on the global
    RNG, and not on which other axes are elastic.
    """

    def __init__(self, space: ElasticSpace, budgets: Mapping[str, float], *, seed: int, width: int = 256, init_std: float = 0.1) -> None:
        """budgets: name -> target cost. Raises ConfigError for targets that are not positive and distinct."""
        super().__init__()
        self.budget_names = order_budgets(budgets)
        self.targets = tuple(budgets[name] for name in self.budget_names)
        self.networks = torch.nn.ModuleDict(
            {
                spec.axis.value: AxisNetwork(
                    len(self.budget_names), width, spec, init_std, derived_generator("router.init", seed, spec.axis.value)
                )
                for spec in space.axes
            }
        )

    def forward(self, budget_input: torch.Tensor) -> dict[ElasticAxis, torch.Tensor]:
        """Logits [places, choices] of every elastic axis for `budget_input` [num_budgets]."""
        return {ElasticAxis(axis): network(budget_input) for axis, network in self.networks.items()}

    def logits_of(self, name: str) -> dict[ElasticAxis, torch.Tensor]:
        """Logits [places, choices] of every axis for the trained budget `name`. Raises ConfigError for an unknown one."""
        return self(self.budget_input(self.position_of(name)))

    def position_of(self, name: str) -> int:
        """Number of budget `name`. Raises ConfigError for an unknown one."""
        if name not in self.budget_names:
            raise ConfigError(f"budget {name!r} is unknown to this router; its budgets are {', '.join(self.budget_names)}")
        return self.budget_names.index(name)

    def position_of_target(self, target: float) -> float:
        """Where `target` lies between the trained budgets, linear between neighbours. Raises ConfigError outside their range."""
        if not self.targets[-1] <= target <= self.targets[0]:
            raise ConfigError(
                f"target {target:g} is outside the router's budgets, {self.targets[-1]:g} to {self.targets[0]:g}; choose one inside"
            )
        for position, (above, below) in enumerate(zip(self.targets, self.targets[1:], strict=False)):
            if target >= below:
                return position + (above - target) / (above - below)
        return float(len(self.targets) - 1)

    def budget_input(self, position: float) -> torch.Tensor:
        """Input [num_budgets]: one-hot for a whole `position`, between two budgets the linear mixture of their one-hots."""
        last = len(self.budget_names) - 1
        problems = [] if 0 <= position <= last else [f"budget position {position} is outside 0 to {last}"]
        raise_all(ConfigError, problems, "router")
        below = min(int(position), last)
        weights = [0.0] * (last + 1)
        weights[below] = 1.0 - (position - below)
        if position > below:
            weights[below + 1] = position - below
        return torch.tensor(weights, dtype=torch.float32, device=next(self.parameters()).device)
