"""`validate --cluster`: what does not fit is refused by its key, its value and a remedy, the shipped recipes are accepted, and torch stays out.

Run: pytest tests/cli/test_validate_cluster.py
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from megatron_elastic import cluster_checks, packages
from megatron_elastic.checkpoint.files import CheckpointKind, Description, new_checkpoint
from megatron_elastic.cli.validate import command
from megatron_elastic.cluster import load_cluster
from megatron_elastic.cluster_checks import Outcome, check_run, refusals
from megatron_elastic.config import load_recipe
from megatron_elastic.errors import ConfigError
from megatron_elastic.recipe import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = Path(__file__).parent / "tiny.yaml"
ALONE = ("data=null", "parent=null")
"""What is only on the cluster is not looked at."""


def recipe_of(name: str, *overrides: str) -> Recipe:
    return load_recipe(TINY if name == "tiny" else RECIPES / f"{name}.yaml", [*ALONE, *overrides])


def refused(recipe: Recipe, cluster: str = "h100", nodes: int = 8, **changes: Any) -> list[str]:
    """The refusals of a recipe on a shipped cluster with changes."""
    return refusals(check_run(recipe, replace(load_cluster(cluster), **changes), nodes))


def write_data(directory: Path, *, tokens: int = 100_000, held_out: int = 100_000, vocab_size: int = 257) -> Path:
    """A data directory as `megatron-elastic data` describes it; the tokens are zeros."""
    directory.mkdir()
    splits = {name: {"documents": 1, "tokens": count, "sha256": "0"} for name, count in (("train", tokens), ("valid", held_out))}
    for name, split in splits.items():
        (directory / f"{name}.bin").write_bytes(bytes(2 * split["tokens"]))
        (directory / f"{name}.idx").write_bytes(b"")
    data = {"format_version": 1, "tokenizer": "byte", "vocab_size": vocab_size, "eod": 256, "bytes_per_token": 2, **splits}
    (directory / "data.json").write_text(json.dumps(data), encoding="utf-8")
    return directory


def write_parent(directory: Path, recipe: Recipe) -> Path:
    """A checkpoint of the recipe's model without tensors."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with new_checkpoint(directory, Description(kind=CheckpointKind.MODEL, shape=recipe.model)):
        pass
    return directory


ACCEPTED = [
    ("demo_dense", "cpu", 2, ()),
    ("demo_hybrid", "cpu", 2, ()),
    ("demo_moe", "cpu", 2, ()),
    ("matformer", "cpu", 2, ()),
    ("smollm2_135m", "h100", 1, ()),
    ("smollm2_135m", "h100", 8, ()),
    *(
        (name, "h100", 8, ())
        for name in ("llama31_8b", "nemotron_nano_v2_9b", "nemotron_nano_v2_12b", "nemotron_3_nano_30b", "qwen3_30b_a3b")
    ),
    # On one node a step takes up to 36 minutes.
    *(
        (name, "h100_bare", 1, ("checkpoint.interval=3", "log.hang_seconds=9000"))
        for name in ("llama31_8b", "nemotron_nano_v2_9b", "nemotron_nano_v2_12b")
    ),
    # A student and a frozen parent of 30B do not fit on one.
    *((name, "h100", 2, ("checkpoint.interval=5",)) for name in ("nemotron_3_nano_30b", "qwen3_30b_a3b")),
]


@pytest.mark.parametrize(("name", "cluster", "nodes", "overrides"), ACCEPTED)
def test_the_shipped_recipes_are_accepted(name, cluster, nodes, overrides):
    assert refused(recipe_of(name, *overrides), cluster, nodes) == []


def test_every_shipped_recipe_is_among_them():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {name for name, *_ in ACCEPTED}


LAYOUTS = [
    ("nemotron_nano_v2_12b", (), "h100", 0, ["--nodes 0 must be at least 1"]),
    (
        "demo_hybrid",
        ("parallel.tensor=2", "parallel.pipeline=2"),
        "cpu",
        1,
        ["parallel.tensor 2 x pipeline 2", "2 processes", "a multiple of 4"],
    ),
    ("demo_hybrid", ("parallel.context=4",), "cpu", 1, ["context 4 does not divide the 2 processes", "start a multiple of 4"]),
    ("nemotron_3_nano_30b", (), "cpu", 2, ["parallel.expert 8", "does not divide the 4 processes", "lower parallel.expert"]),
    (
        "nemotron_nano_v2_12b",
        ("parallel.tensor=3",),
        "h100",
        8,
        ["parallel.tensor 3 does not divide elastic.shard_groups 8", "choose a divisor"],
    ),
    (
        "nemotron_nano_v2_12b",
        ("parallel.tensor=16",),
        "h100",
        8,
        ["parallel.tensor 16 does not divide elastic.shard_groups 8", "choose a divisor"],
    ),
    (
        "nemotron_3_nano_30b",
        ("parallel.tensor=8",),
        "h100",
        8,
        ["parallel.tensor 8 does not divide elastic.shard_groups 4", "raise shard_groups"],
    ),
    ("nemotron_3_nano_30b", ("parallel.expert=16",), "h100", 8, ["parallel.expert 16 does not divide the 8 groups of axis 'experts'"]),
    (
        "nemotron_3_nano_30b",
        ("parallel.pipeline=3",),
        "h100",
        6,
        ["parallel.pipeline 3 does not divide the 52 layers of model.layer_pattern"],
    ),
    ("llama31_8b", ("parallel.expert=2",), "h100", 8, ["parallel.expert 2 needs a mixture of experts; set it to 1"]),
    (
        "smollm2_135m",
        ("parallel.tensor=3",),
        "h100",
        3,
        ["parallel.tensor 3 does not divide the 8 GPUs", "joined by NVLink", "use a divisor of 8"],
    ),
    (
        "demo_dense",
        (),
        "h100",
        8,
        ["stages.long: global_batch_size 16", "micro_batch_size 4 x 64 data-parallel replicas", "a multiple of 256"],
    ),
    (
        "llama31_8b",
        ("parallel={tensor: 4, pipeline: 2, virtual_pipeline: 2}", "stages.short.global_batch_size=24"),
        "h100",
        8,
        ["stages.short: global_batch_size 24", "8 replicas 3 microbatches", "parallel.pipeline 2", "set virtual_pipeline to 1"],
    ),
    ("llama31_8b", ("router.samples_per_decision=7",), "h100", 8, ["global_batch_size 1536", "router.samples_per_decision 7"]),
    ("llama31_8b", ("stages.short.micro_batch_size=16",), "h100", 8, ["micro_batch_size 16", "router.samples_per_decision 8"]),
    ("llama31_8b", ("elastic.budgets.small=0.01",), "h100", 8, ["elastic.budgets.small", "within 0.0", "nearest"]),
    ("llama31_8b", ("stages.long.elastic=false",), "h100", 8, ["stages.long: a stage with elastic: false", "put it first"]),
    ("llama31_8b", ("stages.long.warmup_steps=99999",), "h100", 8, ["stages.long: warmup_steps 99999", "shorten the warm-up"]),
    ("llama31_8b", ("stages=[]",), "h100", 8, ["stages is empty", "add a stage"]),
]


@pytest.mark.parametrize(("name", "overrides", "cluster", "nodes", "parts"), LAYOUTS)
def test_what_cannot_be_laid_out_is_refused(name, overrides, cluster, nodes, parts):
    try:
        found = refused(recipe_of(name, *overrides), cluster, nodes)
    except ConfigError as error:  # what a recipe alone refuses, at once
        found = error.problems
    assert any(all(part in line for part in parts) for line in found), found


SIZES = [
    ("nemotron_3_nano_30b", (), 1, {}, ["stages.short: ", "do not fit in the 71.7 GiB that gpu H100-SXM has", "--nodes to 2"]),
    ("nemotron_3_nano_30b", ("parallel.recompute=none",), 8, {}, ["stages.long: ", "activations", "set parallel.recompute to full"]),
    (
        "nemotron_3_nano_30b",
        (),
        8,
        {"gpu": "A100-40GB"},
        ["stages.long: ", "that gpu A100-40GB has", "raise parallel.tensor, pipeline or expert"],
    ),
    ("nemotron_nano_v2_9b", ("precision=fp32",), 8, {"gpu": "L40S"}, ["stages.long: ", "that gpu L40S has", "set precision to bf16"]),
    (
        "llama31_8b",
        ("stages.long.micro_batch_size=8", "stages.long.global_batch_size=512"),
        8,
        {},
        ["stages.long: ", "set parallel.recompute to full and micro_batch_size to 4"],
    ),
    (
        "nemotron_nano_v2_12b",
        (),
        1,
        {},
        ["signal_lead 900", "stages.long", "checkpoint.interval 100", "lower the interval to 3", "above 4017"],
    ),
    ("nemotron_nano_v2_12b", ("log.hang_seconds=60",), 8, {}, ["log.hang_seconds 60", "stages.short, about 114 s", "raise it above 45"]),
    ("nemotron_nano_v2_12b", (), 1, {"time": "00:40:00"}, ["time '00:40:00'", "stages.long, about 2008 s", "raise it, or --nodes"]),
    ("demo_hybrid", (), 2, {"memory": "100M"}, ["stages.long: ", "0.044 GiB that each of 2 processes in memory 100M has; "]),
]


@pytest.mark.parametrize(("name", "overrides", "nodes", "changes", "parts"), SIZES)
def test_what_is_too_large_or_too_slow_is_refused(name, overrides, nodes, changes, parts):
    found = refused(recipe_of(name, *overrides), "cpu" if "memory" in changes else "h100", nodes, **changes)
    assert any(all(part in line for part in parts) for line in found), found


def tiny_on_cpu(tmp_path: Path, *overrides: str) -> list[str]:
    return refused(recipe_of("tiny", f"run_dir={tmp_path / 'run'}", *overrides), "cpu", 2)


def test_what_is_not_there_or_does_not_match_is_refused(tmp_path, monkeypatch):
    data, whole = write_data(tmp_path / "data"), recipe_of("tiny")
    parent = write_parent(tmp_path / "parent", whole)
    there = (f"data.path={data}", f"parent={parent}", "stages.parent=null")
    assert tiny_on_cpu(tmp_path, *there) == []
    other = write_parent(tmp_path / "other", recipe_of("tiny", "model.mlp.ffn=1024", "elastic=null", "stages=[]"))
    broken = write_data(tmp_path / "broken")
    (broken / "train.bin").write_bytes(b"")
    words, short = write_data(tmp_path / "words", vocab_size=300), write_data(tmp_path / "short", held_out=20_000)
    for change, parts in [
        ("data.path=nowhere", ["data.path 'nowhere' does not exist; write one with: megatron-elastic data SOURCE --out nowhere"]),
        (f"data.path={tmp_path}", [f"data.path '{tmp_path}' is not a data directory", "megatron-elastic data"]),
        (f"data.path={broken}", [str(broken), "train.bin has 0 bytes, not 200000; write the directory again"]),
        (f"data.path={words}", [str(words), "model.vocab_size is 257; set it to 300 or more"]),
        (f"data.path={short}", ["stages.long: eval.samples 64 of 1024 tokens", "lower eval.samples"]),
        ("parent=nowhere", ["parent 'nowhere': checkpoint 'nowhere' does not exist", "megatron-elastic import"]),
        (f"parent={data}", [f"parent '{data}'", "is neither a checkpoint"]),
        (f"parent={other}", [f"parent '{other}'", "model.mlp.ffn is 1024 there and 512 here"]),
    ]:
        (found,) = tiny_on_cpu(tmp_path, *there, change)
        assert [part for part in parts if part not in found] == [], found
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("train.bin"))
    (found,) = tiny_on_cpu(tmp_path, *there)
    assert "data.path" in found and "train.bin cannot be read by this user; chmod it" in found


def test_disks(tmp_path, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    (found,) = tiny_on_cpu(tmp_path)
    assert f"run_dir '{tmp_path / 'run'}': 6 checkpoints of 21.8 MB = 131.0 MB, 100.0 MB free at {tmp_path}" in found
    assert found.endswith("choose another disk, or lower checkpoint.keep_last 2")
    assert tiny_on_cpu(tmp_path, "checkpoint.keep_last=0") == []
    monkeypatch.chdir(tmp_path)
    checks = {check.subject: check for check in check_run(recipe_of("tiny", "run_dir=new"), load_cluster("cpu"), 2)}
    assert checks["disk"].outcome is Outcome.NOTE and "where run_dir 'new' would be made" in checks["disk"].finding
    (tmp_path / "new").mkdir()
    assert len(refused(recipe_of("tiny", "run_dir=new"), "cpu", 2)) == 1
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (found,) = refused(recipe_of("tiny", "run_dir=new"), "cpu", 2)
    assert "run_dir 'new'" in found and "cannot be written by this user; choose another run_dir" in found


def test_packages_say_what_they_cost(monkeypatch):
    none = dict.fromkeys(packages.COSTS)
    monkeypatch.setattr(cluster_checks, "installed_versions", lambda: none)
    recipe = recipe_of("nemotron_nano_v2_12b")
    checks = {check.subject: check for check in check_run(recipe, load_cluster("h100_bare"), 8)}
    assert {name: checks[name].outcome for name in none} == {
        **dict.fromkeys(("megatron-core", "transformer-engine", "apex", "mamba-ssm", "causal-conv1d"), Outcome.NOTE),
        **dict.fromkeys(("nvidia-modelopt", "deepspeed"), Outcome.OK),
    }
    assert checks["mamba-ssm"].finding == f"not installed: {packages.COSTS['mamba-ssm']}"
    monkeypatch.setattr(cluster_checks, "installed_versions", lambda: none | {"megatron-core": "0.15.0"})
    (found,) = refused(recipe, "h100_bare")
    assert "megatron-core 0.15.0 is not supported; install" in found
    assert refused(recipe, "h100") == []  # the container has its own


def test_a_budget_that_the_layout_does_not_divide(monkeypatch):
    """Groups rule it out, so it is put there by hand."""
    recipe = recipe_of("demo_hybrid", "parallel.tensor=2")
    plans = cluster_checks.budget_plans(recipe, cluster_checks.recipe_cost(recipe))
    odd = replace(plans["small"], widths=tuple((axis, 255 if axis == "ffn" else width) for axis, width in plans["small"].widths))
    monkeypatch.setattr(cluster_checks, "budget_plans", lambda *_: plans | {"small": odd})
    assert refused(recipe, "cpu", 2) == ["elastic.budgets.small: parallel.tensor 2 does not divide model.mlp.ffn 255"]


def run(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_one_table_and_the_exit_code(tmp_path):
    fine = run(RECIPES / "nemotron_3_nano_30b.yaml", *ALONE, "--cluster", "h100", "--nodes", 8)
    assert fine.exit_code == 0 and fine.output.rstrip().endswith("nemotron_3_nano_30b.yaml --cluster h100 --nodes 8")
    lines = {line.split("  ")[0]: line for line in fine.output.splitlines()}
    assert "64 = tensor 4 x pipeline 1 x context 1 x 16 replicas; 8 copies of experts over 8 ranks" in lines["layout"]
    assert "GPU-hours" in lines["time, long"] and "of 71.7" in lines["memory, long"]
    bad = run(TINY, "data.path=nowhere", "--cluster", "cpu", "--nodes", 2)
    assert isinstance(bad.exception, ConfigError)  # which the command line ends on with code 2
    assert "refused" in bad.output and bad.exception.problems[0].startswith("data.path 'nowhere' does not exist")
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump({"format_version": 1, "device": "cpu", "gpus_per_node": 4, "time": "10"}), encoding="utf-8")
    assert "1 x 4 processes = 4 processes, 10 a job" in run(TINY, *ALONE, "--cluster", site, "--nodes", 1).output
    assert "--cluster and --nodes belong together" in str(run(TINY, "--nodes", 2).exception)
