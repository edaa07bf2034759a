"""Mamba-2 kernels in plain PyTorch, with the interface of `mamba_ssm` and `causal_conv1d`.

They stand in for the CUDA packages on a machine without a GPU and run anywhere, forward and backward, in fp32 or fp64
(narrower inputs are computed in fp32 and the result is cast back). The scan is the chunked form of the recurrence (Dao and Gu, "Transformers are SSMs",
section 6): matrix products inside a chunk, one small state a chunk between them, vectorised over all chunks at once.

Shapes: b batch, l tokens, h heads, p channels of a head, g groups that share B and C, n states, c chunks, q tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_elastic.errors import UnsupportedError


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Selective state-space scan: h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t + D x_t, then y_t * silu(z_t) with z.

    x, z: [b, l, h, p]. dt: [b, l, h]. A: [h], negative. B, C: [b, l, g, n]. D: [h] or [h, p]. dt_bias: [h].
    initial_states: [b, h, p, n]. seq_idx: [b, l] document of each token; the state starts from zero at each new one.
    Returns y [b, l, h, p] in x's dtype, and with `return_final_states` the state after the last token [b, h, p, n].
    cu_seqlens, return_varlen_states: of batched generation; UnsupportedError when asked for.
    """
    if return_varlen_states:
        raise UnsupportedError(
            "states of each packed document (return_varlen_states) need mamba_ssm; install it, or generate without batching"
        )
    work = torch.promote_types(x.dtype, torch.float32)
    dt = dt.to(work)
    if dt_bias is not None:
        dt = dt + dt_bias.to(work)
    if dt_softplus:
        dt = F.softplus(dt)
    if dt_limit != (0.0, float("inf")):
        dt = dt.clamp(*dt_limit)
    xs = x.to(work)
    y, state = chunked_scan(xs * dt[..., None], dt * A.to(work), B.to(work), C.to(work), chunk_size, initial_states, seq_idx)
    if D is not None:
        y = y + xs * (D if D.dim() == 2 else D[:, None]).to(work)
    if z is not None:
        y = y * F.silu(z.to(work))
    y = y.to(x.dtype)
    return (y, state) if return_final_states else y


def chunked_scan(
    x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, chunk_size: int, initial_states: Tensor | None, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_decay_t) h_{t-1} + x_t B_t^T, y_t = h_t C_t, chunk by chunk.

    x: [b, l, h, p]. log_decay: [b, l, h], at most 0. B, C: [b, l, g, n]. initial_states: [b, h, p, n]. seq_idx: [b, l].
    Returns y [b, l, h, p] and the last state [b, h, p, n]. Inside a chunk tokens i and j <= i interact with weight
    exp(s_i - s_j), s the running sum of log_decay; what came before enters through the state carried between chunks.
    """
    batch, length, heads, width = x.shape
    groups, states = B.shape[2:]
    per_group, chunk = heads // groups, min(chunk_size, length)
    padding = -length % chunk
    if padding:
        # Padded tokens write nothing (x = 0) and decay nothing (log 1 = 0), so the last state is the true one.
        x, log_decay, B, C = (F.pad(t, (0, 0) * (t.dim() - 2) + (0, padding)) for t in (x, log_decay, B, C))
        seq_idx = None if seq_idx is None else torch.cat([seq_idx, seq_idx[:, -1:].expand(-1, padding)], 1)
    chunks = (length + padding) // chunk
    xc = x.view(batch, chunks, chunk, groups, per_group, width).permute(0, 1, 3, 4, 2, 5)  # [b, c, g, h/g, q, p]
    s = log_decay.view(batch, chunks, chunk, groups, per_group).permute(0, 1, 3, 4, 2).cumsum(-1)  # [b, c, g, h/g, q]
    Bc, Cc = (t.view(batch, chunks, chunk, groups, states).permute(0, 1, 3, 2, 4) for t in (B, C))  # [b, c, g, q, n]
    same, continues = _document_masks(seq_idx, batch, chunks, chunk, x.device)

    pair = (s[..., :, None] - s[..., None, :]).masked_fill(~same, float("-inf")).exp()  # [b, c, g, h/g, q, q]
    y = ((Cc @ Bc.transpose(-1, -2))[:, :, :, None] * pair) @ xc
    left = (s[..., -1:] - s).exp() * same[..., -1, :]  # decay from a token to the chunk's end, 0 across documents
    written = _by_group(xc * left[..., None]).transpose(-1, -2) @ Bc  # [b, c, g, h/g * p, n]
    written = written.view(batch, chunks, groups, per_group, width, states)
    decay = s[..., -1].exp() * continues[..., -1]  # over a whole chunk [b, c, g, h/g]
    entering, state = _carry(written, decay, _as_groups(initial_states, groups))
    before = Cc @ entering.flatten(3, 4).transpose(-1, -2)  # [b, c, g, q, h/g * p]
    before = before.view(batch, chunks, groups, chunk, per_group, width).transpose(3, 4)
    y = y + before * (s.exp() * continues)[..., None]
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, length + padding, heads, width)
    return y[:, :length], state.reshape(batch, heads, width, states)


def _document_masks(seq_idx: Tensor | None, batch: int, chunks: int, chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which token reads which inside a chunk [., ., 1, 1, q, q], and which reads the state that enters it [., ., 1, 1, q]."""
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()[None, None, None, None]
    if seq_idx is None:
        return causal, torch.ones(1, 1, 1, 1, chunk, dtype=torch.bool, device=device)
    document = seq_idx.view(batch, chunks, chunk)
    entering = torch.cat([document[:, :1, 0], document[:, :-1, -1]], 1)  # the document the carried state belongs to
    same = document[..., :, None] == document[..., None, :]
    return causal & same[:, :, None, None], (document == entering[..., None])[:, :, None, None]


def _by_group(t: Tensor) -> Tensor:
    """[b, c, g, h/g, q, p] -> [b, c, g, q, h/g * p]: the heads of a group side by side, one product for all of them."""
    return t.transpose(3, 4).flatten(4)


def _as_groups(states: Tensor | None, groups: int) -> Tensor | None:
    """[b, h, p, n] -> [b, g, h/g, p, n]."""
    return None if states is None else states.unflatten(1, (groups, -1))


def _carry(written: Tensor, decay: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pass the state from chunk to chunk.

    written: what each chunk adds [b, c, g, h/g, p, n]. decay: of a whole chunk [b, c, g, h/g]. state: before the first chunk.
    Returns the state entering each chunk [b, c, g, h/g, p, n] and the one after the last.
    """
    state = torch.zeros_like(written[:, 0]) if state is None else state.to(written.dtype)
    entering = []
    for added, kept in zip(written.unbind(1), decay[..., None, None].unbind(1), strict=True):
        entering.append(state)
        state = torch.addcmul(added, kept, state)
    return torch.stack(entering, 1), state


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Depthwise causal convolution: y_t = bias + sum_k weight_k x_{t - taps + 1 + k}, then silu for activation silu or swish.

    x: [b, channels, l]. weight: [channels, taps]. bias: [channels]. seq_idx: [b, l]; no tap reaches into another document.
    Returns [b, channels, l]. initial_states: of generation in pieces; UnsupportedError when given.
    """
    if initial_states is not None:
        raise UnsupportedError(
            "a convolution that continues an earlier one (initial_states) needs causal_conv1d; install it, or prefill at once"
        )
    return _convolve(x.transpose(1, 2), weight, bias, seq_idx, activation).transpose(1, 2)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, activation: str | None) -> Tensor:
    """`causal_conv1d_fn` on [b, l, channels]."""
    work = torch.promote_types(x.dtype, torch.float32)
    start = x.new_zeros(x.shape[-1], dtype=work) if bias is None else bias.to(work)
    y = _CausalConvolution.apply(x.to(work), weight.to(work), start, seq_idx)
    return (F.silu(y) if activation in ("silu", "swish") else y).to(x.dtype)


class _CausalConvolution(torch.autograd.Function):
    """A sum of shifted products, accumulated in place: on a CPU four times as fast as torch's grouped convolution, which also wants a transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None) -> Tensor:
        """x: [b, l, channels]. weight: [channels, taps]. bias: [channels]. seq_idx: [b, l]."""
        ctx.save_for_backward(x, weight, seq_idx)
        by_tap = weight.t().contiguous()
        y = torch.addcmul(bias, x, by_tap[-1])
        for back in range(1, min(by_tap.shape[0], x.shape[1])):
            y[:, back:].addcmul_(_within(x[:, :-back], seq_idx, back), by_tap[-1 - back])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of x, weight and bias."""
        x, weight, seq_idx = ctx.saved_tensors
        grad, by_tap = grads[0].contiguous(), weight.t().contiguous()
        grad_x, grad_taps = grad * by_tap[-1], torch.zeros_like(by_tap)
        grad_taps[-1] = (grad * x).sum((0, 1))
        for back in range(1, min(by_tap.shape[0], x.shape[1])):
            later = _within(grad[:, back:], seq_idx, back)
            grad_x[:, :-back].addcmul_(later, by_tap[-1 - back])
            grad_taps[-1 - back] = (later * x[:, :-back]).sum((0, 1))
        return grad_x, grad_taps.t(), grad.sum((0, 1)), None


def _within(t: Tensor, seq_idx: Tensor | None, back: int) -> Tensor:
    """t [b, l - back, channels] with zeros where the token and the one `back` before it are of different documents."""
    return t if seq_idx is None else t * (seq_idx[:, back:] == seq_idx[:, :-back])[..., None]


def rms_norm_gated(x: Tensor, weight: Tensor, z: Tensor | None, eps: float, group_size: int, norm_before_gate: bool) -> Tensor:
    """RMS norm over groups of `group_size` channels, times weight; gated by silu(z) after it, or before it.

    x, z: [..., channels]. weight: [channels]. Returns x's shape and dtype.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    y = x.to(work)
    if z is not None and not norm_before_gate:
        y = y * F.silu(z.to(work))
    y = F.rms_norm(y.unflatten(-1, (-1, group_size)), (group_size,), eps=eps).flatten(-2) * weight.to(work)
    if z is not None and norm_before_gate:
        y = y * F.silu(z.to(work))
    return y.to(x.dtype)


class RMSNorm(nn.Module):
    """`mamba_ssm`'s gated RMS norm as a module; see `rms_norm_gated`.

    group_size: channels normalised together; all of them when None.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Weights start at one."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise x [..., channels], gated by z of the same shape when given."""
        return rms_norm_gated(x, self.weight, z, self.eps, self.group_size or x.shape[-1], self.norm_before_gate)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor | None,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """A whole Mamba-2 mixer after its input projection: convolution, scan, gate, and optionally gated norm and output projection.

    zxbcdt: [b, l, 2 h p + 2 g n + h], in the order z, x, B, C, dt. conv1d_weight: [h p + 2 g n, taps]. dt_bias, A: [h].
    D: [h] or [h, p]. headdim: p, needed unless D gives it. seq_idx: [b, l] documents. initial_states: [b, h, p, n].
    The gate silu(z) is applied here when `rmsnorm_weight` is None (then an outer norm sees gated values), else by the norm.
    Returns [b, l, h p] (or the projection's width), with `return_final_states` also the last state [b, h, p, n].
    """
    heads = dt_bias.shape[0]
    width = headdim if headdim is not None else (D.shape[1] if D is not None and D.dim() == 2 else 0)
    assert width > 0, "headdim is needed when D has one value a head"
    inner = heads * width
    states = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xBC, dt = zxbcdt.split([inner, inner + 2 * ngroups * states, heads], -1)
    xBC = _convolve(xBC, conv1d_weight, conv1d_bias, seq_idx, activation)
    x, B, C = xBC.split([inner, ngroups * states, ngroups * states], -1)
    scanned = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, width)),
        dt,
        A,
        B.unflatten(-1, (ngroups, states)),
        C.unflatten(-1, (ngroups, states)),
        chunk_size,
        D=D,
        z=z.unflatten(-1, (heads, width)) if rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=return_final_states,
    )
    y, state = scanned if isinstance(scanned, tuple) else (scanned, None)
    y = y.flatten(-2)
    if rmsnorm_weight is not None:
        y = rms_norm_gated(y, rmsnorm_weight, z, rmsnorm_eps, inner // ngroups, norm_before_gate)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return y if state is None else (y, state)
