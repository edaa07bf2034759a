"""A real pretrained model goes all the way: SmolLM2-135M comes in, writes what transformers' model writes, goes out bit for bit, is cut and
read back by transformers, and is trained as a family for two steps (slow; `tests/docs` trains it for one).

Run: pytest tests/hf/test_smollm2.py (two minutes on two cores)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.config import decode_recipe, load_recipe
from megatron_elastic.corpus.tokenizer import open_tokenizer
from megatron_elastic.corpus.write import CorpusOptions, write_data
from megatron_elastic.recipe import Recipe
from megatron_elastic.recipe_files import read_yaml
from tests.train.harness import in_new_process, rows, train

pytest.importorskip("transformers")
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from megatron_elastic.elastic.attach import ElasticHandle, elasticize  # noqa: E402
from megatron_elastic.export.evaluate import Evaluator  # noqa: E402
from megatron_elastic.export.generate import GenerateOptions, generate  # noqa: E402
from megatron_elastic.export.load import load_model  # noqa: E402
from megatron_elastic.export.member import cut  # noqa: E402
from megatron_elastic.export.sources import Source, open_source  # noqa: E402
from megatron_elastic.export.to_megatron import import_model, importable  # noqa: E402
from megatron_elastic.export.write import Options, with_recipe, write_member  # noqa: E402
from tests.export.read_back import logits_in_a_fresh_process  # noqa: E402

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="two minutes; the small models of the other tests tell the releases apart"
)
RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2_135m.yaml"
KNOWN_PERPLEXITY = 7.45
"""Of the first 2,048 tokens of argparse.py, whose text differs a little between releases of Python."""


@dataclass
class Ours:
    """The import as a family: on the disk, and in memory."""

    path: Path
    source: Source
    model: Any
    handle: ElasticHandle
    parallel: Any


@pytest.fixture(scope="module")
def ours(smollm2_directory: Path, tmp_path_factory: Any, _one_process: Any) -> Iterator[Ours]:
    """SmolLM2 imported, and made elastic by the recipe that ships."""
    path = tmp_path_factory.mktemp("runs") / "smollm2"
    with importable(smollm2_directory, path) as source:
        import_model(source, cut(source, None), path)
    family, _ = with_recipe(open_source(path), RECIPE)
    assert family.space is not None
    model = load_model(family, _one_process)
    yield Ours(path, family, model, elasticize(model, family.space, _one_process, family.shape), _one_process)


@pytest.fixture(scope="module")
def theirs(smollm2_directory: Path) -> Any:
    """transformers' model of the same directory."""
    return AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32).eval()


def text_ids(directory: Path, tokens: int) -> np.ndarray:
    """The first tokens of argparse.py, in the words of the model in `directory`."""
    return open_tokenizer(str(directory)).encode(Path(argparse.__file__).read_text(encoding="utf-8"))[:tokens].astype(np.int32)


def their_perplexity(model: Any, ids: np.ndarray) -> float:
    """Of one window, by a plain cross-entropy."""
    with torch.no_grad():
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        logits = model(tokens[:, :-1], use_cache=False).logits[0]
        return math.exp(float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:])))


def our_perplexity(ours: Ours, ids: np.ndarray) -> float:
    """The same by `eval`'s evaluator."""
    evaluator = Evaluator(ours.model, ours.handle, ours.source.shape, ours.parallel)
    return math.exp(evaluator.losses({"parent": None}, [ids], len(ids))["parent"])


def test_the_import_is_the_recipes_parent(ours: Ours) -> None:
    written = load_recipe(ours.path / "recipe.yaml")
    assert written.model == load_recipe(RECIPE).model == open_source(ours.path).shape
    assert written.parent == str(ours.path)
    assert list(ours.source.plans) == ["full", "medium", "small"]


def test_the_tokenizer_comes_along(ours: Ours, smollm2_directory: Path) -> None:
    text = Path(argparse.__file__).read_text(encoding="utf-8")[:20_000]
    assert ours.source.assets is not None
    mine = open_tokenizer(str(ours.source.assets)).encode(text)
    assert mine.tolist() == AutoTokenizer.from_pretrained(smollm2_directory)(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("prompt", ["The three primary colours are", "def fibonacci(n):\n"])
def test_greedy_continuations_are_transformers(prompt: str, ours: Ours, theirs: Any) -> None:
    ids = [int(number) for number in open_tokenizer(str(ours.source.assets)).encode(prompt)]
    options = GenerateOptions(tokens=32, end=-1, vocab_size=ours.source.shape.vocab_size, drawable=ours.source.shape.vocab_size)
    with torch.no_grad():
        found = theirs.generate(
            torch.tensor([ids]), max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    assert list(generate(ours.model, ids, options).ids) == found[0, len(ids) :].tolist()


def test_perplexity_is_transformers_and_the_known_one(ours: Ours, theirs: Any, smollm2_directory: Path) -> None:
    ids = text_ids(smollm2_directory, 2048)
    mine = our_perplexity(ours, ids)
    assert mine == pytest.approx(their_perplexity(theirs, ids), rel=1e-4)
    assert mine == pytest.approx(KNOWN_PERPLEXITY, rel=0.02)


def test_in_and_out_bit_for_bit(ours: Ours, smollm2_directory: Path, tmp_path: Path) -> None:
    write_member(open_source(ours.path), None, tmp_path / "back", Options(hugging_face=True, shard_gigabytes=0.2))
    before, after = (
        {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for directory in (smollm2_directory, tmp_path / "back")
    )
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert before.keys() == after.keys() and len(before) == 272
    assert all(torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (smollm2_directory / name).read_bytes(), name


def test_a_member_is_the_masked_family_to_transformers(ours: Ours, smollm2_directory: Path, tmp_path: Path) -> None:
    plan = ours.handle.space.plan({ElasticAxis.HIDDEN: 504, ElasticAxis.FFN: 1152, ElasticAxis.HEADS: 6, ElasticAxis.LAYERS: 26})
    write_member(ours.source, plan, tmp_path / "member", Options(hugging_face=True))
    tokens = torch.from_numpy(text_ids(smollm2_directory, 48).astype(np.int64)).reshape(2, 24)
    (found,) = logits_in_a_fresh_process({tmp_path / "member": tokens})
    with ours.handle.use(plan, "mask"), torch.no_grad():
        masked = ours.model(tokens, torch.arange(24)[None].expand_as(tokens), None)
    assert float((found - masked).abs().max()) <= 1e-4
    assert json.loads((tmp_path / "member" / "config.json").read_text())["model_type"] == "llama"
    assert "base_model" in (tmp_path / "member" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_training_starts_from_the_import_and_its_members_are_cut_out(
    ours: Ours, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.train.harness.SECONDS", 600.0)
    recipe = short_training(ours, tmp_path)
    printed = in_new_process(train, recipe)
    steps = rows(Path(recipe.run_dir))
    assert len(steps) == 2 and all(math.isfinite(row["loss"]) for row in steps), printed
    trained = open_source(Path(recipe.run_dir))
    assert trained.space == recipe.space and list(trained.plans) == ["full", "medium", "small"]
    write_member(trained, trained.plans["small"], tmp_path / "small", Options(hugging_face=True), budget="small")
    member = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    assert member.num_parameters() == pytest.approx(0.5 * 134_515_008, rel=0.02)
    assert (tmp_path / "small" / "tokenizer.json").is_file()
    name = "decoder.layers.29.mlp.linear_fc2.weight"
    assert not torch.equal(trained.tensors[name], ours.source.tensors[name]), "nothing was learned"


def short_training(ours: Ours, directory: Path) -> Recipe:
    """The recipe that ships, on a little text and with two tiny steps of one stage; its plans are pinned, as two steps teach no router."""
    texts = directory / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"Text number {number} says that {number} times {number} is {number * number}. " * 8)
    write_data(CorpusOptions(sources=(str(texts),), holdout=0.3, tokenizer=str(ours.path / "assets")), directory / "data")
    plain = read_yaml(RECIPE)
    sizes = {"sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 4, "tokens": None, "steps": 2, "warmup_steps": 1}
    changes = {
        "parent": str(ours.path),
        "run_dir": str(directory / "run"),
        "data": {"path": str(directory / "data")},
        "stages": [plain["stages"][0] | sizes],
        "router": {"choice": "uniform", "samples_per_decision": 4},
        "eval": {"interval": 100, "samples": 2},
        "log": {"tensorboard": False},
    }
    return decode_recipe(plain | changes, "smollm2_135m.yaml")
