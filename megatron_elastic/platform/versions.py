"""Everything that differs between the supported megatron-core releases, 0.16.1 and 0.19.x, in one place.

| what | 0.16.1 | 0.19 |
|---|---|---|
| hybrid model, stack | MambaModel, MambaStack | HybridModel, HybridStack |
| keyword of the stack's spec | mamba_stack_spec | hybrid_stack_spec |
| keyword of the layer pattern | hybrid_override_pattern | hybrid_layer_pattern, `|` between pipeline stages |
| convolution of a Mamba mixer | module `conv1d`, parameters conv1d.weight and conv1d.bias | parameters conv1d_weight and conv1d_bias (the checkpoint keeps conv1d.weight) |
| dense MLP and shared expert in a spec | ModuleSpec | a callable |
| documents of a packed batch, for Mamba | derived by the mixer | PackedSeqParams.seq_idx, None unless total_tokens is given |
| hybrid stack in several parts on a pipeline rank | refused | yes |
| gradients of experts where expert_tensor differs from tensor, without expert parallelism | never summed: refused | summed |
| auxiliary losses with the loss per token | by a rank's own tokens: mended in `router.py` | by the microbatch's |
| plain data of a checkpoint | the file common.pt | object `common_state` among the shards; reads common.pt too |

Importing this module costs nothing; megatron-core is imported inside the functions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_elastic.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.mlp import MLPSubmodules

SUPPORTED = "0.16.1 (Python 3.11) and 0.19.x (Python 3.12 and later)"


class Generation(StrEnum):
    """A line of megatron-core releases that behave alike here."""

    V0_16 = "0.16"
    V0_19 = "0.19"


def installed_release() -> str | None:
    """The version of the installed megatron-core, from its metadata; None when it is not installed."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return None


@functools.cache
def megatron_generation() -> Generation:
    """The generation of the installed megatron-core.

    Raises UnsupportedError when megatron-core is missing or of a release that was never tried.
    """
    installed = installed_release()
    if installed is None:
        raise UnsupportedError(f"megatron-core is not installed; install {SUPPORTED}")
    return generation_of(installed)


def generation_of(installed: str) -> Generation:
    """The generation of a megatron-core version string. Raises UnsupportedError for any that is not supported."""
    if installed == "0.16.1":
        return Generation.V0_16
    if installed.startswith("0.19."):
        return Generation.V0_19
    raise UnsupportedError(f"megatron-core {installed} is not supported; install {SUPPORTED}")


@dataclass(frozen=True, slots=True)
class HybridClasses:
    """Where a generation keeps its hybrid model.

    model, stack, submodules: the classes (MambaModel, MambaStack, MambaStackSubmodules, or their successors).
    spec_keyword, pattern_keyword: the model's arguments for the stack's spec and for the layer pattern.
    """

    model: type[Any]
    stack: type[Any]
    submodules: type[Any]
    spec_keyword: str
    pattern_keyword: str


def hybrid_classes() -> HybridClasses:
    """The hybrid model's classes in the installed megatron-core."""
    if megatron_generation() is Generation.V0_16:
        from megatron.core.models.mamba.mamba_model import MambaModel
        from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules

        return HybridClasses(MambaModel, MambaStack, MambaStackSubmodules, "mamba_stack_spec", "hybrid_override_pattern")
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules  # pyright: ignore[reportMissingImports]
    from megatron.core.models.hybrid.hybrid_model import HybridModel  # pyright: ignore[reportMissingImports]

    return HybridClasses(HybridModel, HybridStack, HybridStackSubmodules, "hybrid_stack_spec", "hybrid_layer_pattern")


def interleaves_hybrid() -> bool:
    """Whether the hybrid stack can be cut into several parts on one pipeline rank."""
    return megatron_generation() is Generation.V0_19


def parts_pattern(pattern: str, parts: int) -> str:
    """The layer pattern as the installed release wants it: with `|` between the parts of the pipeline, or bare.

    pattern: one letter a layer; its length is a multiple of `parts`.
    """
    if megatron_generation() is Generation.V0_16 or parts == 1:
        return pattern
    size = len(pattern) // parts
    return "|".join(pattern[at : at + size] for at in range(0, len(pattern), size))


def mlp_spec(submodules: MLPSubmodules) -> Any:
    """The `mlp` entry of a transformer layer's spec for a dense MLP."""
    from megatron.core.transformer.mlp import MLP

    if megatron_generation() is Generation.V0_16:
        from megatron.core.transformer.spec_utils import ModuleSpec

        return ModuleSpec(module=MLP, submodules=submodules)
    return functools.partial(MLP.as_mlp_submodule, submodules=submodules)  # pyright: ignore[reportAttributeAccessIssue]


def moe_spec(submodules: MLPSubmodules) -> Any:
    """The `mlp` entry of a transformer layer's spec for a mixture of experts, one MLP an expert, and its shared expert."""
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    if megatron_generation() is Generation.V0_16:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from megatron_elastic.platform.router import TopKRouter

        experts, shared = (ModuleSpec(module=module, submodules=submodules) for module in (SequentialMLP, SharedExpertMLP))
        return ModuleSpec(module=MoELayer, submodules=MoESubmodules(router=TopKRouter, experts=experts, shared_experts=shared))
    experts, shared = (functools.partial(module, submodules=submodules) for module in (SequentialMLP, SharedExpertMLP))
    return functools.partial(MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared))


def canonical_name(name: str) -> str:
    """A parameter's name as 0.16.1 and every checkpoint spell it (0.19: `mixer.conv1d_weight` is `mixer.conv1d.weight`)."""
    for part in ("weight", "bias"):
        if name.endswith(f"mixer.conv1d_{part}"):
            return f"{name.removesuffix(f'conv1d_{part}')}conv1d.{part}"
    return name


def conv_parameters(mixer: torch.nn.Module) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Weight [channels, 1, taps] and bias [channels] of a Mamba mixer's convolution."""
    if megatron_generation() is Generation.V0_16:
        conv = mixer.get_submodule("conv1d")
        return conv.get_parameter("weight"), conv.get_parameter("bias")
    return mixer.get_parameter("conv1d_weight"), mixer.get_parameter("conv1d_bias")


def conv_owner(mixer: torch.nn.Module) -> torch.nn.Module:
    """The module that holds the parameters of a Mamba mixer's convolution: its own `conv1d`, or the mixer itself."""
    return mixer.get_submodule("conv1d") if megatron_generation() is Generation.V0_16 else mixer


def packed_documents(boundaries: torch.Tensor, longest: int, total_tokens: int, *, context: int = 1) -> PackedSeqParams:
    """The parameters of a packed batch whose documents do not see each other, in attention, scan and convolution.

    boundaries: cumulative document starts [documents + 1], int32, from 0; tokens after the last one form a document of their own.
    longest: tokens of the longest document. total_tokens: tokens of the whole batch.
    context: ranks that share the tokens; everything else speaks of the whole row, whatever part of it a rank holds.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    common: dict[str, Any] = {
        # In a thd batch megatron-core takes every document for one that is itself cut over the context-parallel ranks: with several ranks the
        # batch is one sequence to its attention layer, which then turns queries and keys by the angles it is given, token by token.
        "qkv_format": "thd" if context == 1 else "sbhd",
        "cu_seqlens_q": boundaries,
        "cu_seqlens_kv": boundaries,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    if megatron_generation() is Generation.V0_19:
        # Without it seq_idx stays None and the Mamba layers silently let documents see each other.
        common["total_tokens"] = total_tokens
    return PackedSeqParams(**common)


def sequence_index(mixer: Any, packed: PackedSeqParams | None, tokens: int) -> torch.Tensor | None:
    """The document of each token [1, tokens] as a Mamba mixer's scan wants it; None when the batch is not packed. tokens: the whole row's."""
    if packed is None:
        return None
    return mixer._create_packed_seq_idx(packed, tokens) if megatron_generation() is Generation.V0_16 else packed.seq_idx


def sums_expert_gradients(tensor: int, expert: int, expert_tensor: int) -> bool:
    """Whether the gradients of experts are summed over all ranks that hold them, on a layout of these sizes.

    0.16.1 counts experts among the split layers unless there is expert parallelism, and so leaves out the ranks that split those.
    """
    return megatron_generation() is Generation.V0_19 or expert > 1 or expert_tensor == tensor


def load_sharded(state: dict[str, Any], directory: Path, plain: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's `dist_checkpointing.load`, for a checkpoint that either release has written. Collective over all ranks.

    state: a sharded state dict without objects, filled in place. plain: the plain data of the checkpoint (`checkpoint.plain.read_plain`), which
    megatron-core would unpickle, and run what a foreign one holds. Returns `state` together with it.
    Still unpickled without limits: the index, by torch. Read it before with `checkpoint.index.read_index`, which refuses all but an index.
    """
    from megatron.core import dist_checkpointing

    if megatron_generation() is Generation.V0_16:
        return dist_checkpointing.load(state, str(directory), common_strategy=_given(plain))  # pyright: ignore[reportReturnType] - a tuple only if asked for
    from megatron.core.dist_checkpointing import serialization

    loader = serialization.load_common_state_dict
    serialization.load_common_state_dict = lambda _: plain
    try:
        return dist_checkpointing.load(state, str(directory))  # pyright: ignore[reportReturnType]
    finally:
        serialization.load_common_state_dict = loader


def _given(plain: dict[str, Any]) -> Any:
    """A strategy of 0.16.1 for plain data that was read already."""
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    class Given(TorchCommonLoadStrategy):
        def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
            return plain

    return Given()


def forget_router_losses() -> None:
    """Drop megatron-core's record of auxiliary losses, which is as long as the first model of the process is deep."""
    if megatron_generation() is Generation.V0_16:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        get_moe_layer_wise_logging_tracker().clear()
    else:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker  # pyright: ignore[reportMissingImports]

        destroy_moe_metrics_tracker()
