"""The elastic classes of a Mamba mixer: its gated norm, its share of the heads with context parallelism, and the mixer itself."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.ssm.mamba_mixer import ExtendedRMSNorm, MambaMixer, causal_conv1d_fn, mamba_chunk_scan_combined

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.elastic.modules import Site, wide, write_result
from megatron_elastic.models.context import WholeRowContextParallel
from megatron_elastic.platform.versions import sequence_index


class ElasticGatedNorm(ExtendedRMSNorm):
    """The Mamba mixer's norm over each SSM group: its input is the mask point of mamba_heads and mamba_head_dim."""

    site: Site

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """[kept channels of this rank]."""
        whole = self._parameters["weight"]
        assert whole is not None
        return self.site.cut(whole)

    @property
    def group_size(self) -> int:
        """Kept channels of one SSM group."""
        heads = self.site.share(ElasticAxis.MAMBA_HEADS, self.__dict__["group_size"])
        return self.site.share(ElasticAxis.MAMBA_HEAD_DIM, heads)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """[..., kept channels] -> the same."""
        share = self.site.alive_share(x)
        if share is None:
            return super().forward(x) if z is None else super().forward(x, z)
        scale, values = share.sqrt(), wide(x)  # fp32 as the norm inside: the result is rounded once, as the small model's
        vector = self.site.vector(values)
        assert vector is not None
        masked = values * (vector / scale)
        return ((super().forward(masked) if z is None else super().forward(masked, z)) * scale).to(x.dtype)


class ElasticMambaContextParallel(WholeRowContextParallel):
    """Counts the kept heads and channels, and hands the mixer the kept part of its convolution and per-head parameters.

    With context parallelism a rank's heads are an equal share of the kept ones: whole SSM groups, or, with more ranks than groups, an equal
    share of each group's kept prefix (`fit.context_problems`).
    """

    conv_site: Site
    heads_site: Site

    def _kept(self, name: str, *axes: ElasticAxis) -> int:
        """What a decision computes of the entries that megatron-core counted under `name`."""
        count = self.__dict__[name]
        for axis in axes:
            count = self.heads_site.share(axis, count)
        return count

    @property
    def nheads_local_tp(self) -> int:
        """Kept heads of this tensor-parallel rank."""
        return self._kept("nheads_local_tp", ElasticAxis.MAMBA_HEADS)

    @property
    def nheads_local_tpcp(self) -> int:
        """Kept heads that this context-parallel rank scans."""
        return self._kept("nheads_local_tpcp", ElasticAxis.MAMBA_HEADS)

    @property
    def d_inner_local_tp(self) -> int:
        """Kept channels of this tensor-parallel rank."""
        return self._kept("d_inner_local_tp", ElasticAxis.MAMBA_HEADS, ElasticAxis.MAMBA_HEAD_DIM)

    @property
    def d_inner_local_tpcp(self) -> int:
        """Kept channels of the heads that this context-parallel rank scans."""
        return self._kept("d_inner_local_tpcp", ElasticAxis.MAMBA_HEADS, ElasticAxis.MAMBA_HEAD_DIM)

    @property
    def d_state(self) -> int:
        """Kept state channels of one SSM group."""
        return self._kept("d_state", ElasticAxis.MAMBA_STATE)

    def _slice_conv_param(self, param: torch.Tensor) -> torch.Tensor:
        return super()._slice_conv_param(self.conv_site.cut(param))

    def _slice_vector_param(self, param: torch.Tensor, has_hdim: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 - megatron's signature
        return super()._slice_vector_param(self.heads_site.cut(param), has_hdim)


class ElasticMambaMixer(MambaMixer):
    """Writes to the residual stream; C after the convolution is the mask point of mamba_state."""

    site: Site
    state_site: Site
    cp: ElasticMambaContextParallel

    @property
    def headdim(self) -> int:
        """Kept channels of one head."""
        return self.site.share(ElasticAxis.MAMBA_HEAD_DIM, self.__dict__["headdim"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the mixer, in kept widths."""
        return write_result(super().forward(*args, **kwargs), self.site)

    def _ssm_training(self, zxBCdt: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:  # noqa: N803 - megatron's name
        """[l, b, kept rows of in_proj] -> [l, b, kept channels]; unfused while C is masked, because the fused kernel hides C.

        With context parallelism: the whole row and the rows of this rank's heads in, this rank's tokens and all kept channels out.
        """
        mask = self.state_site.vector(zxBCdt)
        if mask is None:
            return super()._ssm_training(zxBCdt, packed_seq_params)
        seq_idx = sequence_index(self, packed_seq_params, zxBCdt.shape[0])
        own = mask[: self.cp.ngroups_local_tpcp * self.cp.d_state]  # all SSM groups are masked alike, and these may be fewer
        scanned = masked_state_scan(self, zxBCdt.transpose(0, 1), own, seq_idx)
        y = self.cp.post_conv_ssm(scanned.transpose(0, 1).contiguous())
        return self.norm(y) if self.rmsnorm else y


def masked_state_scan(mixer: MambaMixer, projected: torch.Tensor, mask: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """Convolution, scan and gate of a mixer with C multiplied by `mask` [groups x state]; a state channel enters the output through C alone.

    projected: z, x, B, C, dt of this rank's heads and groups [b, l, kept rows]; seq_idx: document of each token [b, l] or None.
    Returns [b, l, kept channels of its heads].
    """
    cp, state = mixer.cp, mask.numel()
    heads = cp.get_dt_bias().shape[0]
    inner = heads * mixer.headdim
    z, xbc, dt = projected.split([inner, inner + 2 * state, heads], dim=-1)
    weight, bias = cp.get_conv1d_weight().squeeze(1), cp.get_conv1d_bias()
    conv = causal_conv1d_fn(xbc.transpose(1, 2), weight, bias, seq_idx=seq_idx, activation=mixer.activation).transpose(1, 2)
    x, b, c = conv.split([inner, state, state], dim=-1)
    groups = cp.ngroups_local_tpcp
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, mixer.headdim)).contiguous(),
        dt.contiguous(),
        -torch.exp(cp.get_A_log().float()),
        b.unflatten(-1, (groups, state // groups)).contiguous(),
        (c * mask).unflatten(-1, (groups, state // groups)).contiguous(),
        mixer.chunk_size,
        D=cp.get_D(),
        z=z.unflatten(-1, (heads, mixer.headdim)).contiguous(),
        dt_bias=cp.get_dt_bias().float(),
        dt_softplus=True,
        seq_idx=seq_idx,
    )
    return y.flatten(2)
