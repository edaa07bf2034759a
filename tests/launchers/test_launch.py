"""How ranks are started: every variable has a reason, flags are what SLURM and pyxis take, each launcher starts what it says, and nothing that a
cluster file holds is ever read as shell code.

Run: pytest tests/launchers/test_launch.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_elastic import launch
from megatron_elastic.cluster import Cluster, Container, load_cluster
from megatron_elastic.config import load_recipe
from megatron_elastic.errors import EXIT_REQUEUE, ConfigError
from megatron_elastic.launch import (
    PORTS,
    container_options,
    meeting_variables,
    rank_variables,
    ranked_parent,
    sbatch_options,
    variables_of_command,
)
from megatron_elastic.packed_task import pack, unpack
from megatron_elastic.recipe import ParallelConfig
from megatron_elastic.slurm_task import become_rank, code_when_stopped

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "; touch owned",
    "$(touch owned)",
    "`touch owned`",
    "a'; touch owned; '",
    '"; touch owned; "',
    "-rf \\",
    "* ~ $HOME",
    "&& touch owned #",
)


def cluster(**changes: Any) -> Cluster:
    """A small cluster."""
    plain = {"format_version": 1, "device": "cuda", "gpu": "H100-SXM", "gpus_per_node": 8, "time": "04:00:00"}
    return Cluster(**{**plain, **changes})


def values(found: list[Any]) -> dict[str, str]:
    assert len({one.name for one in found}) == len(found)
    assert all(one.reason for one in found)
    return {one.name: one.value for one in found}


@pytest.mark.parametrize(
    ("gpu", "layout", "expected"),
    [
        ("H100-SXM", ParallelConfig(tensor=2), "1"),
        ("A100-80GB", ParallelConfig(context=2), "1"),
        (None, ParallelConfig(tensor=8), "1"),
        ("B200", ParallelConfig(tensor=2), None),
        ("H100-SXM", ParallelConfig(pipeline=4, expert=8), None),
        ("H100-SXM", None, None),
    ],
)
def test_kernels_start_in_order_where_that_lets_communication_overlap(gpu, layout, expected):
    assert values(rank_variables(cluster(gpu=gpu), layout)).get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


def test_a_cluster_has_the_last_word():
    found = values(rank_variables(cluster(environment={"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "WARN"}), None))
    assert found["OMP_NUM_THREADS"] == "4" and found["NCCL_DEBUG"] == "WARN"
    assert "TORCHDYNAMO_DISABLE" in values(rank_variables(cluster(device="cpu", gpu=None), None))
    assert values(rank_variables(None, ParallelConfig(tensor=2))).keys() == {"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "OMP_NUM_THREADS"}


def test_jobs_beside_each_other_meet_at_other_ports_and_a_requeued_one_at_its_own():
    ports = [int(values(meeting_variables("node7", job))["MASTER_PORT"]) for job in (1, 2, 1, 19_999, 20_000, 987_654_321)]
    assert ports[0] == ports[2] and len(set(ports)) == 5 and all(port in PORTS for port in ports)
    assert values(meeting_variables("node7", 1))["MASTER_ADDR"] == "node7"


def test_the_launchers_read_the_layout_of_the_recipe_that_they_start():
    words = ["train", str(ROOT / "recipes" / "demo_hybrid.yaml"), "--steps", "2", "parallel.tensor=2"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in values(variables_of_command("h100", words))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in values(variables_of_command("h100", words[:-1]))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in values(variables_of_command("h100", ["report", "runs/demo"]))


def test_a_container_is_asked_for_as_pyxis_wants_it():
    container = Container(image="/images/a b.sqsh", mounts=("/shared:/shared", "/data:/data:ro"))
    assert container_options(cluster(container=container), "/elsewhere/me/clone") == [
        "--container-image=/images/a b.sqsh",
        "--container-mounts=/shared:/shared,/data:/data:ro",
        "--container-workdir=/elsewhere/me/clone",
        "--no-container-mount-home",
    ]
    own = Container(image="x", workdir="/work", mount_home=True)
    assert container_options(cluster(container=own), "/home") == [
        "--container-image=x",
        "--container-workdir=/work",
        "--container-mount-home",
    ]
    assert container_options(cluster(), "/home") == []


def test_the_signal_goes_to_the_ranks_and_only_what_computes_asks_for_gpus():
    options = sbatch_options(cluster(signal_lead=120, account="me", memory="0"), "stage1", 4)
    assert {"--signal=USR1@120", "--requeue", "--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--account=me", "--mem=0"} <= set(
        options
    )
    alone = sbatch_options(cluster(), "sort", None)
    assert {"--nodes=1", "--ntasks-per-node=1"} <= set(alone) and not any("gpus" in option for option in alone)
    assert not any("gpus" in option for option in sbatch_options(cluster(device="cpu", gpu=None), "stage1", 2))


def test_a_task_of_srun_becomes_a_rank_or_says_what_is_missing():
    task = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "10001"}
    become_rank(task)
    assert (task["RANK"], task["WORLD_SIZE"], task["LOCAL_RANK"]) == ("3", "4", "1")
    with pytest.raises(ConfigError, match="SLURM_PROCID, MASTER_ADDR is not set: .* submit one"):
        become_rank({"SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "MASTER_PORT": "10001", "MASTER_ADDR": ""})


def test_srun_has_one_code_to_report_when_all_ranks_stop(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    assert [code_when_stopped(rank) for rank in (1, 2, 3)] == [0, 0, 0] and not slept
    assert code_when_stopped(0) == EXIT_REQUEUE and slept[0] >= 3
    assert f"\n    {EXIT_REQUEUE})" in (ROOT / "slurm" / "common.sh").read_text(encoding="utf-8")


def test_the_pipeline_wants_a_parent_that_is_there():
    with pytest.raises(ConfigError, match="parent is null: the pipeline ranks and sorts a parent"):
        ranked_parent(load_recipe(ROOT / "recipes" / "demo_hybrid.yaml"))


def words(*arguments: str) -> str:
    """What a job's script is told, with the NULs."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
        launch.main(arguments)
    assert end.value.code == 0
    return said.getvalue()


def launcher(name: str) -> Any:
    """launchers/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"launcher_{name}", ROOT / "launchers" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_local_becomes_torchrun(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    launcher("local").main(["--cluster", "cpu", "2", "train", str(ROOT / "recipes" / "demo_hybrid.yaml"), "--steps", "2"])
    ((program, given, environment),) = started
    assert program == sys.executable and given[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert given[-5:] == ["megatron_elastic.cli.main", "train", str(ROOT / "recipes" / "demo_hybrid.yaml"), "--steps", "2"]
    assert environment["TORCHDYNAMO_DISABLE"] == "1" and environment["PATH"] == os.environ["PATH"]


def test_a_hostfile_goes_to_deepspeed_in_words_that_no_shell_reads(tmp_path, monkeypatch):
    path = tmp_path / "hosts"
    path.write_text("node1 slots=8\nnode2 slots=8\n", encoding="utf-8")
    site = tmp_path / "site.yaml"
    plain = {"format_version": 1, "device": "cpu", "gpus_per_node": 2, "time": "30", "environment": {"ODD": HOSTILE[1]}}
    site.write_text(yaml.safe_dump(plain), encoding="utf-8")
    command = ["train", str(ROOT / "recipes" / "demo_hybrid.yaml"), f"run_dir={HOSTILE[1]}"]
    given = launcher("hostfile").deepspeed_words(path, str(site), 22, command)
    assert given[:2] == ["--hostfile", str(path)] and given[-3:-1] == ["--module", "megatron_elastic.packed_task"]
    assert re.fullmatch(r"[\w=-]+", given[-1])
    back, environment = unpack(given[-1])
    assert back == command and environment["ODD"] == HOSTILE[1]
    with pytest.raises(ConfigError, match="is not a file; write a line a machine"):
        launcher("hostfile").deepspeed_words(tmp_path / "none", None, 22, command)


def test_without_deepspeed_its_launcher_is_refused_by_name(tmp_path, capsys):
    if importlib.util.find_spec("deepspeed") is not None:
        pytest.skip("deepspeed is installed")
    (tmp_path / "hosts").write_text("node1 slots=1\n", encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        launcher("hostfile").main([str(tmp_path / "hosts"), "doctor"])
    assert end.value.code == 2
    assert "needs DeepSpeed's launcher, and deepspeed is not installed; pip install deepspeed" in capsys.readouterr().err


def test_a_packed_task_becomes_the_command(tmp_path):
    word = pack(["--version"], {"ODD": "$(id)"})
    done = subprocess.run(
        [sys.executable, "-m", "megatron_elastic.packed_task", word], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("megatron-elastic "), done.stderr


FAKES = {
    "srun": 'printf "%s\\0" "$@" >"$FAKES/srun.words"\nexit "${SRUN_CODE:-0}"',
    "scontrol": 'case $1 in show) [ -z "${NO_HOSTS:-}" ] || exit 1; printf "node7\\nnode8\\n" ;; *) echo "$*" >>"$FAKES/scontrol.words" ;; esac',
    "squeue": 'echo "${STATE:-RUNNING}"',
}
"""SLURM's commands in a job, as small as they can be."""


def job(
    tmp_path: Path, site: Path | str, *arguments: str, more: Mapping[str, str] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run slurm/elastic_stage1.sh as a job would. more: commands that are something else."""
    fakes = tmp_path / "bin"
    fakes.mkdir(exist_ok=True)
    for name, body in {"python3": f'exec "{sys.executable}" "$@"', **FAKES, **(more or {})}.items():
        (fakes / name).write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        (fakes / name).chmod(0o755)
    of_job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "elastic-stage1", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    of_job |= {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_SUBMIT_DIR": str(ROOT)}
    paths = {"PATH": f"{fakes}:{os.environ['PATH']}", "FAKES": str(fakes), "ELASTIC_CLUSTER": str(site)}
    return subprocess.run(
        ["bash", str(ROOT / "slurm" / "elastic_stage1.sh"), *arguments],
        env={**os.environ, **of_job, **paths, **environment}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip


def srun_words(tmp_path: Path) -> list[str]:
    return (tmp_path / "bin" / "srun.words").read_text(encoding="utf-8").split("\0")[:-1]


def test_hostile_values_reach_srun_as_they_are(tmp_path):
    environment = {f"V{number}": value for number, value in enumerate(HOSTILE)}
    container = {"image": HOSTILE[1], "mounts": [f"/a{HOSTILE[0]}:/b"], "workdir": HOSTILE[3]}
    plain = {"format_version": 1, "device": "cpu", "gpus_per_node": 2, "time": "30", "environment": environment, "container": container}
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump(plain), encoding="utf-8")
    run_dir = tmp_path / "a run % $(touch owned)"
    done = job(tmp_path, site, str(ROOT / "recipes" / "demo_hybrid.yaml"), f"run_dir={json.dumps(str(run_dir))}")
    assert done.returncode == 0, done.stderr
    found = srun_words(tmp_path)
    assert [word for word in found if re.match(r"V\d=", word)] == [f"{name}={value}" for name, value in environment.items()]
    assert f"--container-image={HOSTILE[1]}" in found and f"--container-workdir={HOSTILE[3]}" in found
    logs = str(run_dir / "logs" / "elastic-stage1-41-rank%t.log")
    assert f"--output={logs.replace('run %', 'run %%')}" in found
    assert found[found.index("train") :] == ["train", str(run_dir / "jobs" / "41.yaml"), "--stage", "short"]
    assert {"MASTER_ADDR=node7", "--ntasks=4", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "--open-mode=append"} <= set(found)
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize(
    ("changes", "code", "said", "requeued"),
    [
        ({}, 0, "4 ranks from node7 on", False),
        ({"SRUN_CODE": str(EXIT_REQUEUE)}, EXIT_REQUEUE, "goes back to the queue", True),
        ({"SRUN_CODE": str(EXIT_REQUEUE), "STATE": "COMPLETING"}, EXIT_REQUEUE, "has ended, the same command goes on from here", False),
        ({"SRUN_CODE": "1"}, 1, "error: boom\nerror: elastic-stage1 failed; the log of every rank", False),
        ({"NO_HOSTS": "1"}, 2, "error: scontrol cannot say which hosts are node[7-8]", False),
        ({"SLURM_JOB_ID": ""}, 2, "error: not in a job; start the script with sbatch", False),
        (
            {"NO_WORDS": "1"},
            2,
            "megatron_elastic.launch recipe: see above; sbatch must be called with the project's environment activated",
            False,
        ),
    ],
    ids=["well", "stopped", "cancelled", "failed", "no hosts", "no job", "no environment"],
)
def test_a_job_ends_as_its_ranks_do(tmp_path, changes, code, said, requeued):
    (tmp_path / "logs").mkdir()
    for rank, text in enumerate(("error: rank 0 lost contact with another rank\n", "a step\nerror: boom\n", "a step\n")):
        (tmp_path / "logs" / f"elastic-stage1-41-rank{rank}.log").write_text(text, encoding="utf-8")
    recipe = str(ROOT / "recipes" / "demo_hybrid.yaml")
    asked = {"recipe": ("--restarts", "0"), "container": (), "environment": ("--address", "node7")}
    for what, options in asked.items():
        arguments = ["--cluster", "cpu"] if what != "recipe" else []
        arguments += ["--job", "41", *options, recipe, f"run_dir={tmp_path}"] if what != "container" else []
        (tmp_path / f"{what}.words").write_text(words(what, *arguments), encoding="utf-8")
    answers = {"python3": f'[ -z "${{NO_WORDS:-}}" ] && cat "{tmp_path}/$3.words"'}
    done = job(tmp_path, "cpu", recipe, more=answers, **changes)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stdout + done.stderr
    assert "lost contact" not in done.stderr
    queue = tmp_path / "bin" / "scontrol.words"
    assert (queue.read_text(encoding="utf-8") if queue.exists() else "") == ("requeue 41\n" if requeued else "")


def test_a_requeued_job_goes_on_with_the_recipe_that_it_started_with(tmp_path):
    recipe, run = str(ROOT / "recipes" / "demo_hybrid.yaml"), f"run_dir={tmp_path}"
    first = words("recipe", "--job", "7", "--restarts", "0", recipe, run, "seed=1").split("\0")
    assert first[:-1] == [str(tmp_path), str(tmp_path / "jobs" / "7.yaml"), "short", "", "runs/demo/data"]
    words("recipe", "--job", "7", "--restarts", "1", recipe, run, "seed=2")
    assert load_recipe(Path(first[1])).seed == 1
    words("recipe", "--job", "7", "--restarts", "0", recipe, run, "seed=2")
    assert load_recipe(Path(first[1])).seed == 2, "another job with a number that the scheduler gave before"


def test_shipped_clusters_make_jobs_without_secrets():
    for name in ("cpu", "h100", "h100_bare"):
        text = "\n".join([*sbatch_options(load_cluster(name), "stage1", 2), *container_options(load_cluster(name), "/x")])
        assert not re.search(r"(?i)token|secret|password|key", text)


def test_the_pipeline_submits_jobs_that_wait_for_each_other(tmp_path):
    count = f'printf "%s\\n" "$*" >>{tmp_path}/jobs; wc -l <{tmp_path}/jobs'
    for name, body in {"sbatch": count, "python3": f'exec "{sys.executable}" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    script, recipe = str(ROOT / "slurm" / "elastic_pipeline.sh"), str(ROOT / "recipes" / "nemotron_nano_v2_12b.yaml")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(
        [script, recipe, "run_dir=/shared/nano"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["rank:", "1", "sort:", "2", "stage1:", "3", "stage2:", "4", "extract:", "5", "verify:", "6"]
    jobs = (tmp_path / "jobs").read_text(encoding="utf-8").splitlines()
    assert jobs[0] == f"--parsable {ROOT}/slurm/elastic_rank.sh {recipe} run_dir=/shared/nano"
    waits = "--parsable --dependency=afterok:3 --kill-on-invalid-dep=yes"
    assert jobs[3] == f'{waits} {ROOT}/slurm/elastic_stage2.sh {recipe} run_dir=/shared/nano parent="/shared/nano/sorted"'
