"""A stand-in for a GPU on a machine without one: tensors that say they are on cuda:N, computed on the CPU, and refused where CUDA would refuse them.

Every storage is the CPU's, the accelerator's, or free: made inside torch, where nobody here can say on which device. An operation's tensors are
all on one side, or it raises; what it makes is there too. The numbers are the CPU's, bit for bit, so that a run here equals the same run on the CPU.
What this cannot tell: whether kernels, streams and NCCL do their work.

Call `install()` in a process of its own, after megatron-core was imported; nothing takes it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_elastic.models import local_layers
from megatron_elastic.platform.cpu import _FACTORIES  # pyright: ignore[reportPrivateUsage] - the same functions, redirected once more

CPU = torch.device("cpu")
COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_")
"""Operations whose tensors may be on different devices."""
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Operations that take indices of the CPU for a tensor of the accelerator."""


class WrongDevice(RuntimeError):
    """What CUDA, or NCCL, would have refused."""


def is_on(tensor: torch.Tensor) -> str:
    """Where a tensor is: "cpu", "cuda", or "free"."""
    return vars(tensor.untyped_storage()).get("place", "cpu")


def put(tensor: torch.Tensor, place: str) -> torch.Tensor:
    """`tensor`, which is now there with all that shares its storage."""
    vars(tensor.untyped_storage())["place"] = place
    return tensor


def is_cuda(device: object) -> bool:
    """Whether a `device` argument names the accelerator: by a number, a name or a torch.device."""
    return isinstance(device, int) or (device is not None and str(device).startswith("cuda"))


class Accelerator(TorchDispatchMode):
    """Watches every operation of its thread, those of backwards too. current: the number of the GPU that was set, None before."""

    current: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Refuse, or compute and note where the result is."""
        name, named = func._schema.name, kwargs or {}
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
        places = {is_on(tensor) for tensor in given}
        if name.startswith("c10d::"):
            if "cpu" in places:
                raise WrongDevice(f"{name}: NCCL takes no tensor of the CPU")
            return func(*args, **named)
        if {"cpu", "cuda"} <= places and name not in COPIES:
            _check(func, args, named, given)
        before = {id(tensor.untyped_storage()) for tensor in given}
        result = func(*args, **named)
        place = "cuda" if "cuda" in places else "cpu" if "cpu" in places else "free"
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in before:
                put(tensor, place)
        for tensor in given:
            if place == "cuda" and name not in COPIES and is_on(tensor) == "free":
                put(tensor, place)
        return result


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]) -> None:
    """Raise WrongDevice unless what is on the CPU may be: a number that is only read, or indices."""
    name = func._schema.name
    values = [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    values += zip(func._schema.arguments, args, strict=False)
    read = {id(value) for argument, value in values if argument.alias_info is None or not argument.alias_info.is_write}
    for tensor in given:
        number = tensor.dim() == 0 and id(tensor) in read
        index = name in INDEXED and is_on(args[0]) == "cuda" and tensor is not args[0]
        if is_on(tensor) == "cpu" and not number and not index:
            raise WrongDevice(f"{name}: not on the same device: {', '.join(f'{is_on(one)} {list(one.shape)}' for one in given)}")


def install(gpus: int = 1) -> Accelerator:
    """Be the GPUs of this process from now on; returns the watcher, already watching."""
    watcher = Accelerator()
    watcher.__enter__()
    _answer(watcher, gpus)
    _make()
    _move(watcher)
    _communicate(watcher)
    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu  # the CPU's platform has one of its own
    local_layers.causal_lower_right = _unwatched(local_layers.causal_lower_right)  # torch makes it of a tensor that nobody has seen
    return watcher


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return called


def _answer(watcher: Accelerator, gpus: int) -> None:
    """What `torch.cuda` says. Streams, events and generators stay those of the CPU's platform."""

    def set_device(device: Any) -> None:
        watcher.current = torch.device(device).index

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: gpus
    torch.cuda.current_device = lambda: watcher.current or 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.set_device = set_device
    torch.accelerator.is_available = lambda: False  # a torch that was built for GPUs would ask the driver


def _make() -> None:
    """Tensors are made where the call says."""

    def makes(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def made(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.pop("device", None)
            result = function(*args, **kwargs, **({} if device is None or is_cuda(device) else {"device": device}))  # "meta" stays so
            if device is None and (name.startswith("new_") or name.endswith("_like") or name == "as_tensor"):
                return result  # where its argument is
            return put(result, "cuda" if is_cuda(device) else "cpu")

        return made

    for name in _FACTORIES.split():
        setattr(torch, name, makes(name, getattr(torch, name)))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, makes(name, getattr(torch.Tensor, name)))


def _move(watcher: Accelerator) -> None:
    """Tensors go where they are sent, and say where they are."""

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype = kwargs.get("device"), kwargs.get("dtype") or self.dtype
        for value in args:
            if isinstance(value, torch.Tensor):
                device, dtype = value.device, value.dtype
            elif isinstance(value, str | torch.device):
                device = value
            elif isinstance(value, torch.dtype):
                dtype = value
        here = is_on(self)
        place = here if device is None else "cuda" if is_cuda(device) else "cpu"
        return put(move(self, dtype, copy=place != here or kwargs.get("copy", False)), place)

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_on(self) == "cuda":
            raise WrongDevice("numpy: it reads no tensor of a GPU; .cpu() first")
        return to_numpy(self, *args, **kwargs)

    def kind(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = named(self, *args, **kwargs)
        return result.replace("torch.cuda.", "torch.", 1) if isinstance(result, str) and is_on(self) != "cuda" else result

    def device_of(self: torch.Tensor) -> torch.device:
        if type(self) not in (torch.Tensor, torch.nn.Parameter):
            return CPU  # torch's sharded tensors have no storage of their own
        real = has_device.__get__(self)
        return torch.device("cuda", watcher.current or 0) if real == CPU and is_on(self) == "cuda" else real

    tensor: Any = torch.Tensor
    move, to_numpy, named, has_device = tensor.to, tensor.numpy, tensor.type, tensor.device
    tensor.to, tensor.numpy, tensor.type, tensor.device = to, numpy, kind, property(device_of)
    tensor.cuda = lambda self, *args, **kwargs: self.to("cuda")
    tensor.cpu = lambda self, *args, **kwargs: self.to("cpu")
    tensor.is_cuda = property(lambda self: is_on(self) == "cuda")


def _communicate(watcher: Accelerator) -> None:
    """NCCL is gloo that takes tensors of the accelerator alone; objects travel as such."""
    start = dist.init_process_group

    def init_process_group(backend: str, *args: Any, **kwargs: Any) -> None:
        if backend != "nccl" or watcher.current is None:
            raise WrongDevice(f"processes were started with {backend!r}, with GPU {watcher.current} set")
        start("gloo", *args, **kwargs)

    dist.init_process_group = init_process_group
    distributed_c10d._get_object_coll_device = lambda group=None: "cuda"  # pyright: ignore[reportPrivateUsage]
