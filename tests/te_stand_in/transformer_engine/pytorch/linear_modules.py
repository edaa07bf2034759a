"""Linear and LayerNormLinear, tensor parallel by megatron-core's own communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from transformer_engine.pytorch.base import TransformerEngineBaseModule, gamma


class Linear(TransformerEngineBaseModule):
    """A linear layer. parallel_mode: "column" (rows are cut), "row" (columns are cut), or None."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        rng_tracker_name: str | None = None,
    ) -> None:
        super().__init__()
        assert not fuse_wgrad_accumulation, "the stand-in leaves gradients in param.grad"
        assert parallel_mode in ("column", "row", None), parallel_mode
        self.tp_group, self.tp_size = tp_group, tp_size
        self.parallel_mode = parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=params_dtype, device=device))
        if init_method is not None:
            init_method(self.weight)
        if bias:
            self.bias = nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype, device=device))
        else:
            self.bias = torch.empty(0, dtype=params_dtype, device=device)  # not a parameter, as in Transformer Engine
        self._mark_shards()

    def _mark_shards(self) -> None:
        dim = 1 if self.parallel_mode == "row" else 0
        vars(self.weight).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
        if self.use_bias and self.parallel_mode == "row":
            vars(self.bias)["sequence_parallel"] = self.sequence_parallel
        elif self.use_bias and self.parallel_mode == "column":
            vars(self.bias).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., in_features] -> [..., out_features], and the bias where it is returned."""
        return self._linear(inp)

    def _linear(self, inp: torch.Tensor) -> Any:
        from megatron.core.tensor_parallel import mappings

        assert inp.shape[-1] == self.in_features, f"GEMM not possible: {tuple(inp.shape)} with {tuple(self.weight.shape)}"
        if self.parallel_mode == "column" and self.sequence_parallel:
            inp = mappings.gather_from_sequence_parallel_region(inp, tensor_parallel_output_grad=True, group=self.tp_group)
        elif self.parallel_mode == "column":
            inp = mappings.copy_to_tensor_model_parallel_region(inp, group=self.tp_group)
        output = F.linear(inp, self.weight)
        if self.parallel_mode == "row" and self.sequence_parallel:
            output = mappings.reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group)
        elif self.parallel_mode == "row":
            output = mappings.reduce_from_tensor_model_parallel_region(output, group=self.tp_group)
        if self.apply_bias:
            output = output + self.bias
        return (output, self.bias) if self.return_bias else output


class LayerNormLinear(Linear):
    """A norm and a linear layer in one kernel: nothing can be done between them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            device=device,
        )
        assert not return_layernorm_output
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        start = 0.0 if zero_centered_gamma else 1.0
        self.layer_norm_weight = nn.Parameter(torch.full((in_features,), start, dtype=params_dtype, device=device))
        vars(self.layer_norm_weight)["sequence_parallel"] = self.sequence_parallel
        self.layer_norm_bias: nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=params_dtype, device=device))
            vars(self.layer_norm_bias)["sequence_parallel"] = self.sequence_parallel

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., in_features] -> [..., out_features], and the bias where it is returned."""
        assert inp.shape[-1] == self.in_features, "GEMM not possible"
        weight = gamma(self.layer_norm_weight, zero_centered=self.zero_centered_gamma)
        if self.layer_norm_bias is None:
            return self._linear(F.rms_norm(inp, weight.shape, weight, self.eps))
        return self._linear(F.layer_norm(inp, weight.shape, weight, self.layer_norm_bias, self.eps))


class GroupedLinear(TransformerEngineBaseModule):
    """One weight for each group of tokens: built, so that it can be refused; never run."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, params_dtype: torch.dtype | None = None, **unused: Any) -> None:
        super().__init__()
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.zeros(out_features, in_features, dtype=params_dtype)))
