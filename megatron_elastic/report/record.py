"""A run as its directory tells it: recipe, metrics, versions, what `verify` found, the ranking of its parent. Plain Python but for the last."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.checkpoint.files import RANKING_FILE, RECIPE_FILE
from megatron_elastic.config import load_recipe
from megatron_elastic.errors import CheckpointError, ConfigError
from megatron_elastic.formats import FORMAT_VERSION, METRICS, VERIFY, VERSIONS
from megatron_elastic.recipe import Recipe, StageConfig
from megatron_elastic.report.importance import Importance, read_importance

METRICS_FILE = "metrics.jsonl"
VERSIONS_FILE = "versions.json"
VERIFY_FILE = "verify.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of metrics.jsonl.

    kind: "train" (measured in step `step`), "eval" (after `step` steps) or "untrained" (the plans on the parent's weights); step: of the stage; tokens: of the run, before the row.
    values: everything, as it was written.
    """

    kind: str
    stage: str
    step: int
    tokens: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that has been evaluated in an elastic stage at least once.

    rows: every row once, by stage and step; verified: budget -> what `verify` measured with each reader, empty without verify.json.
    versions: package -> version that ran it, empty without versions.json; notes: what a reader should know about the files, one line each.
    importance: of the parent's components, None where the run has no ranking.
    """

    path: Path
    recipe: Recipe
    rows: tuple[Row, ...]
    verified: Mapping[str, Sequence[Mapping[str, Any]]]
    versions: Mapping[str, str]
    notes: tuple[str, ...]
    importance: Importance | None

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.path.resolve().name

    @property
    def finished(self) -> bool:
        """Whether the end of the last stage has been evaluated."""
        end = self.stages[-1]
        return (self.last_eval.stage, self.last_eval.step) == (end.name, end.total_steps)

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """The elastic stages in order."""
        return elastic_stages(self.recipe)

    @property
    def budgets(self) -> tuple[str, ...]:
        """The budgets in the recipe's order, the parent's first."""
        assert self.recipe.elastic is not None
        return tuple(self.recipe.elastic.budgets)

    def rows_of(self, kind: str, stage: StageConfig) -> list[Row]:
        """The rows of one kind and stage, by step."""
        return [row for row in self.rows if row.kind == kind and row.stage == stage.name]

    def losses_at(self, stage: StageConfig, step: int) -> Mapping[str, float]:
        """Budget -> held-out loss after `step` steps of a stage; empty when it was not evaluated there."""
        return next((row.values["loss"] for row in self.rows_of("eval", stage) if row.step == step), {})

    def worst_verified(self, budget: str) -> Mapping[str, Any]:
        """What `verify` measured of a budget with the reader that was farthest off; empty when it measured nothing."""

        def difference(found: Mapping[str, Any]) -> float:
            value = found["masked_extracted"]
            return math.inf if math.isnan(value) else value

        return max(self.verified.get(budget, ()), key=difference, default={})

    @property
    def last_eval(self) -> Row:
        """The newest evaluation of an elastic stage."""
        return [row for stage in self.stages for row in self.rows_of("eval", stage)][-1]

    @property
    def last_stage(self) -> StageConfig:
        """The stage of the newest evaluation."""
        return next(stage for stage in self.stages if stage.name == self.last_eval.stage)

    def plan_of(self, budget: str) -> SubmodelPlan:
        """The plan of a budget in the newest evaluation."""
        space = self.recipe.space
        assert space is not None
        return space.completed(SubmodelPlan.from_dict(self.last_eval.values["plans"][budget]))

    def parent_loss(self, stage: StageConfig) -> float | None:
        """The frozen parent's held-out loss on sequences of `stage`, None when nothing tells it.

        It is the full budget's loss under the untrained weights; before a stage has ended, for stages as long as the first elastic one,
        the full budget's before the first step.
        """
        told = self.untrained_losses(stage) or (
            self.losses_at(self.stages[0], 0) if stage.sequence_length == self.stages[0].sequence_length else {}
        )
        return told.get(self.budgets[0])

    def untrained_losses(self, stage: StageConfig) -> Mapping[str, float]:
        """Budget -> held-out loss of the stage's last plans under the frozen parent's weights; empty before the stage has ended."""
        rows = self.rows_of("untrained", stage)
        return rows[-1].values["loss"] if rows else {}

    def elastic_step(self, row: Row) -> int:
        """Steps of all elastic stages before `row`."""
        return self.first_step([stage.name for stage in self.stages].index(row.stage)) + row.step

    def first_step(self, number: int) -> int:
        """Elastic steps before elastic stage `number` (from 0; the number of stages for all steps)."""
        return sum(stage.total_steps for stage in self.stages[:number])

    def first_token(self, stage: StageConfig) -> int:
        """Tokens of the run before a stage."""
        stages = self.recipe.stages
        return sum(stage_tokens(one) for one in stages[: stages.index(stage)])

    def last_token(self, stage: StageConfig) -> int:
        """Tokens of the run up to the end of a stage."""
        return self.first_token(stage) + stage_tokens(stage)

    def step_seconds(self, stage: StageConfig) -> float:
        """Seconds that the steps of a stage have taken so far; evaluations and checkpoints are not in it, nor are steps without a row."""
        step_tokens = stage.global_batch_size * stage.sequence_length
        return sum(step_tokens / row.values["tokens_per_second"] for row in self.rows_of("train", stage))


def stage_tokens(stage: StageConfig) -> int:
    """Tokens of a whole stage."""
    return stage.total_steps * stage.global_batch_size * stage.sequence_length


def elastic_stages(recipe: Recipe) -> tuple[StageConfig, ...]:
    """The stages of a recipe that train the family."""
    return tuple(stage for stage in recipe.stages if stage.elastic)


def read_run(path: Path) -> RunRecord:
    """Read a run's directory.

    Raises CheckpointError when there is no run, no metrics or no evaluation of an elastic stage yet, ConfigError when the run's recipe has
    no elastic stage or not the stages of its metrics, CheckpointError also for a ranking that is none, or of another model.
    """
    if not (path / RECIPE_FILE).is_file():
        what = f"{str(path)!r} is not a run (it has no {RECIPE_FILE})" if path.exists() else f"no run at {str(path)!r}"
        raise CheckpointError(f"{what}; name the run_dir of a recipe that `megatron-elastic train` has run")
    recipe = load_recipe(path / RECIPE_FILE)
    if recipe.elastic is None or not elastic_stages(recipe):
        raise ConfigError(f"{path}: its recipe has no elastic stage, so there is no family to report; report a run with an elastic stage")
    rows, notes = _read_metrics(path / METRICS_FILE, recipe)
    names = [stage.name for stage in elastic_stages(recipe)]
    evaluated = [row for row in rows if row.kind == "eval" and row.stage in names]
    if not evaluated:
        raise CheckpointError(
            f"{path}: no elastic stage ({', '.join(names)}) has been evaluated yet; continue with `megatron-elastic train`"
        )
    last, end = evaluated[-1], elastic_stages(recipe)[-1]
    if (last.stage, last.step) != (end.name, end.total_steps):
        steps = next(stage.total_steps for stage in recipe.stages if stage.name == last.stage)
        notes.append(f"{path} is not finished: last evaluated in stage {last.stage} at step {last.step} of {steps}")
    verified = _read_verify(path / VERIFY_FILE, f"stage-{end.name}", notes)
    versions = _read_versions(path / VERSIONS_FILE)
    importance = read_importance(path / RANKING_FILE, recipe.model) if (path / RANKING_FILE).exists() else None
    return RunRecord(path, recipe, tuple(rows), verified, versions, tuple(notes), importance)


def _read_metrics(path: Path, recipe: Recipe) -> tuple[list[Row], list[str]]:
    """(rows, notes): a resumed run writes steps again that a kill had lost, so the last row of a kind, stage and step counts."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent}: no {METRICS_FILE}: nothing has been trained yet; run `megatron-elastic train`")
    order = {stage.name: number for number, stage in enumerate(recipe.stages)}
    found: dict[tuple[str, str, int], Row] = {}
    broken = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            broken.append(number)
            continue
        row = _to_row(values, f"{path}, line {number}")
        if row.stage not in order:
            raise ConfigError(f"{path}, line {number}: stage {row.stage!r} is not in {RECIPE_FILE} ({', '.join(order)}); restore that file")
        found[row.kind, row.stage, row.step] = row
    notes = [f"{path}: line {', '.join(map(str, broken))} cannot be read (a kill while it was written?) and is left out"] if broken else []
    return sorted(found.values(), key=lambda row: (order[row.stage], row.step, row.kind)), notes


def _to_row(values: Any, place: str) -> Row:
    if isinstance(values, dict):
        METRICS.check(values, place)
    needed: tuple[str, ...] = ("kind", "stage", "step", "tokens", "loss")
    if isinstance(values, dict) and values.get("kind") == "train":
        needed += ("by_budget", "cost_ratio", "lr", "tokens_per_second")
    missing = [key for key in needed if key not in values] if isinstance(values, dict) else list(needed)
    if missing:
        raise CheckpointError(f"{place}: no {', '.join(missing)}; the file is not one of `megatron-elastic train`, restore it")
    return Row(values["kind"], values["stage"], values["step"], values["tokens"], values)


def _read_json(path: Path, remedy: str) -> Mapping[str, Any]:
    """The mapping in a JSON file, empty when there is no file. Raises CheckpointError naming `remedy` when it holds something else."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        raise CheckpointError(f"{path} is not JSON; {remedy}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, not a mapping; {remedy}")
    return data


def _read_versions(path: Path) -> Mapping[str, str]:
    """Package -> version, empty when there is no file."""
    data = _read_json(path, "restore it, or remove it to report without versions")
    VERSIONS.check(data, str(path))
    return {package: version for package, version in data.items() if package != FORMAT_VERSION}


def _read_verify(path: Path, expected: str, notes: list[str]) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Budget -> what `verify` measured; adds a note when that was another checkpoint than `expected`, and when members did not agree."""
    if not path.is_file():
        return {}
    remedy = f"run `megatron-elastic verify {path.parent}` again"
    data = _read_json(path, remedy)
    VERIFY.check(data, str(path))
    if data["checkpoint"] != expected:
        notes.append(f"{path} is of checkpoint {data['checkpoint']}, not of {expected}; {remedy}")
    budgets = {name: [found] if isinstance(found, dict) else found for name, found in data["budgets"].items()}  # one in version 1
    failed = [f"{name} ({found['reader']})" for name, each in budgets.items() for found in each if not found.get("holds", True)]
    if failed:
        notes.append(f"{path}: {', '.join(failed)}: the member was not the family's; extract it and {remedy}")
    return budgets
