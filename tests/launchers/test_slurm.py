"""On a real SLURM of two nodes, two ranks each (gloo): `submit --pipeline` runs to the end, job by job; a job that is told to stop saves, goes back
to the queue and ends with the bits of one that nobody disturbed; and when a rank dies, its job fails at once and shows why.

Run: pytest -m slow tests/launchers/test_slurm.py (four minutes; SLURM is installed where it is missing and this is root)
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launchers.slurm_cluster import Slurm, two_nodes
from tests.train.harness import RECIPE, command, different, in_new_process, rows, stored

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
CHANGES = (
    "stages.short.steps=10",
    "stages.long.steps=2",
    "stages.long.sequence_length=36",
    "checkpoint.interval=100",
    "eval.interval=100",
    "log.tensorboard=false",
)
JOB_SECONDS = 240.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: Any) -> Iterator[Slurm]:
    with two_nodes(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def write_data(directory: Path) -> Path:
    """As much text as `rank` asks for."""
    from megatron_elastic.corpus.write import CorpusOptions
    from megatron_elastic.corpus.write import write_data as write

    (directory / "texts").mkdir()
    for number in range(60):
        (directory / "texts" / f"{number}.txt").write_text(f"text number {number} says {number * number} " * 70, encoding="utf-8")
    write(CorpusOptions(sources=(str(directory / "texts"),), holdout=0.3), directory / "data")
    return directory / "data"


@pytest.fixture(scope="module")
def parent(tmp_path_factory: Any) -> tuple[Path, Path]:
    """A parent, and the text that it was trained on."""
    root = tmp_path_factory.mktemp("parent")
    data = in_new_process(write_data, root)
    arguments = ["train", str(RECIPE), f"run_dir={root / 'run'}", f"data.path={data}", "--stage", "parent"]
    code, out, err = in_new_process(command, *arguments)
    assert code == 0, out + err
    return root / "run", data


def submit(slurm: Slurm, run_dir: Path, parent: Path, data: Path, *options: str) -> dict[str, int]:
    """`megatron-elastic submit` on both nodes; the number of each job."""
    words = ["submit", str(RECIPE), f"run_dir={run_dir}", f"parent={parent}", f"data.path={data}", "stages.parent=null", *CHANGES]
    words += ["--cluster", "cpu", "--nodes", "2", *options]
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    said = slurm.command(sys.executable, "-m", "megatron_elastic.cli.main", *words, environment=here, cwd=run_dir.parent)
    return {name: int(number) for name, number in re.findall(r"^(\w+): job (\d+)$", said, flags=re.MULTILINE)}


def log(run_dir: Path, name: str, number: int) -> str:
    """What a job and its ranks said."""
    paths = sorted((run_dir / "logs").glob(f"elastic-{name}-{number}*.log"))
    return "\n".join(f"== {path.name}\n{path.read_text(encoding='utf-8')}" for path in paths)


@pytest.fixture(scope="module")
def finished(slurm: Slurm, parent: tuple[Path, Path], tmp_path_factory: Any) -> Path:
    """The run of a pipeline that nobody disturbed."""
    run_dir = tmp_path_factory.mktemp("pipeline") / "run"
    jobs = submit(slurm, run_dir, *parent, "--pipeline")
    assert list(jobs) == ["rank", "sort", "stage1", "stage2", "extract", "verify"]
    for name, number in jobs.items():
        assert slurm.wait(number, JOB_SECONDS) == "COMPLETED", log(run_dir, name, number)
    return run_dir


def wait_for_step(run_dir: Path, step: int) -> None:
    """Wait until a run has taken so many steps of its first stage."""
    end = time.monotonic() + JOB_SECONDS
    while True:
        found = json.loads((run_dir / "heartbeat.json").read_text(encoding="utf-8")) if (run_dir / "heartbeat.json").exists() else {}
        if found.get("step", 0) >= step:
            return
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_a_pipeline_runs_to_the_end(finished: Path) -> None:
    assert sorted(path.name for path in (finished / "members").iterdir()) == ["full", "medium", "small"]
    assert json.loads((finished / "verify.json").read_text(encoding="utf-8"))
    assert {row["stage"] for row in rows(finished)} == {"short", "long"}
    recipe = (finished / "recipe.yaml").read_text(encoding="utf-8")
    assert f"parent: {finished / 'sorted'}" in recipe
    assert len(list((finished / "logs").glob("elastic-stage1-*-rank*.log"))) == 4


def test_a_job_that_is_told_to_stop_goes_on_in_the_queue_and_nothing_is_lost(
    slurm: Slurm, parent: tuple[Path, Path], finished: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    jobs = submit(slurm, run_dir, finished / "sorted", parent[1])
    wait_for_step(run_dir, 2)
    slurm.command("scancel", "--signal=USR1", str(jobs["stage1"]))
    slurm.wait(jobs["stage1"], 60, for_state="PENDING")
    said = log(run_dir, "stage1", jobs["stage1"])
    assert "stopped: told to stop by SIGUSR1" in said and "goes back to the queue" in said, said
    assert slurm.job(jobs["stage2"])["Dependency"].startswith("afterok:"), "the next job still waits"
    assert slurm.wait(jobs["stage1"], JOB_SECONDS) == "COMPLETED", log(run_dir, "stage1", jobs["stage1"])
    assert slurm.job(jobs["stage1"])["Restarts"] == "1"
    said = log(run_dir, "stage1", jobs["stage1"])
    assert said.count("4 ranks from") == 2 and "resumed from" in said, "one log, continued"
    slurm.command("scancel", str(jobs["stage2"]))
    assert different(stored(run_dir / "checkpoints" / "stage-short"), stored(finished / "checkpoints" / "stage-short")) == []
    assert rows(run_dir) == [row for row in rows(finished) if row["stage"] == "short"]


def test_when_a_rank_dies_its_job_fails_at_once_and_shows_why(
    slurm: Slurm, parent: tuple[Path, Path], finished: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    jobs = submit(slurm, run_dir, finished / "sorted", parent[1])
    wait_for_step(run_dir, 1)
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


def test_the_scripts_run_as_they_are_given_to_sbatch(slurm: Slurm, parent: tuple[Path, Path], finished: Path, tmp_path: Path) -> None:
    here = {"ELASTIC_CLUSTER": "cpu", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    options = ["--parsable", "--nodes=1", "--ntasks-per-node=1", f"--output={tmp_path}/%x.log"]
    script = [str(ROOT / "slurm" / "elastic_extract.sh"), str(RECIPE), f"run_dir={tmp_path / 'run'}"]
    (tmp_path / "run").symlink_to(finished)
    subprocess.run(["mv", str(finished / "members"), str(tmp_path / "members")], check=True)
    number = int(slurm.command("sbatch", *options, *script, environment=here, cwd=ROOT))
    assert slurm.wait(number, JOB_SECONDS) == "COMPLETED", (tmp_path / "elastic-extract.log").read_text(encoding="utf-8")
    assert sorted(path.name for path in (finished / "members").iterdir()) == ["full", "medium", "small"]
