"""Sub-models of a real model, extracted and written as GGUF, have in llama.cpp the perplexity they have in transformers."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.export.sources import open_source
from megatron_elastic.export.write import Options, write_member
from megatron_elastic.space import build_space, parent_width
from tests.hf.gguf_writer import tokenizer_keys, write_gguf

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 2048
PLANS: dict[str, dict[ElasticAxis, int]] = {
    "layers": {ElasticAxis.LAYERS: 29},
    "widths": {ElasticAxis.HIDDEN: 540, ElasticAxis.FFN: 1440, ElasticAxis.HEADS: 6, ElasticAxis.LAYERS: 29},
}
"""The first is the layer that SmolLM2 misses least. The second, a cut that was neither sorted for nor trained, leaves a broken model: it shows where
every number goes, in F16, whose rounding is small. Q8_0 rounds activations too, and a broken model is sensitive to that (1 to 6 % for cuts of FFN alone)."""
CASES = [("layers", GGMLQuantizationType.F16), ("layers", GGMLQuantizationType.Q8_0), ("widths", GGMLQuantizationType.F16)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # the first run on a machine compiles llama.cpp


@pytest.fixture(scope="module")
def llama_cpp() -> Path:
    """The interpreter that has llama_cpp."""
    found = subprocess.run([sys.executable, ROOT / "scripts" / "llama_cpp.py"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(found.stdout.strip())


def member_of(plan: str, smollm2_directory: Path, directory: Path) -> Path:
    """A member of SmolLM2 as a Hugging Face directory."""
    source = open_source(smollm2_directory)
    choices = {axis: (parent_width(source.shape, axis), width) for axis, width in PLANS[plan].items()}
    space = build_space(source.shape, choices, shard_groups=1, drop_order=(5,))  # pyright: ignore[reportArgumentType] - widths are numbers here
    write_member(replace(source, space=space), space.plan(PLANS[plan]), directory, Options(hugging_face=True))
    return directory


@pytest.fixture(scope="module")
def text() -> str:
    return Path(argparse.__file__).read_text()


def tokens(directory: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(directory)(text, add_special_tokens=False)["input_ids"]


def perplexity(directory: Path, ids: list[int]) -> float:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    batch = torch.tensor([ids])
    with torch.no_grad():
        return math.exp(model(batch, labels=batch).loss.item())


def in_llama_cpp(interpreter: Path, file: Path, ids: list[int], text: str) -> dict[str, Any]:
    (file.parent / "ids.json").write_text(json.dumps(ids))
    (file.parent / "text").write_text(text)
    command = [interpreter, ROOT / "tests" / "hf" / "llama_cpp_logits.py", file, file.parent / "ids.json", file.parent / "text"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


@pytest.mark.parametrize(("plan", "kind"), CASES)
def test_a_slice_has_the_same_perplexity_in_llama_cpp(
    plan: str, kind: GGMLQuantizationType, llama_cpp: Path, smollm2: Path, smollm2_directory: Path, text: str, tmp_path: Path
) -> None:
    smollm2_slice = member_of(plan, smollm2_directory, tmp_path / "slice")
    ids = tokens(smollm2_slice, text)
    write_gguf(smollm2_slice, tmp_path / "slice.gguf", kind=kind, tokenizer=tokenizer_keys(smollm2))
    theirs = in_llama_cpp(llama_cpp, tmp_path / "slice.gguf", ids[:TOKENS], text)
    assert theirs["perplexity"] == pytest.approx(perplexity(smollm2_slice, ids[:TOKENS]), rel=0.01)
    assert theirs["ids"] == ids, "the tokenizer cuts the text as llama.cpp does"


def test_the_whole_model_has_the_perplexity_of_its_file(
    llama_cpp: Path, smollm2: Path, smollm2_directory: Path, text: str, tmp_path: Path
) -> None:
    ids = tokens(smollm2_directory, text)[:TOKENS]
    (tmp_path / "model.gguf").symlink_to(smollm2)
    theirs = in_llama_cpp(llama_cpp, tmp_path / "model.gguf", ids, text)
    assert theirs["perplexity"] == pytest.approx(perplexity(smollm2_directory, ids), rel=0.01)
