"""From probabilities over choices to weights of components and layers.

A decision for an axis is pi over its choices n_1 > n_2 > ... ; the weight of a component is the sum of pi over the choices that
keep it. Choices are nested, so these sums are partial sums of pi: one small vector per axis. A one-hot pi gives weights that
are exactly 0 or 1; a soft one gives weights that fall from the sum of pi to pi_1 along the group.

Every function is differentiable in pi, does not read values back from the device, and keeps pi's dtype and device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def prefix_weights(choices: Sequence[int], groups: int, pi: torch.Tensor) -> torch.Tensor:
    """Weights [..., group_size] of the components of one group; every group has the same.

    choices: widths, widest first, each a multiple of `groups`; pi: [..., choices], their probabilities.
    w_c = sum of pi_i over the choices that keep component c of a group (n_i / groups > c).
    """
    kept = [choice // groups for choice in choices]
    sums = pi.cumsum(-1)
    narrower = [*kept[1:], 0]
    # Components between two neighbouring choices share a weight. Runs are expanded rather than indexed: no index tensor has to be
    # copied to the device, and the backward is a plain sum (deterministic on a GPU, unlike an indexed one).
    runs = [sums[..., i, None].expand(*pi.shape[:-1], kept[i] - narrower[i]) for i in reversed(range(len(kept)))]
    return torch.cat(runs, -1)


def survival_weights(choices: Sequence[int], drop_order: Sequence[int], pi: torch.Tensor, num_layers: int) -> torch.Tensor:
    """Survival probabilities [num_layers] of the layers under pi over the choices of axis `layers`.

    choices: numbers of layers kept, widest first; choice n drops the first (parent - n) of `drop_order`. A layer that no choice
    drops has the sum of pi.
    """
    sums = pi.cumsum(0)
    dropped = [choices[0] - choice for choice in choices]
    last_keeping = [len(choices) - 1] * num_layers
    for position, layer in enumerate(drop_order):
        last_keeping[layer] = max(i for i, count in enumerate(dropped) if count <= position)
    return torch.stack([sums[i] for i in last_keeping])
