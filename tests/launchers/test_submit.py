"""`submit`: what it would write and run is what is in golden/, a file for each shipped cluster; what it writes is all that jobs read; and it refuses,
before it writes anything, what could not run.

Run: pytest tests/launchers/test_submit.py; with WRITE_GOLDEN=1 the golden files are written anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megatron_elastic.cli.main import build_app
from megatron_elastic.cluster import load_cluster
from megatron_elastic.config import load_recipe
from megatron_elastic.errors import ConfigError
from megatron_elastic.launch import container_options
from megatron_elastic.recipe import Recipe
from megatron_elastic.submit import ON_ALL_RANKS, SCRIPTS, describe, header, plan_submission, submit

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
JOBS = ("rank", "sort", "stage1", "stage2", "extract", "verify")


@pytest.fixture
def in_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a directory that the shipped container shows."""
    monkeypatch.setattr(Path, "cwd", lambda: Path("/shared/megatron-elastic"))


def nemotron(*changes: str) -> Recipe:
    """The default recipe, everything of it on a shared disk."""
    paths = ["run_dir=/shared/runs/nano", "parent=/shared/models/nano", "data.path=/shared/data/nano"]
    return load_recipe(ROOT / "recipes" / "nemotron_nano_v2_12b.yaml", [*paths, *changes])


@pytest.mark.usefixtures("in_shared")
@pytest.mark.parametrize(("name", "pipeline"), [("h100", True), ("h100_bare", False), ("cpu", False)])
def test_the_dry_run_is_the_golden_one(name, pipeline):
    cluster = load_cluster(name)
    text = describe(plan_submission(nemotron(), cluster, 8, pipeline=pipeline), nemotron(), cluster) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_every_cluster_file_has_a_golden_one():
    assert {path.stem for path in GOLDEN.iterdir()} == {path.stem for path in (SCRIPTS / "clusters").iterdir()}


@pytest.mark.parametrize("name", JOBS)
def test_the_shipped_scripts_have_the_header_of_the_shipped_cluster(name):
    text = (SCRIPTS / f"elastic_{name}.sh").read_text(encoding="utf-8")
    assert header(load_cluster("h100"), name, 8, "slurm/clusters/h100.yaml (another cluster: docs/cluster.md)") in text
    lines = text.splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options == list(range(options[0], options[-1] + 1)), "sbatch may not read past a gap"
    assert all(line.startswith("#") for line in lines[: options[0]])
    assert "localhost" not in text + (SCRIPTS / "common.sh").read_text(encoding="utf-8")


def test_shellcheck_is_content():
    scripts = [path for path in ROOT.rglob("*.sh") if path.relative_to(ROOT).parts[0] in ("slurm", "launchers", "docker", "scripts")]
    scripts += [ROOT / "bin" / "megatron-elastic", ROOT / ".ci" / "run"]
    done = subprocess.run(["shellcheck", "-x", "-P", str(ROOT), *map(str, scripts)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("in_shared")
def test_one_elastic_stage_is_one_job_and_a_sorted_parent_begins_after_the_sort():
    jobs = plan_submission(nemotron("stages.long=null"), load_cluster("h100"), 8, pipeline=False).jobs
    assert [job.name for job in jobs] == ["stage1"]
    planned = plan_submission(nemotron(), load_cluster("h100"), 8, pipeline=True)
    assert [job.name for job in planned.jobs] == list(JOBS) and set(ON_ALL_RANKS) < set(JOBS)
    assert [len(job.arguments) for job in planned.jobs] == [1, 1, 2, 2, 2, 2]


@pytest.mark.usefixtures("in_shared")
@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (lambda: nemotron("data=null"), "data is null: there is no text to train on; set data.path"),
        (lambda: nemotron("parent=null"), "parent is null, and the first stage (short) is elastic; set parent: PATH"),
        (
            lambda: nemotron("run_dir=/elsewhere/me/run"),
            "run_dir '/elsewhere/me/run' is not seen in the container: no entry of container.mounts shows it under its own name",
        ),
        (lambda: nemotron("data.path=/sharedness"), "data.path '/sharedness' is not seen in the container"),
        (lambda: replace(nemotron(), stages=(replace(nemotron().stages[0], elastic=False),)), "stages: none is elastic"),
    ],
)
def test_what_a_job_could_not_find_is_refused(recipe: Callable[[], Recipe], said: str):
    with pytest.raises(ConfigError) as refused:
        plan_submission(recipe(), load_cluster("h100"), 8, pipeline=False)
    assert said in str(refused.value)


def test_where_one_submits_from_must_be_seen_in_the_container(monkeypatch):
    monkeypatch.setattr(Path, "cwd", lambda: Path("/elsewhere/me"))
    with pytest.raises(ConfigError, match="the current directory '/elsewhere/me' is not seen in the container"):
        plan_submission(nemotron(), load_cluster("h100"), 8, pipeline=False)
    assert "--container-workdir=/elsewhere/me" in container_options(load_cluster("h100"), str(Path.cwd()))


def tiny(tmp_path: Path) -> Recipe:
    """A recipe whose run is in a directory with an odd name."""
    return load_recipe(ROOT / "recipes" / "demo_hybrid.yaml", [f'run_dir="{tmp_path}/a % run"'])


def sbatch(directory: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for sbatch and scancel that write down their words."""
    for name, text in {"sbatch": body, "scancel": ""}.items():
        (directory / name).write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "{name} $*" >>{directory}/words\n{text}\n', encoding="utf-8")
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_everything_a_job_reads_is_frozen(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    sbatch(tmp_path / "bin", f'echo "$(wc -l <{tmp_path}/bin/words);test"', monkeypatch)
    planned = plan_submission(tiny(tmp_path), load_cluster("cpu"), 2, pipeline=False)
    assert list(submit(planned)) == [("stage1", "1"), ("stage2", "2")]
    first, second = (tmp_path / "bin" / "words").read_text(encoding="utf-8").splitlines()
    run = tmp_path / "a % run"
    assert f"--output={tmp_path}/a %% run/logs/%x-%j.log {run}/submitted/001/elastic_stage1.sh {run}/submitted/001/recipe.yaml" in first
    assert "--dependency=afterok:1 --kill-on-invalid-dep=yes" in second and (run / "logs").is_dir()
    frozen = run / "submitted" / "001"
    assert load_recipe(frozen / "recipe.yaml") == tiny(tmp_path) and load_cluster(str(frozen / "cluster.yaml")) == load_cluster("cpu")
    script = (frozen / "elastic_stage1.sh").read_text(encoding="utf-8")
    assert f"export ELASTIC_HOME='{frozen}/code'" in script and (frozen / "code" / "slurm" / "common.sh").is_file()
    subprocess.run(["bash", "-n", frozen / "elastic_stage1.sh"], check=True)
    code = {"PYTHONPATH": str(frozen / "code"), "PATH": os.environ["PATH"]}
    line = "import megatron_elastic.launch as it; print(it.__file__)"
    done = subprocess.run([sys.executable, "-c", line], env=code, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(frozen / "code" / "megatron_elastic" / "launch.py")
    assert plan_submission(tiny(tmp_path), load_cluster("cpu"), 2, pipeline=False).directory == run / "submitted" / "002"


def test_when_sbatch_refuses_a_job_those_before_it_are_taken_back(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    body = "case $* in *stage2*) echo 'sbatch: error: invalid qos' >&2; exit 1 ;; *) echo 7 ;; esac"
    sbatch(tmp_path / "bin", body, monkeypatch)
    with pytest.raises(ConfigError, match="sbatch refuses job stage2: sbatch: error: invalid qos; correct the cluster file"):
        list(submit(plan_submission(tiny(tmp_path), load_cluster("cpu"), 2, pipeline=False)))
    assert (tmp_path / "bin" / "words").read_text(encoding="utf-8").splitlines()[-1] == "scancel 7"


def test_without_sbatch_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no sbatch here; .* add --dry-run"):
        list(submit(plan_submission(tiny(tmp_path), load_cluster("cpu"), 2, pipeline=False)))
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_file_cannot_put_shell_code_into_a_script(tmp_path):
    plain = yaml.safe_load((SCRIPTS / "clusters" / "cpu.yaml").read_text(encoding="utf-8"))
    site = tmp_path / "site; $(touch owned).yaml"
    site.write_text(yaml.safe_dump({**plain, "environment": {"ODD": "$(touch owned); '\"` rm -rf"}}), encoding="utf-8")
    planned = plan_submission(tiny(tmp_path), load_cluster(str(site)), 2, pipeline=False)
    assert all("owned" not in job.script for job in planned.jobs), "values travel in cluster.yaml"
    for key in ("partition", "account", "qos", "reservation"):
        for hostile in ("a; rm -rf /", "$(id)", "a\n#SBATCH --wrap=id", "'"):
            site.write_text(yaml.safe_dump({**plain, key: hostile}), encoding="utf-8")
            with pytest.raises(ConfigError, match=key):
                load_cluster(str(site))


def test_the_command_refuses_what_validate_refuses_and_a_dry_run_writes_nothing(tmp_path):
    arguments = ["submit", str(ROOT / "recipes" / "demo_hybrid.yaml"), f"run_dir={tmp_path}/run", f"data.path={tmp_path}/none"]
    arguments += ["--cluster", "cpu", "--dry-run", "--nodes"]
    refused = CliRunner().invoke(build_app(), [*arguments, "3"])
    assert isinstance(refused.exception, ConfigError)
    assert "stages.parent" in str(refused.exception) and "data.path" in str(refused.exception)
    assert list(tmp_path.iterdir()) == []
