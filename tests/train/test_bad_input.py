"""Bad input gives one clear message, exit code 2, no traceback and no hung rank, before work starts, and leaves nothing under a final name.

Run: pytest tests/train/test_bad_input.py
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_elastic.cli import main
from megatron_elastic.config import decode_recipe
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.errors import ElasticError
from megatron_elastic.models.build import build_model
from megatron_elastic.testing.tiny import tiny_shape
from tests.elastic.family import tiny_space
from tests.train import harness
from tests.train.harness import RECIPE, command, in_new_process, in_new_processes, plain_recipe


@pytest.fixture(scope="module")
def parent(tmp_path_factory: Any, data: Path) -> Path:
    """The run of a parent alone."""
    directory = tmp_path_factory.mktemp("parent") / "run"
    stages = plain_recipe(directory, data)["stages"][:1]
    in_new_process(harness.train, decode_recipe(plain_recipe(directory, data, elastic=None, stages=stages), "tiny.yaml"))
    return directory


def only_message(result: tuple[int, str, str]) -> str:
    """The message of a command that failed as it should."""
    code, _, err = result
    assert code == 2, result
    assert err.startswith("error: ") and err.count("error: ") == 1 and "Traceback" not in err
    return err.removeprefix("error: ").strip()


BAD_RECIPES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["router.temprature=[1,1]"], ["router.temprature is not a known key; did you mean router.temperature?"]),
    "wrong type": (["stages.short.lr=fast"], ["lr 'fast' (str) must be", "float"]),
    "choice between groups": (["elastic.axes.ffn=[72,50,24]"], ["ffn", "50", "multiple of", "8"]),
    "tensor parallelism and shard_groups": (
        ["parallel.tensor=3"],
        ["parallel.tensor 3 does not divide elastic.shard_groups 4; choose a divisor or raise shard_groups"],
    ),
    "top-k above the kept experts": (["elastic.axes.experts=[8,6,2]"], ["experts", "topk 3", "2"]),
    "unreachable budget": (
        ["elastic.budgets.small=0.1"],
        ["elastic.budgets.small", "10463.2 within 0.02", "the nearest reachable cost is 21932"],
    ),
    "pinned plan outside the space": (["elastic.budgets.medium.plan.ffn=40"], ["elastic.budgets.medium.plan", "ffn 40", "[72, 48, 24]"]),
    "stage of another name": (["--stage", "shrot"], ["--stage 'shrot' is not a stage of the recipe; stages: parent, short, long"]),
    "no steps": (["--steps", "0"], ["--steps 0 must be at least 1"]),
    "no stages": (["stages=[]"], ["stages is empty"]),
    "data missing": (
        ["data.path=nowhere"],
        ["data.path 'nowhere' does not exist; write one with: megatron-elastic data SOURCE --out nowhere"],
    ),
    "no data section": (["data=null"], ["data is missing; set data.path"]),
    "token ids outside the vocabulary": (
        ["model.vocab_size=200"],
        ["a token id outside the vocabulary", "run up to 256", "model.vocab_size is 200; set it to 257 or more"],
    ),
    "held-out text too short for a late stage": (
        ["stages.long.sequence_length=9000"],
        ["stages.long: eval.samples 3 of 9000 tokens are more than the 0 the held-out text", "lower eval.samples or hold out more"],
    ),
    "a warm-up that fills a late stage": (
        ["stages.long.warmup_steps=3"],
        ["stages.long: warmup_steps 3 must lie between 0 and the stage's 3 steps"],
    ),
    "a parent's stage too late": (
        ["stages.short.elastic=true", "stages.long.elastic=false"],
        ["stages.long: a stage with elastic: false cannot follow an elastic one; put it first"],
    ),
    "micro-batch and decisions": (["router.samples_per_decision=3"], ["router.samples_per_decision 3", "micro_batch_size 2"]),
    "elastic without a parent": (
        ["stages.parent.elastic=true"],
        ["stages[0] (parent) is elastic but there is no parent; set parent: PATH"],
    ),
    "no such parent": (["parent=nowhere"], ["checkpoint 'nowhere' does not exist"]),
    "processes that the layout does not divide": (["parallel.expert=2"], ["parallel.expert 2", "does not divide the 1 processes"]),
}


@pytest.mark.parametrize("case", BAD_RECIPES)
def test_a_bad_recipe_is_refused_before_anything_is_written(case: str, data: Path, tmp_path: Path) -> None:
    arguments, parts = BAD_RECIPES[case]
    message = only_message(in_new_process(command, "train", str(RECIPE), f"run_dir={tmp_path / 'run'}", f"data.path={data}", *arguments))
    assert [part for part in parts if part not in message] == [], message
    assert list(tmp_path.iterdir()) == []


def test_every_problem_of_a_recipe_at_once(data: Path, tmp_path: Path) -> None:
    bad = ["elastic.axes.hidden=[40,90]", "stages.short.min_lr=1", "checkpoint.interval=0"]
    message = only_message(in_new_process(command, "train", str(RECIPE), f"run_dir={tmp_path / 'run'}", f"data.path={data}", *bad))
    assert "min_lr 1.0 is above lr" in message and "checkpoint.interval 0 must be at least 1" in message
    assert message.count("\n  - ") == 2 and list(tmp_path.iterdir()) == []


def test_a_parent_of_another_model(parent: Path, data: Path, tmp_path: Path) -> None:
    changes = [f"parent={parent}", "model.mamba.state=9", "model.norm_epsilon=1e-3"]
    message = only_message(in_new_process(command, "train", str(RECIPE), f"run_dir={tmp_path / 'run'}", f"data.path={data}", *changes))
    assert "stage-parent' is of another model: " in message
    assert "model.mamba.state is 7 there and 9 here" in message and "model.norm_epsilon is 1e-05 there and 0.001 here" in message
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_recipe_is_not_continued(parent: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(parent, run)
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    message = only_message(in_new_process(command, "train", str(RECIPE), f"run_dir={run}", f"data.path={data}"))
    assert "stage-parent' was made by another recipe: " in message and "elastic.axes.shared_ffn was None and is [48, 36, 12]" in message
    assert message.endswith("choose another run_dir or delete this one")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


def test_a_half_written_parent(parent: Path, data: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(parent / "checkpoints" / "stage-parent", broken)
    (broken / "__0_0.distcp").write_bytes(b"half")
    arguments = [f"run_dir={tmp_path / 'run'}", f"data.path={data}", f"parent={broken}"]
    message = only_message(in_new_process(command, "train", str(RECIPE), *arguments))
    assert "broken' is half-written: __0_0.distcp has 4 bytes, not " in message and message.endswith("use an earlier one")
    assert not (tmp_path / "run").exists()


def test_empty_and_missing_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    for source in ("empty.txt", "absent.txt"):
        message = only_message(in_new_process(command, "data", str(tmp_path / source), "--out", str(tmp_path / "data")))
        assert source in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt"]


def test_a_data_directory_with_a_part_missing(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "train.bin").unlink()
    arguments = [f"run_dir={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}"]
    message = only_message(in_new_process(command, "train", str(RECIPE), *arguments))
    assert "train.bin is missing; write the directory again" in message and not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(data: Path, tmp_path: Path) -> None:
    arguments = [f"run_dir={tmp_path / 'run'}", f"data.path={data}", "stages.short.lr=1e30", "checkpoint.interval=1"]
    message = only_message(in_new_process(command, "train", str(RECIPE), *arguments))
    assert message == "stage 'short', step 1: the loss is nan; lower stages.short.lr or start from an earlier checkpoint"
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"latest", "step-parent-0000002", "stage-parent", "step-short-0000001"}
    assert not (tmp_path / "run" / "family.json").exists()


def poisoned_gradient(*arguments: str) -> tuple[int, str, str]:
    """Run a command during which one gradient of the parent's second step is infinite although its loss is finite."""
    from megatron_elastic.train import step

    check = step._check_finite

    def poison(stage: Any, number: int, what: str, value: float) -> None:
        check(stage, number, what, value)
        if what == "loss" and number == 1:
            step.poisoned.main_grad[0] = torch.inf

    accumulate = step.accumulate_gradients

    def keep(run: Any, *args: Any) -> Any:
        step.poisoned = next(iter(run.parts[0].parameters()))
        return accumulate(run, *args)

    step._check_finite, step.accumulate_gradients = poison, keep
    return command(*arguments)


def test_a_gradient_that_is_not_finite_reaches_no_checkpoint(data: Path, tmp_path: Path) -> None:
    arguments = [f"run_dir={tmp_path / 'run'}", f"data.path={data}", "checkpoint.interval=1"]
    message = only_message(in_new_process(poisoned_gradient, "train", str(RECIPE), *arguments))
    assert message.startswith("stage 'parent', step 1: the gradient's norm is ")
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"latest", "step-parent-0000001"}


def full_disk(*arguments: str) -> tuple[int, str, str]:
    """Run a command on a disk with 1 kB left."""
    shutil.disk_usage = lambda path: SimpleNamespace(free=1000)
    return command(*arguments)


def test_a_full_disk(data: Path, tmp_path: Path) -> None:
    arguments = [f"run_dir={tmp_path / 'run'}", f"data.path={data}"]
    message = only_message(in_new_process(full_disk, "train", str(RECIPE), *arguments))
    assert "step-parent-0000002' cannot be written: No space left on device" in message
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_family_that_misses_its_targets_is_not_written(data: Path, tmp_path: Path) -> None:
    short = [f"stages.{stage}.{key}" for stage in ("parent", "short", "long") for key in ("steps=1", "warmup_steps=0")]
    message = only_message(in_new_process(missed_targets, "train", str(RECIPE), f"run_dir={tmp_path / 'run'}", f"data.path={data}", *short))
    assert message == "the router's plans are no family yet: budget 'small' is far off"
    assert not (tmp_path / "run" / "family.json").exists() and (tmp_path / "run" / "checkpoints" / "stage-long").is_dir()


def missed_targets(*arguments: str) -> tuple[int, str, str]:
    """Run a command whose router stands for a family with a problem."""
    from megatron_elastic.train.decide import Decider

    family = Decider.family
    Decider.family = lambda self: replace(family(self), problems=["budget 'small' is far off"])
    return command(*arguments)


# --- what elasticize refuses


def refused(model: Any, parallel: Any, space: Any, shape: Any) -> str:
    """The message of a refusal that leaves the model as it was."""
    kinds, state = [type(module) for module in model.modules()], [sorted(vars(module)) for module in model.modules()]
    rate = model.config.moe_router_bias_update_rate
    with pytest.raises(ElasticError) as caught:
        elasticize(model, space, parallel, shape)
    assert [type(module) for module in model.modules()] == kinds and [sorted(vars(module)) for module in model.modules()] == state
    assert model.config.moe_router_bias_update_rate == rate == 0.25
    return str(caught.value)


REFUSALS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "recompute": ({"recompute_granularity": "full"}, ["recompute_granularity 'full': megatron's recompute would replay another"]),
    "fused gradients": ({"gradient_accumulation_fusion": True}, ["gradient_accumulation_fusion", "set it to False"]),
    "capacity": ({"moe_expert_capacity_factor": 1.0}, ["moe_expert_capacity_factor 1.0: its capacity is the parent's", "set it to None"]),
    "two at once": (
        {"recompute_granularity": "full", "moe_router_fusion": True},
        ["recompute_granularity", "moe_router_fusion True: the fused router knows no expert weights"],
    ),
}


@pytest.fixture
def parts(parallel: Any) -> tuple[Any, Any, Any]:
    """A tiny model that megatron-core would update the experts' bias of, its space and its shape."""
    shape = tiny_shape()
    return build_model(shape, parallel, expert_bias_rate=0.25), tiny_space(shape), shape


@pytest.mark.parametrize("case", REFUSALS)
def test_elasticize_refuses_what_it_cannot_follow(case: str, parts: tuple[Any, Any, Any], parallel: Any) -> None:
    model, space, shape = parts
    settings, wanted = REFUSALS[case]
    for name, value in settings.items():
        assert hasattr(model.config, name)
        setattr(model.config, name, value)
    message = refused(model, parallel, space, shape)
    assert [part for part in wanted if part not in message] == [], message


def test_elasticize_refuses_layouts(parts: tuple[Any, Any, Any], parallel: Any) -> None:
    model, space, shape = parts
    assert "parallel.tensor 3 does not divide elastic.shard_groups 4" in refused(model, replace(parallel, tensor=3), space, shape)
    assert "parallel.tensor 4 above model.attention.kv_groups 2" in refused(model, replace(parallel, tensor=4), space, shape)


def test_elasticize_names_a_module_it_does_not_know(parts: tuple[Any, Any, Any], parallel: Any) -> None:
    model, space, shape = parts
    tokens = torch.arange(9)[None]
    before = model(tokens, tokens, None)
    model.decoder.layers[2].adapter = torch.nn.Linear(3, 5)
    message = refused(model, parallel, space, shape)
    assert message == "elasticize: decoder.layers.2.adapter (Linear) holds parameters but has no elastic form"
    assert torch.equal(model(tokens, tokens, None), before)
    del model.decoder.layers[2].adapter
    handle = elasticize(model, space, parallel, shape)
    assert model.config.moe_router_bias_update_rate == 0
    handle.remove()
    assert model.config.moe_router_bias_update_rate == 0.25


# --- two processes


def free_port() -> int:
    """A port nobody listens on, below those the system gives to outgoing connections."""
    while True:
        port = random.randint(15_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def impatient(*arguments: str) -> tuple[int, str, str]:
    """A command whose second process does not wait for the first: no launcher watches them here."""
    main.SECONDS_FOR_THE_FIRST = 0.0
    return command(*arguments)


def on_two_ranks(*arguments: list[str]) -> list[tuple[int, str, str]]:
    """The same command on two processes, as torchrun starts them; a list of arguments for each."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return in_new_processes(impatient, list(map(tuple, arguments)), environment=[common | {"RANK": str(rank)} for rank in range(2)])


GPT_PARENT = ("model.layer_pattern=TXTXTX", "elastic=null", "stages.short.elastic=false", "stages.long.elastic=false")
"""The recipe without its family and with layers that either megatron-core deals out in several parts."""

BAD_ON_RANKS: dict[str, tuple[list[str], list[str], str]] = {
    "on both": (["stages.parent.warmup_steps=9"], ["stages.parent.warmup_steps=9"], "stages.parent: warmup_steps 9 must lie between 0 and"),
    "on one": ([], ["data.path=nowhere"], "data.path 'nowhere' does not exist; write one with"),
    "tensor parallelism": (
        ["parallel.tensor=2", "parallel.sequence_parallel=false"],
        ["parallel.tensor=2", "parallel.sequence_parallel=false"],
        "parallel.sequence_parallel false with tensor 2: megatron-core trains experts under tensor parallelism with it only",
    ),
    "pipeline": (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
        "parallel.pipeline 2 x virtual_pipeline 2 does not divide the 6 layers",
    ),
    "rounds": (
        [*GPT_PARENT, "parallel.pipeline=2", "parallel.virtual_pipeline=3", "stages.parent.global_batch_size=6"],
        [*GPT_PARENT, "parallel.pipeline=2", "parallel.virtual_pipeline=3", "stages.parent.global_batch_size=6"],
        "stages.parent: global_batch_size 6 gives each of 1 replicas 3 microbatches, not a multiple of parallel.pipeline 2",
    ),
    "replicas": (
        ["stages.long.micro_batch_size=8", "router.samples_per_decision=8"],
        ["stages.long.micro_batch_size=8", "router.samples_per_decision=8"],
        "stages.long: global_batch_size 8 is not a multiple of micro_batch_size 8 x 2 data-parallel replicas; use a multiple of 16",
    ),
    "loss": (["stages.parent.lr=1e30"], ["stages.parent.lr=1e30"], "stage 'parent', step 1: the loss is nan"),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", BAD_ON_RANKS)
def test_two_ranks_stop_together_with_one_message(case: str, data: Path, tmp_path: Path) -> None:
    *extra, text = BAD_ON_RANKS[case]
    common = ["train", str(RECIPE), f"run_dir={tmp_path / 'run'}", f"data.path={data}"]
    first, second = on_two_ranks(*([*common, *more] for more in extra))
    message = only_message(first)
    assert text in message
    assert second[0] == 2 and second[2] == ""


@pytest.mark.dist
def test_torchrun_ends_with_one_message_of_ours(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    bad = ["-m", "megatron_elastic.cli.main", "train", str(RECIPE), "routr.hidden=3"]
    ended = subprocess.run([*launch, *bad], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, env=dict(os.environ))
    assert ended.returncode != 0
    assert ended.stderr.count("error: ") == 1 and "routr is not a known key; did you mean router?" in ended.stderr
    assert "raise ConfigError" not in ended.stderr and list(tmp_path.iterdir()) == []
