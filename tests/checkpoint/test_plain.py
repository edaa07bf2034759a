"""Plain data of a checkpoint is read in the layouts of both megatron-core releases, and what else a foreign one holds there is never run: neither
by `extract --target`, which asks for the router, nor when it is loaded to train on.

Run: pytest tests/checkpoint/test_plain.py
"""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import yaml
from evil import Evil
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_elastic.checkpoint import NamedTensors, load_checkpoint, load_latest, save_checkpoint, write_named
from megatron_elastic.checkpoint.files import DESCRIPTION
from megatron_elastic.checkpoint.index import read_index
from megatron_elastic.checkpoint.plain import RUN, read_plain
from megatron_elastic.config import decode_recipe
from megatron_elastic.errors import CheckpointError
from megatron_elastic.layout import full_shapes
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.preflight import budget_plans, budget_targets, recipe_cost
from megatron_elastic.router.network import BudgetRouter
from megatron_elastic.testing.tiny import random_tensor
from tests.train.harness import command, plain_recipe

LAYOUTS = ["0.16.1", "0.19"]
STATE = {RUN: {"step": 3, "router": {"weight": torch.arange(3.0)}, "names": ["a", None]}, "optimizer": {"step": 2.0}}

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def put(directory: Path, data: Any, layout: str) -> None:
    """Make `data` the plain data of a checkpoint, in a layout, and describe its files anew."""
    index = read_index(directory)
    for key in [key for key in index.state_dict_metadata if key.startswith("common_state/")]:
        del index.state_dict_metadata[key], index.storage_data[MetadataIndex(key)]
    (directory / "common.pt").unlink(missing_ok=True)
    if layout == "0.16.1":
        torch.save(data, directory / "common.pt")
    else:
        stream, key = io.BytesIO(), "common_state/shard_0_1"
        torch.save([data], stream)
        with (directory / "__0_0.distcp").open("ab") as file:
            index.storage_data[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", file.tell(), len(stream.getvalue()))
            file.write(stream.getvalue())
        index.state_dict_metadata[key] = BytesStorageMetadata()
    (directory / ".metadata").write_bytes(pickle.dumps(index))
    describe(directory)


def describe(directory: Path) -> None:
    description = directory / DESCRIPTION
    data = json.loads(description.read_text())
    data["files"] = {file.name: file.stat().st_size for file in directory.iterdir() if file.is_file() and file != description}
    data["checksums"] = {}
    description.write_text(json.dumps(data))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    generator = torch.Generator()
    tensors = ((name, random_tensor(name, size, generator)) for name, size in full_shapes(tiny_run.SHAPE).items())
    write_named(tmp_path / "a", tensors, tiny_run.SHAPE)
    return tmp_path / "a"


@layouts
def test_both_layouts_are_read(checkpoint: Path, layout: str) -> None:
    put(checkpoint, STATE, layout)
    found = read_plain(checkpoint)
    assert torch.equal(found[RUN].pop("router")["weight"], torch.arange(3.0))
    assert found == {RUN: {"step": 3, "names": ["a", None]}, "optimizer": {"step": 2.0}}


@layouts
@pytest.mark.parametrize("data", [Evil(), {RUN: {"router": Evil()}}], ids=["all", "inside"])
def test_code_is_not_run(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, layout: str, data: Any) -> None:
    monkeypatch.chdir(checkpoint.parent)
    put(checkpoint, data, layout)
    with pytest.raises(CheckpointError, match="a' holds more than plain data and tensors, which is not run") as caught:
        read_plain(checkpoint)
    assert "\n" not in str(caught.value) and not Path("ran").exists()


def test_what_is_no_plain_data_is_refused(checkpoint: Path) -> None:
    for layout in LAYOUTS:
        put(checkpoint, 7, layout)
        with pytest.raises(CheckpointError, match="has a int for its plain data"):
            read_plain(checkpoint)
    put(checkpoint, {}, "0.16.1")
    for data in (b"", b"text", b"\x80\x02K\x07."):
        (checkpoint / "common.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"holds more than plain data and tensors"):
            read_plain(checkpoint)
    (checkpoint / "common.pt").unlink()
    describe(checkpoint)
    with pytest.raises(CheckpointError, match="has no plain data: neither common.pt nor common_state"):
        read_plain(checkpoint)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A family inside a run, its weights random; it is not trained, and has no plain data yet."""
    recipe = plain_recipe(tmp_path / "run", tmp_path / "data")
    recipe["elastic"]["budgets"]["medium"] = 0.62
    decoded = decode_recipe(recipe, "tiny.yaml")
    assert decoded.space is not None
    generator = torch.Generator()
    tensors = ((name, random_tensor(name, size, generator)) for name, size in full_shapes(decoded.model).items())
    plans = budget_plans(decoded, recipe_cost(decoded))
    write_named(tmp_path / "run" / "checkpoints" / "a", tensors, decoded.model, space=decoded.space, plans=plans)
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return tmp_path / "run"


def extract(run: Path) -> tuple[int, str]:
    code, _, err = command("extract", str(run), "--target", "0.57", "--out", str(run.parent / "half"))
    return code, err


@layouts
def test_extracting_a_target_runs_nothing(run: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.chdir(run.parent)
    put(run / "checkpoints" / "a", {RUN: {"router": Evil()}}, layout)
    code, err = extract(run)
    assert not Path("ran").exists() and not Path("half").exists()
    assert code == 2 and err.startswith("error: ") and "holds more than plain data" in err and err.count("\n") == 1


@layouts
def test_extracting_a_target_takes_the_router_or_says_why_not(run: Path, layout: str) -> None:
    recipe = decode_recipe(yaml.safe_load((run / "recipe.yaml").read_text()), "recipe.yaml")
    assert recipe.space is not None
    router = BudgetRouter(recipe.space, budget_targets(recipe, recipe_cost(recipe)), seed=2, width=recipe.router.hidden)
    put(run / "checkpoints" / "a", {RUN: {"router": router.state_dict()}}, layout)
    code, err = extract(run)
    assert code == 0, err
    for state in (7, {"weight": torch.ones(2)}, dict.fromkeys(router.state_dict(), 7)):
        put(run / "checkpoints" / "a", {RUN: {"router": state}}, layout)
        code, _, err = command("extract", str(run), "--target", "0.57", "--out", str(run.parent / "again"))
        assert code == 2 and "the router in checkpoint" in err and "is not one of its recipe" in err and err.count("\n") == 1


def _bomb_every_object(directory: Path) -> int:
    """Have every object among the shards, layers' own included, be code; returns how many there are."""
    index = read_index(directory)
    stream, names = io.BytesIO(), [key for key, entry in index.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    torch.save([Evil()], stream)
    with (directory / "__0_0.distcp").open("ab") as file:
        for name in names:
            place = index.storage_data[MetadataIndex(name)]
            place.offset, place.length = file.tell(), len(stream.getvalue())
            file.write(stream.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(index))
    return len(names)


@layouts
def test_training_goes_on_from_either_layout_and_runs_nothing_of_it(
    parallel: ParallelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tiny_run.start(parallel)
    tiny_run.train(run, 0, 1)
    directory = tmp_path / "a"
    save_checkpoint(directory, model=run.model, optimizer=run.optimizer, shape=tiny_run.SHAPE, parallel=parallel, state={"step": 1})
    saved = read_plain(directory)
    assert _bomb_every_object(directory) > 0
    put(directory, saved, layout)
    other = tiny_run.start(parallel, seed=8)
    found = load_checkpoint(directory, model=other.model, optimizer=other.optimizer, shape=tiny_run.SHAPE, parallel=parallel)
    state = run.state()
    assert found == {"step": 1} and all(torch.equal(tensor, state[name]) for name, tensor in other.state().items())
    put(directory, {**saved, RUN: {"step": Evil()}}, layout)
    assert NamedTensors(directory)
    for load in (load_checkpoint, load_latest):
        with pytest.raises(CheckpointError, match="holds more than plain data"):
            load(
                directory if load is load_checkpoint else tmp_path,
                model=other.model,
                optimizer=other.optimizer,
                shape=tiny_run.SHAPE,
                parallel=parallel,
            )
    assert not Path("ran").exists()
    (tmp_path / "latest").write_text("../a")
    with pytest.raises(CheckpointError, match="is not the name of a checkpoint beside it"):
        load_latest(tmp_path, model=other.model, optimizer=other.optimizer, shape=tiny_run.SHAPE, parallel=parallel)
