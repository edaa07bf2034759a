"""Everything about a recipe that can be refused before torch is imported: budgets, decisions and the layout.

`load_recipe` checks each value by itself; this module checks what the parts mean together. `validate` prints the outcome, and
a run refuses to start on the same problems.
"""

from __future__ import annotations

from pathlib import Path

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.cost import cost_function
from megatron_elastic.errors import ConfigError
from megatron_elastic.planning import Cost, check_targets, plan_cost, uniform_plan
from megatron_elastic.recipe import PinnedBudget, Recipe, StageConfig
from megatron_elastic.shape import ModelShape, parent_plan


def cost_sequence_length(recipe: Recipe) -> int:
    """Tokens of the sequences for which FLOPs are counted: those of the last stage, or the longest the model is meant for."""
    return recipe.stages[-1].sequence_length if recipe.stages else recipe.model.max_sequence_length


def check_sequence_length(shape: ModelShape, length: int, key: str) -> None:
    """Raise ConfigError when FLOPs per token cannot be counted for sequences of `length`; `key` names it in the message."""
    chunk = shape.mamba.chunk if shape.mamba and "M" in shape.layer_pattern else 1
    if length < 1 or (length > chunk and length % chunk):
        near = max(chunk, length // chunk * chunk)
        raise ConfigError(f"{key} {length} is not a multiple of model.mamba.chunk {chunk}; use {near}")


def recipe_cost(recipe: Recipe) -> Cost:
    """The cost that `elastic.cost` names (active parameters for a recipe without elasticity)."""
    kind = recipe.elastic.cost if recipe.elastic else "active_params"
    return cost_function(recipe.model, kind, cost_sequence_length(recipe))


def budget_targets(recipe: Recipe, cost: Cost) -> dict[str, float]:
    """Budget -> absolute target: a fraction of the parent's cost, a cost as it stands, or the exact cost of a pinned plan."""
    if recipe.elastic is None:
        return {}
    parent, pinned = plan_cost(recipe.model, parent_plan(recipe.model), cost), recipe.pinned_plans()
    targets = {}
    for name, budget in recipe.elastic.budgets.items():
        if isinstance(budget, PinnedBudget):
            targets[name] = plan_cost(recipe.model, pinned[name], cost)
        else:
            targets[name] = float(budget * parent if budget <= 1 else budget)
    return targets


def budget_plans(recipe: Recipe, cost: Cost) -> dict[str, SubmodelPlan]:
    """Budget -> plan: the pinned one, else the uniform plan at the target, nested in the next larger budget's."""
    space = recipe.space
    if recipe.elastic is None or space is None:
        return {}
    pinned, plans, outer = recipe.pinned_plans(), {}, space.parent
    for name, target in budget_targets(recipe, cost).items():
        if name in pinned:
            outer = pinned[name]
        else:
            outer = uniform_plan(space, recipe.model, target, cost, within=outer, tolerance=recipe.router.tolerance[1])
        plans[name] = outer
    return plans


def recipe_problems(recipe: Recipe) -> list[str]:
    """Every reason why this recipe cannot run, one line each."""
    problems = _layout_problems(recipe)
    for number, stage in enumerate(recipe.stages):
        problems += _decision_problems(recipe, stage, f"stages[{number}] ({stage.name})")
    space = recipe.space
    if recipe.elastic is None or space is None:
        return problems
    if recipe.elastic.cost == "flops":
        check_sequence_length(recipe.model, cost_sequence_length(recipe), "the last stage's sequence_length")
    cost, pinned = recipe_cost(recipe), recipe.pinned_plans()
    targets = {name: pinned.get(name, target) for name, target in budget_targets(recipe, cost).items()}
    return problems + check_targets(space, recipe.model, targets, cost, recipe.router.tolerance[1])


def recipe_notes(recipe: Recipe) -> list[str]:
    """What is worth knowing but no reason to refuse the recipe, one line each."""
    if recipe.data is None:
        return ["no data section: this recipe can be planned, not trained; set data.path"] if recipe.stages else []
    if not Path(recipe.data.path).is_dir():
        return [f"data.path {recipe.data.path!r} is not there yet; write it with `megatron-elastic data`"]
    return []


def _decision_problems(recipe: Recipe, stage: StageConfig, key: str) -> list[str]:
    """A decision spans whole micro-batches of all replicas that exchange tokens, and a global batch whole decisions."""
    if not stage.elastic:
        return []
    group, together = recipe.router.samples_per_decision, stage.micro_batch_size * recipe.parallel.expert
    problems = []
    if stage.global_batch_size % group:
        problems.append(f"{key}: global_batch_size {stage.global_batch_size} is not a multiple of router.samples_per_decision {group}")
    if group % together:
        problems.append(
            f"{key}: micro_batch_size {stage.micro_batch_size} x parallel.expert {recipe.parallel.expert} = {together} samples are computed "
            f"together and must divide router.samples_per_decision {group}"
        )
    return problems


def _layout_problems(recipe: Recipe) -> list[str]:
    """What megatron-core's shards need of the parent, whether an axis is elastic or not."""
    model, parallel = recipe.model, recipe.parallel
    sizes = {"padded_vocab_size" if model.padded_vocab_size else "vocab_size": model.vocab_rows}
    if model.attention and "*" in model.layer_pattern:
        sizes["attention.heads"] = model.attention.heads
    if model.mlp and "-" in model.layer_pattern:
        sizes["mlp.ffn"] = model.mlp.ffn
    if model.moe and "E" in model.layer_pattern:
        sizes |= {"moe.ffn": model.moe.ffn, "moe.shared_ffn": model.moe.shared_ffn or 0}
    if model.mamba and "M" in model.layer_pattern:
        sizes |= {"mamba.heads": model.mamba.heads, "mamba.groups": model.mamba.groups}
    found = [
        f"parallel.tensor {parallel.tensor} does not divide model.{key} {size}" for key, size in sizes.items() if size % parallel.tensor
    ]
    if model.attention and "*" in model.layer_pattern:
        kv = model.attention.kv_groups
        if kv % parallel.tensor and parallel.tensor % kv:
            found.append(f"parallel.tensor {parallel.tensor} is neither a divisor nor a multiple of model.attention.kv_groups {kv}")
    if parallel.expert > 1 and (model.moe is None or "E" not in model.layer_pattern):
        found.append(f"parallel.expert {parallel.expert} needs a mixture of experts; set it to 1")
    elif model.moe and model.moe.experts % parallel.expert:
        found.append(f"parallel.expert {parallel.expert} does not divide model.moe.experts {model.moe.experts}")
    if model.num_layers % parallel.pipeline:
        found.append(f"parallel.pipeline {parallel.pipeline} does not divide the {model.num_layers} layers of model.layer_pattern")
    return found
