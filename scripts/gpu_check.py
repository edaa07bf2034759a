"""What a machine with a GPU can tell about this project in three minutes: `make gpu`.

Tiny models of every kind of parent are built with the local layers and, where Transformer Engine is installed, with its layers. Each is compared with the same
model on the CPU (logits and gradients), a half-width plan in mask mode with the same in slice mode, and one larger model is timed. Then each is trained a
little, as `megatron-elastic train` does it, and the losses are compared with the CPU's. What a package that is not installed would be needed for
is named and skipped.
Exit code: 0 all agree, 1 something does not, 2 there is no CUDA device or the time is up.

Run: scripts/run.sh python scripts/gpu_check.py
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.platform import prepare_platform
from megatron_elastic.recipe import DistillConfig, ElasticConfig, OptimizerConfig, PinnedBudget, Recipe, RouterConfig, StageConfig
from megatron_elastic.shape import AttentionShape, MlpShape, ModelShape
from megatron_elastic.space import AXES, AxisChoices, build_space, parent_plan
from megatron_elastic.testing.tiny import randomize_, tiny_dense, tiny_moe, tiny_shape

if TYPE_CHECKING:
    from megatron_elastic.train.data import MicroBatch

SECONDS = 180.0
PACKAGES = ("megatron-core", "torch", "transformer-engine", "mamba-ssm", "causal-conv1d", "megatron-elastic")
SHAPES: dict[str, Callable[[], ModelShape]] = {"dense": tiny_dense, "moe": tiny_moe, "hybrid": tiny_shape}
SHARD_GROUPS = 4
TOLERANCE = 2e-3
"""Largest relative difference (norm of the difference over the norm): fp32 on both sides, other kernels and another order of sums."""
BF16_TOLERANCE = 5e-2
"""The same for losses of a model in bf16 against one in fp32."""
SEQUENCE, BATCH, STEPS = 24, 2, 2
"""Of what is trained: tokens of a sample, samples of a step, elastic steps."""
TOKENS, REPEATS = 2048, 5
"""Of the timed model: tokens of a sequence, forwards and backwards of each way."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. value: a relative difference or a ratio of times; passed: None for what is only measured."""

    layers: str
    parent: str
    what: str
    value: float
    passed: bool | None


Result = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Logits and gradients by name, on the CPU."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a few training steps. losses: of every step, by budget and together; divergence: KL(parent || full budget) before the elastic ones."""

    losses: list[dict[str, float]]
    divergence: float


def main() -> int:
    """Check, print one table, and return the exit code."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked; run this on a machine with a GPU", file=sys.stderr)
        return 2
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # Transformer Engine multiplies fp32 in TF32; no library has read the variable yet
    started = time.monotonic()
    print(", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results, losses = cpu_results(Path(folder))
            rows = check(results, started) + check_training(losses, started)
        except TimeoutError as error:
            print(error, file=sys.stderr)
            return 2
    print(table(rows))
    failed = [row for row in rows if row.passed is False]
    print(f"{len(failed)} of {sum(row.passed is not None for row in rows)} checks failed, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


def check(expected: dict[str, Result], started: float) -> list[Row]:
    """The rows of the table for models that are run, on the GPU (or, for tests, on the CPU where there is none).

    expected: the results of the CPU, by parent; one that is not there is compared with itself only.
    """
    from megatron_elastic.parallel import ParallelContext
    from megatron_elastic.platform.te import transformer_engine

    parallel = ParallelContext.initialize()
    rows, device = [], parallel.device
    try:
        for layers in ("local",) if transformer_engine() is None else ("local", "te"):
            for parent in SHAPES:
                if parent == "hybrid" and not has_mamba_kernels():
                    print(f"{layers} hybrid: not checked, a GPU needs mamba-ssm and causal-conv1d for it", flush=True)
                    continue
                rows += [Row(layers, parent, *found) for found in compare(parent, layers, device, expected.get(parent), parallel)]
                in_time(started)
            rows += [Row(layers, "dense 1024", *found) for found in timing(layers, device, parallel)]
            in_time(started)
    finally:
        parallel.destroy()
    return rows


def check_training(expected: dict[str, Trained], started: float, parents: Sequence[str] = tuple(SHAPES)) -> list[Row]:
    """The rows for models that are trained: in fp32 with the local layers, compared with the CPU (`expected`, by parent) where that could, and in bf16
    with those that `train` takes, compared with fp32."""
    from megatron_elastic.platform.te import transformer_engine
    from megatron_elastic.train.loop import LARGEST_DIVERGENCE

    rows: list[Row] = []
    for parent in parents:
        if parent == "hybrid" and not has_mamba_kernels():
            continue
        fp32, bf16 = (trained(SHAPES[parent](), precision) for precision in ("fp32", "bf16"))
        layers = {"fp32": "local", "bf16": "local" if transformer_engine() is None else "te"}
        pairs = [("bf16", "fp32's", bf16, fp32, BF16_TOLERANCE)]
        if parent in expected:
            pairs.insert(0, ("fp32", "CPU's", fp32, expected[parent], TOLERANCE))
        for precision, whose, found, wanted, allowed in pairs:
            wrong = worst_loss(found.losses, wanted.losses)
            rows.append(Row(layers[precision], parent, f"{precision} training, losses = {whose}", wrong, wrong < allowed))
        for precision, found in (("fp32", fp32), ("bf16", bf16)):
            parted = found.divergence
            rows.append(Row(layers[precision], parent, f"{precision} training, KL(parent || full)", parted, parted <= LARGEST_DIVERGENCE))
        in_time(started)
    return rows


def trained(shape: ModelShape, precision: str) -> Trained:
    """One step of a parent, its checkpoint, and two elastic steps from there, with a plan and with what a router chooses, on this machine's device."""
    from megatron_elastic.train.data import share_of_context
    from megatron_elastic.train.loop import divergence_from_parent, start_parallel
    from megatron_elastic.train.run import Run, parent_checkpoint
    from megatron_elastic.train.step import train_step

    with tempfile.TemporaryDirectory() as folder:
        recipe = replace(training_recipe(shape, precision), run_dir=folder)
        parallel = start_parallel(recipe)
        try:
            run, data = Run(recipe, parallel), rows_of(shape.vocab_size)
            randomize_(run.parts[0])
            run.optimizer.reload_model_params()
            metrics = [train_step(run, data)]
            run.stage_index = 1
            run.save(stage_end=True)
            run.become_elastic(parent_checkpoint(recipe))
            (divergence,) = divergence_from_parent(run, share_of_context(next(rows_of(shape.vocab_size)), parallel))
            for _ in range(STEPS):
                metrics.append(train_step(run, data))
                run.step += 1
        finally:
            parallel.destroy()
    return Trained([{"all": one.loss, **one.by_budget} for one in metrics], divergence)


def training_recipe(shape: ModelShape, precision: str) -> Recipe:
    """Half widths as a plan, and what is learned between them and the parent."""
    space = half_widths(shape)
    half = space.plan({spec.axis: spec.choices[-1] for spec in space.axes})
    stage = StageConfig(
        name="parent", elastic=False, sequence_length=SEQUENCE, global_batch_size=BATCH, micro_batch_size=1, steps=1, lr=1e-3
    )
    return Recipe(
        format_version=1,
        model=shape,
        precision=precision,  # pyright: ignore[reportArgumentType] - fp32 or bf16
        seed=44,  # its four draws have all three budgets
        elastic=ElasticConfig(
            axes={spec.axis.value: AxisChoices(choices=spec.choices) for spec in space.axes},
            budgets={"full": 1.0, "half": PinnedBudget(plan={axis.value: width for axis, width in half.widths}), "learned": 0.7},
            shard_groups=SHARD_GROUPS,
        ),
        router=RouterConfig(hidden=24, samples_per_decision=1),
        distill=DistillConfig(ce_weight=0.5, chunk_tokens=7),
        optimizer=OptimizerConfig(eps=1e-4),  # Adam takes a full step on the rounding of a gradient that is zero
        stages=(stage, replace(stage, name="short", elastic=True, steps=4 * STEPS)),
    )


def rows_of(words: int) -> Iterator[MicroBatch]:
    """Rows of two documents each, as many as are asked for; the samples of a step are numbered from 0."""
    from megatron_elastic.train.data import pack_samples

    positions, draw = torch.cat([torch.arange(9), torch.arange(SEQUENCE - 9)]), torch.Generator().manual_seed(2)
    while True:
        for number in range(BATCH):
            ids = torch.randint(0, words, (SEQUENCE + 1,), generator=draw)
            sample = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": torch.ones(SEQUENCE), "position_ids": positions}
            yield pack_samples([sample], number)


def worst_loss(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    """The largest relative difference of a loss."""
    pairs = [(found[name], loss) for found, wanted in zip(actual, expected, strict=True) for name, loss in wanted.items()]
    return max(abs(found - loss) / abs(loss) for found, loss in pairs)


def in_time(started: float) -> None:
    """Raises TimeoutError when the three minutes are over."""
    if time.monotonic() - started > SECONDS:
        raise TimeoutError(f"not done in {SECONDS:.0f} s; the rest was not checked")


def has_mamba_kernels() -> bool:
    """Whether a Mamba layer can run here: a GPU needs the packages, on a CPU we have kernels of our own."""
    return not torch.cuda.is_available() or all(importlib.util.find_spec(name) is not None for name in ("mamba_ssm", "causal_conv1d"))


def compare(parent: str, layers: str, device: torch.device, expected: Result | None, parallel: Any) -> list[tuple[str, float, bool]]:
    """(what, difference, within tolerance) for one tiny model."""
    from megatron_elastic.elastic.attach import elasticize

    shape = SHAPES[parent]()
    model = built(shape, layers, parallel)
    found: list[tuple[str, float]] = []
    whole = forward_backward(model, device)
    if expected is not None:
        found += [("logits = CPU's", relative(whole[0], expected[0])), ("gradients = CPU's", worst(whole[1], expected[1]))]
    space = half_widths(shape)
    handle = elasticize(model, space, parallel, shape)
    plan = space.plan({spec.axis: spec.choices[-1] for spec in space.axes})
    results = []
    for mode in ("mask", "slice"):
        with handle.use(plan, mode):
            results.append(forward_backward(model, device))
    (masked, masked_grads), (sliced, sliced_grads) = results
    with handle.use(space.parent):
        again = forward_backward(model, device)[0]
    found += [
        ("masked = sliced, logits", relative(masked, sliced)),
        ("masked = sliced, gradients", worst(masked_grads, sliced_grads)),
        ("full budget = parent", relative(again, whole[0])),
    ]
    return [(what, difference, difference < TOLERANCE) for what, difference in found]


def half_widths(shape: ModelShape) -> ElasticSpace:
    """Every axis of a width at the parent's and at about half of it; topk, which the experts that are kept bound, stays."""
    axes: dict[ElasticAxis, tuple[int | float, ...]] = {}
    for axis, parent in parent_plan(shape).widths:
        if axis is not ElasticAxis.TOPK:
            assert isinstance(parent, int)
            unit = 1 if axis is ElasticAxis.EXPERTS else AXES[axis].groups(shape, SHARD_GROUPS)
            axes[axis] = (parent, parent // unit // 2 * unit)
    return build_space(shape, axes, shard_groups=SHARD_GROUPS)


def built(shape: ModelShape, layers: str, parallel: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model on this machine's device with weights that depend on nothing but their names."""
    from megatron_elastic.models.build import build_model

    model = build_model(shape, parallel, params_dtype=dtype, layers=layers)
    randomize_(model)
    return model


def forward_backward(model: Any, device: torch.device) -> Result:
    """A fixed text through a model and back."""
    model.zero_grad()
    tokens = torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(1)).to(device)
    logits = model(tokens, torch.arange(24, device=device)[None].expand(2, -1), None)
    (logits.float().tanh() * torch.linspace(-1, 1, logits.shape[-1], device=device)).sum().backward()
    return logits.detach().cpu(), {name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None}


def timed_shape() -> ModelShape:
    """A dense GPT of 78 M parameters."""
    return ModelShape(
        layer_pattern="TTTT",
        hidden_size=1024,
        vocab_size=8192,
        max_sequence_length=TOKENS,
        activation="silu",
        gated=True,
        attention=AttentionShape(heads=16, kv_groups=4, head_dim=64, rope_base=10000.0),
        mlp=MlpShape(ffn=4096),
    )


def timing(layers: str, device: torch.device, parallel: Any) -> list[tuple[str, float, None]]:
    """Time of forward and backward in bf16 at half widths, over the parent's, in mask mode and in slice mode."""
    from megatron_elastic.elastic.attach import elasticize

    shape = timed_shape()
    model = built(shape, layers, parallel, torch.bfloat16)
    space = half_widths(shape)
    handle = elasticize(model, space, parallel, shape)
    plan = space.plan({spec.axis: spec.choices[-1] for spec in space.axes})
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device=device)
    positions = torch.arange(TOKENS, device=device)[None]

    def seconds(decided: Any, mode: str) -> float:
        synchronize(device)
        start = time.perf_counter()
        with handle.use(decided, mode):
            model(tokens, positions, None, labels=tokens).mean().backward()
        synchronize(device)
        return time.perf_counter() - start

    ways = {"parent": (None, "slice"), "mask": (plan, "mask"), "slice": (plan, "slice")}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS + 1):
        for name, way in ways.items():
            taken[name].append(seconds(*way))
    median = {name: statistics.median(times[1:]) for name, times in taken.items()}
    ratios = (("mask", "parent"), ("slice", "parent"), ("slice", "mask"))
    return [(f"time, {name} / {base}", median[name] / median[base], None) for name, base in ratios]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of `b`."""
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-12))


def worst(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any gradient that is not zero."""
    return max(relative(actual[name], gradient) for name, gradient in expected.items() if float(gradient.norm()) > 1e-6)


def cpu_results(folder: Path) -> tuple[dict[str, Result], dict[str, Trained]]:
    """What the local layers compute, and what is trained, on the CPU, by parent: from a process that sees no GPU."""
    target = folder / "cpu.pt"
    subprocess.run([sys.executable, __file__, str(target)], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True, timeout=SECONDS)
    results, losses = torch.load(target)
    return results, {parent: Trained(**found) for parent, found in losses.items()}


def write_cpu_results(target: Path) -> int:
    """The other end of `cpu_results`. A hybrid model is left out where `mamba_ssm` is installed: its kernels do not run on a CPU."""
    prepare_platform()
    from megatron_elastic.parallel import ParallelContext

    parallel, cpu = ParallelContext.initialize(), torch.device("cpu")
    parents = [parent for parent in SHAPES if parent != "hybrid" or importlib.util.find_spec("mamba_ssm") is None]
    results = {parent: forward_backward(built(SHAPES[parent](), "local", parallel), cpu) for parent in parents}
    parallel.destroy()
    torch.save((results, {parent: asdict(trained(SHAPES[parent](), "fp32")) for parent in parents}), target)
    return 0


def table(rows: list[Row]) -> str:
    """The rows in columns."""
    verdict = {True: "ok", False: "DIFFERS", None: ""}
    lines = [("layers", "parent", "what", "value", "")]
    for row in rows:
        value = f"{row.value:.2f}" if row.passed is None else f"{row.value:.1e}"
        lines.append((row.layers, row.parent, row.what, value, verdict[row.passed]))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(write_cpu_results(Path(sys.argv[1])) if len(sys.argv) > 1 else main())
