"""Elastic forms of megatron-core's Transformer Engine layers; importable only where Transformer Engine is.

Transformer Engine's kernels take whole weights. So they run for the parent and in mask mode, and what a plan cuts is computed by plain
PyTorch, as in the local layers: the norm on the kept channels, then `ElasticMatmul` on the kept rows and columns, with megatron-core's communication
of the same layer. Parameters have the same names either way.

The fused norm and linear hides the point between the two, where mask mode scales the norm's output by s = sqrt(d/D) (`modules.rms_norm`).
A linear layer commutes with a number, so its output is scaled instead: W(s n) + b = s (W n + b) + (1 - s) b. LayerNorm has no such
form (its mean and variance are over the d channels that are alive) and is unfused while hidden is masked.

`TEDotProductAttention` needs no elastic form: it holds no parameters and reads the number of query heads from its inputs; what it fixes (groups of keys
and values, the size of a head) is no axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megatron_elastic.elastic.linear import LinearSite, elastic_matmul
from megatron_elastic.elastic.modules import Site, layer_norm, rms_norm
from megatron_elastic.layout import Runs
from megatron_elastic.platform.te import transformer_engine
from megatron_elastic.runs import select

_TE: Any = transformer_engine()


class _GradientByHook(torch.autograd.Function):
    """The output of a kernel that leaves its weight's gradient in `param.grad`: DDP's hook is to add it.

    `ElasticMatmul` adds to `main_grad` itself and tells the hook so, for the rest of the step; without this word the gradient of a later
    microbatch that runs in full width would be dropped.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, linear: Any) -> torch.Tensor:
        ctx.linear = linear
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight = ctx.linear.weight
        if hasattr(weight, "main_grad"):
            weight.grad_added_to_main_grad = False
        return grads[0], None


def _by_hook(linear: Any, result: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What Transformer Engine's own forward returned: (output, bias to be added later)."""
    output = _GradientByHook.apply(result[0], linear)
    assert isinstance(output, torch.Tensor)
    return output, result[1]


def _column(linear: Any, x: torch.Tensor, rows: Runs | None, cols: Runs | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A column-parallel linear in kept rows and columns: [s, b, kept hidden] -> ([s, b, kept rows], bias to be added later)."""
    if linear.parallel_mode is None:
        gathered = x  # an expert: its layer's dispatcher communicates
    elif linear.sequence_parallel:
        gathered = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=linear._tp_group)
    else:
        gathered = copy_to_tensor_model_parallel_region(x, group=linear._tp_group)
    return _with_bias(linear, elastic_matmul(gathered, linear.weight, rows, cols), rows)


def _row(linear: Any, x: torch.Tensor, rows: Runs | None, cols: Runs | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A row-parallel linear in kept rows and columns: [s, b, kept cols] -> ([s, b, kept hidden], bias to be added later)."""
    output = elastic_matmul(x, linear.weight, rows, cols)
    if linear.parallel_mode is None:
        pass
    elif linear.sequence_parallel:
        output = reduce_scatter_to_sequence_parallel_region(output, group=linear._tp_group)
    else:
        output = reduce_from_tensor_model_parallel_region(output, group=linear._tp_group)
    return _with_bias(linear, output, rows)


def _with_bias(linear: Any, output: torch.Tensor, rows: Runs | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = select(linear.bias, 0, rows) if linear.use_bias else None
    if bias is not None and not linear.te_return_bias:
        return output + bias, None
    return output, bias


def _gamma(weight: torch.Tensor, module: Any) -> torch.Tensor:
    """What a norm multiplies by: its weight, or one more (`layernorm_zero_centered_gamma`)."""
    return weight + 1.0 if module.zero_centered_gamma else weight


class ElasticTEColumnLinear(_TE.column):
    """Column-parallel linear: its input is the residual stream, its rows belong to an axis of their own."""

    site: LinearSite

    def forward(self, x: torch.Tensor) -> Any:
        """[s, b, kept hidden] -> ([s, b, kept rows], bias to be added later)."""
        rows, cols = self.site.kept()
        if rows is None and cols is None:
            return _by_hook(self, super().forward(x))
        return _column(self, x, rows, cols)


class ElasticTERowLinear(_TE.row):
    """Row-parallel linear: its input is the mask point of its axis, its output is written to the residual stream."""

    site: LinearSite

    def forward(self, x: torch.Tensor) -> Any:
        """[s, b, kept cols] -> ([s, b, kept hidden], bias to be added later)."""
        rows, cols = self.site.kept()
        masked = self.site.masked_input(x)
        if rows is None and cols is None:
            return _by_hook(self, super().forward(masked))
        return _row(self, masked, rows, cols)


class ElasticTENormLinear(_TE.norm_column):
    """Norm over the residual stream and a column-parallel linear; in one kernel where nothing is cut."""

    site: LinearSite
    norm_site: Site

    def forward(self, x: torch.Tensor) -> Any:
        """[s, b, kept hidden] -> ([s, b, kept rows], bias to be added later)."""
        rows, cols = self.site.kept()
        share = self.norm_site.alive_share(x)
        if rows is not None or cols is not None or (share is not None and self.layer_norm_bias is not None):
            return _column(self, self._normalize(x, share), rows, cols)
        if share is None:
            return _by_hook(self, super().forward(x))
        scale = share.sqrt().to(x.dtype)
        output, bias = _by_hook(self, super().forward(x / scale))
        output = output * scale
        if self.use_bias and bias is None:
            output = output + self.bias * (1.0 - scale)  # the kernel added it, and it was scaled with the rest
        return output, bias

    def _normalize(self, x: torch.Tensor, share: torch.Tensor | None) -> torch.Tensor:
        weight = _gamma(self.layer_norm_weight, self)
        if self.layer_norm_bias is not None:
            return layer_norm(x, self.norm_site, weight, self.layer_norm_bias, self.eps)
        return rms_norm(x, share, self.norm_site.cut(weight), self.eps)


class ElasticTERMSNorm(_TE.rms_norm):
    """RMS norm over the residual stream (or over a head, whose channels are no axis)."""

    site: Site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., kept hidden] -> the same."""
        share, weight = self.site.alive_share(x), self.site.cut(self.weight)
        if weight.shape != self.weight.shape:
            return rms_norm(x, share, _gamma(weight, self), self.eps)
        if share is None:
            return super().forward(x)
        scale = share.sqrt().to(x.dtype)
        return super().forward(x / scale) * scale


class ElasticTELayerNorm(_TE.layer_norm):
    """LayerNorm over the residual stream (or over a head, whose channels are no axis)."""

    site: Site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., kept hidden] -> the same."""
        if self.site.cut(self.bias).shape == self.bias.shape and self.site.vector(x) is None:
            return super().forward(x)
        return layer_norm(x, self.site, _gamma(self.weight, self), self.bias, self.eps)


COLUMNS: Mapping[type, type] = {_TE.column: ElasticTEColumnLinear}
NORM_COLUMNS: Mapping[type, type] = {_TE.norm_column: ElasticTENormLinear}
ROWS: Mapping[type, type] = {_TE.row: ElasticTERowLinear}
NORMS: Mapping[type, type] = {_TE.rms_norm: ElasticTERMSNorm, _TE.layer_norm: ElasticTELayerNorm}
"""Exact type -> its elastic form. What is not here (grouped linears, fused residual norms) is refused by name."""
