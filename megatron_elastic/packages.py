"""The packages that decide what a run can do and how fast, and what each costs where it is missing. Read from metadata: nothing is imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from megatron_elastic.shape import ModelShape

COSTS: Mapping[str, str] = {
    "megatron-core": "nothing trains, ranks or extracts; only plan, validate and doctor run",
    "transformer-engine": "layers are plain PyTorch: slower, and norms keep more memory",
    "apex": "without it and transformer-engine Adam is torch's, not fused",
    "mamba-ssm": "models with Mamba layers cannot be built on a GPU; on a CPU a plain-PyTorch scan takes its place",
    "causal-conv1d": "as without mamba-ssm",
    "nvidia-modelopt": "only benchmarks use it, to compare with Minitron's pruning",
    "deepspeed": "only clusters without SLURM need its launcher",
}
"""Name on the package index -> what is missing without it."""


def installed_versions() -> dict[str, str | None]:
    """Package of `COSTS` -> its version, None where it is not installed."""
    return {name: version_of(name) for name in COSTS}


def version_of(package: str) -> str | None:
    """The version of an installed package; None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_wanted(package: str, shape: ModelShape, device: str) -> bool:
    """Whether training a model on a device ("cuda", "cpu") misses the package where it is not installed."""
    if package in ("mamba-ssm", "causal-conv1d"):
        return device == "cuda" and shape.has("mamba")
    return package == "megatron-core" or (device == "cuda" and package in ("transformer-engine", "apex"))
