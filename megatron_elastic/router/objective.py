"""What the router is trained on beside distillation: the budget loss and the anchor of the full budget (arXiv 2511.16664, section 3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.cost import Number, SoftChoices, Widths
from megatron_elastic.decisions import survival_weights

ANCHOR_WEIGHT = 10.0


def expected_widths(space: ElasticSpace, pi_by_axis: Mapping[ElasticAxis, torch.Tensor], num_layers: int) -> Widths:
    """The expectation of a decision, for the cost model: 0-d tensors, differentiable in pi; a tuple of them for a per-layer axis.

    pi_by_axis: [places, choices] for each elastic axis. Axes that are not elastic keep the parent's integer width.
    """
    axes: dict[ElasticAxis, Number | tuple[Number, ...]] = dict(space.parent.widths)
    survival: list[Number] = [1] * num_layers
    for spec in space.axes:
        pi = pi_by_axis[spec.axis]
        if spec.axis is ElasticAxis.LAYERS:
            survival = list(survival_weights(spec.choices, space.drop_order, pi[0], num_layers).unbind())
            continue
        widths = (pi * pi.new_tensor(spec.choices)).sum(-1).unbind()
        axes[spec.axis] = widths if spec.per_layer else widths[0]
    return Widths(axes, survival, SoftChoices(space, pi_by_axis))


def budget_loss(cost: torch.Tensor, target: float, tolerance: float) -> torch.Tensor:
    """|cost / target - 1|, zero with zero gradient where that is at most `tolerance`."""
    deviation = (cost / target - 1.0).abs()
    return torch.where(deviation > tolerance, deviation, torch.zeros_like(deviation))


def anchor_loss(pi_by_axis: Mapping[ElasticAxis, torch.Tensor]) -> torch.Tensor:
    """10 x the sum over axes of the mean square of (pi - one-hot of the largest choice): keeps the full budget at the parent.

    pi_by_axis: [places, choices]. The mean runs over the places too, so that a per-layer axis weighs as a homogeneous one does.
    """
    terms = []
    for pi in pi_by_axis.values():
        parent = torch.zeros_like(pi)
        parent[..., 0] = 1.0
        terms.append(functional.mse_loss(pi, parent))
    return ANCHOR_WEIGHT * torch.stack(terms).sum()
