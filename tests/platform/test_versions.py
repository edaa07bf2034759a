"""Proves that supported megatron-core releases are recognised, all others refused by name, and that asking costs no import of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_elastic.errors import UnsupportedError
from megatron_elastic.platform import versions
from megatron_elastic.platform.versions import (
    Generation,
    canonical_name,
    generation_of,
    megatron_generation,
    parts_pattern,
    sums_expert_gradients,
)


def test_supported_releases() -> None:
    assert generation_of("0.16.1") is Generation.V0_16
    assert generation_of("0.19.2") is Generation.V0_19


@pytest.mark.parametrize("release", ["0.16.0", "0.17.1", "0.20.0", "0.190.0", "1.16.1"])
def test_other_releases_are_refused_by_name(release: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"megatron-core {release} is not supported; install 0\.16\.1"):
        generation_of(release)


def test_a_missing_megatron_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", absent)
    with pytest.raises(UnsupportedError, match="megatron-core is not installed"):
        megatron_generation.__wrapped__()


def test_asking_imports_neither_torch_nor_megatron() -> None:
    code = "import sys; from megatron_elastic.platform import megatron_generation; megatron_generation(); print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pattern_of_pipeline_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "megatron_generation", lambda: Generation.V0_19)
    assert parts_pattern("ME*-ME", 2) == "ME*|-ME"
    assert parts_pattern("ME*-ME", 1) == "ME*-ME"
    monkeypatch.setattr(versions, "megatron_generation", lambda: Generation.V0_16)
    assert parts_pattern("ME*-ME", 3) == "ME*-ME"


def test_convolution_is_named_as_in_checkpoints() -> None:
    assert canonical_name("decoder.layers.0.mixer.conv1d_weight") == "decoder.layers.0.mixer.conv1d.weight"
    assert canonical_name("decoder.layers.0.mixer.conv1d_bias") == "decoder.layers.0.mixer.conv1d.bias"
    assert canonical_name("decoder.layers.0.mixer.D") == "decoder.layers.0.mixer.D"


def test_only_the_newer_release_sums_whole_experts_beside_split_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for generation, sums in ((Generation.V0_16, False), (Generation.V0_19, True)):
        monkeypatch.setattr(versions, "megatron_generation", lambda generation=generation: generation)
        assert sums_expert_gradients(tensor=2, expert=1, expert_tensor=1) is sums
        assert sums_expert_gradients(tensor=2, expert=1, expert_tensor=2)
        assert sums_expert_gradients(tensor=2, expert=2, expert_tensor=1)
