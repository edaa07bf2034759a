"""megatron-core's distributed optimizer around torch's Adam, made to survive a save and a load.

Without Transformer Engine and Apex, megatron-core 0.16.1 and 0.19 keep one step number for each parameter, as torch's Adam does, and:

1. `state_dict()` asserts that there is exactly one step number, and fails before the first step, when there is none.
2. `load_state_dict()` copies tensors onto the keys of the *existing* state, `step` among them, which the file does not have: KeyError.
3. It gives all parameters the *same* step tensor. Adam then advances it once for every parameter, so that the bias correction
   runs away without an error.

So: the state is there before saving and loading, `step` is taken out while moments are loaded, and each parameter gets one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_elastic.errors import UnsupportedError


def inner_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The distributed optimizers inside `optimizer` (experts have one of their own). Raises UnsupportedError for any other kind."""
    found = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for inner in found:
        if not isinstance(inner, DistributedOptimizer):
            raise UnsupportedError(f"{type(inner).__name__} cannot be saved; use megatron-core's distributed optimizer")
    return found


def _has_torch_adam(inner: DistributedOptimizer) -> bool:
    return isinstance(inner.optimizer, torch.optim.Adam | torch.optim.AdamW)


def initialize_state(optimizer: MegatronOptimizer) -> None:
    """Give every parameter that was never stepped its moments (0) and its step (0); weights and other state stay as they are."""
    for inner in inner_optimizers(optimizer):
        if not _has_torch_adam(inner):
            continue
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                state = inner.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)


def sharded_state(
    optimizer: MegatronOptimizer, model_state: ShardedStateDict, metadata: dict[str, Any], *, is_loading: bool
) -> ShardedStateDict:
    """The optimizer's sharded state, ready to be saved or to be filled. Collective over data-parallel ranks."""
    initialize_state(optimizer)
    return optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)


def restore(optimizer: MegatronOptimizer, loaded: Mapping[Any, Any]) -> None:
    """Put a loaded state into `optimizer`, bit for bit."""
    inner = inner_optimizers(optimizer)
    parts = [loaded] if len(inner) == 1 else [loaded[number] for number in range(len(inner))]
    for one, part in zip(inner, parts, strict=True):
        if _has_torch_adam(one):
            _restore_torch_adam(one, dict(part))
        else:
            one.load_state_dict(part)


def _restore_torch_adam(inner: DistributedOptimizer, state: dict[str, Any]) -> None:
    parameter_state = state.pop("param_state")
    inner.load_state_dict(state)
    steps = {group["step"] for group in state["optimizer"]["param_groups"]}
    assert len(steps) == 1, steps
    (step,) = steps
    for entry in inner.optimizer.state.values():
        del entry["step"]
    inner.load_parameter_state_from_fully_reshardable(parameter_state)
    for entry in inner.optimizer.state.values():
        entry["step"] = torch.tensor(float(step))
