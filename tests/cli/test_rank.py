"""`megatron-elastic rank` finds the parent, the text and the layout, writes a ranking that says where it is from, and refuses by name what it
cannot do. What it computes is tested in tests/importance.

Run: pytest tests/cli/test_rank.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import EXIT_REQUEUE
from megatron_elastic.importance.ranking import check_model, read_ranking
from megatron_elastic.testing.tiny import tiny_shape
from tests.export.random_family import write_family
from tests.train import harness
from tests.train.harness import command, in_new_process, in_new_processes, plain_recipe
from tests.train.two_ranks import start_command

SHAPE = tiny_shape(vocab_size=264, padded_vocab_size=264, max_sequence_length=128)


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    """A run whose stage `parent` has ended with random weights, its recipe, its data and a text."""
    root = tmp_path_factory.mktemp("rank")
    data = in_new_process(harness.write_data, root)
    write_family(root / "run" / "checkpoints" / "stage-parent", SHAPE)
    recipe = plain_recipe(root / "run", data)
    recipe["model"] |= {"vocab_size": 264}
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    (root / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    (root / "book.txt").write_text("text number 4 says 16, " * 40, encoding="utf-8")
    return root


def rank(*arguments: str) -> tuple[int, str, str]:
    return in_new_process(command, "rank", *arguments)


def test_a_recipe_on_one_process_and_on_two_gives_the_same_ranking(root: Path) -> None:
    options = ["--tokens", "144", "--depth-tokens", "36"]
    code, out, err = rank(str(root / "recipe.yaml"), *options, "--out", str(root / "one.ranking"))
    assert code == 0, err
    assert "ranked on " in out and "wrote " in out and "layers, first dropped first" in out
    assert "layer 1: experts chosen by " in out and "warning: layer 1: " in err
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    world: list[Mapping[str, str]] = [
        {"RANK": str(n), "WORLD_SIZE": "2", "LOCAL_RANK": str(n), "MASTER_ADDR": "localhost", "MASTER_PORT": port} for n in range(2)
    ]
    call = ("rank", str(root / "recipe.yaml"), "parallel.tensor=2", *options, "--out", str(root / "two.ranking"))
    answers = in_new_processes(command, [call, call], environment=world)
    assert [code for code, _, _ in answers] == [0, 0], answers
    assert answers[1][1] == ""
    one, two = read_ranking(root / "one.ranking"), read_ranking(root / "two.ranking")
    assert one.scores.keys() == two.scores.keys() == set(ElasticAxis) - {ElasticAxis.TOPK}
    for axis, by_layer in one.scores.items():
        for layer, values in by_layer.items():
            torch.testing.assert_close(two.scores[axis][layer], values, rtol=1e-4, atol=1e-7)
    assert one.provenance["model"]["fingerprint"] == two.provenance["model"]["fingerprint"]
    assert one.provenance["tokens"] == two.provenance["tokens"] == 144
    assert len(one.provenance["depth"]["errors"]) == SHAPE.num_layers - 1
    assert one.criteria[ElasticAxis.LAYERS] == "kl" and one.criteria[ElasticAxis.EXPERTS] == "reap"


def test_a_path_is_ranked_on_text_and_says_which_model_it_is_of(root: Path) -> None:
    from megatron_elastic.export.sources import open_source

    file = root / "text.ranking"
    code, out, err = rank(
        str(root / "run"), "--text", str(root / "book.txt"), "--tokens", "200", "--sequence-length", "64", "--criterion", "minitron",
        "--experts", "gate", "--depth-tokens", "0", "--out", str(file),
    )  # fmt: skip
    assert code == 0, err
    found = read_ranking(file)
    assert found.criteria[ElasticAxis.FFN] == "minitron" and found.criteria[ElasticAxis.EXPERTS] == "gate"
    assert ElasticAxis.LAYERS not in found.scores and "layers, first" not in out
    assert found.provenance["data"] == str(root / "book.txt") and found.provenance["sequence_length"] == 64
    source = open_source(root / "run")
    check_model(found, file, source.shape, source.tensors)


def told_in_a_window() -> None:
    """Be told while the first window of the text goes through the model."""
    from megatron_elastic.importance import collect

    compute = collect.map_microbatches

    def tells(*args: Any) -> Any:
        print("a window", flush=True)
        os.kill(os.getpid(), signal.SIGUSR1)
        return compute(*args)

    collect.map_microbatches = tells


def told_while_layers_are_tried() -> None:
    """Be told while the third layer is left out."""
    from megatron_elastic.importance import depth

    difference, tried = depth._Reference.error, []

    def tells(*args: Any) -> Any:
        tried.append(args)
        if len(tried) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return difference(*args)

    depth._Reference.error = tells


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "name"), [(told_in_a_window, "SIGUSR1"), (told_while_layers_are_tried, "SIGTERM")])
def test_one_of_two_ranks_that_is_told_to_stop_ends_both_and_nothing_is_written(root: Path, tmp_path: Path, fault: Any, name: str) -> None:
    before = {path for path in root.rglob("*") if "data_cache" not in path.parts}
    arguments = ["rank", str(root / "recipe.yaml"), "parallel.tensor=2", "--tokens", "360", "--depth-tokens", "36"]
    both = start_command([*arguments, "--out", str(root / "none.ranking")], tmp_path / "rank", {1: fault})
    assert [one.end(harness.SECONDS) for one in both] == [EXIT_REQUEUE, EXIT_REQUEUE], both[0].text + both[1].text
    assert f"stopped: told to stop by {name}; nothing is written; start again" in both[0].text
    assert both[1].text.count("a window") == (1 if fault is told_in_a_window else 0) and "stopped" not in both[1].text
    assert {path for path in root.rglob("*") if "data_cache" not in path.parts} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--tokens", "100"], "there is no text to rank on"),
        (["run", "--text", "book.txt", "--data", "data"], "give one of --data and --text"),
        (["run", "--tokens", "1"], "--tokens 1 must be at least 2"),
        (["run", "parallel.tensor=2"], "'parallel.tensor=2' is for recipes"),
        (["recipe.yaml", "--tokens", "99999999"], "the training split of"),
        (["run", "--text", "book.txt", "--sequence-length", "129"], "--sequence-length 129 must be between 1 and"),
        (["recipe.yaml", "run_dir=elsewhere"], "the parent's checkpoint"),
    ],
)
def test_what_cannot_be_ranked_is_refused(arguments: list[str], message: str, root: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(root)
    code, _, err = rank(*arguments, "--out", str(root / "none.ranking"))
    assert code == 2 and message in err.replace("\n", " "), err
    assert not (root / "none.ranking").exists()


def test_the_ids_of_another_tokenizer_are_refused(root: Path) -> None:
    other = root / "other"
    shutil.copytree(root / "data", other)
    said = json.loads((other / "data.json").read_text(encoding="utf-8")) | {"tokenizer": "elsewhere", "vocab_size": 260}
    (other / "data.json").write_text(json.dumps(said), encoding="utf-8")
    code, _, err = rank(str(root / "run"), "--data", str(other), "--tokens", "144", "--out", str(root / "none.ranking"))
    assert code == 2 and "holds ids of tokenizer 'elsewhere' (260 words), but the model's own is 'byte' (257 words)" in err.replace(
        "\n", " "
    ), err
    assert not (root / "none.ranking").exists()
