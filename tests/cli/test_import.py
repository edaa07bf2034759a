"""`megatron-elastic import` and `extract` on Hugging Face directories: what comes in goes out again bit for bit, a run that starts from an import
hands on what belongs to the model, and whatever is wrong with a directory is one line, with nothing written and nothing touched.

Run: pytest tests/cli/test_import.py
"""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_elastic.checkpoint import NamedTensors, open_checkpoint
from megatron_elastic.config import load_recipe
from megatron_elastic.export.sources import open_source
from megatron_elastic.platform import prepare_platform

prepare_platform()
from tests.export.pretrained import change_json, contents, family_shapes, same, weights_of, write_pretrained  # noqa: E402
from tests.train import harness  # noqa: E402
from tests.train.harness import command, in_new_process  # noqa: E402

KINDS = ["nemotron_h", "qwen2", "qwen3_moe"]
BF16 = torch.bfloat16


def run(*arguments: object) -> str:
    """What a command prints."""
    code, out, err = command(*map(str, arguments))
    assert code == 0, err
    return out


def refusal(*arguments: object) -> str:
    """The one line of a command that fails as it should."""
    code, _, err = command(*map(str, arguments))
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err and err.count("\n") in (1, 10), err  # or a list of eight
    return err.removeprefix("error: ").strip()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: Any) -> Path:
    """A dense model in several shards. Do not write into it."""
    return write_pretrained(tmp_path_factory.mktemp("hub") / "Dense-1B", family_shapes()["qwen2"], shard_bytes=100_000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [None, 144])
def test_in_and_out_again(kind: str, padded: int | None, tmp_path: Path) -> None:
    shape = family_shapes()[kind]
    theirs = write_pretrained(tmp_path / "theirs", shape, dtype=BF16, shard_bytes=60_000)
    padding = [] if padded is None else ["--padded-vocab-size", padded]
    out = run("import", theirs, "--out", tmp_path / "ours", *padding)
    assert f"{theirs}: " in out and "parameters" in out and "vocabulary 131" in out
    checkpoint = tmp_path / "ours" / "checkpoints" / "parent"
    ours = NamedTensors(checkpoint)
    assert ours.info.shape == replace(shape, padded_vocab_size=padded, init_std=ours.info.shape.init_std)
    words = ours["embedding.word_embeddings.weight"]
    assert words.shape[0] == (padded or 131) and words.dtype == BF16 and not words[131:].any()
    recipe = load_recipe(tmp_path / "ours" / "recipe.yaml")
    assert recipe.model == ours.info.shape and recipe.parent == str(tmp_path / "ours")
    assets = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE", "origin.json"}
    assert {file.name for file in (tmp_path / "ours" / "assets").iterdir()} == assets
    run("extract", tmp_path / "ours", "--format", "hf", "--out", tmp_path / "back")
    assert same(weights_of(tmp_path / "back"), weights_of(theirs))
    assert open_source(tmp_path / "back").shape == open_source(theirs).shape
    before, after = (json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (theirs, tmp_path / "back"))
    assert {key: after[key] for key in before if key not in ("auto_map", "_name_or_path")} == {
        key: value for key, value in before.items() if key not in ("auto_map", "_name_or_path")
    }
    assert "auto_map" not in after and after["eos_token_id"] == [128, 126]
    for name in assets - {"config.json", "origin.json"}:
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes()
    assert not list(tmp_path.rglob("ours/**/*.py")) and not list((tmp_path / "back").glob("*.py"))


def test_a_type_that_is_asked_for(dense: Path, tmp_path: Path) -> None:
    run("extract", dense, "--format", "hf", "--dtype", "bfloat16", "--out", tmp_path / "half")
    wanted = {name: tensor.to(BF16) for name, tensor in weights_of(dense).items()}
    assert same(weights_of(tmp_path / "half"), wanted)
    assert json.loads((tmp_path / "half" / "config.json").read_text(encoding="utf-8"))["torch_dtype"] == "bfloat16"
    hybrid = write_pretrained(tmp_path / "hybrid", family_shapes()["nemotron_h"])
    run("extract", hybrid, "--dtype", "bfloat16", "--out", tmp_path / "megatron")
    types = {name: tensor.dtype for name, tensor in NamedTensors(tmp_path / "megatron").items()}
    assert {types[name] for name in types if name.endswith("expert_bias")} == {torch.float32}, "another type chooses other experts"
    assert {types[name] for name in types if not name.endswith("expert_bias")} == {BF16}


def test_a_dry_run_writes_nothing(dense: Path, tmp_path: Path) -> None:
    assert "parameters, layers T4, hidden 80, vocabulary 131" in run("import", dense, "--out", tmp_path / "ours", "--dry-run")
    assert list(tmp_path.iterdir()) == []


def test_training_hands_on_what_belongs_to_the_model(dense: Path, tmp_path: Path) -> None:
    data = in_new_process(harness.write_data, tmp_path / "text")
    theirs = write_pretrained(tmp_path / "Mine-1B", replace(family_shapes()["qwen2"], vocab_size=300), dtype=BF16)
    run("import", theirs, "--out", tmp_path / "ours", "--padded-vocab-size", "304")
    recipe = yaml.safe_load((tmp_path / "ours" / "recipe.yaml").read_text(encoding="utf-8"))
    stage = {"sequence_length": 36, "global_batch_size": 4, "micro_batch_size": 2, "steps": 2, "lr": 1e-3}
    recipe |= {
        "run_dir": str(tmp_path / "run"),
        "data": {"path": str(data)},
        "elastic": {"axes": {"hidden": [80, 60], "ffn": [72, 40]}, "budgets": {"full": 1.0, "small": 0.75}},
        "router": {"choice": "uniform", "samples_per_decision": 2},
        "stages": [{"name": "elastic", **stage}],
        "eval": {"samples": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    code, _, err = in_new_process(command, "train", str(tmp_path / "recipe.yaml"))
    assert code == 0, err
    shutil.rmtree(tmp_path / "ours")
    shutil.rmtree(theirs)
    out = run("extract", tmp_path / "run", "--budget", "small", "--format", "hf", "--out", tmp_path / "small")
    small = tmp_path / "small"
    config = json.loads((small / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["vocab_size"], config["eos_token_id"]) == ("qwen2", 300, [128, 126])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"):
        assert (small / name).read_bytes() == (dense / name).read_bytes()
    card = (small / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["license"] == "apache-2.0" and "base_model: Mine-1B" in card
    assert "- Budget: `small`" in card and f"- Trained on: {Path(data).name} (elastic: 288 tokens)" in card and "small, " in out


def break_shard(directory: Path) -> None:
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])


def edit_weights(change: Callable[[dict[str, torch.Tensor]], Any], number: int = 0) -> Callable[[Path], None]:
    """What changes the tensors of one shard, the index with them."""

    def apply(directory: Path) -> None:
        shard, index = sorted(directory.glob("*.safetensors"))[number], directory / "model.safetensors.index.json"
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard)
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        places = {name: file for name, file in places.items() if file != shard.name} | dict.fromkeys(tensors, shard.name)
        change_json(index, weight_map=places)

    return apply


def edit_config(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: change_json(directory / "config.json", **changes)


NORM, WORDS = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"
VALUES = "model.layers.0.self_attn.v_proj.weight"


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors[WORDS][7, 3], tensors[WORDS][8, 4] = torch.nan, torch.inf


class Bomb:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


def only_pickle(directory: Path) -> None:
    for file in directory.glob("model*"):
        file.unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def escape(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    change_json(index, weight_map=places | {WORDS: "../elsewhere.safetensors"})


def with_family(**changes: Any) -> Callable[[Path], None]:
    """An elastic.json, some of it changed."""
    axis = {"axis": "hidden", "choices": [80, 60], "groups": 1}
    space = {"axes": [axis], "drop_order": [], "shard_groups": 8}
    plan = {"format_version": 2, "widths": {"hidden": 60}, "dropped_layers": []}
    family = {"format_version": 1, "space": space, "plans": {"small": plan}, "provenance": {"parent": None, "license": None, "data": None}}

    def apply(directory: Path) -> None:
        (directory / "elastic.json").write_text(json.dumps(family | changes), encoding="utf-8")

    return apply


def more_words(directory: Path) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["word too many"] = 131
    change_json(directory / "tokenizer.json", model=tokenizer["model"])


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_text(text, encoding="utf-8")


def remove(pattern: str) -> Callable[[Path], Any]:
    return lambda directory: [file.unlink() for file in directory.glob(pattern)]


OTHER = {"axes": [{"axis": "hidden", "choices": [96, 60], "groups": 1}], "drop_order": [], "shard_groups": 8}
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a truncated shard": (break_shard, "safetensors' is truncated: it has "),
    "a missing shard": (remove("*-00002-*"), "-00002-of-"),
    "a missing tensor": (edit_weights(lambda tensors: tensors.pop(NORM)), f"config.json and weights disagree: {NORM} is missing"),
    "an extra tensor": (
        edit_weights(lambda tensors: tensors.update(more=torch.ones(3))),
        "disagree: more is not one of the model's tensors",
    ),
    "integers": (edit_weights(lambda t: t.update({NORM: torch.ones(80, dtype=torch.int8)})), f"'{NORM}' is I8, not one of F32, BF16, F16"),
    "several types": (
        edit_weights(lambda tensors: tensors.update({VALUES: tensors[VALUES].half()}), 1),
        f" to {VALUES} are of several types (torch.float",
    ),
    "not a number": (edit_weights(poison), f"{WORDS}: 2 of 10480 weights are NaN or infinite"),
    "another config": (edit_config(intermediate_size=73), "\n  - and 4 more"),
    "a config that ties what is not tied": (edit_config(tie_word_embeddings=True), f"but lm_head.weight is not {WORDS}; set it to false"),
    "a tokenizer of another model": (more_words, "tokenizer.json' has 132 words, more than the 131 of vocab_size in config.json"),
    "a tokenizer that is none": (write("tokenizer.json", "{}"), "not a tokenizer"),
    "only pickled weights": (only_pickle, "pytorch_model.bin"),
    "a shard elsewhere": (escape, "../elsewhere.safetensors"),
    "a config that is none": (write("config.json", "{"), "config.json' cannot be read"),
    "an unknown model": (edit_config(model_type="rwkv"), "model_type 'rwkv' is not supported; choose a model of llama"),
    "quantised weights": (edit_config(quantization_config={"bits": 4}), "quantization_config: quantised weights are not read"),
    "a key nobody knows": (edit_config(attention_sinks=4), "attention_sinks 4 is not known here"),
    "a family of another model": (with_family(space=OTHER), "elastic.json' is not of the model beside it"),
    "a plan of another family": (
        with_family(plans={"small": {"format_version": 2, "widths": {"hidden": 50}, "dropped_layers": []}}),
        "elastic.json' is not of the model beside it: the plan does not fit the space: hidden 50 is not one of its choices [80, 60]",
    ),
    "a family that is none": (write("elastic.json", "[1]"), "elastic.json' cannot be understood"),
    "a family of a later release": (with_family(format_version=7), "elastic.json: format_version 7 is not 1; export the family again"),
}


def mess(dense: Path, case: str, tmp_path: Path) -> Path:
    """A copy of a directory with something wrong."""
    shutil.copytree(dense, tmp_path / "in" / "theirs")
    BAD[case][0](tmp_path / "in" / "theirs")
    return tmp_path / "in" / "theirs"


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_line(case: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = mess(dense, case, tmp_path)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    before, loaded = contents(tmp_path / "in"), set(sys.modules)
    for arguments in (["import"], ["extract", "--format", "hf"], ["extract"]):
        assert BAD[case][1] in refusal(arguments[0], theirs, *arguments[1:], "--out", tmp_path / "out" / "new")
        assert list((tmp_path / "out").iterdir()) == [], "something half-written is left"
    assert contents(tmp_path / "in") == before and sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert not {name for name in set(sys.modules) - loaded if "evil" in name}


def test_a_budget_cannot_be_a_path(dense: Path, tmp_path: Path) -> None:
    plan = {"format_version": 2, "widths": {"hidden": 60}, "dropped_layers": []}
    theirs = tmp_path / "in" / "theirs"
    shutil.copytree(dense, theirs)
    for name in ("../../evil", "/evil", ".", "..", "", "a\nb", "a\0"):
        with_family(plans={name: plan})(theirs)
        assert "cannot be the name of a directory" in refusal("extract", theirs, "--out", tmp_path / "out" / "members")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def little_room(*arguments: str) -> tuple[int, str, str]:
    """Run a command where no file can grow beyond 60 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    return command(*arguments)


@pytest.mark.parametrize("arguments", [["import"], ["extract"], ["extract", "--format", "hf"]], ids=" ".join)
def test_no_room(arguments: list[str], dense: Path, tmp_path: Path) -> None:
    before = contents(dense)
    code, _, err = in_new_process(little_room, arguments[0], str(dense), *arguments[1:], "--out", str(tmp_path / "new"))
    assert code == 2 and err.count("\n") == 1 and "new" in err and "cannot be written: File too large; free space there" in err
    assert list(tmp_path.iterdir()) == [] and contents(dense) == before


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: Any) -> Path:
    """A GGUF file of 300 kB. Do not write beside it."""
    pytest.importorskip("gguf")
    from transformers import LlamaConfig

    from tests.hf.gguf_writer import write_gguf
    from tests.hf.test_gguf import F32, SIZES, TOKENIZER, model_directory

    root = tmp_path_factory.mktemp("gguf")
    write_gguf(model_directory(root / "llama", LlamaConfig(**SIZES)), root / "tiny.gguf", kind=F32, tokenizer=TOKENIZER)
    return root / "tiny.gguf"


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=" ".join)
def test_no_room_for_the_dequantised_model(options: list[str], gguf: Path, tmp_path: Path) -> None:
    code, _, err = in_new_process(little_room, "import", str(gguf), "--out", str(tmp_path / "new"), *options)
    assert code == 2 and "Traceback" not in err and list(tmp_path.iterdir()) == []
    last = err.splitlines()[-1]  # after transformers' bars
    assert last.startswith(f"error: '{tmp_path}' cannot be written: ") and "File too large" in last and "; free space there" in last


def test_no_place_for_the_dequantised_model(gguf: Path) -> None:
    assert refusal("import", gguf, "--out", "/proc/new").startswith("'/proc' cannot be written: ")


def test_the_dequantised_model_lies_beside_the_import(gguf: Path, tmp_path: Path) -> None:
    from megatron_elastic.export.to_megatron import importable

    with importable(gguf, tmp_path / "deep" / "new") as source:
        assert source.path.name == "tiny" and source.path.parent.parent == tmp_path and source.path.parent.name.startswith(".tmp-new-")
    assert list(tmp_path.iterdir()) == []
    run("import", gguf, "--out", tmp_path / "deep" / "new")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"] and [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_nothing_is_overwritten(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious", encoding="utf-8")
    for arguments in (["import", dense], ["import", dense, "--dry-run"], ["extract", dense], ["extract", dense, "--format", "hf"]):
        assert f"'{tmp_path}' exists; choose another path or delete it" in refusal(*arguments, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_paths_of_another_kind(dense: Path, tmp_path: Path) -> None:
    out = ["--out", tmp_path / "out"]
    gguf, weights = tmp_path / "model.gguf", tmp_path / "weights"
    gguf.write_bytes(b"GGUF")
    weights.mkdir()
    shutil.copy(next(iter(dense.glob("*.safetensors"))), weights)
    assert refusal("extract", gguf, *out) == f"'{gguf}' is a GGUF file; first bring it in: megatron-elastic import {gguf} --out DIR"
    assert "is a GGUF file; first bring it in" in refusal("verify", gguf)
    assert "holds weights but no config.json; get that file, too" in refusal("extract", weights, *out)
    assert "is a file; give the directory" in refusal("extract", dense / "config.json", *out)
    assert "does not exist; give a run" in refusal("extract", tmp_path / "nowhere", *out)
    neither = "is neither a Hugging Face directory (no config.json) nor a GGUF file"
    for path in (weights, tmp_path / "nowhere", dense / "config.json"):
        assert neither in refusal("import", path, *out)
    run("import", dense, *out)
    assert neither in refusal("import", tmp_path / "out", "--out", tmp_path / "other")
    assert "padded_vocab_size 7" in refusal("import", dense, "--out", tmp_path / "other", "--padded-vocab-size", "7")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out", "weights"]


def test_a_family_comes_in_whole(dense: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(dense, theirs)
    with_family()(theirs)
    run("import", theirs, "--out", tmp_path / "ours")
    assert dict(open_checkpoint(tmp_path / "ours" / "checkpoints" / "parent").plans) == dict(open_source(theirs).plans)
    for source in (theirs, tmp_path / "ours"):
        run("extract", source, "--format", "hf", "--out", tmp_path / f"{source.name} members")
    assert contents(tmp_path / "ours members" / "small").keys() == contents(tmp_path / "theirs members" / "small").keys()
    assert same(weights_of(tmp_path / "ours members" / "small"), weights_of(tmp_path / "theirs members" / "small"))
