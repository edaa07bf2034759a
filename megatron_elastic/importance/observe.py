"""Forward hooks that show statistics what the modules of a model compute, on any layout.

Every token and every entry is seen by one rank: of copies (the residual stream under tensor parallelism without sequence parallelism) the first
tensor-parallel rank's counts, of shards each rank's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.importance.criteria import Statistics
from megatron_elastic.importance.experts import ExpertObserver
from megatron_elastic.importance.mamba import local_slices, with_convolved_state
from megatron_elastic.importance.places import NORMS, WIDTHS, WRITES, Place, Site, sites_of
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import canonical_name
from megatron_elastic.shape import ModelShape
from megatron_elastic.train.data import MicroBatch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def row_of_tokens(batch: MicroBatch, row: int) -> Tensor:
    """int64 [tokens of this rank]: `row` where the loss counts, else -1."""
    return torch.where(batch.loss_mask[0] > 0, row, -1)


class PartObserver:
    """One part of this rank's model, and where it stands among the microbatches that run through it.

    statistics: of widths, None to leave them out; experts: None to leave them out. seen: the places that were observed here.
    """

    def __init__(
        self,
        part: Any,
        shape: ModelShape,
        parallel: ParallelContext,
        statistics: Statistics[Place] | None,
        experts: ExpertObserver | None,
    ) -> None:
        self.part, self.shape, self.parallel = part, shape, parallel
        self.statistics, self.experts = statistics, experts
        self.seen: set[Place] = set()
        self._window: Sequence[tuple[MicroBatch, int]] = ()
        self._position = -1
        self._rows = torch.empty(0, dtype=torch.int64)

    def open(self, window: Sequence[tuple[MicroBatch, int]]) -> None:
        """The next microbatches (this rank's share of each, and the number of its row), in the order in which they will come."""
        self._window, self._position = window, -1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe every forward of the part."""
        handles = [self.part.get_submodule("embedding" if self.part.pre_process else "decoder").register_forward_pre_hook(self._begin)]
        try:
            for name, module in self.part.named_modules():
                handles += self._hooks(canonical_name(name), module)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, *_: Any) -> None:
        """A microbatch enters. Copies that fill up an interleaved schedule's last round count nothing."""
        self._position += 1
        batch, row = self._batch
        self._rows = row_of_tokens(batch, row if self._position < len(self._window) else -1)

    @property
    def _batch(self) -> tuple[MicroBatch, int]:
        return self._window[min(self._position, len(self._window) - 1)]

    def _hooks(self, name: str, module: Any) -> list[Any]:
        match = _LAYER.fullmatch(name)
        layer = None if match is None else self.part.decoder.layers[int(match[1])].layer_number - 1
        inner = name if match is None else match[2]
        handles = []
        if self.statistics is not None:
            hidden = WRITES if self.statistics.criterion.needs == "backward" else NORMS
            first = self.experts.first_expert(layer) if self.experts is not None and layer is not None and ".experts." in inner else 0
            for site, place in sites_of(inner, WIDTHS + hidden, layer, self.shape, first):
                handles.append(_hook(module, site, partial(self._observe, site, place, module, inner)))
        if self.experts is not None and layer is not None:
            handles += self._expert_hooks(inner, module, layer, self.experts)
        return handles

    def _expert_hooks(self, inner: str, module: Any, layer: int, experts: ExpertObserver) -> list[Any]:
        if inner == "mlp.router":
            moe = next(other.mlp for other in self.part.decoder.layers if other.layer_number - 1 == layer)
            experts.check(moe, layer)

            def routed(_: Any, args: Any, output: Any) -> None:
                probs, routing_map = output
                experts.routed(moe, layer, probs, routing_map, self.token_rows())

            return [module.register_forward_hook(routed)]
        if match := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc2", inner):
            local = int(match[1])
            return [module.register_forward_hook(lambda _, args, output: experts.answered(layer, local, output[0]))]
        return []

    def token_rows(self) -> Tensor:
        """The row of each of this rank's tokens [tokens] of the residual stream in the current microbatch; -1: it does not count."""
        parallel = self.parallel
        return self._rows.chunk(parallel.tensor)[parallel.tensor_rank] if parallel.sequence_parallel else self._rows

    def _observe(self, site: Site, place: Place, module: Any, inner: str, value: Tensor, source: Tensor) -> None:
        """value: what is observed [..., entries]; source: the tensor whose gradient is its gradient."""
        parallel = self.parallel
        self.seen.add(place)
        if site.axis is ElasticAxis.HIDDEN:
            if parallel.sequence_parallel or parallel.tensor_rank == 0:
                self._add(place, value, source, self.token_rows())
        elif site.axis is ElasticAxis.MOE_FFN:
            assert self.experts is not None and place.layer is not None
            local = int(place.part) - self.experts.first_expert(place.layer)
            self._add(place, value, source, self.experts.rows_of(place.layer, local), parallel.expert_tensor_rank)
        elif site.axis in (ElasticAxis.MAMBA_HEADS, ElasticAxis.MAMBA_STATE):
            self._observe_mixer(site, place, inner, value, source)
        else:
            self._add(place, value, source, self._rows, parallel.tensor_rank)

    def _observe_mixer(self, site: Site, place: Place, inner: str, value: Tensor, source: Tensor) -> None:
        assert self.statistics is not None and place.layer is not None
        mixer = next(other.mixer for other in self.part.decoder.layers if other.layer_number - 1 == place.layer)
        rows, flat = self._rows, value.reshape(-1, value.shape[-1])
        if site.axis is ElasticAxis.MAMBA_STATE:
            self.seen -= {place}  # B and C are places of their own
            if self.statistics.criterion.needs == "forward":
                flat = with_convolved_state(mixer, flat, self._batch[0], self.parallel)
        for own, where in local_slices(mixer, place.layer):
            if own.axis is site.axis:
                self.seen.add(own)
                self._add(own, flat, source, rows, self.parallel.tensor_rank, where)

    def _add(self, place: Place, value: Tensor, source: Tensor, rows: Tensor, rank: int = 0, where: slice = slice(None)) -> None:
        """Now, or when the gradient of `source` is there. rank: of the shards that entries are dealt over; where: which columns they are."""
        statistics = self.statistics
        assert statistics is not None
        activation = value.detach().reshape(-1, value.shape[-1])[:, where]
        first = rank * activation.shape[1]
        if statistics.criterion.needs == "forward":
            statistics.add(place, activation, rows, first=first)
        elif source.requires_grad:

            def with_gradient(gradient: Tensor) -> None:
                statistics.add(place, activation, rows, gradient=gradient.reshape(-1, gradient.shape[-1])[:, where], first=first)

            source.register_hook(with_gradient)


def _hook(module: Any, site: Site, observe: Callable[[Tensor, Tensor], None]) -> Any:
    """Show `observe` (what is observed, the tensor with its gradient) the site's side of every forward of a module."""
    if site.side == "input":
        return module.register_forward_pre_hook(lambda _, args: observe(args[0], args[0]))
    if site.side == "norm":
        return module.register_forward_pre_hook(lambda _, args: observe(normalized(module, args[0]), args[0]))
    if site.side == "output":
        return module.register_forward_hook(lambda _, args, output: observe(*[output[0] if isinstance(output, tuple) else output] * 2))

    def written(_: Any, args: Any, output: Any) -> None:
        result, bias = output if isinstance(output, tuple) else (output, None)
        if torch.is_grad_enabled() and not result.requires_grad:
            result.requires_grad_()  # the embedding of a model whose weights are frozen: what the backward goes to
        observe(result if bias is None else result + bias, result)

    return module.register_forward_hook(written)


@torch.no_grad()
def normalized(linear: Any, x: Tensor) -> Tensor:
    """What the norm of a linear that has its norm inside gives for x [..., hidden], by its own weights: the module does not show it."""
    if linear.normalization == "LayerNorm":
        return F.layer_norm(x, (x.shape[-1],), linear.layer_norm_weight, linear.layer_norm_bias, linear.eps)
    return F.rms_norm(x, (x.shape[-1],), linear.layer_norm_weight, linear.eps)
