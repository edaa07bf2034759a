"""Linear layers in kept rows and columns, and the elastic forms of megatron's column- and row-parallel linears.

Slice mode multiplies by a view of the weight (a copy when the kept entries are not one block). A view has no gradient buffer of
its own, so one autograd function adds the weight's gradient to the kept part of `main_grad`. It serves every elastic linear in
every mode: megatron's own function would leave its gradient in `param.grad`, and one parameter cannot use both ways in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megatron_elastic.elastic.decision import Slot
from megatron_elastic.layout import Dim, Runs
from megatron_elastic.runs import add_selected, num_kept, select, select_matrix


class ElasticMatmul(torch.autograd.Function):
    """x [tokens, kept cols] times the kept part of weight [rows, cols], transposed: [tokens, kept rows].

    The weight's gradient goes to `weight.main_grad` when megatron's DDP made one, else it is returned with zeros outside the plan.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rows: Runs | None, cols: Runs | None) -> torch.Tensor:
        """Save the input and the whole weight; the kept part is taken again in the backward rather than stored."""
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.cols = rows, cols
        if not len(x):  # an expert without tokens: its weight is not worth a copy
            return x.new_empty(0, num_kept(weight.shape[0], rows))
        return x.mm(select_matrix(weight, rows, cols).t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        """Gradients of the input and of the weight."""
        x, weight = ctx.saved_tensors
        grad = grads[0]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.mm(select_matrix(weight, ctx.rows, ctx.cols)) if len(x) else torch.empty_like(x)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None
        return grad_x, _weight_gradient(grad, x, weight, ctx.rows, ctx.cols), None, None


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: Runs | None, cols: Runs | None) -> torch.Tensor:
    """grad [tokens, kept rows] transposed times x [tokens, kept cols], in `main_grad` or returned in the weight's shape."""
    fused = hasattr(weight, "main_grad")
    if not fused and rows is None and cols is None:
        return grad.t().mm(x)
    whole = weight.main_grad if fused else torch.zeros_like(weight)
    if len(x):
        add_selected(whole, grad.t().mm(x), rows, cols)
    if not fused:
        return whole
    # DDP's hook must run, and must not add anything: megatron's own fused path hands it the same empty stand-in.
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def elastic_matmul(x: torch.Tensor, weight: torch.Tensor, rows: Runs | None, cols: Runs | None) -> torch.Tensor:
    """`ElasticMatmul` for x [..., kept cols]: [..., kept rows].

    Flattened first: given three dims and strides that it cannot fold, torch multiplies row by row, several times as slow.
    """
    result = ElasticMatmul.apply(x.reshape(-1, x.shape[-1]), weight, rows, cols)
    assert isinstance(result, torch.Tensor)
    return result.view(*x.shape[:-1], result.shape[-1])


@dataclass(frozen=True)
class LinearSite:
    """What an elastic linear knows of itself.

    layer: its global layer number (from 0), None outside the layers; rows, cols: its dims in the layout table; row_shards, col_shards:
    how many ranks share each; masks_input: whether its input is the mask point of the axes of its columns.
    """

    slot: Slot
    layer: int | None
    rows: Dim
    cols: Dim
    row_shards: int = 1
    col_shards: int = 1
    masks_input: bool = False

    def kept(self) -> tuple[Runs | None, Runs | None]:
        """Computed rows and columns of this rank's shard; None where all are."""
        decision = self.slot.decision
        if decision is None:
            return None, None
        return decision.runs(self.rows, self.layer, self.row_shards), decision.runs(self.cols, self.layer, self.col_shards)

    def masked_input(self, x: torch.Tensor) -> torch.Tensor:
        """The input times the weights of its axis: the mask point of ffn, moe_ffn, shared_ffn and heads."""
        decision = self.slot.decision
        if decision is None or not self.masks_input:
            return x
        vector = decision.vector(self.cols, self.layer, self.col_shards, x)
        return x if vector is None else x * vector


class ElasticColumnLinear(ColumnParallelLinear):
    """Column-parallel linear: its input is the residual stream, its rows belong to an axis of their own."""

    site: LinearSite

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        """[s, b, kept hidden] -> ([s, b, kept rows], bias to be added later)."""
        rows, cols = self.site.kept()
        matrix = self.weight if weight is None else weight
        if cols is not None and matrix.shape[1] == input_.shape[-1]:
            cols = None  # a tied output layer is handed an embedding that is cut already
        if self.explicit_expert_comm:
            gathered = input_
        elif self.sequence_parallel:
            gathered = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            gathered = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        if weight is None:
            output = elastic_matmul(gathered, matrix, rows, cols)
        else:
            output = gathered.matmul(select_matrix(matrix, rows, cols).t())  # shared with the embedding: plain autograd
        bias = None if self.bias is None else select(self.bias, 0, rows)
        if bias is not None and not self.skip_bias_add:
            output = output + bias
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            output = gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, bias if self.skip_bias_add else None


class ElasticRowLinear(RowParallelLinear):
    """Row-parallel linear: its input is the mask point of its axis, its output is written to the residual stream."""

    site: LinearSite

    def forward(self, input_: torch.Tensor) -> Any:
        """[s, b, kept cols] -> ([s, b, kept hidden], bias to be added later)."""
        rows, cols = self.site.kept()
        output = elastic_matmul(self.site.masked_input(input_), self.weight, rows, cols)
        if self.explicit_expert_comm:
            pass
        elif self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group)
        else:
            output = reduce_from_tensor_model_parallel_region(output, group=self.tp_group)
        bias = None if self.bias is None else select(self.bias, 0, rows)
        if bias is not None and not self.skip_bias_add:
            return output + bias, None
        return output, bias
