"""Proves that the plain-PyTorch SSM kernels are the recurrence they claim, forward and backward, documents included,
and that they take every argument megatron-core passes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_elastic.errors import UnsupportedError
from megatron_elastic.platform import kernels

CASES = [
    # batch, length, heads, head_dim, groups, states, chunk
    (2, 13, 6, 5, 3, 4, 4),  # length no multiple of the chunk
    (1, 16, 4, 3, 4, 2, 8),  # a group of its own for each head
    (3, 7, 2, 1, 1, 6, 16),  # shorter than a chunk
    (1, 9, 6, 2, 2, 3, 1),  # chunks of one token
]


def recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, state: Tensor | None, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token after another, as written in the docstring of the kernel."""
    batch, length, heads, width = x.shape
    repeat = heads // B.shape[2]
    state = x.new_zeros(batch, heads, width, B.shape[3]) if state is None else state
    ys = []
    for t in range(length):
        if seq_idx is not None and t > 0:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        b, c = (v[:, t].repeat_interleave(repeat, 1) for v in (B, C))
        state = (dt[:, t] * A).exp()[..., None, None] * state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, :, None]
        y = (state * c[:, :, None]).sum(-1)
        if D is not None:
            y = y + x[:, t] * (D if D.dim() == 2 else D[:, None])
        ys.append(y if z is None else y * F.silu(z[:, t]))
    return torch.stack(ys, 1), state


def scan_inputs(case: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    batch, length, heads, width, groups, states, _ = case
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()

    return {
        "x": draw(batch, length, heads, width),
        "dt": draw(batch, length, heads),
        "A": (-draw(heads).exp()).detach().requires_grad_(),
        "B": draw(batch, length, groups, states),
        "C": draw(batch, length, groups, states),
        "D": draw(heads),
        "z": draw(batch, length, heads, width),
        "dt_bias": draw(heads),
        "initial_states": draw(batch, heads, width, states),
    }


def documents(batch: int, length: int) -> Tensor:
    """Other boundaries in each sample, among them one right at a chunk's edge and documents of one token."""
    rows = [
        torch.bucketize(torch.arange(length), torch.tensor(sorted({1 + row, 4, length // 2, length - 2})), right=True)
        for row in range(batch)
    ]
    return torch.stack(rows).to(torch.int32)


def assert_same_with_gradients(mine: Tensor, reference: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)
    weight = torch.randn(mine.shape, generator=torch.Generator().manual_seed(9), dtype=mine.dtype)
    for a, b in zip(
        torch.autograd.grad((mine * weight).sum(), inputs), torch.autograd.grad((reference * weight).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_scan_equals_recurrence(case: tuple[int, ...], packed: bool) -> None:
    given = scan_inputs(case)
    seq_idx = documents(case[0], case[1]) if packed else None
    y, state = kernels.mamba_chunk_scan_combined(
        given["x"],
        given["dt"],
        given["A"],
        given["B"],
        given["C"],
        case[-1],
        D=given["D"],
        z=given["z"],
        dt_bias=given["dt_bias"],
        initial_states=given["initial_states"],
        seq_idx=seq_idx,
        dt_softplus=True,
        return_final_states=True,
    )
    dt = F.softplus(given["dt"] + given["dt_bias"])
    expected = recurrence(given["x"], dt, given["A"], given["B"], given["C"], given["D"], given["z"], given["initial_states"], seq_idx)
    both = torch.cat([y.flatten(), state.flatten()])
    assert_same_with_gradients(both, torch.cat([t.flatten() for t in expected]), list(given.values()))


def test_scan_of_long_decays_stays_finite_in_fp32() -> None:
    """exp of differences of large running sums: neither infinite nor NaN, forward and backward."""
    x = torch.ones(1, 64, 2, 3, requires_grad=True)
    dt = torch.full((1, 64, 2), 50.0)
    y = kernels.mamba_chunk_scan_combined(x, dt, torch.tensor([-16.0, -1.0]), torch.ones(1, 64, 1, 4), torch.ones(1, 64, 1, 4), 32)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert x.grad is not None
    assert y.isfinite().all() and x.grad.isfinite().all()


def test_scan_clamps_dt_and_takes_a_bias_for_each_channel() -> None:
    given = scan_inputs(CASES[0])
    D = torch.randn(6, 5, dtype=torch.float64)
    y = kernels.mamba_chunk_scan_combined(
        given["x"], given["dt"], given["A"], given["B"], given["C"], 4, D=D, dt_softplus=True, dt_limit=(0.3, 0.9)
    )
    expected, _ = recurrence(given["x"], F.softplus(given["dt"]).clamp(0.3, 0.9), given["A"], given["B"], given["C"], D, None, None, None)
    torch.testing.assert_close(y, expected)


def test_bf16_is_computed_in_fp32_and_returned_as_bf16() -> None:
    given = {name: t.detach().to(torch.bfloat16) for name, t in scan_inputs(CASES[0]).items()}
    y = kernels.mamba_chunk_scan_combined(given["x"], given["dt"], given["A"], given["B"], given["C"], 4, dt_softplus=True)
    wide = {name: t.float() for name, t in given.items()}
    expected = kernels.mamba_chunk_scan_combined(wide["x"], wide["dt"], wide["A"], wide["B"], wide["C"], 4, dt_softplus=True)
    assert isinstance(y, Tensor) and isinstance(expected, Tensor)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected.to(torch.bfloat16))


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "taps"), [(13, 4), (2, 5), (7, 1)])
def test_convolution_equals_conv1d_of_each_document(length: int, taps: int, packed: bool, activation: str | None) -> None:
    g = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in ((2, 6, length), (6, taps), (6,)))
    seq_idx = documents(2, length) if packed else None

    def plain(piece: Tensor) -> Tensor:
        y = F.conv1d(piece, weight[:, None], bias, padding=taps - 1, groups=6)[..., : piece.shape[-1]]
        return F.silu(y) if activation else y

    if seq_idx is None:
        expected = plain(x)
    else:
        lengths = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in seq_idx]
        rows = [torch.cat([plain(p) for p in x[row : row + 1].split(counts, -1)], -1) for row, counts in enumerate(lengths)]
        expected = torch.cat(rows)
    mine = kernels.causal_conv1d_fn(x, weight, bias, seq_idx=seq_idx, activation=activation)
    assert_same_with_gradients(mine, expected, [x, weight, bias])


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group_size", [None, 4])
def test_gated_norm_equals_its_formula(before: bool, gated: bool, group_size: int | None) -> None:
    g = torch.Generator().manual_seed(2)
    x, z = (torch.randn(3, 5, 12, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
    norm = kernels.RMSNorm(12, eps=0.1, group_size=group_size, norm_before_gate=before, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.normal_(generator=g)
    size = group_size or 12
    y = x if before or not gated else x * F.silu(z)
    grouped = y.unflatten(-1, (12 // size, size))
    y = (grouped / (grouped.square().mean(-1, keepdim=True) + 0.1).sqrt()).flatten(-2) * norm.weight
    y = y * F.silu(z) if before and gated else y
    inputs = [x, norm.weight] + ([z] if gated else [])
    assert_same_with_gradients(norm(x, z if gated else None), y, inputs)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_whole_mixer_equals_its_parts(normed: bool, packed: bool) -> None:
    batch, length, heads, width, groups, states, chunk = 2, 11, 6, 5, 3, 4, 4
    inner, bc = heads * width, groups * states
    g = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()

    zxbcdt, conv, conv_bias = draw(batch, length, 2 * inner + 2 * bc + heads), draw(inner + 2 * bc, 4), draw(inner + 2 * bc)
    dt_bias, log_a, D, norm, proj = draw(heads), draw(heads), draw(heads), draw(inner), draw(7, inner)
    seq_idx = documents(batch, length) if packed else None
    mine = kernels.mamba_split_conv1d_scan_combined(
        zxbcdt,
        conv,
        conv_bias,
        dt_bias,
        -log_a.exp(),
        D=D,
        chunk_size=chunk,
        seq_idx=seq_idx,
        headdim=width,
        ngroups=groups,
        norm_before_gate=False,
        rmsnorm_weight=norm if normed else None,
        rmsnorm_eps=0.1,
        outproj_weight=proj if normed else None,
    )
    assert isinstance(mine, Tensor)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * bc, heads], -1)
    xbc = kernels.causal_conv1d_fn(xbc.transpose(1, 2), conv, conv_bias, seq_idx, activation="silu").transpose(1, 2)
    x, B, C = xbc.split([inner, bc, bc], -1)
    y, _ = recurrence(
        x.unflatten(-1, (heads, width)),
        F.softplus(dt + dt_bias),
        -log_a.exp(),
        B.unflatten(-1, (groups, states)),
        C.unflatten(-1, (groups, states)),
        D,
        None,
        None,
        seq_idx,
    )
    # megatron-core passes no norm weight and norms the gated result itself.
    y = y.flatten(-2) * F.silu(z)
    inputs = [zxbcdt, conv, conv_bias, dt_bias, log_a, D]
    if normed:
        grouped = y.unflatten(-1, (groups, -1))
        y = (grouped / (grouped.square().mean(-1, keepdim=True) + 0.1).sqrt()).flatten(-2) * norm @ proj.T
        inputs += [norm, proj]
    assert_same_with_gradients(mine, y, inputs)


@pytest.mark.parametrize(
    ("function", "passed"),
    [
        (kernels.mamba_split_conv1d_scan_combined, {"D", "chunk_size", "activation", "headdim", "ngroups", "norm_before_gate", "seq_idx"}),
        (
            kernels.mamba_chunk_scan_combined,
            {"D", "z", "dt_bias", "dt_softplus", "return_final_states", "seq_idx", "cu_seqlens", "return_varlen_states", "initial_states"},
        ),
        (kernels.causal_conv1d_fn, {"x", "weight", "bias", "activation", "seq_idx", "initial_states"}),
        (kernels.RMSNorm, {"eps", "group_size", "norm_before_gate", "device", "dtype"}),
    ],
)
def test_signatures_take_what_megatron_passes(function: Any, passed: set[str]) -> None:
    assert passed <= set(inspect.signature(function).parameters)


def test_what_only_generation_needs_is_refused_by_name() -> None:
    given = {name: t.detach() for name, t in scan_inputs(CASES[0]).items()}
    with pytest.raises(UnsupportedError, match="return_varlen_states"):
        kernels.mamba_chunk_scan_combined(*(given[name] for name in ("x", "dt", "A", "B", "C")), 4, return_varlen_states=True)
    with pytest.raises(UnsupportedError, match="initial_states"):
        kernels.causal_conv1d_fn(torch.ones(1, 2, 3), torch.ones(2, 4), initial_states=torch.ones(1, 2, 3))
