"""`make gpu` says in one line that there is no GPU, and its checks are such that a model on another device can pass and fail them.

What it finds on a GPU only a GPU can show; here the other device is the CPU, or a stand-in of a GPU that refuses tensors of both (tests/accelerator.py),
and Transformer Engine is a stand-in. So the training it does also proves that `train` leaves no tensor on the CPU that a GPU needs.

Run: pytest tests/test_gpu_check.py
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic.te_ranks import StandInRanks
from tests.train.harness import in_new_process

SCRIPT = Path(__file__).parents[1] / "scripts/gpu_check.py"


@pytest.fixture(scope="module")
def te() -> Iterator[StandInRanks]:
    """Ranks where the stand-in is installed."""
    ranks = StandInRanks()
    yield ranks
    ranks.close()


def script() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "no CUDA device: nothing was checked; run this on a machine with a GPU\n"


def rows_on_the_cpu(rank: int, world: int, wrong: bool) -> list[tuple[str, str, str, float, bool | None]]:
    """The rows of the script with the CPU in the GPU's place. wrong: the results it compares with are another model's."""
    gpu_check, cpu = script(), torch.device("cpu")
    gpu_check.TOKENS, gpu_check.REPEATS, gpu_check.timed_shape = 32, 1, gpu_check.SHAPES["dense"]
    from megatron_elastic.parallel import ParallelContext

    parallel, expected = ParallelContext.initialize(), {}
    for parent, shape in gpu_check.SHAPES.items():
        model = gpu_check.built(shape(), "local", parallel)
        if wrong:
            model.embedding.word_embeddings.weight.data.mul_(1.5)
        expected[parent] = gpu_check.forward_backward(model, cpu)
    parallel.destroy()
    rows = gpu_check.check(expected, time.monotonic())
    return [(row.layers, row.parent, row.what, row.value, row.passed) for row in rows]


@pytest.mark.dist
def test_the_cpu_passes_its_own_checks(te: StandInRanks) -> None:
    rows = te(rows_on_the_cpu, False)[0]
    parents = ("dense", "moe", "hybrid", "dense 1024")
    assert {row[:2] for row in rows} == {(layers, parent) for layers in ("local", "te") for parent in parents}
    judged = [row for row in rows if row[4] is not None]
    assert len(judged) == 2 * 3 * 5 and all(row[4] for row in judged)
    assert all(row[3] < 1e-4 for row in judged)


@pytest.mark.dist
def test_another_model_fails(te: StandInRanks) -> None:
    failed = {row[2] for row in te(rows_on_the_cpu, True)[0] if row[4] is False}
    assert failed == {"logits = CPU's", "gradients = CPU's"}


def trained_on_the_cpu(parent: str) -> dict[str, Any]:
    """What the script trains, in plain data."""
    gpu_check = script()
    return asdict(gpu_check.trained(gpu_check.SHAPES[parent](), "fp32"))


def trained_on_the_accelerator(parent: str, expected: dict[str, Any]) -> list[tuple[str, float, bool | None]]:
    """The rows of the script for a model that is trained, on the stand-in of a GPU."""
    from tests.accelerator import install

    gpu_check = script()
    install()
    rows = gpu_check.check_training({parent: gpu_check.Trained(**expected)}, time.monotonic(), [parent])
    return [(row.what, row.value, row.passed) for row in rows]


@pytest.mark.parametrize("parent", ["dense", "hybrid", pytest.param("moe", marks=pytest.mark.slow)])
def test_training_leaves_no_tensor_on_the_cpu_that_a_gpu_needs(parent: str) -> None:
    rows = in_new_process(trained_on_the_accelerator, parent, in_new_process(trained_on_the_cpu, parent))
    assert len(rows) == 4 and all(passed for *_, passed in rows), rows
    assert {value for what, value, _ in rows if what.startswith("fp32")} == {0.0}  # the stand-in computes as the CPU does, bit for bit


def test_time_that_is_up_ends_it() -> None:
    with pytest.raises(TimeoutError, match="not done in 180 s"):
        script().in_time(time.monotonic() - 181)


def test_the_table_has_a_line_for_every_row() -> None:
    gpu_check = script()
    rows = [gpu_check.Row("local", "dense", "logits", 3e-7, True), gpu_check.Row("te", "moe", "time, slice / mask", 0.61234, None)]
    lines = gpu_check.table(rows).splitlines()
    assert lines[1].split() == ["local", "dense", "logits", "3.0e-07", "ok"] and lines[2].split()[-1] == "0.61" and len(lines) == 3
