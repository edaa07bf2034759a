"""ParallelContext: who this process is in the parallel layout, and the process groups it talks in.

The only file that reads megatron-core's process-group globals; everything else takes a ParallelContext. megatron-core is imported
when a context is made, not when this module is.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from megatron_elastic.errors import ConfigError, ElasticError, raise_all
from megatron_elastic.fit import LayoutSizes

if TYPE_CHECKING:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.distributed import ProcessGroup


COLLECTIVE_MINUTES = 5.0
"""How long a rank waits in a collective before it takes another for hung. The longest that is right: rank 0 counts out a large data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """The parallel layout and this process' place in it.

    tensor, pipeline, expert, expert_tensor, context, data: number of ranks along each dimension (data: whole replicas).
    virtual_pipeline: parts of the model on each pipeline rank, taken in turn (the interleaved schedule); 1: one part.
    sequence_parallel: whether norms and the residual stream are divided over the tensor-parallel ranks by tokens.
    dispatcher: how tokens reach their experts, "alltoall" or "allgather".
    *_rank: this process' position along it. rank, world_size: of all processes.
    device: where this process computes, and where a tensor must be for a collective: its GPU, or the CPU.
    groups: megatron-core's collection, handed to every module it builds.
    """

    tensor: int
    pipeline: int
    virtual_pipeline: int
    sequence_parallel: bool
    dispatcher: Literal["alltoall", "allgather"]
    expert: int
    expert_tensor: int
    context: int
    data: int
    rank: int
    world_size: int
    tensor_rank: int
    pipeline_rank: int
    expert_rank: int
    expert_tensor_rank: int
    context_rank: int
    data_rank: int
    device: torch.device
    groups: ProcessGroupCollection
    owns_processes: bool
    """Whether this context started torch.distributed, and so ends it."""

    @classmethod
    def initialize(  # noqa: PLR0913 - one number for each dimension
        cls,
        tensor: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        expert_tensor: int | None = None,
        context: int = 1,
        *,
        virtual_pipeline: int = 1,
        sequence_parallel: bool | None = None,
        dispatcher: Literal["alltoall", "allgather"] = "alltoall",
        seed: int = 1234,
    ) -> ParallelContext:
        """Start torch.distributed where it is not running, form megatron-core's groups and seed its random states.

        Processes come from the usual environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT); without RANK there is one process.
        A process computes on the GPU of its number on this node (`place_of`), and on the CPU where it sees none: CUDA_VISIBLE_DEVICES= hides them.
        expert_tensor: tensor parallelism of the experts; None means `tensor` without expert parallelism and 1 with it.
        sequence_parallel: None means with tensor parallelism.
        seed: of megatron-core's random states; weights do not depend on it.
        Raises ConfigError when the world cannot be divided this way, or there is no GPU for this process where there are some.
        """
        from megatron_elastic.platform import prepare_platform

        prepare_platform()
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        sizes = LayoutSizes.of(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual_pipeline,
            sequence_parallel=sequence_parallel,
            dispatcher=dispatcher,
            expert=expert,
            expert_tensor=expert_tensor,
            context=context,
        )
        owns = not dist.is_initialized()
        # Processes that a caller has started with another backend than NCCL cannot talk from a GPU.
        on_gpus = torch.cuda.is_available() and (owns or "nccl" in dist.get_backend_config())
        device = torch.device(place_of(_local_rank(), torch.cuda.device_count() if on_gpus else 0))
        compute_on(device)  # before there is a group: NCCL, megatron-core and "cuda" without a number take the current one
        if owns:
            _start_processes("nccl" if device.type == "cuda" else "gloo")
        world = dist.get_world_size()
        try:
            raise_all(ConfigError, sizes.problems() + sizes.process_problems(world), "layout")
        except ConfigError:
            if owns:
                dist.destroy_process_group()
            raise
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            create_gloo_process_groups=False,  # for an optimizer that gathers its state on the CPU, as ours does not
            distributed_timeout_minutes=COLLECTIVE_MINUTES,  # pyright: ignore[reportArgumentType] - it makes a timedelta of it
        )
        model_parallel_cuda_manual_seed(seed)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return cls(
            **asdict(sizes),
            data=groups.dp.size(),
            rank=dist.get_rank(),
            world_size=world,
            tensor_rank=groups.tp.rank(),
            pipeline_rank=groups.pp.rank(),
            expert_rank=groups.ep.rank(),
            expert_tensor_rank=groups.expt_tp.rank(),
            context_rank=groups.cp.rank(),
            data_rank=groups.dp.rank(),
            device=device,
            groups=groups,
            owns_processes=owns,
        )

    def destroy(self) -> None:
        """Dissolve the groups, and end torch.distributed if this context started it."""
        import torch.distributed as dist

        dissolve_groups()
        if self.owns_processes:
            dist.destroy_process_group()

    @property
    def sizes(self) -> LayoutSizes:
        """The sizes of the layout, without this process' place in it."""
        return LayoutSizes(**{field.name: getattr(self, field.name) for field in fields(LayoutSizes)})

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all: it prints and writes what is written once."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether this process holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process computes the loss."""
        return self.pipeline_rank == self.pipeline - 1

    def first_part(self, part: int) -> bool:
        """Whether part number `part` of this rank's model holds the embedding."""
        return self.is_first_stage and part == 0

    def last_part(self, part: int) -> bool:
        """Whether part number `part` of this rank's model computes the loss."""
        return self.is_last_stage and part == self.virtual_pipeline - 1

    @property
    def world(self) -> ProcessGroup:
        """The group of all processes."""
        import torch.distributed as dist

        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def tp(self) -> ProcessGroup:
        """The tensor-parallel group."""
        return self.groups.tp

    @property
    def pp(self) -> ProcessGroup:
        """The pipeline-parallel group."""
        return self.groups.pp

    @property
    def ep(self) -> ProcessGroup:
        """The expert-parallel group."""
        return self.groups.ep

    @property
    def cp(self) -> ProcessGroup:
        """The context-parallel group."""
        return self.groups.cp

    @property
    def dp(self) -> ProcessGroup:
        """The data-parallel group."""
        return self.groups.dp

    @property
    def dp_cp(self) -> ProcessGroup:
        """The data- and context-parallel group: gradients of dense parameters are reduced over it."""
        return self.groups.dp_cp

    def raise_together(self, error: ElasticError | None) -> None:
        """Raise a user error of any rank on every rank; do nothing when there is none. A collective: every rank calls it.

        error: this rank's error, or None. Called before work starts, so that no rank is left waiting for one that stopped.
        The lowest failing rank's kind is raised; a message that differs between ranks is listed once for each rank that has it.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return
        import torch.distributed as dist

        mine = None if error is None else (type(error), str(error))
        found: list[tuple[type[ElasticError], str] | None] = [None] * self.world_size
        dist.all_gather_object(found, mine)
        failed = {rank: item for rank, item in enumerate(found) if item is not None}
        if not failed:
            return
        kind, message = next(iter(failed.values()))
        if len({text for _, text in failed.values()}) > 1:
            message = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in failed.items())
        raise kind(message) from error


def _local_rank() -> int | None:
    """The number of this process on its node; None where there are several processes and nobody said."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return 0 if int(os.environ.get("WORLD_SIZE", "1")) == 1 else None


def place_of(local_rank: int | None, gpus: int) -> str:
    """The device of process `local_rank` of a node, of which it sees `gpus` GPUs: that of its number, or "cpu" where there is none.

    Raises ConfigError when there are GPUs, but fewer than processes: two on one would halve both, and NCCL refuses them; and where a process does
    not know its number (None).
    """
    if gpus == 0:
        return "cpu"
    if local_rank is None:
        raise ConfigError(
            f"LOCAL_RANK is not set, so that this process cannot know which of {gpus} GPUs is its own; start with torchrun or slurm/, or set it"
        )
    if local_rank >= gpus:
        raise ConfigError(
            f"process {local_rank} of this node (LOCAL_RANK) has no GPU: {gpus} {'is' if gpus == 1 else 'are'} visible; start at most {gpus} "
            "a node (gpus_per_node of the cluster file), or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    return f"cuda:{local_rank}"


def compute_on(device: torch.device) -> None:
    """Make `device` this thread's current GPU; nothing for the CPU. Every thread begins on GPU 0, and whatever it asks of CUDA takes memory there."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)


def dissolve_groups() -> None:
    """End megatron-core's groups, whoever formed them; do nothing when there are none."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    # megatron-core only forgets its groups; each would keep its threads and sockets for as long as the process lives.
    for group in vars(parallel_state)["_global_process_group_list"] or []:
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    # One cache of the class, keyed by the module, keeps the last 32 rotary embeddings, and each of them its context-parallel group.
    vars(RotaryEmbedding)["forward"].cache_clear()


def _start_processes(backend: str) -> None:
    import torch.distributed as dist

    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(minutes=COLLECTIVE_MINUTES))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
