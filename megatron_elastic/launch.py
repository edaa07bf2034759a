"""How the processes of a run are started: the environment variables of every rank, and the options of sbatch and srun. Plain Python, no torch.

The only place that decides either, for SLURM, for one machine and for a hostfile (launchers/). Nothing here is shell code: a job's script asks
`python3 -m megatron_elastic.launch` for its words, which come with a NUL after each, and passes them on as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from megatron_elastic.cluster import Cluster, load_cluster
from megatron_elastic.config import load_recipe, to_plain
from megatron_elastic.errors import EXIT_USER_ERROR, ConfigError, ElasticError
from megatron_elastic.recipe import ParallelConfig, Recipe

PORTS = range(10_000, 30_000)
"""Ports that a job's processes may meet at: below those that Linux gives to outgoing connections (32768 and up), above the reserved ones."""
_OVERRIDE = re.compile(r"@|[\w.]+=")
"""How an override of a recipe begins."""


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of every rank."""

    name: str
    """Its name."""
    value: str
    """Its value."""
    reason: str
    """Why it is set, and to this."""


def rank_variables(cluster: Cluster | None, parallel: ParallelConfig | None) -> list[Variable]:
    """The variables of every rank, but for those that say which rank it is.

    cluster: where it runs; None: only what holds everywhere. parallel: the layout; None: of a command without a recipe.
    A cluster's own `environment` comes last and replaces what is decided here.
    """
    found = [
        Variable("PYTHONUNBUFFERED", "1", "a log shows a line as soon as it is written, also the last one of a process that is killed"),
        Variable("PYTHONFAULTHANDLER", "1", "a crash in native code leaves the Python stack in the rank's log"),
        Variable("OMP_NUM_THREADS", "1", "the ranks of a node share its cores; by default each would start a thread on every one"),
    ]
    if cluster is None:
        return found
    if cluster.device == "cpu":
        found.append(Variable("CUDA_VISIBLE_DEVICES", "", "a process computes on the GPU of its number wherever it sees one"))
        found.append(Variable("TORCHDYNAMO_DISABLE", "1", "torch's compiler asks for the properties of a CUDA device"))
    elif parallel is not None and max(parallel.tensor, parallel.context) > 1 and not (cluster.hardware and cluster.hardware.blackwell):
        reason = "before Blackwell, tensor and context parallelism overlap with computation only when kernels start in the order they are queued in"
        found.append(Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", reason))
    site = [Variable(name, value, "the cluster file's") for name, value in cluster.environment.items()]
    return [one for one in found if one.name not in cluster.environment] + site


def variables_of_command(cluster: str | None, command: Sequence[str]) -> list[Variable]:
    """The same for a command line that a launcher was given: `train RECIPE [key=value ...] [options]`, or another.

    cluster: name or path. Raises ConfigError for a recipe or a cluster that cannot be read.
    """
    parallel = None
    if len(command) > 1 and Path(command[1]).suffix in (".yaml", ".yml"):
        parallel = load_recipe(Path(command[1]), [word for word in command[2:] if _OVERRIDE.match(word)]).parallel
    return rank_variables(None if cluster is None else load_cluster(cluster), parallel)


def meeting_variables(address: str, job_id: int) -> list[Variable]:
    """Where the ranks of a job meet: at its first host, at a port of the job's own."""
    port = PORTS[job_id % len(PORTS)]
    return [
        Variable("MASTER_ADDR", address, "rank 0 is on the job's first host, by the name that the cluster has for it"),
        Variable(
            "MASTER_PORT", str(port), "from the job's number: jobs that share a host must not meet each other, and a requeued job keeps it"
        ),
    ]


def sbatch_options(cluster: Cluster, name: str, nodes: int | None) -> list[str]:
    """The options of a job's header. nodes: a rank on each GPU of so many nodes; None: one process in the memory of one node, without a GPU."""
    named = {key: getattr(cluster, key) for key in ("partition", "account", "qos", "reservation")}
    tasks = 1 if nodes is None else cluster.gpus_per_node
    return [
        f"--job-name=elastic-{name}",
        f"--nodes={nodes or 1}",
        f"--ntasks-per-node={tasks}",
        *([f"--gpus-per-node={tasks}"] if nodes is not None and cluster.device == "cuda" else []),
        *(f"--{key}={value}" for key, value in named.items() if value is not None),
        f"--time={cluster.time}",
        *([f"--mem={cluster.memory}"] if cluster.memory is not None else []),
        *(["--exclusive"] if cluster.exclusive else []),
        f"--signal=USR1@{cluster.signal_lead}",  # without "B:", so that the ranks get it and not the script
        "--requeue",
        "--open-mode=append",  # a requeued job goes on in the same log
    ]


def container_options(cluster: Cluster, directory: str) -> list[str]:
    """srun's options for the cluster's container (pyxis); none without one. directory: where processes start if the cluster does not say."""
    container = cluster.container
    if container is None:
        return []
    return [
        f"--container-image={container.image}",
        *([f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []),  # pyxis takes the option once
        f"--container-workdir={container.workdir or directory}",
        "--container-mount-home" if container.mount_home else "--no-container-mount-home",
    ]


def first_elastic_stage(recipe: Recipe) -> str:
    """The stage that stage 1 ends with. Raises ConfigError when no stage is elastic."""
    for stage in recipe.stages:
        if stage.elastic:
            return stage.name
    raise ConfigError(
        "stages: none is elastic, so that there is no family to train; add one, or train the parent with megatron-elastic train"
    )


def ranked_parent(recipe: Recipe) -> str:
    """The parent that a pipeline ranks and sorts. Raises ConfigError when the recipe trains its own."""
    if recipe.parent is None:
        raise ConfigError(
            "parent is null: the pipeline ranks and sorts a parent that is there; train it first (megatron-elastic train RECIPE --stage NAME "
            "run_dir=...), and set parent to it and its stage to null"
        )
    return recipe.parent


def sorted_parent(run_dir: Path) -> str:
    """The override of a recipe that starts from the parent that a pipeline has sorted."""
    return f"parent={json.dumps(str(run_dir / 'sorted'))}"


def recipe_text(recipe: Recipe) -> str:
    """A resolved recipe as YAML."""
    return yaml.safe_dump(to_plain(recipe), sort_keys=False)


def _words(arguments: argparse.Namespace) -> list[str]:
    """What a job's script asked for."""
    if arguments.what == "container":
        return container_options(load_cluster(arguments.cluster), str(Path.cwd()))
    recipe = load_recipe(Path(arguments.recipe), arguments.overrides)
    if arguments.what == "environment":
        found = rank_variables(load_cluster(arguments.cluster), recipe.parallel)
        found += meeting_variables(arguments.address, arguments.job)
        return [f"{one.name}={one.value}" for one in found]
    run_dir = Path(recipe.run_dir).absolute()
    if arguments.what == "pipeline":
        ranked_parent(recipe)
        first_elastic_stage(recipe)
        return [sorted_parent(run_dir)]
    kept = run_dir / "jobs" / f"{arguments.job}.yaml"
    if arguments.restarts and kept.exists():
        recipe = load_recipe(kept)  # a requeued job goes on with what it started with
    else:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(recipe_text(recipe), encoding="utf-8")
    return [str(run_dir), str(kept), first_elastic_stage(recipe), recipe.parent or "", recipe.data.path if recipe.data else ""]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Print the words that a job's script asks for, a NUL after each. Raises SystemExit always."""
    parser = argparse.ArgumentParser(prog="python3 -m megatron_elastic.launch", description=__doc__)
    asked = parser.add_subparsers(dest="what", required=True)
    recipe, job, cluster = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    recipe.add_argument("recipe")
    recipe.add_argument("overrides", nargs="*")
    job.add_argument("--job", type=int, required=True, help="number of the job")
    cluster.add_argument("--cluster", required=True)
    asked.add_parser("pipeline", parents=[recipe], help="the override that starts from the parent once it is sorted")
    of_job = asked.add_parser(
        "recipe", parents=[job, recipe], help="the run's directory, the resolved recipe, its first elastic stage, parent and data"
    )
    of_job.add_argument("--restarts", type=int, required=True, help="how often the job was requeued")
    asked.add_parser("container", parents=[cluster], help="srun's options for the container")
    environment = asked.add_parser("environment", parents=[cluster, job, recipe], help="every rank's variables, NAME=VALUE")
    environment.add_argument("--address", required=True, help="the job's first host")
    try:
        words = _words(parser.parse_args(argv))
    except ElasticError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_USER_ERROR)
    sys.stdout.write("".join(f"{word}\0" for word in words))
    sys.exit(0)


if __name__ == "__main__":
    main()
