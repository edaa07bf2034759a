"""Run megatron-core on a machine without a GPU.

megatron-core assumes CUDA in four ways: it asks `torch.cuda` for devices, streams and random state, it writes device="cuda" literally, it compares
tensor type names with 'torch.cuda.FloatTensor', and it needs packages that exist for GPUs only. `prepare_platform()` answers each on the CPU.
This is the only place that patches torch or megatron-core; with a GPU present one name is bound that 0.16.1 forgets without Transformer Engine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_FACTORIES = "tensor zeros ones empty full arange rand randn randint as_tensor linspace empty_strided zeros_like ones_like empty_like eye"
_NOISE = (
    "full scope is deprecated",
    "MLP requires ffn_hidden_size",
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "Warning: tp_group is None, using default tp group",
    "(Transformer Engine and )?Apex (is|are) not installed",
    "MimoModelConfig is experimental",
    r"torch\.distributed is disabled, unavailable or uninitialized",
    "The argument order of load has been changed",
    "`load_state_dict` is deprecated and will be removed",
)


@functools.cache
def prepare_platform() -> None:
    """Make megatron-core importable and trainable on this machine; call it before `megatron.core` is imported. Later calls do nothing.

    With a GPU present it binds one name in megatron-core. Raises RuntimeError when `megatron.core` was imported first and there is no GPU.
    """
    import torch

    if torch.cuda.is_available():
        _bind_te_gemm()
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("call megatron_elastic.platform.prepare_platform() before megatron.core is imported")
    _disable_dynamo()
    _quieten()
    _install_kernels()
    _answer_for_cuda(torch)
    _redirect_literal_devices(torch)
    _rename_tensor_types(torch)
    _share_gloo_device()
    _allow_unequal_shares(torch)
    _mend_megatron(torch)


def _disable_dynamo() -> None:
    """Inductor asks for CUDA properties. The variable also reaches worker processes."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Imported now because it lists torch's functions by identity, and rejects the patched ones.
    importlib.import_module("torch._dynamo").config.disable = True


def _quieten() -> None:
    """Hide warnings about GPU packages and internals that a CPU user cannot act on."""
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    for logger in (
        "megatron.core.tensor_parallel.random",  # watches the "GPU" random state, here the CPU's own, which always changes
        "torch.utils.cpp_extension",  # misses a compiler for GPUs
        # 0.19 announces changes of its own interfaces, and that a checkpoint is in the older form, which it reads
        "megatron.core.distributed.distributed_data_parallel",
        "megatron.core.dist_checkpointing.strategies.common",
        "megatron.core.models.gpt.gpt_model",
    ):
        logging.getLogger(logger).setLevel(logging.ERROR)


def _install_kernels() -> None:
    """Offer the plain-PyTorch SSM kernels under the names megatron-core imports, where the CUDA packages are absent."""
    from megatron_elastic.platform import kernels

    if importlib.util.find_spec("mamba_ssm") is None:
        _install("mamba_ssm", "2.0.0")
        _install("mamba_ssm.ops", "2.0.0")
        _install("mamba_ssm.ops.triton", "2.0.0")
        _install("mamba_ssm.ops.triton.layernorm_gated", "2.0.0", RMSNorm=kernels.RMSNorm)
        _install(
            "mamba_ssm.ops.triton.ssd_combined",
            "2.0.0",
            mamba_chunk_scan_combined=kernels.mamba_chunk_scan_combined,
            mamba_split_conv1d_scan_combined=kernels.mamba_split_conv1d_scan_combined,
        )
        # Decoding is not offered here: None makes megatron-core use its own plain-PyTorch step.
        _install("mamba_ssm.ops.triton.selective_state_update", "2.0.0", selective_state_update=None)
    if importlib.util.find_spec("causal_conv1d") is None:
        _install("causal_conv1d", "1.4.0", causal_conv1d_fn=kernels.causal_conv1d_fn, causal_conv1d_update=None)
        _install("causal_conv1d.causal_conv1d_varlen", "1.4.0", causal_conv1d_varlen_states=None)


def _install(name: str, release: str, **members: object) -> None:
    """Register a module. `release` is the interface it offers: the least one megatron-core accepts for packed training."""
    module = types.ModuleType(name, "Plain-PyTorch stand-in of megatron_elastic.platform.kernels.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    module.__dict__.update(members, __version__=release)
    sys.modules[name] = module


class _Inert:
    """Stands for a CUDA stream or event: every operation is already complete."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accepts what torch.cuda.Stream and Event accept."""

    def record_event(self, *args: object) -> _Inert:
        """An event that has happened."""
        return _Inert()

    def wait_event(self, *args: object) -> None:
        """Nothing to wait for."""

    def wait_stream(self, *args: object) -> None:
        """Nothing to wait for."""

    def wait(self, *args: object) -> None:
        """Nothing to wait for."""

    def record(self, *args: object) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def __eq__(self, other: object) -> bool:
        """There is one stream, so any two are the same."""
        return isinstance(other, _Inert)

    def __hash__(self) -> int:
        """Equal objects have equal hashes."""
        return 0


class _Generators:
    """Stands for torch.cuda.default_generators: one generator for every device index."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __getitem__(self, index: object) -> torch.Generator:
        return self.generator


@contextlib.contextmanager
def _same_stream(stream: object) -> Iterator[None]:
    yield


def _answer_for_cuda(torch: Any) -> None:
    """Give `torch.cuda` the answers of a machine whose only device is the CPU."""
    cpu, cuda = torch.device("cpu"), torch.cuda

    def nothing(*args: object, **kwargs: object) -> None:
        return None

    def state(*args: object, **kwargs: object) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: Any, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(new_state)

    def lazily(function: Callable[[], Any], **kwargs: object) -> None:
        function()

    answers: dict[str, object] = {
        "current_device": lambda: cpu,  # megatron-core passes it on as a device
        "device_count": lambda: 1,
        "memory_allocated": lambda *args, **kwargs: 0,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": state,
        "set_rng_state": set_state,
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "_lazy_call": lazily,  # the random-state tracker sets states through it
        "default_generators": _Generators(torch.default_generator),
        "Stream": _Inert,
        "Event": _Inert,
        "current_stream": lambda *args, **kwargs: _Inert(),
        "stream": _same_stream,
        **dict.fromkeys(("synchronize", "set_device", "empty_cache", "_lazy_init"), nothing),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.random.get_rng_state, cuda.random.set_rng_state = state, set_state
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _redirect_literal_devices(torch: Any) -> None:
    """Read device="cuda" as the CPU in tensor factories and in Tensor.to."""
    cpu = torch.device("cpu")

    def is_cuda(value: object) -> bool:
        return isinstance(value, str | torch.device) and str(value).startswith("cuda")

    def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = cpu
            return function(*args, **kwargs)

        return wrapped

    # `with torch.device("meta")` acts on the functions it finds in a list that torch makes once: make it before they are replaced.
    torch.utils._device._device_constructors()  # pyright: ignore[reportPrivateUsage]
    for name in _FACTORIES.split():
        setattr(torch, name, on_cpu(getattr(torch, name)))
    move = on_cpu(torch.Tensor.to)
    torch.Tensor.to = lambda self, *args, **kwargs: move(self, *(cpu if is_cuda(arg) else arg for arg in args), **kwargs)


def _rename_tensor_types(torch: Any) -> None:
    """The optimizers accept parameters of type 'torch.cuda.FloatTensor' and its kin only."""
    original = torch.Tensor.type

    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) and "cuda" not in result else result

    torch.Tensor.type = renamed


def _share_gloo_device() -> None:
    """One gloo device, and so one polling thread, for all process groups of this process.

    torch makes a device for each group, whose thread wakes a hundred times a second for as long as the group lives. A layout has some twenty
    groups on each rank: the ranks of a machine would spend their cores on waiting.
    """
    from torch.distributed import distributed_c10d

    gloo = distributed_c10d.ProcessGroupGloo

    @functools.cache
    def device_of(process: int) -> Any:
        """The device of this process: one that a fork brought along has no thread."""
        return gloo.create_default_device()

    class SharedDeviceGloo(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device_of(os.getpid())], 1, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # pyright: ignore[reportAttributeAccessIssue]


def _allow_unequal_shares(torch: Any) -> None:
    """gloo gathers and scatters equal shares only; experts that are cut over ranks exchange as many tokens as each rank has."""
    dist = torch.distributed
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def unequal(tensors: list[Any]) -> bool:
        return len({tensor.shape for tensor in tensors}) > 1

    def all_gather(tensor_list: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's
        if not unequal(tensor_list):
            return gather(tensor_list, tensor, group, async_op)
        assert not async_op, "unequal shares are gathered at once"
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, share in enumerate(tensor_list):
            dist.broadcast(share, group_src=rank, group=group)
        return None

    def reduce_scatter(output: Any, input_list: list[Any], *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if not unequal(input_list):
            return scatter(output, input_list, *args, group=group, **kwargs)
        assert not args and not kwargs, "unequal shares are summed, and at once"
        for rank, share in enumerate(input_list):
            total = share.clone()
            dist.all_reduce(total, group=group)
            if rank == dist.get_rank(group):
                output.copy_(total)
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _mend_megatron(torch: Any) -> None:
    """Two places of megatron-core that stop a run without a GPU and without Transformer Engine, and one that keeps finished runs alive."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    _bind_te_gemm()

    def split_sizes(tensor: Any, *, as_numpy: object = None, **streams: object) -> Any:
        # megatron-core returns a tensor that is already on the CPU as it is, but wants its split sizes as numpy arrays.
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    vars(dispatcher)["maybe_move_tensor_to_cpu"] = split_sizes
    combine = dispatcher.MoEAlltoAllTokenDispatcher.combine_postprocess

    @functools.wraps(combine)
    def combine_and_forget(self: Any, hidden: Any) -> Any:
        # The last probabilities hold the layer's autograd graph, which holds DDP by its gradient hooks, which holds the layer. Python's
        # collector does not see through the graph: no trained model would ever be freed, nor its process groups with their threads.
        self.probs = None
        return combine(self, hidden)

    dispatcher.MoEAlltoAllTokenDispatcher.combine_postprocess = combine_and_forget


def _bind_te_gemm() -> None:
    """0.16.1 binds this name only when Transformer Engine is there, and tests it against None: no router would run, with a GPU or without."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)
