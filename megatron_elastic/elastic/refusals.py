"""What a megatron config may ask for that has no elastic form: refused by name, with what to do, never trained half-elastic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.elastic.router_module import router_problems


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field of TransformerConfig that must stand at one of `allowed`; the releases do not all have every field."""

    field: str
    what: str
    remedy: str
    allowed: tuple[Any, ...] = (None, False)


REFUSALS: tuple[Refusal, ...] = (
    Refusal("multi_latent_attention", "multi-latent attention (MLA) has no elastic form", "use a parent with grouped-query attention"),
    Refusal("experimental_attention_variant", "GatedDeltaNet and sparse attention have no elastic form", "use a parent without them"),
    Refusal("attention_output_gate", "gated attention has no elastic form", "use a parent without it"),
    Refusal("moe_latent_size", "a latent mixture of experts has no elastic form", "use a parent whose experts read the residual stream"),
    Refusal("mtp_num_layers", "multi-token prediction (MTP) heads have no elastic form", "remove them from the parent", (None, 0)),
    Refusal("moe_mlp_glu_interleave_size", "interleaved gates of experts would be cut across", "store gate and value as two halves"),
    Refusal(
        "moe_shared_expert_glu_interleave_size", "interleaved gates of the shared expert would be cut across", "store them as two halves"
    ),
    Refusal("moe_shared_expert_gate", "the shared expert's own gate has no elastic form", "use a parent without it"),
    Refusal("moe_shared_expert_overlap", "its stages call the shared expert's linears past their decision", "set it to False"),
    Refusal("fused_residual_rmsnorm", "the fused kernel hides the write to the residual stream", "set it to False"),
    Refusal("apply_residual_connection_post_layernorm", "the residual stream would hold normalised values", "set it to False"),
    Refusal("heterogeneous_block_specs", "layers of different sizes make no elastic parent", "start from the model they were cut from"),
    Refusal("gradient_accumulation_fusion", "its kernel writes whole gradients", "set it to False"),
    Refusal("delay_wgrad_compute", "a cut weight's gradient is computed at once", "set it to False"),
    Refusal("moe_grouped_gemm", "the grouped kernels take whole experts", "set it to False (one MLP an expert)"),
    Refusal("softmax_type", "Transformer Engine keeps an offset for every head", "use 'vanilla'", ("vanilla",)),
    Refusal(
        "recompute_granularity",
        "megatron's recompute would replay another microbatch's decision",
        "use None, or build the model with recompute 'full'",
        (None, "selective"),
    ),
    Refusal(
        "recompute_modules",
        "only core attention follows no decision; the others would be computed again under another microbatch's",
        "use ['core_attn']",
        (None, ["core_attn"]),
    ),
    Refusal("cpu_offloading", "offloaded activations are not followed through a cut layer", "set it to False"),
    Refusal("persist_layer_norm", "the persistent kernel hides the mean over what is alive", "set it to False"),
)


def config_problems(config: Any, space: ElasticSpace) -> list[str]:
    """Every setting of a TransformerConfig that cannot be elastic, one line each: value, reason, remedy."""
    values = vars(config)
    problems = [
        f"{refusal.field} {values[refusal.field]!r}: {refusal.what}; {refusal.remedy}"
        for refusal in REFUSALS
        if refusal.field in values and values[refusal.field] not in refusal.allowed
    ]
    if config.num_moe_experts is not None:
        problems += router_problems(config, space.spec(ElasticAxis.TOPK) is not None)
    return problems


def slice_problems(config: Any) -> list[str]:
    """Every setting that cannot compute a part of a weight: those plans run in mask mode only."""
    return [
        f"{name} {vars(config)[name]!r}: slice mode would quantise every cut weight again in every layer; run the plan with mode 'mask'"
        for name in ("fp8", "fp4", "quant_recipe")
        if name in vars(config) and vars(config)[name]
    ]
