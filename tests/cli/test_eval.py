"""`megatron-elastic eval` finds the model, its budgets and its tokenizer from a path, prints and writes each budget's numbers, and refuses
by name what it cannot do. What it computes is tested in tests/export/test_evaluate.py.

Run: pytest tests/cli/test_eval.py
"""

from __future__ import annotations

import json
import math
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_elastic.testing.tiny import tiny_shape
from tests.export.pretrained import family_shapes, write_pretrained
from tests.export.random_family import write_family
from tests.train import harness
from tests.train.harness import command, in_new_process, in_new_processes, plain_recipe

SHAPE = tiny_shape(vocab_size=264, padded_vocab_size=264, max_sequence_length=128)
"""More words than the byte tokenizer, as a model whose vocabulary was rounded up has."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    """A run as `train` leaves it, with a family of random weights; beside it one member, a text and its data."""
    root = tmp_path_factory.mktemp("eval")
    data = in_new_process(harness.write_data, root)
    write_family(root / "run" / "checkpoints" / "stage-long", SHAPE)
    code, _, err = in_new_process(command, "extract", str(root / "run"), "--budget", "small", "--out", str(root / "member"))
    assert code == 0, err
    (root / "run" / "recipe.yaml").write_text(yaml.safe_dump(plain_recipe(root / "run", data)), encoding="utf-8")
    (root / "book.txt").write_text("text number 4 says 16, " * 10, encoding="utf-8")
    return root / "run"


def evaluate(path: Path, *options: str) -> str:
    code, out, err = in_new_process(command, "eval", str(path), *options)
    assert code == 0, err
    return out


def refusal(path: Path, *options: str) -> str:
    """The one message of a command that fails as it should."""
    code, out, err = in_new_process(command, "eval", str(path), *options)
    assert code == 2 and not out and err.startswith("error: ") and "Traceback" not in err and err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()


def rows(table: str) -> dict[str, list[str]]:
    """Name -> the columns after it."""
    return {name: rest.split() for name, rest in re.findall(r"^(parent|full|medium|small|model) +(.+)$", table, flags=re.MULTILINE)}


def test_every_budget_is_scored_on_every_text(run: Path, tmp_path: Path) -> None:
    texts = ["--text", str(run.parent / "book.txt"), "--data", str(run.parent / "data")]
    out = evaluate(run, *texts, "--sequence-length", "32", "--json", str(tmp_path / "found.json"))
    book, split = out.split(f"{run.parent / 'data'}: ")
    assert book.startswith(f"{run.parent / 'book.txt'}: 1 document in windows of 32 tokens\n")
    assert re.match(r"\d\d documents in windows of 32 tokens\n", split) and out.endswith(f"wrote {tmp_path / 'found.json'}\n")
    written = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert (written["format_version"], written["source"], written["sequence_length"]) == (1, str(run), 32)
    for table, found in zip((book, split), written["texts"], strict=True):
        printed = rows(table)
        assert list(printed) == list(found["budgets"]) == ["parent", "full", "medium", "small"] and printed["parent"] == printed["full"]
        for name, (parameters, tokens, loss, perplexity, bits, ratio) in printed.items():
            score = found["budgets"][name]
            assert (parameters, tokens) == (f"{score['parameters']:,}", f"{found['tokens']:,}")
            assert float(loss) == pytest.approx(score["loss"], abs=1e-4)
            assert float(perplexity.replace(",", "")) == pytest.approx(math.exp(score["loss"]), abs=0.01)
            assert float(bits) == pytest.approx(score["loss"] / math.log(2), abs=1e-4) and found["tokens_per_byte"] == 1.0
            assert float(ratio) == pytest.approx(score["perplexity"] / found["budgets"]["parent"]["perplexity"], abs=1e-4)
    assert written["texts"][0]["tokens"] == 23 * 10 - 1
    ends = {len(line) for line in book.splitlines()[1:]}
    assert len(ends) == 1, "numbers stand under the ends of their titles"


def test_a_budget_and_the_extracted_member_are_one(run: Path) -> None:
    options = ["--text", str(run.parent / "book.txt"), "--tokens", "100"]
    family = evaluate(run / "checkpoints" / "stage-long", *options, "--budget", "small")
    member = evaluate(run.parent / "member", *options)  # its tokenizer is that of the run it was extracted from
    assert list(rows(family)) == ["parent", "small"] and list(rows(member)) == ["model"]
    assert rows(family)["small"][:5] == rows(member)["model"][:5] and rows(member)["model"][5] == "1.0000"
    assert family.startswith(f"{run.parent / 'book.txt'}: 1 document in windows of 128 tokens; cut at --tokens 100: there is more\n")


REFUSED: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "there is nothing to score; give --text FILE or DIR, or --data DIR"),
    "no file": (["--text", "nowhere.txt"], "source 'nowhere.txt' does not exist"),
    "no tokenizer": (["--text", "book.txt", "--tokenizer", "nowhere"], "no tokenizer.json at 'nowhere'"),
    "no data": (["--data", "nowhere"], "data.path 'nowhere' does not exist"),
    "unknown budget": (["--text", "book.txt", "--budget", "smal"], "budget 'smal' is not one of the family's: full, medium, small"),
    "too long": (["--text", "book.txt", "--sequence-length", "129"], "--sequence-length 129 must be between 1 and the model's"),
    "no tokens": (["--text", "book.txt", "--tokens", "1"], "--tokens 1 must be at least 2"),
    "tokenizer of no text": (["--data", "data", "--tokenizer", "byte"], "--tokenizer: only files of --text are read with that; add --text"),
    "files of no text": (
        ["--data", "data", "--key", "a", "--include", "*"],
        "--include and --key: only files of --text are read with that",
    ),
    "taken": (["--text", "book.txt", "--json", "data/data.json"], "data.json' exists; name another file or delete it"),
    "nowhere to write": (["--text", "book.txt", "--json", "nowhere/found.json"], "there is no directory "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused(case: str, run: Path) -> None:
    options, text = REFUSED[case]
    here = ("book.txt", "data", "data/data.json", "nowhere/found.json")
    assert text in refusal(run, *(str(run.parent / option) if option in here else option for option in options))


def test_a_member_has_no_budgets(run: Path) -> None:
    message = refusal(run.parent / "member", "--text", str(run.parent / "book.txt"), "--budget", "small")
    assert "holds no family, so there is nothing for --budget; leave it out" in message


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, run: Path) -> None:
    write_family(tmp_path / "alone", tiny_shape())
    message = refusal(tmp_path / "alone", "--text", str(run.parent / "book.txt"), "--tokenizer", "byte")
    assert "tokenizer 'byte' has 257 words, but model.vocab_size is 131" in message


def test_data_of_another_tokenizer_is_refused(tmp_path: Path, run: Path) -> None:
    """All their ids are words of the model, which has one of its own."""
    theirs = write_pretrained(tmp_path / "theirs", replace(family_shapes()["qwen2"], vocab_size=300))
    message = refusal(theirs, "--data", str(run.parent / "data"))
    assert (
        f"data' holds ids of tokenizer 'byte' (257 words), but the model's own is '{theirs}' (130 words); write the text again" in message
    )


def test_it_runs_on_one_process(run: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    call = ("eval", str(run), "--text", str(run.parent / "book.txt"))
    answers = in_new_processes(command, [call, call], environment=[{**common, "RANK": str(rank)} for rank in range(2)])
    message = "error: eval runs on one process, not on 2; start it without torchrun\n"
    assert [answer[0] for answer in answers] == [2, 2] and sorted(answer[2] for answer in answers) == ["", message]
