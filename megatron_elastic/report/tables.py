"""The tables of a report as text, for the terminal and the page alike. Plain Python."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from megatron_elastic.config import to_plain
from megatron_elastic.recipe import Recipe, StageConfig
from megatron_elastic.report.record import RunRecord, stage_tokens
from megatron_elastic.report.summary import BudgetRow
from megatron_elastic.report.units import amount, count, duration

WORDS = ("budget", "run", "plan", "stage", "trains", "budgets drawn")
"""Columns of words; the others hold numbers, which stand at the right."""


def family_cells(row: BudgetRow, kind: str, *, several: bool) -> dict[str, str]:
    """Column -> text of a member; kind: what costs are counted in (`elastic.cost`); several: whether more than one run is shown."""

    def loss(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    return {
        "budget": row.budget,
        **({"run": row.run} if several else {}),
        "plan": row.plan_source,
        "total": count(row.total_params),
        "active": count(row.active_params),
        "cost": amount(row.cost, kind),
        "target": amount(row.target, kind),
        "cost/target": f"{row.cost_ratio:.3f}",
        "loss before": loss(row.loss_before),
        **{f"after {stage}": loss(value) for stage, value in row.loss_after.items()},
        "extracted": loss(row.extracted_loss),
        "max diff": "-" if row.masked_extracted is None else f"{row.masked_extracted:.1e}",
    }


def stage_cells(record: RunRecord, stage: StageConfig) -> dict[str, str]:
    """Column -> text of a stage: what was asked for and how far it is."""
    rows = record.rows_of("train", stage)
    done = rows[-1].step + 1 if rows else 0
    drawn = stage.budget_probs or {}
    return {
        "stage": stage.name,
        "trains": "the family" if stage.elastic else "the parent",
        "tokens a sample": f"{stage.sequence_length:,}",
        "samples a step": f"{stage.global_batch_size:,}",
        "steps": f"{done:,} of {stage.total_steps:,}",
        "tokens": count(done * stage.global_batch_size * stage.sequence_length),
        "learning rate": f"{stage.lr:g} to {stage.min_lr:g}",
        "router's": f"{stage.router_lr:g}" if stage.elastic and record.recipe.router.choice == "learned" else "-",
        "budgets drawn": ", ".join(f"{name} {share:g}" for name, share in drawn.items()) or ("all alike" if stage.elastic else "-"),
        "tokens/s": count(statistics.median(row.values["tokens_per_second"] for row in rows)) if rows else "-",
        "time in steps": duration(record.step_seconds(stage)) if rows else "-",
    }


def about(record: RunRecord, largest: BudgetRow) -> dict[str, str]:
    """What the run is: label -> text; largest: its largest member, the parent."""
    recipe, model = record.recipe, record.recipe.model
    assert recipe.elastic is not None and recipe.space is not None
    done = sum(one.global_batch_size * one.sequence_length * len(record.rows_of("train", one)) for one in recipe.stages)
    kinds = {"learned": "a learned router", "uniform": "hand: frozen plans that shrink every axis by about the same fraction"}
    layout = recipe.parallel
    return {
        "Parent": f"{model.layer_pattern}: {model.num_layers} layers, {count(largest.total_params)} parameters, "
        f"{count(largest.active_params)} active for a token",
        "Family": f"{len(record.budgets)} members on {len(recipe.space.axes)} axes; cost counted in {recipe.elastic.cost.replace('_', ' ')}",
        "Sizes chosen by": kinds[recipe.router.choice],
        "Started from": recipe.parent or "random weights",
        **({} if record.importance is None else {"Parent ranked by": str(record.importance)}),
        "Text": recipe.data.path if recipe.data else "-",
        "Tokens": f"{count(done)} of {count(sum(stage_tokens(one) for one in recipe.stages))}",
        "Time in steps": f"{duration(sum(record.step_seconds(one) for one in recipe.stages))} (without evaluations and checkpoints)",
        "Arithmetic": f"{recipe.precision}; tensor x pipeline x expert parallelism {layout.tensor} x {layout.pipeline} x {layout.expert}",
        "Seed": str(recipe.seed),
        "Versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()) or "not recorded",
    }


def recipe_differences(recipe: Recipe, other: Recipe) -> list[tuple[str, str, str]]:
    """(key, value, the other's value) wherever two recipes differ; "-" where one has no such key; a stage of one alone is one line."""
    mine, theirs = _flat("", to_plain(recipe)), _flat("", to_plain(other))
    names = [{stage.name for stage in one.stages} for one in (recipe, other)]
    for name in sorted(names[0] ^ names[1]):
        for flat, own in zip((mine, theirs), names, strict=True):
            for key in [key for key in flat if key.startswith(f"stages.{name}.")]:
                del flat[key]
            if name in own:
                flat[f"stages.{name}"] = "trained"
    keys = [*mine, *(key for key in theirs if key not in mine)]
    return [(key, mine.get(key, "-"), theirs.get(key, "-")) for key in keys if mine.get(key) != theirs.get(key)]


def _flat(prefix: str, data: Mapping[str, Any]) -> dict[str, str]:
    """Full key -> value as text; a stage is named as `stages.NAME`."""
    found = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if name == "stages":
            value = {stage["name"]: stage for stage in value}
        if isinstance(value, Mapping) and value:
            found |= _flat(f"{name}.", value)
        else:
            found[name] = str(value)
    return found
