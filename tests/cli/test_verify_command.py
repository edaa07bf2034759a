"""`megatron-elastic verify` reads every member back with both readers, compares perplexities on a text, says pass or fail in a table and in
verify.json, and ends with an error when a member is not the family's; one that was rounded, or widened, is the family's all the same.

Run: pytest tests/cli/test_verify_command.py
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_elastic.platform import prepare_platform

prepare_platform()
from megatron_elastic.errors import CheckpointError  # noqa: E402
from megatron_elastic.export.read_back import TransformersModel  # noqa: E402
from tests.cli.test_extract_command import ELASTIC, run  # noqa: E402
from tests.export.pretrained import contents, family_shapes, write_pretrained  # noqa: E402
from tests.train.harness import command, in_new_process  # noqa: E402

BUDGETS = ["full", "medium", "small"]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra hf")


def commands(*each: list[str]) -> list[tuple[int, str, str]]:
    """Several commands in one process, which imports transformers once."""
    return [command(*arguments) for arguments in each]


def rows(table: str) -> dict[tuple[str, str], list[str]]:
    """(budget, reader) -> the columns after them."""
    found = re.findall(r"^(\w+) +(megatron|transformers) +(.+)$", table, flags=re.MULTILINE)
    return {(name, reader): rest.split() for name, reader, rest in found}


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> tuple[Path, list[tuple[int, str, str]]]:
    """A family cut out of a plain model, its members, good and damaged, and what `verify` says of them."""
    root = tmp_path_factory.mktemp("verify")
    whole = write_pretrained(root / "Dense-1B", family_shapes()["qwen2"])
    run("import", whole, "--out", root / "ours")
    recipe = yaml.safe_load((root / "ours" / "recipe.yaml").read_text(encoding="utf-8")) | {"elastic": ELASTIC}
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    run("extract", whole, "--recipe", root / "recipe.yaml", "--nested", "--format", "hf", "--out", root / "family")
    run("extract", root / "family", "--format", "hf", "--out", root / "members")
    for name, damage in (("moved", 0.05), ("nan", torch.nan)):
        shutil.copytree(root / "members", root / name)
        file = root / name / "medium" / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.0.mlp.down_proj.weight"][3, 5] += damage
        save_file(tensors, file)
    shutil.copytree(root / "members", root / "lacking")
    file = root / "lacking" / "small" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "layers.1.mlp.up_proj" not in name}, file)
    (root / "text.jsonl").write_text("".join(json.dumps({"text": "w1 w7 w99 w7 " * n}) + "\n" for n in (9, 3)), encoding="utf-8")
    (root / "records").mkdir()
    (root / "records" / "one.log").write_text("w1 w7 w99 w7 " * 9, encoding="utf-8")
    (root / "records" / "two.jsonl").write_text(json.dumps({"body": "w1 w7 w99 w7 " * 3}) + "\n", encoding="utf-8")
    (root / "other").mkdir()
    words = json.loads((whole / "tokenizer.json").read_text(encoding="utf-8"))
    words["model"]["vocab"] |= {"w7": 99, "w99": 7}
    (root / "other" / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    for format in ("hf", "megatron"):
        run("extract", root / "family", "--format", format, "--dtype", "bfloat16", "--out", root / f"rounded {format}")
    shutil.copytree(root / "rounded hf", root / "rounded moved")
    file = root / "rounded moved" / "medium" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] += 0.05
    save_file(tensors, file)
    run("extract", root / "family", "--nested", "--out", root / "run" / "checkpoints" / "stage-long")
    shutil.copytree(root / "members", root / "swapped")
    shutil.rmtree(root / "swapped" / "small")
    shutil.copytree(root / "members" / "medium", root / "swapped" / "small")
    family = str(root / "family")
    text = ["--text", str(root / "text.jsonl"), "--sequence-length", "16"]
    records = ["--text", str(root / "records"), "--sequence-length", "16"]
    answers = in_new_process(
        commands,
        ["verify", family, *text],
        *(["verify", family, "--members", str(root / name)] for name in ("members", "moved", "nan", "lacking")),
        ["verify", family, *text, "--tokens", "20"],
        *(["verify", family, "--members", str(root / f"rounded {name}")] for name in ("hf", "megatron", "moved")),
        ["verify", family, "--members", str(root / "members"), *text],
        ["verify", family, "--members", str(root / "members"), *records, "--include", "*.log", "--include", "*.jsonl", "--key", "body"],
        ["verify", family, "--members", str(root / "members"), *text, "--tokenizer", str(root / "other")],
        ["verify", family, "--members", str(root / "swapped")],
        ["verify", str(root / "run")],
    )
    shutil.copy(root / "run" / "verify.json", root / "both.json")
    answers += in_new_process(commands, ["verify", str(root / "run"), "--members", str(root / "moved")])
    return root, answers


def test_both_readers_agree_on_everything(found: Any) -> None:
    root, ((code, out, err), *_) = found
    assert code == 0 and not err, err
    table = rows(out)
    assert list(table) == [(name, reader) for name in BUDGETS for reader in ("megatron", "transformers")]
    for (name, _), (sliced, extracted, allowed, perplexity, theirs, verdict) in table.items():
        assert max(float(sliced), float(extracted)) < 1e-4 <= float(allowed) < 2e-3 and verdict == "pass", name
        assert float(theirs) == pytest.approx(float(perplexity), abs=2e-4) and 1 < float(perplexity) < 1e5
    assert len({columns[3] for columns in table.values()}) == 3, "every budget has the same perplexity: the text decides nothing"
    assert not (root / "family" / "verify.json").exists()


def test_fewer_tokens_are_another_perplexity(found: Any) -> None:
    _, answers = found
    code, out, err = answers[5]
    assert code == 0, err
    assert rows(out)[("full", "megatron")][3] != rows(answers[0][1])[("full", "megatron")][3]


def test_a_member_of_a_shorter_type_is_compared_with_rounded_weights(found: Any) -> None:
    """As tightly as any other: one weight that has moved is still noticed."""
    _, answers = found
    for number in (6, 7):
        code, out, err = answers[number]
        assert code == 0, err
        for name in BUDGETS:
            assert f"{name}: stored in bfloat16, and compared with the family's weights rounded to that\n" in out
        assert all(float(extracted) < 1e-4 and verdict == "pass" for _, extracted, *_, verdict in rows(out).values())
    code, out, err = answers[8]
    assert code == 2 and err.startswith("error: medium (transformers): logits differ by ") and err.count("(transformers)") == 1
    assert "stored in" not in answers[1][1]


def test_the_text_is_that_of_the_options(found: Any) -> None:
    _, answers = found
    assert [answers[number][0] for number in (9, 10, 11)] == [0, 0, 0], [answers[number][2] for number in (9, 10, 11)]
    plain, records, others = ([columns[3] for columns in rows(answers[number][1]).values()] for number in (9, 10, 11))
    assert plain == records and not set(plain) & set(others)


def test_a_member_of_another_size_is_named(found: Any) -> None:
    root, answers = found
    code, out, err = answers[12]
    assert code == 2 and not out and err.count("\n") == 1
    assert err.startswith(f"error: Hugging Face directory '{root / 'swapped' / 'small'}' does not have the sizes of its plan: ")


def test_both_readers_are_in_the_file(found: Any) -> None:
    root, answers = found
    assert answers[13][0] == 0, answers[13][2]
    both = json.loads((root / "both.json").read_text(encoding="utf-8"))
    assert both["format_version"] == 2 and both["checkpoint"] == "stage-long" and list(both["budgets"]) == BUDGETS
    for rows_of_budget in both["budgets"].values():
        assert [row["reader"] for row in rows_of_budget] == ["megatron", "transformers"]
        assert all(row["holds"] and row["masked_extracted"] <= row["allowed"] for row in rows_of_budget)
    assert answers[14][0] == 2
    moved = json.loads((root / "run" / "verify.json").read_text(encoding="utf-8"))
    assert {name: row["holds"] for name, (row,) in moved["budgets"].items()} == {"full": True, "medium": False, "small": True}


@pytest.mark.parametrize(("number", "what"), [(2, "moved"), (3, "nan")])
def test_a_damaged_member_fails(found: Any, number: int, what: str) -> None:
    _, answers = found
    assert answers[1][0] == 0, answers[1][2]
    code, out, err = answers[number]
    assert code == 2 and err.count("\n") == 1
    assert re.match(
        r"error: medium \(transformers\): logits differ by (nan|\d\.\de-0[123]), \d\.\de-04 is allowed; the member is not", err
    ), what
    assert {name: columns[-1] for (name, _), columns in rows(out).items()} == {"full": "pass", "medium": "FAIL", "small": "pass"}


def test_a_member_that_lacks_a_tensor_fails(found: Any) -> None:
    _, answers = found
    code, out, err = answers[4]
    assert code == 2 and not out
    assert err == "error: config.json and weights disagree: model.layers.1.mlp.up_proj.weight is missing\n"


def test_transformers_reading_incompletely_fails(found: Any) -> None:
    """It would draw what is missing at random, and only say so in its log."""
    root, _ = found
    with pytest.raises(CheckpointError) as caught:
        TransformersModel(root / "lacking" / "small", 8)
    assert str(caught.value) == (
        f"transformers reads '{root / 'lacking' / 'small'}' incompletely: missing keys: ['model.layers.1.mlp.up_proj.weight']"
    )


def test_options_that_do_not_fit(found: Any, tmp_path: Path) -> None:
    root, _ = found
    before = contents(root / "family")
    text = tmp_path / "text.txt"
    text.write_text("w1 w2", encoding="utf-8")
    for options, message in (
        (["--text", text, "--data", tmp_path], "--text and --data exclude each other; give one"),
        (["--text", text, "--sequence-length", "0"], "--sequence-length 0 must be between 1 and the model's max_sequence_length 512"),
        (["--text", text, "--tokens", "1"], "--tokens 1 must be at least 2"),
        (["--text", tmp_path / "nowhere"], "nowhere"),
        (["--tokens", "9"], "--tokens: there is no text to score; add --text or --data, or leave it out"),
        (["--tokens", "9", "--sequence-length", "8"], "--tokens and --sequence-length: there is no text to score"),
        (["--data", tmp_path, "--tokenizer", "byte"], "--tokenizer: only files of --text are read with that; add --text"),
        (["--include", "*.log", "--key", "body"], "--include and --key: only files of --text are read with that"),
    ):
        code, _, err = command("verify", str(root / "family"), *map(str, options))
        assert code == 2 and message in err and "Traceback" not in err and err.count("\n") == 1
    code, _, err = command("verify", str(root / "Dense-1B"))
    assert code == 2 and "holds no plans" in err
    assert contents(root / "family") == before
