"""What a GPU can do, by its name in a cluster file: arithmetic and memory. Plain Python, no torch.

Arithmetic is the vendor's figure for dense matrices (data sheets print twice that, for sparse ones). Memory is what `nvidia-smi` reports,
which the data sheet's figure only comes near.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    bf16_flops: float
    """Peak FLOP/s of its matrix units in bf16, dense."""
    fp32_flops: float
    """Peak FLOP/s in fp32 without TF32, which is how torch multiplies fp32 matrices unless it is told otherwise."""
    memory: int
    """Bytes."""
    joined: int
    """GPUs that NVLink joins at most, 1 without it: those of a node, or of a rack."""
    blackwell: bool = False
    """Whether it is of that generation or later."""
    source: str
    """Where the figures are from."""


GPUS: Mapping[str, Gpu] = {
    "A100-40GB": Gpu(bf16_flops=312e12, fp32_flops=19.5e12, memory=40960 * MIB, joined=8, source="NVIDIA A100 data sheet (SXM), 2021"),
    "A100-80GB": Gpu(bf16_flops=312e12, fp32_flops=19.5e12, memory=81920 * MIB, joined=8, source="NVIDIA A100 data sheet (SXM), 2021"),
    "H100-SXM": Gpu(bf16_flops=989e12, fp32_flops=67e12, memory=81559 * MIB, joined=8, source="NVIDIA H100 data sheet (SXM5, 80 GB), 2023"),
    "H100-PCIe": Gpu(
        bf16_flops=756e12, fp32_flops=51e12, memory=81559 * MIB, joined=2, source="NVIDIA H100 data sheet (PCIe, 80 GB), 2023"
    ),
    "H200-SXM": Gpu(
        bf16_flops=989e12, fp32_flops=67e12, memory=143771 * MIB, joined=8, source="NVIDIA H200 data sheet (SXM, 141 GB), 2024"
    ),
    "B200": Gpu(
        bf16_flops=2250e12,
        fp32_flops=75e12,
        memory=183359 * MIB,
        joined=8,
        blackwell=True,
        source="NVIDIA HGX B200 data sheet (a system's / 8), 2024",
    ),
    "GB200": Gpu(
        bf16_flops=2500e12,
        fp32_flops=80e12,
        memory=189471 * MIB,
        joined=72,
        blackwell=True,
        source="NVIDIA GB200 NVL72 data sheet (a rack's / 72), 2024",
    ),
    "L40S": Gpu(bf16_flops=362e12, fp32_flops=91.6e12, memory=46068 * MIB, joined=1, source="NVIDIA L40S data sheet, 2023"),
}
"""Name in a cluster file (`gpu:`) -> the GPU."""
