"""`megatron-elastic verify` reads every member back with both readers, compares perplexities on a text, says pass or fail in a table, and ends with
an error when a member is not the family's.

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
    family = str(root / "family")
    text = ["--text", str(root / "text.jsonl"), "--sequence-length", "16"]
    answers = in_new_process(
        commands,
        ["verify", family, *text],
        *(["verify", family, "--members", str(root / name)] for name in ("members", "moved", "nan", "lacking")),
        ["verify", family, *text, "--tokens", "20"],
    )
    return root, answers


def test_both_readers_agree_on_everything(found: Any) -> None:
    root, ((code, out, err), *_) = found
    assert code == 0 and not err, err
    table = rows(out)
    assert list(table) == [(name, reader) for name in BUDGETS for reader in ("megatron", "transformers")]
    for (name, _), (sliced, extracted, perplexity, theirs, verdict) in table.items():
        assert max(float(sliced), float(extracted)) < 1e-4 and verdict == "pass", name
        assert float(theirs) == pytest.approx(float(perplexity), abs=2e-4) and 1 < float(perplexity) < 1e5
    assert len({columns[2] for columns in table.values()}) == 3, "every budget has the same perplexity: the text decides nothing"
    assert not (root / "family" / "verify.json").exists()


def test_fewer_tokens_are_another_perplexity(found: Any) -> None:
    _, answers = found
    code, out, err = answers[-1]
    assert code == 0, err
    assert rows(out)[("full", "megatron")][2] != rows(answers[0][1])[("full", "megatron")][2]


@pytest.mark.parametrize(("number", "what"), [(2, "moved"), (3, "nan")])
def test_a_damaged_member_fails(found: Any, number: int, what: str) -> None:
    _, answers = found
    assert answers[1][0] == 0, answers[1][2]
    code, out, err = answers[number]
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("error: medium (transformers): logits differ by more than 0.0001; the member is not the family's"), what
    assert {name: columns[-1] for (name, _), columns in rows(out).items()} == {"full": "pass", "medium": "FAIL", "small": "pass"}


def test_a_member_that_transformers_reads_incompletely_fails(found: Any) -> None:
    """It would draw what is missing at random, and only say so in its log."""
    root, answers = found
    code, _, err = answers[4]
    assert code == 2 and "Traceback" not in err
    assert err.splitlines()[-1] == (
        f"error: transformers reads '{root / 'lacking' / 'small'}' incompletely: missing keys: ['model.layers.1.mlp.up_proj.weight']"
    )


def test_options_that_do_not_fit(found: Any, tmp_path: Path) -> None:
    root, _ = found
    before = contents(root / "family")
    text = tmp_path / "text.txt"
    text.write_text("w1 w2", encoding="utf-8")
    for options, message in (
        (["--text", text, "--data", tmp_path], "--text and --data exclude each other; give one"),
        (["--sequence-length", "0"], "--sequence-length 0 must be between 1 and the model's max_sequence_length 512"),
        (["--text", text, "--tokens", "1"], "--tokens 1 must be at least 2"),
        (["--text", tmp_path / "nowhere"], "nowhere"),
    ):
        code, _, err = command("verify", str(root / "family"), *map(str, options))
        assert code == 2 and message in err and "Traceback" not in err and err.count("\n") == 1
    code, _, err = command("verify", str(root / "Dense-1B"))
    assert code == 2 and "holds no plans" in err
    assert contents(root / "family") == before
