"""Everything about a run on a cluster that can be said before it starts: does it fit, how long does it take, is everything there. No torch.

`validate --cluster` prints the outcome, and `submit` refuses on the same problems. What a recipe must satisfy on any machine is `preflight`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.checkpoint.files import check_shape, find_model_checkpoint, open_checkpoint
from megatron_elastic.cluster import Cluster
from megatron_elastic.corpus.info import SPLITS, DataInfo, check_held_out, open_data
from megatron_elastic.errors import ElasticError
from megatron_elastic.estimate import EFFICIENCY, StageEstimate, estimate_stage, kind_of
from megatron_elastic.fit import model_problems, replica_problems, round_problems
from megatron_elastic.packages import COSTS, installed_versions, is_wanted
from megatron_elastic.platform.versions import generation_of
from megatron_elastic.preflight import budget_plans, recipe_cost, recipe_problems
from megatron_elastic.recipe import Recipe, StageConfig
from megatron_elastic.space import resize
from megatron_elastic.training_memory import RESERVED, RankMemory, checkpoint_bytes, fullest_rank

GIB = 2**30


class Outcome(StrEnum):
    """What a check came to."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing, and no reason to refuse."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    subject: str
    """What was looked at."""
    outcome: Outcome
    """What it came to."""
    finding: str
    """The number; where it is refused the key, the value and the remedy."""


def check_run(recipe: Recipe, cluster: Cluster, nodes: int) -> list[Check]:
    """Every check of a recipe on so many nodes of a cluster, in the order in which they are worth reading.

    Where the layout is refused, nothing is said of memory and time, which it decides.
    """
    world = nodes * cluster.gpus_per_node
    found = [*_cluster_checks(cluster, nodes), *_recipe_checks(recipe)]
    if nodes >= 1:
        found += _layout_checks(recipe, cluster, nodes)
    if not refusals(found):
        plans = budget_plans(recipe, recipe_cost(recipe))
        found += _budget_checks(recipe, plans)
        found += [check for stage in recipe.stages for check in _memory_checks(recipe, stage, cluster, world)]
        found += _time_checks(recipe, cluster, world, plans)
    return [*found, *_data_checks(recipe), *_parent_checks(recipe), *_disk_checks(recipe), *_package_checks(recipe, cluster)]


def refusals(checks: Sequence[Check]) -> list[str]:
    """The findings that are reasons to refuse a run."""
    return [check.finding for check in checks if check.outcome is Outcome.REFUSED]


def _judged(subject: str, problems: Sequence[str], fine: str) -> Iterator[Check]:
    """A refusal for each problem, or one line that says what is fine."""
    for problem in problems:
        yield Check(subject, Outcome.REFUSED, problem)
    if not problems:
        yield Check(subject, Outcome.OK, fine)


def _problems_of(check: Callable[[], object]) -> list[str]:
    """What a function refuses."""
    try:
        check()
    except ElasticError as error:
        return error.problems
    return []


def _cluster_checks(cluster: Cluster, nodes: int) -> Iterator[Check]:
    what = cluster.gpu or ("GPUs" if cluster.device == "cuda" else "processes")
    problems = [] if nodes >= 1 else [f"--nodes {nodes} must be at least 1"]
    yield from _judged(
        "cluster", problems, f"{nodes} x {cluster.gpus_per_node} {what} = {nodes * cluster.gpus_per_node} processes, {cluster.time} a job"
    )
    image = cluster.container.image if cluster.container else ""
    if image.startswith("/") and not Path(image).exists():
        yield Check("container", Outcome.NOTE, f"container.image {image!r} is not on this machine")


def _recipe_checks(recipe: Recipe) -> Iterator[Check]:
    problems = recipe_problems(recipe)
    if not recipe.stages:
        problems.append("stages is empty: nothing to train; add a stage")
    budgets = len(recipe.elastic.budgets) if recipe.elastic else 0
    yield from _judged("recipe", problems, f"{len(recipe.stages)} stages, {budgets} budgets")


def _layout_checks(recipe: Recipe, cluster: Cluster, nodes: int) -> Iterator[Check]:
    """Whether the processes can be divided as the recipe says, and each step over what is left."""
    sizes, world = recipe.parallel.sizes, nodes * cluster.gpus_per_node
    found = sizes.process_problems(world)
    problems = [f"{line} ({nodes} nodes x {cluster.gpus_per_node})" for line in found] + _across_nodes(recipe, cluster, nodes)
    dense = sizes.tensor * sizes.pipeline * sizes.context
    replicas = max(world // dense, 1)
    text = f"{world} = tensor {sizes.tensor} x pipeline {sizes.pipeline} x context {sizes.context} x {replicas} replicas"
    if recipe.model.has("moe"):
        text += f"; {world // max(sizes.expert * sizes.expert_tensor * sizes.pipeline, 1)} copies of experts over {sizes.expert} ranks"
    yield from _judged("layout", problems, text)
    for stage in () if found else recipe.stages:
        batch = stage.global_batch_size, stage.micro_batch_size, replicas
        wrong = replica_problems(*batch) or round_problems(*batch, sizes)
        steps = stage.global_batch_size // (stage.micro_batch_size * replicas)
        yield from _judged(
            f"batch, {stage.name}",
            [f"stages.{stage.name}: {line}" for line in wrong],
            f"{stage.global_batch_size:,} = {replicas} replicas x {stage.micro_batch_size} x {steps} microbatches",
        )


def _across_nodes(recipe: Recipe, cluster: Cluster, nodes: int) -> list[str]:
    """Tensor-parallel ranks exchange activations in every sublayer, which only NVLink carries fast enough to be worth it."""
    gpu, tensor = cluster.hardware, recipe.parallel.tensor
    joined = max(cluster.gpus_per_node, gpu.joined if gpu else 1)
    if cluster.device == "cpu" or nodes == 1 or joined % tensor == 0:
        return []
    return [
        f"parallel.tensor {tensor} does not divide the {joined} GPUs that are joined by NVLink, so that activations would go between nodes in "
        f"every layer; use a divisor of {joined}, and parallel.pipeline or context for the rest"
    ]


def _budget_checks(recipe: Recipe, plans: Mapping[str, SubmodelPlan]) -> Iterator[Check]:
    """Whether the layout divides the widths of every budget's plan. Groups promise it; this looks at the numbers themselves."""
    sizes = recipe.parallel.sizes
    for name, plan in plans.items():
        whole = replace(plan, dropped_layers=())  # a dropped layer stays where it is while the family is trained
        problems = [f"elastic.budgets.{name}: {line}" for line in model_problems(resize(recipe.model, whole), sizes)]
        widths = ", ".join(f"{axis.value} {_width(width)}" for axis, width in plan.widths)
        layers = recipe.model.num_layers - len(plan.dropped_layers)
        yield from _judged(f"budget {name}", problems, f"{widths}, layers {layers}: divided evenly over the ranks")


def _width(width: int | tuple[int, ...]) -> str:
    return str(width) if isinstance(width, int) else f"{min(width)}..{max(width)}"


def _memory_checks(recipe: Recipe, stage: StageConfig, cluster: Cluster, world: int) -> Iterator[Check]:
    """Whether the fullest rank fits in its GPU, or in its share of a node's memory."""
    subject, room = f"memory, {stage.name}", _room(cluster)
    need = fullest_rank(recipe, stage, world)
    parts = ", ".join(f"{name} {_gib(value)}" for name, value in _parts(need).items() if value >= 0.05 * GIB)
    text = f"{_gib(need.total)} GiB on the fullest rank" + (f" ({parts})" if parts else "")
    if room is None:
        yield Check(subject, Outcome.NOTE, f"{text}; the cluster file does not say what there is")
    elif need.total <= room:
        yield Check(subject, Outcome.OK, f"{text} of {_gib(room)}")
    else:
        remedy = _memory_remedy(recipe, stage, cluster, world, room)
        yield Check(
            subject,
            Outcome.REFUSED,
            f"stages.{stage.name}: {text} do not fit in the {_gib(room)} GiB that {_of(cluster)} has; {remedy}",
        )


def _gib(number: float) -> str:
    return f"{number / GIB:.1f}" if number >= GIB else f"{number / GIB:.2g}"


def _parts(need: RankMemory) -> dict[str, float]:
    return {
        "weights": need.weights,
        "gradients": need.gradients,
        "optimizer": need.optimizer,
        "frozen parent": need.parent,
        "activations": need.activations,
        "loss": need.loss,
    }


def _room(cluster: Cluster) -> float | None:
    """Bytes that one process can use."""
    if cluster.device == "cuda":
        return cluster.hardware.memory * (1 - RESERVED) if cluster.hardware else None
    return None if cluster.memory_bytes is None else cluster.memory_bytes / cluster.gpus_per_node * (1 - RESERVED)


def _of(cluster: Cluster) -> str:
    if cluster.gpu is not None:
        return f"gpu {cluster.gpu}"
    return f"each of {cluster.gpus_per_node} processes in memory {cluster.memory}"


def _memory_remedy(recipe: Recipe, stage: StageConfig, cluster: Cluster, world: int, room: float) -> str:
    """The smallest change found that makes a stage fit; what to try where none does."""

    def fits(changed: Recipe, of: StageConfig, processes: int) -> bool:
        allowed = not changed.parallel.sizes.process_problems(processes) and not recipe_problems(replace(changed, stages=(of,)))
        return allowed and fullest_rank(changed, of, processes).total <= room

    again = replace(recipe, parallel=replace(recipe.parallel, recompute="full"))
    if recipe.precision == "fp32" and fits(replace(recipe, precision="bf16"), stage, world):
        return "set precision to bf16"
    if fits(again, stage, world):
        return "set parallel.recompute to full"
    for size in (n for n in (8, 4, 2, 1) if n < stage.micro_batch_size and stage.micro_batch_size % n == 0):
        if fits(again, replace(stage, micro_batch_size=size), world):
            return f"set parallel.recompute to full and micro_batch_size to {size}"
    for times in (2, 4, 8, 16, 32):
        if fits(again, stage, world * times):
            return f"set parallel.recompute to full and --nodes to {world * times // cluster.gpus_per_node}"
    return "raise parallel.tensor, pipeline or expert, and context for long sequences"


def _time_checks(recipe: Recipe, cluster: Cluster, world: int, plans: Mapping[str, SubmodelPlan]) -> Iterator[Check]:
    gpu = cluster.hardware
    if gpu is None:
        yield Check("time", Outcome.NOTE, "not estimated: the cluster file names no gpu")
        return
    if recipe.precision == "fp32":
        yield Check("precision", Outcome.NOTE, "precision fp32 leaves the GPU's matrix units idle; set it to bf16")
    total = 0.0
    for stage in recipe.stages:
        found = estimate_stage(recipe, stage, plans, gpu, world)
        total += found.gpu_hours
        jobs = -(-found.hours * 3600 // cluster.time_seconds)
        yield from _judged(
            f"time, {stage.name}",
            _time_problems(recipe, stage, cluster, found),
            f"{stage.total_steps:,} steps of {_seconds(found.step_seconds)}, {found.tokens_per_second:,.0f} tokens/s; {found.hours:,.1f} hours, "
            f"{found.gpu_hours:,.0f} GPU-hours, {jobs:.0f} jobs of {cluster.time}; {_lost(recipe, found) / 60:,.0f} minutes between checkpoints",
        )
    efficiency = EFFICIENCY[kind_of(recipe.model)]
    yield Check("time, all", Outcome.OK, f"{total:,.0f} GPU-hours at {efficiency.share:.1%} of the peak: {efficiency.source}")


def _seconds(number: float) -> str:
    return f"{number:,.0f} s" if number >= 10 else f"{number:.2g} s"


def _lost(recipe: Recipe, found: StageEstimate) -> float:
    """Seconds of work between two checkpoints, which a job loses that ends without a signal."""
    return recipe.checkpoint.interval * found.step_seconds


def _time_problems(recipe: Recipe, stage: StageConfig, cluster: Cluster, found: StageEstimate) -> list[str]:
    """What is too short for the stage's steps."""
    step, limit, problems = found.step_seconds, cluster.time_seconds, []
    what = f"a step of stages.{stage.name}, about {step:.0f} s"
    if limit < 2 * step:
        problems.append(f"time {cluster.time!r} of the cluster is too short for {what}; raise it, or --nodes")
    elif cluster.signal_lead < step and _lost(recipe, found) > limit:
        problems.append(
            f"signal_lead {cluster.signal_lead} of the cluster is shorter than {what}, and checkpoint.interval {recipe.checkpoint.interval} is longer "
            f"than a job of {cluster.time}: none would save anything; lower the interval to {max(int(limit / step / 2), 1)}, or raise signal_lead "
            f"above {2 * step:.0f}"
        )
    if 0 < recipe.log.hang_seconds < step:
        problems.append(
            f"log.hang_seconds {recipe.log.hang_seconds:g} is shorter than {what}, so that every run counts as hanging; raise it above {4 * step:.0f}"
        )
    return problems


def _data_checks(recipe: Recipe) -> Iterator[Check]:
    """Whether the text is there and can be read, fits the vocabulary and is enough to evaluate on."""
    if recipe.data is None:
        yield Check("data", Outcome.NOTE, "no data section: this recipe can be planned, not trained; set data.path")
        return
    path = recipe.data.path
    try:
        info = open_data(path, recipe.model.vocab_size)
        problems = _unreadable(info)
    except ElasticError as error:
        problems = [line if "data.path" in line else f"data.path {path!r}: {line}" for line in error.problems]
        yield from _judged("data", problems, "")
        return
    for stage in recipe.stages:
        check = (info, recipe.eval.samples, stage.sequence_length)
        problems += [f"stages.{stage.name}: {line}" for line in _problems_of(lambda check=check: check_held_out(*check))]
    asked = sum(stage.total_steps * stage.global_batch_size * stage.sequence_length for stage in recipe.stages)
    read = f"{info.train.tokens:,} tokens, each read {asked / info.train.tokens:.2g} times; {info.valid.tokens:,} held out"
    yield from _judged("data", problems, read)
    yield Check("tokenizer", Outcome.OK, f"{info.tokenizer}: {info.vocab_size:,} ids in a vocabulary of {recipe.model.vocab_size:,}")


def _unreadable(info: DataInfo) -> list[str]:
    files = [Path(info.prefix(split) + suffix) for split in SPLITS for suffix in (".bin", ".idx")]
    return [
        f"data.path {str(info.path)!r}: {file.name} cannot be read by this user; chmod it" for file in files if not os.access(file, os.R_OK)
    ]


def _parent_checks(recipe: Recipe) -> Iterator[Check]:
    """Whether the frozen parent is there, whole, and the recipe's model."""
    if recipe.parent is None:
        if recipe.stages and recipe.stages[0].elastic:
            text = f"stages[0] ({recipe.stages[0].name}) is elastic but there is no parent; set parent: PATH to train"
            yield Check("parent", Outcome.NOTE, text)
        else:
            yield Check("parent", Outcome.OK, "trained by the first stage")
        return
    path = Path(recipe.parent)
    try:
        found = open_checkpoint(find_model_checkpoint(path))
        check_shape(found, recipe.model)
    except ElasticError as error:
        where = f"parent {recipe.parent!r}: "
        missing = "" if path.exists() else "; write it with megatron-elastic import, or correct the path"
        yield from _judged("parent", [where + line + missing for line in error.problems], "")
        return
    yield Check("parent", Outcome.OK, f"{found.path}: whole, and of this model")


def _disk_checks(recipe: Recipe) -> Iterator[Check]:
    """Whether the checkpoints of a run find room: the newest, the one being written, and the end of every stage.

    A relative run_dir that is not there yet may lie on another machine's disk, so that too little room here is only noted.
    """
    run = Path(recipe.run_dir)
    number, size = recipe.checkpoint.keep_last + 1 + len(recipe.stages), checkpoint_bytes(recipe)
    existing = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{number} checkpoints of {_bytes(size)} = {_bytes(number * size)}, {_bytes(free)} free at {existing}"
    if not os.access(existing, os.W_OK):
        yield Check(
            "disk", Outcome.REFUSED, f"run_dir {recipe.run_dir!r}: {existing} cannot be written by this user; choose another run_dir"
        )
    elif free >= number * size:
        yield Check("disk", Outcome.OK, text)
    elif run.is_absolute() or run.exists():
        yield Check(
            "disk",
            Outcome.REFUSED,
            f"run_dir {recipe.run_dir!r}: {text}; choose another disk, or lower checkpoint.keep_last {recipe.checkpoint.keep_last}",
        )
    else:
        yield Check("disk", Outcome.NOTE, f"{text}, where run_dir {recipe.run_dir!r} would be made; set it to a disk of the cluster")


def _bytes(number: float) -> str:
    """An amount in the unit that suits it."""
    unit, name = next(((10**n, name) for n, name in ((12, "TB"), (9, "GB")) if number >= 10**n), (10**6, "MB"))
    return f"{number / unit:,.1f} {name}"


def _package_checks(recipe: Recipe, cluster: Cluster) -> Iterator[Check]:
    """What is installed here, which is what a job has unless it runs in a container."""
    if cluster.container:
        yield Check(
            "packages", Outcome.NOTE, f"those of this environment; jobs run in {cluster.container.image}: run megatron-elastic doctor in it"
        )
    for name, installed in installed_versions().items():
        if installed is None:
            outcome = Outcome.NOTE if is_wanted(name, recipe.model, cluster.device) else Outcome.OK
            yield Check(name, outcome, f"not installed: {COSTS[name]}")
            continue
        unsupported = _problems_of(lambda found=installed: generation_of(found)) if name == "megatron-core" else []
        outcome = Outcome.OK if not unsupported else Outcome.NOTE if cluster.container else Outcome.REFUSED
        yield Check(name, outcome, unsupported[0] if unsupported else installed)
