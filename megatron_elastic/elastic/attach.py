"""`elasticize(model, space, parallel) -> handle`: the one verb that makes a model elastic, and the way back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.mamba_mixer import ExtendedRMSNorm, MambaMixer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.elastic import mamba, modules
from megatron_elastic.elastic.decision import Decision, Mode, Slot, hard_decision
from megatron_elastic.elastic.linear import ElasticColumnLinear, ElasticRowLinear, LinearSite
from megatron_elastic.elastic.refusals import config_problems, slice_problems
from megatron_elastic.elastic.router_module import ElasticAlltoAllDispatcher, ElasticTopKRouter
from megatron_elastic.errors import ConfigError, UnsupportedError, raise_all
from megatron_elastic.fit import space_problems
from megatron_elastic.layout import Dim, axis_groups, dims_of, stacked_name
from megatron_elastic.models.local_layers import LayerNormColumnParallelLinear, LocalLayerNorm, LocalRMSNorm
from megatron_elastic.models.recompute import RecomputableMambaLayer, RecomputableMLPLayer, RecomputableTransformerLayer
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.router import TopKRouter
from megatron_elastic.platform.te import transformer_engine
from megatron_elastic.platform.versions import canonical_name, conv_owner, hybrid_classes
from megatron_elastic.shape import ModelShape

COLUMNS: dict[type, type] = {ColumnParallelLinear: ElasticColumnLinear}
NORM_COLUMNS: dict[type, type] = {LayerNormColumnParallelLinear: modules.ElasticNormLinear}
ROWS: dict[type, type] = {RowParallelLinear: ElasticRowLinear}
NORMS: dict[type, type] = {
    LocalRMSNorm: modules.ElasticRMSNorm,
    LocalLayerNorm: modules.ElasticLayerNorm,
    ExtendedRMSNorm: mamba.ElasticGatedNorm,
}
if transformer_engine() is not None:
    from megatron_elastic.elastic import te  # its classes can be subclassed only where Transformer Engine is

    COLUMNS |= te.COLUMNS
    NORM_COLUMNS |= te.NORM_COLUMNS
    ROWS |= te.ROWS
    NORMS |= te.NORMS
LINEARS = COLUMNS | NORM_COLUMNS | ROWS
WRITERS: Mapping[type, type] = {
    VocabParallelEmbedding: modules.ElasticEmbedding,
    SelfAttention: modules.ElasticSelfAttention,
    MLP: modules.ElasticMLP,
    MoELayer: modules.ElasticMoELayer,
    RecomputableMambaLayer: modules.ElasticMambaLayer,
    RecomputableTransformerLayer: modules.ElasticTransformerLayer,
    RecomputableMLPLayer: modules.ElasticMLPLayer,
}
"""Modules that write to the residual stream, and the layers around them."""
LAYERS = (RecomputableMambaLayer, RecomputableTransformerLayer, RecomputableMLPLayer)
STACKS = (hybrid_classes().stack, TransformerBlock)

_LOCAL_LAYER = re.compile(r"decoder\.layers\.(\d+)(\..*)?")


class ElasticHandle:
    """A model that has become elastic.

    parts: the parts of this rank's share of the model, one unless the pipeline is interleaved; space: its choices;
    attached: axis -> number of modules that follow it on this rank.
    """

    def __init__(self, parts: Sequence[Any], space: ElasticSpace, shape: ModelShape) -> None:
        self.parts, self.space, self.shape = tuple(parts), space, shape
        self.attached: Counter[ElasticAxis] = Counter()
        self._slot = Slot()
        self._swapped: list[tuple[Any, type, tuple[str, ...]]] = []
        self._expert_bias_rate = self.config.moe_router_bias_update_rate

    @property
    def config(self) -> Any:
        """megatron-core's config of the first part."""
        return self.parts[0].config

    @property
    def decision(self) -> Decision | None:
        """The decision in use; None: the parent."""
        return self._slot.decision

    @contextmanager
    def use(self, plan: SubmodelPlan | Decision | None, mode: Mode | str = Mode.SLICE) -> Iterator[None]:
        """Run forwards under a plan in mask or slice mode, under a router's decision, or as the parent (None).

        Backwards need no context: what they use is kept by the graph. Raises PlanError for a plan outside the space and UnsupportedError
        for a precision that cannot compute in cut widths.
        """
        if isinstance(plan, SubmodelPlan):
            decision = hard_decision(self.space, plan, Mode(mode), self.shape.num_layers)
        else:
            decision = plan
        if decision is not None and decision.kept:
            raise_all(UnsupportedError, slice_problems(self.config), "use")
        with self._slot.holding(decision):
            yield

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
        self._update_expert_bias(self._expert_bias_rate)

    def _update_expert_bias(self, rate: float) -> None:
        if self.config.num_moe_experts is not None:
            for part in self.parts:
                part.config.moe_router_bias_update_rate = rate

    def _swap(self, module: Any, kind: type, **sites: Any) -> None:
        self._swapped.append((module, type(module), tuple(sites)))
        module.__class__ = kind
        for name, site in sites.items():
            setattr(module, name, site)


def elasticize(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    space: ElasticSpace,
    parallel: ParallelContext,
    shape: ModelShape,
    *,
    expert_bias_rate: float = 0.0,
) -> ElasticHandle:
    """Make a model from `build_model`, or the parts of one, elastic in place and return the handle to use and undo it.

    Parameters, names and buffers do not change, so checkpoints stay the parent's. expert_bias_rate: how far megatron moves the selection
    bias of the experts a step until `remove()`; 0 freezes it. Every microbatch counts only the experts that are alive in it: plain
    counts over mixed budgets would drive dropped experts up and kept ones down until the full model is ruined.
    Raises ConfigError for a layout whose shards cut groups, and UnsupportedError naming every setting, module, parameter or axis that could
    not be attached; the model is left as it was.
    """
    parts = [model] if isinstance(model, torch.nn.Module) else list(model)
    raise_all(ConfigError, space_problems(space, shape, parallel.sizes), "elastic space")
    handle = ElasticHandle(parts, space, shape)
    raise_all(UnsupportedError, config_problems(handle.config, space), "elasticize")
    try:
        for part in parts:
            for name, module in list(part.named_modules()):
                _Attachment(handle, parallel, part, name, module).make()
            if parallel.pipeline > 1:
                _Attachment(handle, parallel, part, "decoder", part.get_submodule("decoder")).make_stack()
        raise_all(UnsupportedError, _missing(handle), "elasticize")
    except Exception:
        handle.remove()
        raise
    handle._update_expert_bias(expert_bias_rate)
    return handle


class _Attachment:
    """One module on its way to its elastic class. full: its name in the layout table (global layer number, experts stacked)."""

    def __init__(self, handle: ElasticHandle, parallel: ParallelContext, part: Any, name: str, module: Any) -> None:
        self.handle, self.parallel, self.module, self.slot = handle, parallel, module, handle._slot
        match = _LOCAL_LAYER.fullmatch(name)
        self.layer = None if match is None else part.decoder.layers[int(match[1])].layer_number - 1
        full = canonical_name(name if match is None else f"decoder.layers.{self.layer}{match[2] or ''}")
        self.full = stacked_name(full)[0]

    def make(self) -> None:
        """Give the module its elastic class, if it has one and a place in a plan."""
        kind = type(self.module)
        if kind in LINEARS:
            self._linear(kind)
        elif kind is TopKRouter:
            rows, cols = self._dims("weight")
            linear = LinearSite(self.slot, self.layer, rows, cols)
            self.handle._swap(self.module, ElasticTopKRouter, site=modules.RouterSite(self.slot, self.layer, rows), linear_site=linear)
            self._count(*rows.axes, *cols.axes, ElasticAxis.TOPK)
        elif kind in NORMS:
            site = self._site("weight", self.parallel.tensor if kind is ExtendedRMSNorm else 1)
            self.handle._swap(self.module, NORMS[kind], site=site)
            self._count(*site.dim.axes)
        elif kind is MambaMixer:
            self._mixer()
        elif kind in WRITERS and not (kind is MLP and ".experts." in self.full):  # an expert's output is its layer's to write
            self.handle._swap(self.module, WRITERS[kind], site=modules.Site(self.slot, self.layer, self._hidden()))
            if kind in LAYERS:
                self._count(ElasticAxis.LAYERS)
            elif kind is MoELayer and self.handle.space.spec(ElasticAxis.TOPK) is not None:
                self._dispatcher()

    def make_stack(self) -> None:
        """Make the layer stack of a pipeline stage keep the parent's width at both ends."""
        if isinstance(self.module, STACKS):
            self.handle._swap(self.module, _pipeline_stack(type(self.module)), site=modules.Site(self.slot, None, self._hidden()))

    def _linear(self, kind: type) -> None:
        rows, cols = self._dims("weight")
        shards = self.parallel.expert_tensor if ".experts.experts." in self.full else self.parallel.tensor
        column = kind not in ROWS
        # a Mamba mixer's axes are masked before its gated norm, not here
        masks_input = not column and not self.full.endswith("mixer.out_proj")
        row_shards, col_shards = (shards, 1) if column else (1, shards)
        sites: dict[str, Any] = {"site": LinearSite(self.slot, self.layer, rows, cols, row_shards, col_shards, masks_input)}
        if kind in NORM_COLUMNS:
            sites["norm_site"] = self._site("layer_norm_weight")
        self.handle._swap(self.module, LINEARS[kind], **sites)
        self._count(*rows.axes, *cols.axes)

    def _mixer(self) -> None:
        ranks = self.parallel.tensor
        conv, heads = self._site("conv1d.bias", ranks), self._site("A_log", ranks)
        self.handle._swap(self.module.cp, mamba.ElasticMambaContextParallel, conv_site=conv, heads_site=heads)
        site = modules.Site(self.slot, self.layer, self._hidden())
        state = modules.Site(self.slot, self.layer, Dim(conv.dim.segments[-1:]), ranks)  # z and x come first, C last
        self.handle._swap(self.module, mamba.ElasticMambaMixer, site=site, state_site=state)

    def _dispatcher(self) -> None:
        """megatron's all-to-all counts on topk experts for every token; the others ask the routing map."""
        if type(self.module.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            self.handle._swap(self.module.token_dispatcher, ElasticAlltoAllDispatcher)

    def _dims(self, parameter: str) -> tuple[Dim, ...]:
        dims = dims_of(f"{self.full}.{parameter}", self.handle.shape, axis_groups(self.handle.space))
        return dims[1:] if ".experts.experts." in self.full else dims

    def _site(self, parameter: str, shards: int = 1) -> modules.Site:
        return modules.Site(self.slot, self.layer, self._dims(parameter)[0], shards)

    def _hidden(self) -> Dim:
        return dims_of("embedding.word_embeddings.weight", self.handle.shape, axis_groups(self.handle.space))[1]

    def _count(self, *axes: ElasticAxis) -> None:
        elastic = {spec.axis for spec in self.handle.space.axes}
        self.handle.attached.update(elastic & set(axes))


def _missing(handle: ElasticHandle) -> list[str]:
    """Parameters without an elastic owner, and axes of this rank's layers that no module follows; one line each."""
    owners, problems, mine = {id(module) for module, _, _ in handle._swapped}, [], set()
    for part in handle.parts:
        conv = {id(conv_owner(module)) for module in part.modules() if isinstance(module, MambaMixer)}
        problems += [
            f"{name or 'model'} ({type(module).__name__}) holds parameters but has no elastic form"
            for name, module in part.named_modules()
            if any(True for _ in module.parameters(recurse=False)) and id(module) not in owners | conv
        ]
        decoder: Any = part.get_submodule("decoder")
        if not isinstance(decoder, STACKS):
            problems.append(f"the layer stack {type(decoder).__name__} has no elastic form")
        mine |= {layer.layer_number - 1 for layer in decoder.layers}
    for spec in handle.space.axes:
        expected = not spec.layers or mine & set(spec.layers)
        if expected and mine and not handle.attached[spec.axis]:
            problems.append(f"axis {spec.axis.value!r} was attached to no module of this model")
    return problems


def _pipeline_stack(kind: Any) -> type:
    """The stack of a pipeline stage: between stages the hidden state has the parent's width (megatron's p2p shape is config.hidden_size)."""

    class ElasticStack(kind):
        """Cuts what it receives and pads what it sends with zeros."""

        site: modules.Site

        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            """[s, b, parent's hidden] in and out, except at the ends of the pipeline."""
            kept = self.site.share(ElasticAxis.HIDDEN, self.config.hidden_size)
            cut = self.config.hidden_size - kept
            if cut and not self.pre_process:
                self.input_tensor = self.input_tensor[..., :kept]
            output = super().forward(hidden_states, *args, **kwargs)
            return F.pad(output, (0, cut)) if cut and not self.post_process else output

    return ElasticStack
