"""`megatron-elastic generate` finds the model, the plan and the tokenizer from a path, prints each budget's text beside its loss, and
refuses by name what it cannot do. What it computes is tested in tests/export/test_continuations.py.

Run: pytest tests/cli/test_generate.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_elastic.cli.generate import printable
from megatron_elastic.testing.tiny import tiny_shape
from tests.export.random_family import write_family
from tests.train import harness
from tests.train.harness import command, in_new_process, plain_recipe

SHAPE = tiny_shape(vocab_size=264, padded_vocab_size=264, max_sequence_length=128)
"""More words than the byte tokenizer, as a model whose vocabulary was rounded up has."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    """A run as `train` leaves it, with a family of random weights, and one member extracted beside it, outside the run."""
    root = tmp_path_factory.mktemp("generate")
    data = in_new_process(harness.write_data, root)
    write_family(root / "run" / "checkpoints" / "stage-long", SHAPE)
    code, _, err = in_new_process(command, "extract", str(root / "run"), "--budget", "small", "--out", str(root / "member"))
    assert code == 0, err
    (root / "run" / "recipe.yaml").write_text(yaml.safe_dump(plain_recipe(root / "run", data)), encoding="utf-8")
    return root / "run"


def generate(path: Path, *options: str) -> str:
    """What the command prints, without the panel's frame."""
    code, out, err = in_new_process(command, "generate", str(path), *options)
    assert code == 0, err
    return "\n".join(line.strip("│╭╮╰╯─ ") for line in out.splitlines())


def refusal(path: Path, *options: str) -> str:
    """The one message of a command that fails as it should."""
    code, out, err = in_new_process(command, "generate", str(path), *options)
    assert code == 2 and not out and err.startswith("error: ") and "Traceback" not in err, err
    return err.removeprefix("error: ").strip()


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Name -> (loss of the prompt, continuation), as far as one prompt's panel goes."""
    _, *parts = re.split(r"^(full|medium|small|plan|model) +(\S+) +", text.split("continuation", 1)[1], flags=re.MULTILINE)
    return {name: (loss, continuation.strip()) for name, loss, continuation in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def test_every_budget_stands_under_its_prompt(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("text number 4\n\nx\n", encoding="utf-8")
    out = generate(run, "--prompts", str(tmp_path / "prompts.txt"), "--all-budgets", "--tokens", "6")
    first, second = out.split("text number 4", 1)[1].split("\nx\n", 1)
    for text in (first, second):
        assert list(rows(text)) == ["full", "medium", "small"]
        assert len({continuation for _, continuation in rows(text).values()}) > 1
    assert all(float(loss) > 3 for loss, _ in rows(first).values()) and {loss for loss, _ in rows(second).values()} == {"-"}


def test_a_budget_a_plan_and_the_extracted_member_are_one(run: Path, tmp_path: Path) -> None:
    description = json.loads((run / "checkpoints" / "stage-long" / "megatron_elastic.json").read_text(encoding="utf-8"))
    (tmp_path / "plan.json").write_text(json.dumps(description["plans"]["small"]), encoding="utf-8")
    options = ["--prompt", "text number", "--tokens", "12"]
    budget = rows(generate(run, *options, "--budget", "small"))["small"]
    plan = rows(generate(run / "checkpoints" / "stage-long", *options, "--plan", str(tmp_path / "plan.json")))["plan"]
    member = rows(generate(run.parent / "member", *options))["model"]  # its tokenizer is that of the run it was extracted from
    assert budget == plan == member and budget != rows(generate(run, *options))["model"]


def test_draws_repeat_by_seed(run: Path) -> None:
    options = ["--prompt", "text", "--tokens", "12", "--temperature", "3"]
    texts = [generate(run, *options, *more) for more in ([], ["--seed", "0"], ["--seed", "1"])]
    assert texts[0] == texts[1] != texts[2]


REFUSED: dict[str, tuple[list[str], str]] = {
    "no prompt": ([], "give one of --prompt TEXT and --prompts FILE"),
    "two prompts": (["--prompt", "a", "--prompts", "b"], "give one of --prompt TEXT and --prompts FILE"),
    "empty prompt": (["--prompt", ""], "prompt '' is empty; give at least one token"),
    "not text": (["--prompt", "\udcff"], "is not UTF-8"),
    "no file": (["--prompts", "nowhere.txt"], "--prompts 'nowhere.txt' cannot be read: "),
    "too long": (["--prompt", "a" * 100, "--tokens", "29"], "has 100 tokens and --tokens is 29, but model.max_sequence_length is 128"),
    "no tokens": (["--prompt", "a", "--tokens", "0"], "--tokens 0 must be at least 1"),
    "unknown budget": (["--prompt", "a", "--budget", "smal"], "budget 'smal' is not one of the family's: full, medium, small"),
    "budget and plan": (["--prompt", "a", "--budget", "small", "--plan", "p"], "--budget and --plan exclude each other; give one"),
    "seed alone": (["--prompt", "a", "--seed", "3"], "--seed 3 draws nothing by itself; give --temperature, --top-k or --top-p too"),
    "cold": (["--prompt", "a", "--temperature", "0"], "temperature 0.0 must be above 0; leave it out"),
    "no tokenizer": (["--prompt", "a", "--tokenizer", "nowhere"], "no tokenizer.json at 'nowhere'"),
    "end without tokenizer": (["--prompt", "a", "--eod", "</s>"], "--eod '</s>' needs --tokenizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused(case: str, run: Path) -> None:
    options, text = REFUSED[case]
    assert text in refusal(run, *options)


def test_a_member_has_no_members(run: Path) -> None:
    message = refusal(run.parent / "member", "--prompt", "a", "--all-budgets")
    assert "holds no family, so there is nothing for --all-budgets; leave it out" in message


def test_a_checkpoint_outside_a_run_needs_a_tokenizer(tmp_path: Path, run: Path) -> None:
    write_family(tmp_path / "checkpoints" / "alone", SHAPE)
    message = refusal(tmp_path / "checkpoints" / "alone", "--prompt", "a")
    assert "nothing says which tokenizer" in message and "--tokenizer byte" in message
    options = ["--prompt", "text", "--tokens", "3"]
    assert generate(tmp_path / "checkpoints" / "alone", *options, "--tokenizer", "byte") == generate(run, *options)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path / "alone", tiny_shape())
    message = refusal(tmp_path / "alone", "--prompt", "a", "--tokenizer", "byte")
    assert "tokenizer 'byte' has 257 words, but model.vocab_size is 131" in message


def test_the_run_s_data_must_be_there(tmp_path: Path) -> None:
    write_family(tmp_path / "run" / "checkpoints" / "stage-long", SHAPE)
    recipe = plain_recipe(tmp_path / "run", tmp_path / "gone")
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    message = refusal(tmp_path / "run", "--prompt", "a")
    assert f"data.path '{tmp_path / 'gone'}' does not exist" in message and message.endswith("or name the tokenizer with --tokenizer")


def test_no_byte_of_a_text_moves_the_cursor() -> None:
    assert printable("a\x1b[2J\x07é\n\tb\x00\u202e\x7f�") == "a\\x1b[2J\\x07é\n\tb\\x00\\u202e\\x7f�"
