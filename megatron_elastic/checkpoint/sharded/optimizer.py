"""megatron-core's distributed optimizer around torch's Adam, made to survive a save and a load.

Without Transformer Engine and Apex, megatron-core 0.16.1 and 0.19 keep one step number for each parameter, as torch's Adam does, and:

1. `state_dict()` asserts that there is exactly one step number, and fails before the first step, when there is none.
2. `load_state_dict()` copies tensors onto the keys of the *existing* state, `step` among them, which the file does not have: KeyError.
3. It gives all parameters the *same* step tensor. Adam then advances it once for every parameter, so that the bias correction
   runs away without an error.

So: the state is there before saving and loading, `step` is taken out while moments are loaded, and each parameter gets one of its own.

4. How many optimizers there are, and so the names of everything that is not sharded, depends on expert parallelism.

So only moments, fp32 weights and the number of steps are saved; learning rate, decay and the like come from the recipe.

5. `model_param_group_index_map` numbers the parameters of a group in the order of the gradient buffers, but its optimizer holds the fp32 ones
   first, then the masters of the bf16 ones: where both meet (a Mamba layer in bf16 keeps A_log and D in fp32), state is saved under another
   parameter's name, without an error when the sizes agree.

So the numbers are corrected before state is saved or loaded.

6. Moments are gathered without the padding between the buckets of a gradient buffer, and cut into parameters as if it were there: with several
   buckets (an embedding tied across pipeline stages has one of its own) all after the first are saved shifted, without an error.

So the padding is declared a part of each bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_elastic.errors import UnsupportedError


def inner_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The distributed optimizers inside `optimizer` (experts have one of their own). Raises UnsupportedError for any other kind."""
    found = []
    for inner in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        if not isinstance(inner, DistributedOptimizer):
            raise UnsupportedError(f"{type(inner).__name__} cannot be saved; use megatron-core's distributed optimizer")
        found.append(inner)
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
    """The optimizer's state, ready to be saved or to be filled. Collective over data-parallel ranks.

    model_state: the model's sharded state dict. metadata: how to lay the state out, with `fully_reshardable` optimizer state.
    """
    initialize_state(optimizer)
    inner = inner_optimizers(optimizer)
    for one in inner:
        _number_parameters(one)
        _keep_padding(one)
    shards = [one.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)["param_state"] for one in inner]
    state: ShardedStateDict = {"moments": dict(enumerate(shards))}
    if not is_loading:
        state["step"] = _step_of(inner)
    return state


def _number_parameters(inner: DistributedOptimizer) -> None:
    """Make megatron-core's map from parameter to (group, place) say where its optimizer has them; see 5 above."""
    groups = zip(inner.model_fp32_groups, inner.model_float16_groups, strict=True)
    for group, (fp32, float16) in enumerate(groups):
        inner.model_param_group_index_map.update({parameter: (group, place) for place, parameter in enumerate([*fp32, *float16])})


def _keep_padding(inner: DistributedOptimizer) -> None:
    """Make the gathered state as long as the buffers it is cut by; see 6 above."""
    for buffer in inner.buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def _step_of(inner: Sequence[DistributedOptimizer]) -> float:
    steps = {group["step"] for one in inner for group in one.state_dict()["optimizer"]["param_groups"] if "step" in group}
    assert len(steps) <= 1, steps
    return float(steps.pop()) if steps else 0.0  # Transformer Engine's Adam has none before its first step


def restore(optimizer: MegatronOptimizer, loaded: Mapping[str, Any]) -> None:
    """Put a loaded state into `optimizer`, bit for bit, at any parallel layout."""
    for number, inner in enumerate(inner_optimizers(optimizer)):
        state = inner.state_dict()
        for group in state["optimizer"]["param_groups"]:
            group["step"] = int(loaded["step"])  # Transformer Engine's kernel takes no other number
        moments = loaded["moments"][number]
        if _has_torch_adam(inner):
            _restore_torch_adam(inner, state, moments, loaded["step"])
        else:
            inner.load_state_dict({**state, "param_state": moments, "param_state_sharding_type": "fully_reshardable"})


def _restore_torch_adam(inner: DistributedOptimizer, state: dict[str, Any], moments: dict[Any, Any], step: float) -> None:
    inner.load_state_dict(state)
    for entry in inner.optimizer.state.values():
        del entry["step"]
    inner.load_parameter_state_from_fully_reshardable(moments)
    for entry in inner.optimizer.state.values():
        entry["step"] = torch.tensor(step)
