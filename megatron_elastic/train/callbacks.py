"""What happens around the steps: progress, scalars, evaluation, checkpoints. Each is a callback; the loop knows none of them."""

from __future__ import annotations

import json
import time
from typing import Any, TextIO

from megatron_elastic.formats import METRICS
from megatron_elastic.router.finalize import hardened
from megatron_elastic.router.schedules import logit_scale, temperature
from megatron_elastic.train.evaluate import held_out_losses, untrained_losses
from megatron_elastic.train.run import Run, tokens_done
from megatron_elastic.train.step import StepMetrics

METRICS_FILE = "metrics.jsonl"


class Callback:
    """Hooks of the loop; every rank calls every one of them."""

    def on_stage_start(self, run: Run) -> None:
        """Before the first step of a stage in this process."""

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        """After a step; `run.step` is the next one."""

    def on_stage_end(self, run: Run) -> None:
        """After the last step of a stage."""


class Record:
    """metrics.jsonl and TensorBoard scalars of a run, written by the main rank."""

    def __init__(self, run: Run) -> None:
        self._file: TextIO | None = None
        self._writer: Any = None
        if not run.parallel.is_main:
            return
        run.directory.mkdir(parents=True, exist_ok=True)
        path = run.directory / METRICS_FILE
        cut = path.is_file() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if cut:
            self._file.write("\n")  # a kill in the middle of a line: the next row must not be glued to it
        if run.recipe.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(run.directory / "tensorboard"))

    def write(self, kind: str, run: Run, step: int, values: dict[str, Any]) -> None:
        """Append one row and its numbers as scalars; `step` counts inside the stage, scalars over the run."""
        if self._file is None:
            return
        row = {**METRICS.stamp, "kind": kind, "stage": run.stage.name, "step": step, "tokens": tokens_done(run, step), **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._writer is not None:
            for tag, value in _flatten(f"{kind}", values):
                self._writer.add_scalar(tag, value, steps_done(run, step))

    def close(self) -> None:
        """Write what is still in memory; the last call."""
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()


def _flatten(prefix: str, values: dict[str, Any]) -> list[tuple[str, float]]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _flatten(f"{prefix}/{key}", value)
        elif isinstance(value, int | float):
            found.append((f"{prefix}/{key}", float(value)))
    return found


def steps_done(run: Run, step: int) -> int:
    """Steps of the whole run up to `step` of the current stage."""
    return sum(stage.total_steps for stage in run.recipe.stages[: run.stage_index]) + step


class Progress(Callback):
    """One line a step: losses per budget, tokens per second, cost of the decisions over their targets, time left."""

    def __init__(self, record: Record) -> None:
        self._record, self._started, self._first = record, time.perf_counter(), 0

    def on_stage_start(self, run: Run) -> None:
        """Start the clock of the stage."""
        self._started, self._first = time.perf_counter(), run.step

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        """Write scalars; print the line."""
        values = {
            "loss": metrics.loss,
            "by_budget": metrics.by_budget,
            "cost_ratio": metrics.cost_ratio,
            "lr": metrics.lr,
            "grad_norm": metrics.grad_norm,
            "router_grad_norm": metrics.router_grad_norm,
            "tokens_per_second": metrics.tokens / metrics.seconds,
        }
        self._record.write("train", run, metrics.step, values)
        if not run.parallel.is_main or run.step % run.recipe.log.interval:
            return
        left = (run.stage.total_steps - run.step) * (time.perf_counter() - self._started) / (run.step - self._first)
        losses = "  ".join(f"{name} {value:.3f}" for name, value in metrics.by_budget.items())
        costs = "  ".join(f"{name} {value:.2f}" for name, value in metrics.cost_ratio.items())
        line = f"{metrics.stage} {run.step:>5}/{run.stage.total_steps}  loss {losses}"
        line += f"  cost/target {costs}" if costs else ""
        print(f"{line}  {metrics.tokens / metrics.seconds:,.0f} tokens/s  {_clock(left)} left", flush=True)  # noqa: T201 - the progress line


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Evaluation(Callback):
    """Held-out loss of every budget and the router's probabilities, every interval and at both ends of a stage."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def on_stage_start(self, run: Run) -> None:
        """Evaluate a stage that begins, or a step after which the run stopped before it was evaluated."""
        if run.step == 0 or run.unevaluated:
            self._evaluate(run)

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        """Evaluate every `eval.interval` steps and at the end."""
        if run.step % run.recipe.eval.interval == 0 or run.step == run.stage.total_steps:
            self._evaluate(run)

    def on_stage_end(self, run: Run) -> None:
        """The same plans on the frozen parent's weights: where the family started."""
        if run.stage.elastic:
            self._record.write("untrained", run, run.step, {"loss": untrained_losses(run)})

    def _evaluate(self, run: Run) -> None:
        started = time.perf_counter()
        run.unevaluated = True  # what is saved when the run stops in here
        losses = held_out_losses(run)
        values: dict[str, Any] = {"loss": losses}
        decider = run.decider
        if decider is not None:
            report = decider.family()
            values["cost_ratio"] = {name: report.costs[name] / decider.targets[name] for name in report.plans}
            values["plans"] = {name: plan.to_dict() for name, plan in report.plans.items()}
            if decider.router is not None:
                progress, settings = decider.learned_share(run.elastic_progress), run.recipe.router
                values["temperature"] = temperature(progress, *settings.temperature)
                scale = logit_scale(progress, *settings.logit_scale)
                values["router"] = {
                    name: {axis.value: probabilities for axis, probabilities in axes.items()}
                    for name, axes in hardened(decider.router, scale).items()
                }
        self._record.write("eval", run, run.step, values)
        run.unevaluated = False
        if run.parallel.is_main:
            text = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            print(  # noqa: T201 - the progress line
                f"{run.stage.name} {run.step:>5}/{run.stage.total_steps}  held-out loss {text}  ({time.perf_counter() - started:.1f} s)",
                flush=True,
            )


class Checkpointing(Callback):
    """Save every interval and at the end of each stage; keep the last few and every stage's end."""

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        """Publish what has been written meanwhile; save in the middle of a stage."""
        run.finish_save(block=False)
        if run.step % run.recipe.checkpoint.interval == 0 and run.step < run.stage.total_steps:
            run.save(stage_end=False)
