"""Jobs of a run on SLURM: what `submit` freezes into the run's directory, the scripts it renders, and how it hands them to sbatch. No torch.

The scripts are those of slurm/, with the header that a cluster file asks for: what runs is the same, whoever submits it. The directory
RUN/submitted/NUMBER holds everything that its jobs read, so that neither an edit of the clone nor of the recipe reaches a job that waits.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import yaml

from megatron_elastic.cluster import CLUSTERS, Cluster
from megatron_elastic.config import to_plain
from megatron_elastic.errors import ConfigError
from megatron_elastic.launch import (
    container_options,
    first_elastic_stage,
    rank_variables,
    ranked_parent,
    recipe_text,
    sbatch_options,
    sorted_parent,
)
from megatron_elastic.recipe import Recipe

PACKAGE = Path(__file__).resolve().parent
SCRIPTS = CLUSTERS.parent
ON_ALL_RANKS = ("rank", "stage1", "stage2")
"""Jobs with a rank on each GPU; the others are one process each."""
_BEFORE, _AFTER = ("rank", "sort"), ("extract", "verify")
_HEADER = re.compile(r"(?m)^# Options: .*\n(#SBATCH .*\n)+")


@dataclass(frozen=True, slots=True)
class Job:
    """One job."""

    name: str
    """Which of slurm/elastic_NAME.sh it is."""
    script: str
    """The rendered script."""
    arguments: tuple[str, ...]
    """The script's arguments."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Jobs of which each waits for the one before, and the directory of everything they read."""

    run_dir: Path
    """The run's directory, absolute."""
    directory: Path
    """Where it is frozen, inside the run's directory."""
    recipe: str
    """recipe.yaml: the resolved recipe."""
    cluster: str
    """cluster.yaml: the cluster."""
    jobs: tuple[Job, ...]
    """In order."""

    def sbatch(self, job: Job, before: str | None) -> list[str]:
        """The words that submit a job. before: the number of the job that must have ended well, None for the first."""
        logs = str(self.run_dir / "logs").replace("%", "%%")
        waits = [] if before is None else [f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes"]
        script = str(self.directory / f"elastic_{job.name}.sh")
        return ["sbatch", "--parsable", f"--output={logs}/%x-%j.log", *waits, script, *job.arguments]


def plan_submission(recipe: Recipe, cluster: Cluster, nodes: int, *, pipeline: bool) -> Submission:
    """What to write and submit for a recipe on so many nodes; nothing is touched.

    pipeline: also rank and sort the parent first, and extract and verify the members at the end.
    Raises ConfigError where jobs would find nothing to work on, or could not see it.
    """
    _check(recipe, cluster)
    run_dir = Path(recipe.run_dir).absolute()
    directory = _next_directory(run_dir)
    frozen = {"ELASTIC_HOME": str(directory / "code"), "ELASTIC_CLUSTER": str(directory / "cluster.yaml")}
    first = [stage.name for stage in recipe.stages].index(first_elastic_stage(recipe))
    names = ["stage1"] if first == len(recipe.stages) - 1 else ["stage1", "stage2"]
    from_sorted: tuple[str, ...] = ()
    if pipeline:
        ranked_parent(recipe)
        names, from_sorted = [*_BEFORE, *names, *_AFTER], (sorted_parent(run_dir),)
    kept = str(directory / "recipe.yaml")
    jobs = [
        Job(name, _render(name, cluster, nodes, frozen), (kept, *(() if name in _BEFORE else from_sorted)))
        for name in names
    ]  # fmt: skip
    return Submission(run_dir, directory, recipe_text(recipe), yaml.safe_dump(to_plain(cluster), sort_keys=False), tuple(jobs))


def header(cluster: Cluster, name: str, nodes: int, origin: str) -> str:
    """The lines of a job's script that sbatch reads, and one before them that says where they are from; no line between them is empty."""
    several = nodes if name in ON_ALL_RANKS else None
    where = f"{nodes} nodes" if several else "one process in the memory of a node"
    return "\n".join([f"# Options: {origin}, {where}.", *(f"#SBATCH {option}" for option in sbatch_options(cluster, name, several))]) + "\n"


def _render(name: str, cluster: Cluster, nodes: int, frozen: Mapping[str, str]) -> str:
    path = SCRIPTS / f"elastic_{name}.sh"
    if not path.is_file():
        raise ConfigError(f"{path} is not there: an installed package has no job scripts; submit from a clone")
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in frozen.items())
    text, found = _HEADER.subn(
        lambda _: header(cluster, name, nodes, "the cluster file beside this script") + exports, path.read_text("utf-8")
    )
    assert found == 1, path
    return text


def _check(recipe: Recipe, cluster: Cluster) -> None:
    """Raise ConfigError for what `validate` only notes because it may come later: a job needs it now, and where the job runs."""
    problems = []
    if recipe.data is None:
        problems.append("data is null: there is no text to train on; set data.path to a directory that megatron-elastic data wrote")
    if recipe.parent is None and recipe.stages and recipe.stages[0].elastic:
        problems.append(f"parent is null, and the first stage ({recipe.stages[0].name}) is elastic; set parent: PATH")
    paths = {"run_dir": recipe.run_dir, "parent": recipe.parent, "data.path": recipe.data.path if recipe.data else None}
    problems += _unseen({key: Path(path).absolute() for key, path in paths.items() if path is not None}, cluster)
    if problems:
        raise ConfigError("\n".join(problems), problems)


def _unseen(paths: Mapping[str, Path], cluster: Cluster) -> Iterator[str]:
    """A line for each path that the cluster's container does not show under the same name."""
    if cluster.container is None:
        return
    if cluster.container.workdir is None:
        paths = {**paths, "the current directory": Path.cwd()}
    seen = [Path(mount.split(":")[0]) for mount in cluster.container.mounts if Path(mount.split(":")[0]) == Path(mount.split(":")[1])]
    seen += [Path.home()] if cluster.container.mount_home else []
    for key, path in paths.items():
        if not any(path.is_relative_to(mount) for mount in seen):
            yield f"{key} {str(path)!r} is not seen in the container: no entry of container.mounts shows it under its own name; add '{path}:{path}'"


def _next_directory(run_dir: Path) -> Path:
    return next(path for path in (run_dir / "submitted" / f"{number:03}" for number in count(1)) if not path.exists())


def describe(submission: Submission, recipe: Recipe, cluster: Cluster) -> str:
    """What a submission would write and run, to be read."""
    lines = [
        f"would write {submission.directory}:",
        "  code/         this package and slurm/common.sh, as they are now",
        "  recipe.yaml   the resolved recipe",
        "  cluster.yaml  the cluster",
    ]
    lines += [f"  elastic_{job.name}.sh" for job in submission.jobs]
    before = None
    lines += ["", "would run:"]
    for job in submission.jobs:
        lines.append(f"  {shlex.join(submission.sbatch(job, before))}")
        before = f"NUMBER_OF_{job.name}"
    lines += ["", "every rank would be started with:", *(f"  {option}" for option in container_options(cluster, str(Path.cwd())))]
    lines += [f"  {one.name}={shlex.quote(one.value)}  # {one.reason}" for one in rank_variables(cluster, recipe.parallel)]
    for job in submission.jobs:
        lines += ["", f"==> elastic_{job.name}.sh <==", job.script.rstrip()]
    return "\n".join(lines)


def submit(submission: Submission) -> Iterator[tuple[str, str]]:
    """Write everything, hand the jobs to sbatch, and yield the name and the number of each.

    Raises ConfigError without sbatch, and when it refuses a job: those before it are taken back then.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch here; submit from a machine that has SLURM, or add --dry-run to see what would be submitted")
    _write(submission)
    numbers: list[str] = []
    for job in submission.jobs:
        words = submission.sbatch(job, numbers[-1] if numbers else None)
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - no shell reads them
        if done.returncode != 0:
            if numbers:
                subprocess.run(["scancel", *numbers], check=False)  # noqa: S603, S607
            reason = " ".join(done.stderr.split())
            raise ConfigError(f"sbatch refuses job {job.name}: {reason}; correct the cluster file, nothing is queued")
        numbers.append(done.stdout.strip().partition(";")[0])  # NUMBER;CLUSTER where there are several
        yield job.name, numbers[-1]


def _write(submission: Submission) -> None:
    directory = submission.directory
    try:
        directory.mkdir(parents=True)
        (submission.run_dir / "logs").mkdir(exist_ok=True)  # SLURM does not make it
        shutil.copytree(PACKAGE, directory / "code" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (directory / "code" / "slurm").mkdir()
        shutil.copy(SCRIPTS / "common.sh", directory / "code" / "slurm")
        texts = {"recipe.yaml": submission.recipe, "cluster.yaml": submission.cluster}
        for name, text in {**texts, **{f"elastic_{job.name}.sh": job.script for job in submission.jobs}}.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run_dir {str(submission.run_dir)!r}: {os.strerror(error.errno or 0)}; choose another run_dir") from None
