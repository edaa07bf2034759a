"""The numbers of a report: one row a budget, and what they say about the family. Plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_elastic.cost import active_params, total_params, widths_of
from megatron_elastic.errors import ConfigError, raise_all
from megatron_elastic.formats import REPORT
from megatron_elastic.planning import plan_cost
from megatron_elastic.preflight import budget_targets, recipe_cost
from megatron_elastic.recipe import PinnedBudget
from megatron_elastic.report.record import RunRecord
from megatron_elastic.report.widths import AxisWidths, axis_widths

COST_TOLERANCE = 0.05
"""How far a member's cost may be from its target, relative."""

PARENT_TOLERANCE = 0.02
"""How much worse than the parent's the full budget's loss may be, relative."""


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One member of a family after training; losses are held-out, in nats per token, None where they were not measured.

    run: name of the run's directory; plan_source: "parent", "pinned", or the recipe's router.choice ("learned", "uniform").
    cost, target: in the unit of `elastic.cost`; loss_before: the plan under the parent's weights; loss_after: elastic stage -> at its end.
    last_loss: of the newest evaluation; extracted_loss, masked_extracted: of `verify`, on its own samples, with the reader farthest off.
    widths: of the plan, for every elastic axis.
    """

    run: str
    budget: str
    plan_source: str
    total_params: int
    active_params: int
    cost: float
    target: float
    cost_ratio: float
    loss_before: float | None
    loss_after: Mapping[str, float | None]
    last_loss: float
    extracted_loss: float | None
    masked_extracted: float | None
    widths: tuple[AxisWidths, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """One property of a family: whether it holds (None: cannot be told) and the numbers that say so."""

    name: str
    holds: bool | None
    detail: str

    def __str__(self) -> str:
        answer = {True: "yes", False: "NO", None: "unknown"}[self.holds]
        return f"{self.name}: {answer} ({self.detail})"


def budget_rows(record: RunRecord) -> list[BudgetRow]:
    """The family of a run as it stands in the newest evaluation, from the largest target to the smallest.

    Raises PlanError when a plan is not one of the recipe's model.
    """
    recipe, last = record.recipe, record.last_eval
    assert recipe.elastic is not None
    cost = recipe_cost(recipe)
    targets = budget_targets(recipe, cost)
    before = record.untrained_losses(record.stages[0]) or record.losses_at(record.stages[0], 0)
    after = {stage.name: record.losses_at(stage, stage.total_steps) for stage in record.stages}
    rows = []
    for name in sorted(targets, key=lambda one: -targets[one]):
        plan = record.plan_of(name)
        shown = axis_widths(recipe, plan)  # first: refuses a plan of another model by name
        widths, spent = widths_of(plan, recipe.model.num_layers), plan_cost(recipe.model, plan, cost)
        pinned = isinstance(recipe.elastic.budgets[name], PinnedBudget)
        verified = record.worst_verified(name)
        rows.append(
            BudgetRow(
                run=record.name,
                budget=name,
                plan_source="parent" if name == record.budgets[0] else "pinned" if pinned else recipe.router.choice,
                total_params=total_params(recipe.model, widths),
                active_params=active_params(recipe.model, widths),
                cost=spent,
                target=targets[name],
                cost_ratio=spent / targets[name],
                loss_before=before.get(name),
                loss_after={stage: losses.get(name) for stage, losses in after.items()},
                last_loss=last.values["loss"][name],
                extracted_loss=verified.get("extracted_loss"),
                masked_extracted=verified.get("masked_extracted"),
                widths=shown,
            )
        )
    return rows


def check_comparable(record: RunRecord, baseline: RunRecord) -> None:
    """Raise ConfigError listing why the members of two runs cannot stand side by side."""
    assert record.recipe.elastic is not None and baseline.recipe.elastic is not None

    def measured(one: RunRecord) -> dict[str, object]:
        return {
            "elastic.cost": one.recipe.elastic and one.recipe.elastic.cost,
            "the budgets": ", ".join(sorted(one.budgets)),
            "the elastic stages": ", ".join(f"{stage.name} ({stage.sequence_length:,} tokens)" for stage in one.stages),
            "eval.samples": one.recipe.eval.samples,
        }

    mine, theirs = measured(record), measured(baseline)
    problems = [
        f"{key} {theirs[key]} is not the run's {mine[key]}; train the baseline with the run's" for key in mine if mine[key] != theirs[key]
    ]
    raise_all(ConfigError, problems, f"baseline {baseline.path}")


def facts(record: RunRecord, rows: Sequence[BudgetRow], baseline_rows: Sequence[BudgetRow] = ()) -> list[Fact]:
    """What the rows of a run show, beside the baseline's too where there is one, and whether every cost of both meets its target."""
    everyone = [*rows, *baseline_rows]
    found = [_monotone(rows), _full_against_parent(record, rows[0])]
    far = [row for row in everyone if abs(row.cost_ratio - 1) > COST_TOLERANCE]
    shown = far or [max(everyone, key=lambda row: abs(row.cost_ratio - 1))]
    ratios = ", ".join(f"{row.budget} {row.cost_ratio:.3f}" + (f" in {row.run}" if baseline_rows else "") for row in shown)
    found.append(
        Fact(f"each cost within {COST_TOLERANCE:.0%} of its target", not far, f"{'cost/target' if far else 'the farthest'}: {ratios}")
    )
    if len(rows) > 1:
        found += [_improved(record, rows[-1]), _nested(record, rows)]
        if baseline_rows:
            found.append(_against_baseline(rows[1:], baseline_rows))
    return found


def _monotone(rows: Sequence[BudgetRow]) -> Fact:
    holds = all(larger.last_loss <= smaller.last_loss for larger, smaller in itertools.pairwise(rows))
    return Fact("larger budgets at least as good", holds, ", ".join(f"{row.budget} {row.last_loss:.4f}" for row in rows))


def _full_against_parent(record: RunRecord, full: BudgetRow) -> Fact:
    name = f"{full.budget} within {PARENT_TOLERANCE:.0%} of the parent"
    stage = record.last_stage
    parent = record.parent_loss(stage)
    if parent is None:
        needed = f"the parent's held-out loss on {stage.sequence_length:,} tokens is known when stage {stage.name} has ended"
        return Fact(name, None, needed)
    worse = full.last_loss / parent - 1
    return Fact(
        name, worse <= PARENT_TOLERANCE, f"{full.last_loss:.4f} against {parent:.4f}, {worse:+.1%}, on {stage.sequence_length:,} tokens"
    )


def _improved(record: RunRecord, smallest: BudgetRow) -> Fact:
    """Whether the smallest budget is better at the end of every stage that has ended; losses of one stage have one sequence length."""
    moves = []
    for stage in record.stages:
        start, end = (record.losses_at(stage, step).get(smallest.budget) for step in (0, stage.total_steps))
        if start is not None and end is not None:
            moves.append((stage.name, start, end))
    detail = ", ".join(f"{name} {start:.4f} to {end:.4f}" for name, start, end in moves)
    return Fact(
        f"{smallest.budget} better after each stage",
        all(end < start for _, start, end in moves) if moves else None,
        detail or "no stage has ended",
    )


def _nested(record: RunRecord, rows: Sequence[BudgetRow]) -> Fact:
    """Whether every plan is part of the next larger one: never wider on any layer, never deeper."""
    pairs = [(large.budget, small.budget) for large, small in itertools.pairwise(rows)]
    wrong = [f"{small} is not part of {large}" for large, small in pairs if not record.plan_of(large).contains(record.plan_of(small))]
    return Fact("each member part of the larger one", not wrong, ", ".join(wrong) or " > ".join(row.budget for row in rows))


def _against_baseline(rows: Sequence[BudgetRow], baseline_rows: Sequence[BudgetRow]) -> Fact:
    """Whether every member but the largest, which has one plan in both runs, is better than the baseline's."""
    theirs = {row.budget: row.last_loss for row in baseline_rows}
    name = f"each smaller budget better than in {baseline_rows[0].run}"
    detail = ", ".join(f"{row.budget} {row.last_loss:.4f} against {theirs[row.budget]:.4f}" for row in rows)
    return Fact(name, all(row.last_loss < theirs[row.budget] for row in rows), detail)


def report_data(
    record: RunRecord, rows: Sequence[BudgetRow], found: Sequence[Fact], notes: Sequence[str], plots: Sequence[str]
) -> dict[str, Any]:
    """report.json: plain data of everything that is printed; plots: names of the files beside it."""
    assert record.recipe.elastic is not None
    return {
        **REPORT.stamp,
        "cost": record.recipe.elastic.cost,
        "stages": [{"name": stage.name, "sequence_length": stage.sequence_length} for stage in record.stages],
        "parent_loss": {stage.name: record.parent_loss(stage) for stage in record.stages},
        "rows": [asdict(row) for row in rows],
        "facts": [asdict(fact) for fact in found],
        "notes": list(notes),
        "plots": list(plots),
    }
