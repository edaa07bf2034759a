"""`elasticize(model, space, parallel) -> handle`: the one verb that makes a model elastic, and the way back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import ExtendedRMSNorm, MambaMixer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.elastic import modules
from megatron_elastic.elastic.decision import Decision, Mode, Slot, hard_decision
from megatron_elastic.elastic.linear import ElasticColumnLinear, ElasticRowLinear, LinearSite
from megatron_elastic.errors import ConfigError, UnsupportedError, raise_all
from megatron_elastic.layout import Dim, axis_groups, dims_of
from megatron_elastic.models.local_layers import LayerNormColumnParallelLinear, LocalRMSNorm
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import canonical_name, conv_owner, hybrid_classes
from megatron_elastic.shape import AXES, ModelShape

LINEARS: Mapping[type, type] = {
    ColumnParallelLinear: ElasticColumnLinear,
    LayerNormColumnParallelLinear: modules.ElasticNormLinear,
    RowParallelLinear: ElasticRowLinear,
}
OTHERS: Mapping[type, type] = {
    LocalRMSNorm: modules.ElasticRMSNorm,
    VocabParallelEmbedding: modules.ElasticEmbedding,
    ExtendedRMSNorm: modules.ElasticGatedNorm,
    MambaMixer: modules.ElasticMambaMixer,
    SelfAttention: modules.ElasticSelfAttention,
    MLP: modules.ElasticMLP,
    MoELayer: modules.ElasticMoELayer,
    TopKRouter: modules.ElasticTopKRouter,
    MambaLayer: modules.ElasticMambaLayer,
    TransformerLayer: modules.ElasticTransformerLayer,
    MLPLayer: modules.ElasticMLPLayer,
}

_LOCAL_LAYER = re.compile(r"decoder\.layers\.(\d+)(\..*)?")
_LOCAL_EXPERT = re.compile(r"experts\.local_experts\.\d+\.")


class ElasticHandle:
    """A model that has become elastic.

    space: its choices; attached: axis -> number of modules that follow it on this rank.
    """

    def __init__(self, model: torch.nn.Module, space: ElasticSpace, shape: ModelShape) -> None:
        self.model, self.space, self.shape = model, space, shape
        self.attached: Counter[ElasticAxis] = Counter()
        self._slot = Slot()
        self._swapped: list[tuple[Any, type, tuple[str, ...]]] = []
        self._expert_bias_rate = model.config.moe_router_bias_update_rate

    @property
    def decision(self) -> Decision | None:
        """The decision in use; None: the parent."""
        return self._slot.decision

    @contextmanager
    def use(self, plan: SubmodelPlan | Decision | None, mode: Mode | str = Mode.SLICE) -> Iterator[None]:
        """Run forwards under a plan in mask or slice mode, under a router's decision, or as the parent (None).

        Backwards need no context: what they use is kept by the graph. Raises PlanError for a plan outside the space.
        """
        if isinstance(plan, SubmodelPlan):
            decision = hard_decision(self.space, plan, Mode(mode), self.shape.num_layers)
        else:
            decision = plan
        before, self._slot.decision = self._slot.decision, decision
        try:
            yield
        finally:
            self._slot.decision = before

    def summary(self) -> str:
        """One line: what was attached on this rank."""
        return "elastic: " + ", ".join(f"{axis.value} ({self.attached[axis]} modules)" for axis in ElasticAxis if axis in self.attached)

    def remove(self) -> None:
        """Give every module its own class back; the model is what it was before `elasticize`."""
        for module, kind, names in reversed(self._swapped):
            module.__class__ = kind
            for name in names:
                delattr(module, name)
        self._swapped.clear()
        self.attached.clear()
        self.model.config.moe_router_bias_update_rate = self._expert_bias_rate

    def _swap(self, module: Any, kind: type, **sites: Any) -> None:
        self._swapped.append((module, type(module), tuple(sites)))
        module.__class__ = kind
        for name, site in sites.items():
            setattr(module, name, site)


def elasticize(model: torch.nn.Module, space: ElasticSpace, parallel: ParallelContext, shape: ModelShape) -> ElasticHandle:
    """Make a hybrid model from `build_hybrid` elastic in place and return the handle to use and undo it.

    Parameters, names and buffers do not change, so checkpoints stay the parent's. The selection bias of the experts is frozen
    until `remove()`: megatron's own update would drive dropped experts up and kept ones down.
    Raises ConfigError for a layout whose shards cut groups, and UnsupportedError naming every module, parameter or axis that could not be
    attached; the model is left as it was.
    """
    raise_all(ConfigError, space.check_shards(parallel.tensor, parallel.expert), "elastic space")
    raise_all(UnsupportedError, _unsupported(model, parallel), "elasticize")
    handle = ElasticHandle(model, space, shape)
    try:
        for name, module in list(model.named_modules()):
            _attach(handle, parallel, name, module)
        _check_complete(handle, parallel)
    except Exception:
        handle.remove()
        raise
    if model.config.num_moe_experts is not None:
        model.config.moe_router_bias_update_rate = 0.0
    return handle


def _unsupported(model: Any, parallel: ParallelContext) -> list[str]:
    config, problems = model.config, []
    if parallel.context > 1:
        problems.append(f"parallel.context {parallel.context}: context parallelism is not elastic yet; use 1")
    if config.recompute_granularity is not None:
        problems.append(
            f"recompute_granularity {config.recompute_granularity!r}: megatron's recompute would replay another microbatch's decision; use None"
        )
    if config.gradient_accumulation_fusion:
        problems.append("gradient_accumulation_fusion: its kernel writes whole gradients; set it to False")
    if config.num_moe_experts is not None:
        if config.moe_router_score_function != "sigmoid" or not config.moe_router_enable_expert_bias:
            problems.append(
                f"moe_router_score_function {config.moe_router_score_function!r}: only sigmoid routers with an expert bias are elastic yet"
            )
        if config.moe_router_load_balancing_type != "none" or config.moe_z_loss_coeff is not None:
            problems.append(
                f"moe_router_load_balancing_type {config.moe_router_load_balancing_type!r}: auxiliary and z losses would count dropped experts; use 'none'"
            )
        if config.moe_router_num_groups or config.moe_router_fusion or config.moe_expert_capacity_factor is not None:
            problems.append("group-limited routing, a fused router and expert capacity are not elastic yet; switch them off")
    return problems


def _attach(handle: ElasticHandle, parallel: ParallelContext, name: str, module: Any) -> None:
    """Give one module its elastic class, if it has one and a place in a plan."""
    kind = type(module)
    match = _LOCAL_LAYER.fullmatch(name)
    layer = None if match is None else handle.model.decoder.layers[int(match[1])].layer_number - 1  # pyright: ignore
    full = canonical_name(name if match is None else f"decoder.layers.{layer}{match[2] or ''}")
    full = _LOCAL_EXPERT.sub("experts.experts.", full)
    slot = handle._slot
    if kind in LINEARS:
        site = _linear_site(handle, parallel, full, module)
        extra = (
            {"norm_site": modules.Site(slot, layer, _dims(handle, f"{full}.layer_norm_weight")[0])}
            if kind is LayerNormColumnParallelLinear
            else {}
        )
        handle._swap(module, LINEARS[kind], site=site, **extra)
        _count(handle, site.rows, site.cols)
    elif kind is TopKRouter:
        rows, cols = _dims(handle, f"{full}.weight")
        handle._swap(module, OTHERS[kind], site=modules.Site(slot, layer), linear_site=LinearSite(slot, rows, cols))
        _count(handle, rows, cols)
    elif kind is MLP and ".experts." in full:
        return  # an expert: its linears are elastic, its layer writes to the residual stream
    elif kind in (LocalRMSNorm, ExtendedRMSNorm):
        dim = _dims(handle, f"{full}.weight")[0]
        handle._swap(module, OTHERS[kind], site=modules.Site(slot, layer, dim, parallel.tensor if kind is ExtendedRMSNorm else 1))
        _count(handle, dim)
    elif kind in OTHERS:
        handle._swap(module, OTHERS[kind], site=modules.Site(slot, layer))
        if kind in (MambaLayer, TransformerLayer, MLPLayer):
            handle.attached[ElasticAxis.LAYERS] += 1
        elif kind is MambaMixer:
            conv, heads = _dims(handle, f"{full}.conv1d.bias")[0], _dims(handle, f"{full}.A_log")[0]
            sites = {
                "conv_site": modules.Site(slot, layer, conv, parallel.tensor),
                "heads_site": modules.Site(slot, layer, heads, parallel.tensor),
            }
            handle._swap(module.cp, modules.ElasticMambaContextParallel, **sites)


def _dims(handle: ElasticHandle, name: str) -> tuple[Dim, ...]:
    dims = dims_of(name, handle.shape, axis_groups(handle.space))
    return dims[1:] if ".experts.experts." in name else dims


def _linear_site(handle: ElasticHandle, parallel: ParallelContext, full: str, module: Any) -> LinearSite:
    rows, cols = _dims(handle, f"{full}.weight")
    shards = parallel.expert_tensor if ".experts.experts." in full else parallel.tensor
    column = isinstance(module, ColumnParallelLinear)
    return LinearSite(handle._slot, rows, cols, shards if column else 1, 1 if column else shards)


def _count(handle: ElasticHandle, *dims: Dim) -> None:
    elastic = {spec.axis for spec in handle.space.axes}
    found = {segment.axis for dim in dims for segment in dim.segments if segment.axis in elastic}
    handle.attached.update(axis for axis in found if axis is not None)


def _check_complete(handle: ElasticHandle, parallel: ParallelContext) -> None:
    """Every parameter has an elastic owner, every axis of this stage was attached."""
    owners = {id(module) for module, _, _ in handle._swapped}
    conv = {id(conv_owner(module)) for module in handle.model.modules() if isinstance(module, MambaMixer)}
    problems = [
        f"{name or 'model'} ({type(module).__name__}) holds parameters but has no elastic form"
        for name, module in handle.model.named_modules()
        if any(True for _ in module.parameters(recurse=False)) and id(module) not in owners | conv
    ]
    letters = {handle.shape.layer_pattern[layer.layer_number - 1] for layer in handle.model.decoder.layers}  # pyright: ignore
    for spec in handle.space.axes:
        letter = AXES[spec.axis].letter
        if (not letter or letter in letters) and letters and not handle.attached[spec.axis]:
            problems.append(f"axis {spec.axis.value!r} was attached to no module of this model")
    if not isinstance(handle.model.decoder, hybrid_classes().stack):
        problems.append(f"the layer stack {type(handle.model.decoder).__name__} has no elastic form")
    elif parallel.pipeline > 1:
        stack = _pipeline_stack(type(handle.model.decoder))
        handle._swap(handle.model.decoder, stack, site=modules.Site(handle._slot))
    raise_all(UnsupportedError, problems, "elasticize")


def _pipeline_stack(kind: Any) -> type:
    """The stack of a pipeline stage: between stages the hidden state has the parent's width (megatron's p2p shape is config.hidden_size)."""

    class ElasticStack(kind):
        """Cuts what it receives and pads what it sends with zeros."""

        site: modules.Site

        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            """[s, b, parent's hidden] in and out, except at the ends of the pipeline."""
            decision = self.site.sliced
            kept = None if decision is None else decision.hidden_kept()
            if kept is not None and not self.pre_process:
                self.input_tensor = self.input_tensor[..., :kept]
            output = super().forward(hidden_states, *args, **kwargs)
            if kept is not None and not self.post_process:
                output = F.pad(output, (0, self.config.hidden_size - kept))
            return output

    return ElasticStack
