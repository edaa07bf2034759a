"""On a real SLURM of two nodes, two ranks each (gloo): `submit` runs stage 1 and stage 2, and an extraction waits for them; a job that is told to
stop saves, goes back to the queue and ends with the bits and losses of one that nobody disturbed; and when a rank dies, its job fails at once and
shows why.

SLURM is installed where it is missing and this is root (slurm_cluster.py). The whole pipeline, from ranking to verified members, is slow:
pytest -m slow tests/launchers/test_slurm.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launchers.slurm_cluster import Slurm, two_nodes
from tests.train.harness import RECIPE, command, different, in_new_process, rows, stored

pytestmark = [pytest.mark.one_release, pytest.mark.dist, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
CHANGES = (
    "stages.short.steps=10",
    "stages.long.steps=2",
    "stages.long.sequence_length=36",
    "checkpoint.interval=100",
    "eval.interval=100",
    "log.tensorboard=false",
)
ITS_OWN_PARENT = ("stages.parent.steps=2",)
JOB_SECONDS = 240.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: Any) -> Iterator[Slurm]:
    with two_nodes(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> Path:
    """As much text as `rank` asks for."""
    from megatron_elastic.corpus.write import CorpusOptions, write_data

    directory = tmp_path_factory.mktemp("text")
    (directory / "texts").mkdir()
    for number in range(60):
        (directory / "texts" / f"{number}.txt").write_text(f"text number {number} says {number * number} " * 70, encoding="utf-8")
    write_data(CorpusOptions(sources=(str(directory / "texts"),), holdout=0.3), directory / "data")
    return directory / "data"


def environment() -> dict[str, str]:
    """What jobs inherit of who submits them."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "ELASTIC_CLUSTER": "cpu"}


def submit(slurm: Slurm, run_dir: Path, data: Path, *words: str) -> dict[str, int]:
    """`megatron-elastic submit` on both nodes; the number of each job."""
    arguments = ["submit", str(RECIPE), f"run_dir={run_dir}", f"data.path={data}", *CHANGES, "--cluster", "cpu", "--nodes", "2", *words]
    said = slurm.command(sys.executable, "-m", "megatron_elastic.cli.main", *arguments, environment=environment(), cwd=run_dir.parent)
    return {name: int(number) for name, number in re.findall(r"^(\w+): job (\d+)$", said, flags=re.MULTILINE)}


def log(run_dir: Path, name: str, number: int) -> str:
    """What a job and its ranks said."""
    paths = sorted((run_dir / "logs").glob(f"elastic-{name}-{number}*.log"))
    return "\n".join(f"== {path.name}\n{path.read_text(encoding='utf-8')}" for path in paths)


def wait_for_step(run_dir: Path, stage: str, step: int) -> None:
    """Wait until a run has taken so many steps of a stage."""
    end = time.monotonic() + JOB_SECONDS
    while True:
        found = json.loads((run_dir / "heartbeat.json").read_text(encoding="utf-8")) if (run_dir / "heartbeat.json").exists() else {}
        if found.get("stage") == stage and found["step"] >= step:
            return
        assert time.monotonic() < end, found
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, data: Path, tmp_path_factory: Any) -> tuple[Path, dict[str, int]]:
    """A run that trains its own parent and both stages, and then an extraction by the script itself: the directory, and the number of each job."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    jobs = submit(slurm, run_dir, data, *ITS_OWN_PARENT)
    options = [f"--dependency=afterok:{jobs['stage2']}", "--nodes=1", "--ntasks-per-node=1", f"--output={run_dir}/logs/%x-%j.log"]
    words = ["sbatch", "--parsable", *options, str(ROOT / "slurm" / "elastic_extract.sh"), str(RECIPE), f"run_dir={run_dir}"]
    jobs["extract"] = int(slurm.command(*words, environment=environment(), cwd=ROOT))
    assert [slurm.job(jobs[name])["Dependency"].partition("(")[0] for name in ("stage2", "extract")] == [
        f"afterok:{jobs[name]}" for name in ("stage1", "stage2")
    ]
    assert slurm.wait(jobs["stage1"], JOB_SECONDS) == "COMPLETED", log(run_dir, "stage1", jobs["stage1"])
    return run_dir, jobs


def test_two_stages_and_the_extraction_run_to_the_end(slurm: Slurm, undisturbed: tuple[Path, dict[str, int]]) -> None:
    run_dir, jobs = undisturbed
    assert list(jobs) == ["stage1", "stage2", "extract"]
    for name, number in jobs.items():
        assert slurm.wait(number, JOB_SECONDS) == "COMPLETED", log(run_dir, name, number)
    assert [slurm.job(jobs[name])["NumNodes"] for name in jobs] == ["2", "2", "1"]
    assert len(list((run_dir / "logs").glob(f"elastic-stage1-{jobs['stage1']}-rank*.log"))) == 4
    assert {row["stage"] for row in rows(run_dir)} == {"parent", "short", "long"}
    assert sorted(path.name for path in (run_dir / "members").iterdir()) == ["full", "medium", "small"]


def test_a_job_that_is_told_to_stop_goes_on_in_the_queue_and_nothing_is_lost(
    slurm: Slurm, data: Path, undisturbed: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    jobs = submit(slurm, run_dir, data, *ITS_OWN_PARENT)
    wait_for_step(run_dir, "short", 2)
    slurm.command("scancel", "--signal=USR1", str(jobs["stage1"]))
    assert slurm.wait(jobs["stage1"], 60, for_state="PENDING") == "PENDING", log(run_dir, "stage1", jobs["stage1"])
    said = log(run_dir, "stage1", jobs["stage1"])
    assert "stopped: told to stop by SIGUSR1" in said and "goes back to the queue" in said, said
    assert slurm.job(jobs["stage2"])["Dependency"].startswith("afterok:"), "the next job still waits"
    slurm.command("scancel", str(jobs["stage2"]))
    assert slurm.wait(jobs["stage1"], JOB_SECONDS) == "COMPLETED", log(run_dir, "stage1", jobs["stage1"])
    assert slurm.job(jobs["stage1"])["Restarts"] == "1"
    said = log(run_dir, "stage1", jobs["stage1"])
    assert said.count("4 ranks from") == 2 and "resumed from" in said, "one log, continued"
    whole, _ = undisturbed
    assert different(stored(run_dir / "checkpoints" / "stage-short"), stored(whole / "checkpoints" / "stage-short")) == []
    assert rows(run_dir) == [row for row in rows(whole) if row["stage"] != "long"], "every loss, also the last"


def test_when_a_rank_dies_its_job_fails_at_once_and_shows_why(slurm: Slurm, data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    jobs = submit(slurm, run_dir, data, *ITS_OWN_PARENT)
    wait_for_step(run_dir, "short", 1)
    (victim,) = [process for process in psutil.process_iter(["environ"]) if is_rank(process, jobs["stage1"], 3)]
    victim.send_signal(signal.SIGSEGV)
    assert slurm.wait(jobs["stage1"], 60) == "FAILED"
    said = (run_dir / "logs" / f"elastic-stage1-{jobs['stage1']}.log").read_text(encoding="utf-8")
    assert f"elastic-stage1-{jobs['stage1']}-rank3.log" in said and "Fatal Python error: Segmentation fault" in said, said
    assert "task 3: Segmentation fault" in said and "lost contact" not in said, said
    assert slurm.wait(jobs["stage2"], 60) == "CANCELLED", "it has nothing to go on from"


def is_rank(process: psutil.Process, job: int, rank: int) -> bool:
    """Whether a process is this rank of a job."""
    environment = process.info["environ"] or {}
    found = (environment.get("SLURM_JOB_ID"), environment.get("SLURM_PROCID"))
    return found == (str(job), str(rank)) and "megatron_elastic.slurm_task" in " ".join(process.cmdline())


@pytest.mark.slow
def test_a_pipeline_ranks_and_sorts_its_parent_and_verifies_its_members(slurm: Slurm, data: Path, tmp_path: Path) -> None:
    arguments = ["train", str(RECIPE), f"run_dir={tmp_path / 'parent'}", f"data.path={data}", "--stage", "parent"]
    code, out, err = in_new_process(command, *arguments)
    assert code == 0, out + err
    run_dir = tmp_path / "run"
    jobs = submit(slurm, run_dir, data, "stages.parent=null", f"parent={tmp_path / 'parent'}", "--pipeline")
    assert list(jobs) == ["rank", "sort", "stage1", "stage2", "extract", "verify"]
    for name, number in jobs.items():
        assert slurm.wait(number, JOB_SECONDS) == "COMPLETED", log(run_dir, name, number)
    assert sorted(path.name for path in (run_dir / "members").iterdir()) == ["full", "medium", "small"]
    assert json.loads((run_dir / "verify.json").read_text(encoding="utf-8"))
    assert f"parent: {run_dir / 'sorted'}" in (run_dir / "recipe.yaml").read_text(encoding="utf-8")
