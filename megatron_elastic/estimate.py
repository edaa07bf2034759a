"""How long a stage takes on a cluster: FLOPs of the cost model, divided by what GPUs were seen to reach. Plain Python, no torch.

FLOPs of a token: 3 x a forward pass of the student (the backward does twice the forward's products; Narayanan et al., arXiv 2104.04473,
appendix), 1 x that of the frozen parent where a stage is elastic, and 1 x the student's again with recompute `full`. Causal attention is
counted for half of the square of the sequence, which is what its kernels compute. While the router learns, the student is computed in full
width; then in the mean of the budgets' plans, by the probabilities that the stage draws them with.

Time = FLOPs / (GPUs x peak x efficiency), times 1 + (p - 1) / (m v) for a pipeline of p ranks with v parts each and m microbatches (the
same paper, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.cost import flops_per_token
from megatron_elastic.hardware import Gpu
from megatron_elastic.polynomials import added, evaluate, lengths, multiplied, term, widths_of
from megatron_elastic.recipe import Recipe, StageConfig
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import parent_plan


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What share of its peak arithmetic a GPU reaches while it distils a kind of model."""

    share: float
    """Of the peak in the model's precision."""
    source: str
    """Where it was seen."""


_30B = "Nemotron 3 Nano 30B-A3B to 22B-A3B on H100: about 900 GPU-hours for 10B tokens (NVIDIA Model-Optimizer, examples/megatron_bridge/tutorials)"
_QWEN3_8B = "Qwen3-8B to 6B on H100: about 6,000 GPU-hours for 90B tokens (NVIDIA Model-Optimizer, examples/nemo_run/prune_distill)"
_QWEN3_30B = "Qwen3-30B-A3B pretrained on 16 H100: 121 TFLOP/s a GPU (NVIDIA Megatron Bridge, performance summary of 25.11)"

EFFICIENCY: Mapping[str, Efficiency] = {
    "dense GPT": Efficiency(0.21, _QWEN3_8B),
    "dense hybrid": Efficiency(0.21, f"taken to be that of a dense GPT: {_QWEN3_8B}"),
    "MoE GPT": Efficiency(0.12, _QWEN3_30B),
    "MoE hybrid": Efficiency(0.08, _30B),
}
"""Kind of model (`kind_of`) -> the share of a GPU's peak that it reaches. Others' runs, not ours: nothing here has run on a GPU yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """What a stage takes."""

    step_seconds: float
    """One step."""
    tokens_per_second: float
    """Of all GPUs together."""
    hours: float
    """All steps; checkpoints, evaluations and restarts are not counted."""
    gpu_hours: float
    """The same for every GPU."""


def kind_of(shape: ModelShape) -> str:
    """The key of `EFFICIENCY` for a model."""
    return f"{'MoE' if shape.has('moe') else 'dense'} {'GPT' if shape.is_gpt else 'hybrid'}"


def forward_flops(shape: ModelShape, plan: SubmodelPlan, sequence_length: int) -> float:
    """FLOPs of a token in a forward pass of a plan, causal attention counted once (`cost.flops_per_token` counts the whole square)."""
    whole = flops_per_token(shape, widths_of(plan, shape.num_layers), sequence_length)
    return whole - _attention_flops(shape, plan, sequence_length) / 2


def stage_flops(recipe: Recipe, stage: StageConfig, plans: Mapping[str, SubmodelPlan]) -> float:
    """FLOPs of a token of a stage. plans: budget -> plan, as `preflight.budget_plans` gives them; not read where the stage is not elastic."""
    shape, length = recipe.model, stage.sequence_length
    parent = forward_flops(shape, parent_plan(shape), length)
    student = parent
    if stage.elastic:
        soft, chances = soft_share(recipe, stage), stage.budget_probs or dict.fromkeys(plans, 1 / len(plans))
        mean = sum(chance * forward_flops(shape, plans[name], length) for name, chance in chances.items())
        student = soft * parent + (1 - soft) * mean
    passes = 4 if recipe.parallel.recompute == "full" else 3
    again = _attention_flops(shape, parent_plan(shape), length) / 2 if recipe.parallel.recompute == "selective" else 0
    return passes * student + again + (parent if stage.elastic else 0)


def soft_share(recipe: Recipe, stage: StageConfig) -> float:
    """Share of a stage's steps in which the router learns; it does in the first `router.learn_share` of all elastic steps."""
    if recipe.router.choice == "uniform" or not stage.elastic:
        return 0.0
    elastic = [other for other in recipe.stages if other.elastic]
    before = sum(other.total_steps for other in elastic[: elastic.index(stage)])
    learned = recipe.router.learn_share * sum(other.total_steps for other in elastic) - before
    return min(max(learned / stage.total_steps, 0.0), 1.0)


def estimate_stage(recipe: Recipe, stage: StageConfig, plans: Mapping[str, SubmodelPlan], gpu: Gpu, gpus: int) -> StageEstimate:
    """What a stage takes on so many GPUs. plans: as for `stage_flops`."""
    layout = recipe.parallel
    tokens = stage.global_batch_size * stage.sequence_length
    peak = gpu.bf16_flops if recipe.precision == "bf16" else gpu.fp32_flops
    microbatches = stage.global_batch_size * layout.tensor * layout.pipeline * layout.context / (stage.micro_batch_size * gpus)
    bubble = 1 + (layout.pipeline - 1) / (max(microbatches, 1) * layout.virtual_pipeline)
    seconds = tokens * stage_flops(recipe, stage, plans) * bubble / (gpus * peak * EFFICIENCY[kind_of(recipe.model)].share)
    hours = stage.total_steps * seconds / 3600
    return StageEstimate(step_seconds=seconds, tokens_per_second=tokens / seconds, hours=hours, gpu_hours=hours * gpus)


def _attention_flops(shape: ModelShape, plan: SubmodelPlan, sequence_length: int) -> float:
    """FLOPs of a token in core attention over the whole square: scores, and their product with the values."""
    if not shape.has("attention"):
        return 0.0
    context = added(*lengths(shape, "attention", "self_attention.linear_proj.weight", 1))
    return evaluate(shape, widths_of(plan, shape.num_layers), {"attention": multiplied(term(4 * sequence_length), context)})
