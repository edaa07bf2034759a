"""Proves that the prepared machine answers megatron-core's questions about CUDA, offers the SSM kernels, and refuses to come too late."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_elastic.platform import kernels, prepare_platform

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is changed")


@pytest.fixture(autouse=True)
def _prepared(parallel: Any) -> None:
    """megatron-core is imported and the machine prepared."""


def test_calling_again_changes_nothing() -> None:
    zeros, to = torch.zeros, torch.Tensor.to
    prepare_platform()
    assert torch.zeros is zeros
    assert torch.Tensor.to is to


def test_literal_devices_mean_the_cpu() -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2).to("cuda:0").device.type == "cpu"
    assert torch.zeros(2).to(device=torch.device("cuda")).device.type == "cpu"
    assert torch.zeros(2).to(torch.float64).dtype is torch.float64
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.ones(2).cuda().sum() == 2


def test_optimizers_recognise_cpu_parameters() -> None:
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2).type(torch.float64).dtype is torch.float64


def test_streams_and_events_are_inert() -> None:
    stream = torch.cuda.current_stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        stream.wait_event(stream.record_event())
        stream.wait_stream(torch.cuda.Stream())
    assert torch.cuda.Event().query()


def test_random_state_tracker_forks_and_returns() -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(3), first)


def test_kernels_stand_in_only_for_absent_packages() -> None:
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    assert mamba_split_conv1d_scan_combined is kernels.mamba_split_conv1d_scan_combined
    code = (
        "import sys, types, importlib.machinery as m\n"
        "real = types.ModuleType('mamba_ssm'); real.__spec__ = m.ModuleSpec('mamba_ssm', None); sys.modules['mamba_ssm'] = real\n"
        "from megatron_elastic.platform.cpu import _install_kernels; _install_kernels()\n"
        "print(sys.modules['mamba_ssm'] is real, 'mamba_ssm.ops' in sys.modules, 'causal_conv1d' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True False True"


def test_coming_after_megatron_is_refused() -> None:
    code = "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\nfrom megatron_elastic.platform import prepare_platform; prepare_platform()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "before megatron.core is imported" in done.stderr


def test_a_device_context_still_acts() -> None:
    prepare_platform()
    with torch.device("meta"):
        made = [torch.empty(3), torch.zeros(2), torch.rand(2), torch.nn.Linear(2, 3).weight]
    assert {tensor.device.type for tensor in made} == {"meta"}
