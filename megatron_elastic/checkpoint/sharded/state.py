"""What is saved: the model's shards, the optimizer's, and plain data, as one sharded state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import Float16Module, MegatronModule

from megatron_elastic.checkpoint.plain import RUN
from megatron_elastic.checkpoint.sharded.optimizer import sharded_state
from megatron_elastic.parallel import ParallelContext

MODEL, OPTIMIZER = "model", "optimizer"
"""Entries of the state dict, beside RUN; the parts of a model are entries of MODEL. Keys in the file know neither."""


def parts_of_model(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[MegatronModule]:
    """The bare modules of a rank: of its one part, or of each part that the interleaved schedule takes in turn."""
    return [_unwrap(part) for part in ([model] if isinstance(model, torch.nn.Module) else model)]


def _unwrap(model: torch.nn.Module) -> MegatronModule:
    """The module inside megatron-core's data-parallel and half-precision wrappers."""
    while isinstance(model, DistributedDataParallel | Float16Module):
        model = model.get_submodule("module")
    assert isinstance(model, MegatronModule), type(model)
    return model


def sharding_metadata(parallel: ParallelContext) -> dict[str, Any]:
    """How megatron-core lays state out in a checkpoint: loadable at any layout, optimizer keys without the optimizer's number."""
    return {
        "dp_cp_group": parallel.dp_cp,
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }


def build_state(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    run_state: Mapping[str, Any] | None,
    parallel: ParallelContext,
    *,
    is_loading: bool,
) -> ShardedStateDict:
    """The sharded state dict of a model (one module, or the parts of this rank), its optimizer and plain data."""
    metadata = sharding_metadata(parallel)
    # A layer's key has its number in the whole model, so that parts differ in no key.
    parts = {number: part.sharded_state_dict(metadata=metadata) for number, part in enumerate(parts_of_model(model))}
    state: ShardedStateDict = {MODEL: parts}
    if optimizer is not None:
        state[OPTIMIZER] = sharded_state(optimizer, parts, metadata, is_loading=is_loading)
    if run_state is not None:
        state[RUN] = dict(run_state)
    return state


def detach_from_model(state: ShardedStateDict) -> None:
    """Copy the model's tensors that this rank writes, so that training may go on; the optimizer's are copies already, gathered by it."""
    for shard in nested_values(state[MODEL]):
        if isinstance(shard, ShardedTensor | ShardedTensorFactory) and is_main_replica(shard.replica_id):
            shard.data = torch.empty_like(shard.data, device="cpu", requires_grad=False).copy_(shard.data.detach())


def drop_extra_states(state: ShardedStateDict) -> ShardedStateDict:
    """`state` without the `_extra_state` objects: statistics of 8-bit training, empty in every precision we support."""
    return {
        key: drop_extra_states(value) if isinstance(value, dict) else value
        for key, value in state.items()
        if not (isinstance(value, ShardedObject) and value.key.endswith("_extra_state"))
    }
