"""Directories of runs that were never trained: a recipe, metrics.jsonl with losses chosen by hand, versions.json, verify.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from megatron_elastic.checkpoint.files import RANKING_FILE
from megatron_elastic.config import load_recipe, to_plain
from megatron_elastic.planning import plan_cost
from megatron_elastic.preflight import budget_plans, budget_targets, recipe_cost
from megatron_elastic.recipe import Recipe

RECIPE = Path(__file__).parents[1] / "cli" / "tiny.yaml"
STEPS = ("stages.parent.steps=20", "stages.short.steps=12", "stages.long.steps=6", "stages.long.warmup_steps=2", "eval.interval=4")
FEW_AXES = ("elastic.axes={hidden: [128, 96, 64], ffn: [512, 256, 128], mamba_heads: [8, 4]}", "elastic.drop_order=[]")
"""Overrides for a quick plot of the router; the costs of its plans miss their targets."""

PER_LAYER = (
    "model.layer_pattern=MEM*-EM-E",
    "elastic.axes={hidden: [128, 96, 64], ffn: {choices: [512, 256, 128], per_layer: true}, "
    "mamba_heads: {choices: [8, 4], per_layer: true}, layers: [9, 8]}",
    "elastic.drop_order=[2]",
)
"""Overrides for two axes with a width for each layer: ffn of layers 4 and 7, mamba_heads of layers 0, 2 and 6; costs miss their targets."""

FLOOR = {"full": 2.0, "medium": 2.2, "small": 2.5}
"""Held-out loss at the end of the first elastic stage; the second stage's is 0.25 lower."""

BEFORE = {"full": 2.0, "medium": 3.0, "small": 5.0}
LONG = -0.25


def held_out(name: str, stage: str, share: float) -> float:
    """The loss of a budget after `share` of a stage: from BEFORE to FLOOR in `short`; in `long` 0.05 better at its end."""
    if stage == "short":
        return BEFORE[name] + (FLOOR[name] - BEFORE[name]) * share
    return FLOOR[name] + LONG - 0.05 * share


def write_run(directory: Path, *overrides: str, parent_loss: bool = False, worse: float = 0.0) -> Path:
    """Write a finished run; worse: added to every loss but the full budget's; parent_loss: whether stages say what their plans lose under the parent's weights."""
    recipe = load_recipe(RECIPE, [*STEPS, f"run_dir={directory}", *overrides])
    directory.mkdir(parents=True)
    (directory / "recipe.yaml").write_text(yaml.safe_dump(to_plain(recipe), sort_keys=False))
    rows, tokens, done, family = [], 0, 0, _family(recipe)
    for stage in recipe.stages:
        for step in range(stage.total_steps + 1):
            head = {"stage": stage.name, "step": step, "tokens": tokens + step * stage.global_batch_size * stage.sequence_length}
            if step % recipe.eval.interval == 0 or step == stage.total_steps:
                rows.append({"kind": "eval", **head, **_evaluation(family, stage.name, step / stage.total_steps, worse)})
                if stage.elastic and parent_loss and step == stage.total_steps:
                    full = {"full": 2.0 if stage.name == "short" else 1.75}
                    rows.append({"kind": "untrained", **head, "loss": {**BEFORE, **full}})
            if step < stage.total_steps:
                rows.append({"kind": "train", **head, **_step(list(FLOOR) if stage.elastic else ["parent"], done)})
                done += stage.elastic
        tokens = head["tokens"]
    write_rows(directory, rows)
    (directory / "versions.json").write_text(json.dumps({"torch": "9.8.7", "megatron-core": "0.99"}))
    both = {"masked_sliced": 1e-6, "loss": 2.1, "allowed": 1e-4, "holds": True}
    budgets = {
        name: [
            {"reader": "megatron", **both, "masked_extracted": 1e-6, "extracted_loss": loss + 1},
            {"reader": "transformers", **both, "masked_extracted": 2e-6, "extracted_loss": loss},
        ]
        for name, loss in FLOOR.items()
    }
    (directory / "verify.json").write_text(json.dumps({"format_version": 2, "checkpoint": "stage-long", "budgets": budgets}))
    return directory


def _family(recipe: Recipe) -> dict[str, Any]:
    """What every evaluation of a run says alike, and "sizes": axis -> (places, choices), empty without a learned router."""
    cost, space = recipe_cost(recipe), recipe.space
    plans, targets = budget_plans(recipe, cost), budget_targets(recipe, cost)
    assert space is not None
    return {
        "cost_ratio": {name: plan_cost(recipe.model, plan, cost) / targets[name] for name, plan in plans.items()},
        "plans": {name: plan.to_dict() for name, plan in plans.items()},
        "sizes": {spec.axis.value: (spec.places, len(spec.choices)) for spec in space.axes} if recipe.router.choice == "learned" else {},
    }


def _evaluation(family: dict[str, Any], stage: str, share: float, worse: float) -> dict[str, Any]:
    if stage == "parent":
        return {"loss": {"parent": 5.0 - 3.0 * share}}
    names = list(family["plans"])
    values = {"loss": {name: held_out(name, stage, share) + (worse if name != "full" else 0) for name in names}}
    values |= {key: family[key] for key in ("cost_ratio", "plans")}
    if family["sizes"]:
        values["router"] = dict.fromkeys(names, {axis: _probabilities(share, *sizes) for axis, sizes in family["sizes"].items()})
    return values


def _probabilities(share: float, places: int, choices: int) -> list[Any]:
    """[choices] that move from all alike to the first; [places][choices] where every place moves a little less than the one before."""
    rows = []
    for place in range(places):
        sure = share / (1 + place)
        rows.append([sure + (1 - sure) / choices, *[(1 - sure) / choices] * (choices - 1)])
    return rows if places > 1 else rows[0]


def _step(names: list[str], done: int) -> dict[str, Any]:
    losses = {name: 0.0 if name == "full" and done == 0 else 0.1 * place / (1 + done) + 0.01 for place, name in enumerate(names)}
    ratios = {name: 1.0 + 0.1 * place / (1 + done) for place, name in enumerate(names)}
    values = {"loss": sum(losses.values()), "by_budget": losses, "cost_ratio": {} if names == ["parent"] else ratios}
    return values | {"lr": 1e-3 / (1 + done), "router_lr": 1e-2 / (1 + done), "tokens_per_second": 4096.0}


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run as they stand in metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Replace metrics.jsonl."""
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


DROPPED = (3, 1, 0, 5, 2, 4)
"""The order in which the layers of a ranking of `write_importance` are dropped."""


def write_importance(directory: Path, *, without: tuple[str, ...] = (), **provenance: Any) -> Path:
    """Give a run the ranking of its parent: scores by chance, layers in the order of DROPPED; without: axes that it does not have.

    provenance: over what it says of its text, its layers and its experts; None leaves an entry out.
    """
    import torch

    from megatron_elastic.axes import ElasticAxis
    from megatron_elastic.importance.ranking import Ranking, score_shapes, write_ranking

    shape, generator = load_recipe(directory / "recipe.yaml").model, torch.Generator().manual_seed(0)
    sizes = {axis: found for axis in ElasticAxis if axis.value not in without and (found := score_shapes(shape, axis))}
    scores = {axis: {layer: torch.rand(size, generator=generator) for layer, size in found.items()} for axis, found in sizes.items()}
    if ElasticAxis.LAYERS in scores:
        scores[ElasticAxis.LAYERS] = {None: torch.tensor(DROPPED).argsort().double()}
    names = {ElasticAxis.EXPERTS: "reap", ElasticAxis.LAYERS: "kl"}
    said = {
        "model": {"path": "somewhere", "fingerprint": "0"},
        "data": "a text",
        "tokens": 4096,
        "depth": {"errors": [0.001, 0.02, 0.1, 0.5, 1.5], "influence": [0.3, 0.1, 0.2, 0.01, 0.4, 0.25]},
        "expert_tokens": {str(layer): [100 * (expert + layer) for expert in range(8)] for layer in (5, 1)},
    } | provenance
    kept = {key: value for key, value in said.items() if value is not None}
    write_ranking(directory / RANKING_FILE, Ranking(shape, {axis: names.get(axis, "activation") for axis in scores}, scores, kept))
    return directory
