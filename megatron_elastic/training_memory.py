"""Bytes that training takes on the fullest GPU, from a recipe and a number of processes alone. Plain Python, no torch.

A rank's share of the model is itself a ModelShape: its layers, each with what tensor and expert parallelism leave of it. What it holds:

- weights, gradients and optimizer: (2 + 4 + 12/d) bytes a parameter in bf16, (4 + 4 + 8/d) in fp32, where d is the number of ranks that have the
  same parameters: megatron-core's documentation of its distributed optimizer, with gradients in fp32;
- the frozen parent's weights, where a stage is elastic: 2 or 4 bytes a parameter;
- activations kept for the backward. As in Korthikanti et al. (arXiv 2205.05198, section 4): the inputs of every product, of what follows it,
  and of the attention kernel, which stores no scores; without dropout. Sizes are read off the layout table, as `memory.activation_bytes`
  reads the moments of a forward pass. Under soft decisions each mask point keeps its input too. Recompute `full` keeps the residual stream
  between layers and one layer's activations; `selective` saves scores that no kernel here stores. A pipeline rank keeps as many microbatches
  as its schedule runs ahead (1F1B: Narayanan et al., arXiv 2104.04473, section 2.2);
- working memory of the backward: the gradients of one sublayer's activations, and its gathered input twice;
- the loss on the last stage: final hidden states of student and parent, six [chunk, words] tensors in fp32, the gradient of the output weight.

It is the memory of Transformer Engine's layers and mamba_ssm's kernels. The plain-PyTorch layers keep up to twice as much, the plain scan
four times (tests/test_training_memory.py). Experts are taken to be balanced. Not counted: the CUDA context, communication buffers, what the allocator cannot use; `RESERVED` is for these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_elastic.axes import ElasticAxis, Width
from megatron_elastic.cost import total_params
from megatron_elastic.fit import LayoutSizes
from megatron_elastic.polynomials import Polynomial, evaluate, lengths, parameters, value_at, widths_of
from megatron_elastic.recipe import Recipe, StageConfig
from megatron_elastic.shape import LAYER_KINDS, ModelShape
from megatron_elastic.space import parent_plan

RESERVED = 0.1
"""Share of a GPU's memory that is left to what is not counted. Ours, not measured yet."""
CHUNK_TENSORS = 6
"""[chunk, words] tensors of the loss at a time: both models' logits, the gradient, and temporaries of the two softmaxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank."""

    weights: float
    """Of the student."""
    gradients: float
    """In fp32, for every parameter."""
    optimizer: float
    """Master weights and moments, this rank's share of them."""
    parent: float
    """Weights of the frozen parent."""
    activations: float
    """Kept for the backward, and the backward's working memory."""
    loss: float
    """Of the last stage."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.parent + self.activations + self.loss


def fullest_rank(recipe: Recipe, stage: StageConfig, processes: int) -> RankMemory:
    """The rank of a pipeline that needs the most, in a stage on so many processes (a multiple of what the layout divides)."""
    ranks = (_rank(recipe, stage, processes, rank) for rank in range(recipe.parallel.pipeline))
    return max(ranks, key=lambda rank: rank.total)


def rank_shape(shape: ModelShape, sizes: LayoutSizes, layers: list[int]) -> ModelShape:
    """What a rank holds of some layers of `shape`, as a shape of its own; its embedding and output layer are those of a rank that has them.

    It still has all routed experts, because each rank's router knows them all. Where a rank has less than one KV group, it is counted as one.
    """

    def of(part: str, width: Width, ranks: int) -> Width:
        if isinstance(width, int):
            return width // ranks
        return tuple(width[place] // ranks for place, layer in enumerate(shape.layers_with(part)) if layer in layers)

    parts: dict[str, Any] = {}
    if shape.attention and shape.has("attention"):
        kv = max(shape.attention.kv_groups // sizes.tensor, 1)
        parts["attention"] = replace(shape.attention, heads=of("attention", shape.attention.heads, sizes.tensor), kv_groups=kv)
    if shape.mlp and shape.has("mlp"):
        parts["mlp"] = replace(shape.mlp, ffn=of("mlp", shape.mlp.ffn, sizes.tensor))
    if shape.moe and shape.has("moe"):
        moe = shape.moe
        parts["moe"] = replace(
            moe,
            experts=of("moe", moe.experts, 1),
            topk=of("moe", moe.topk, 1),
            ffn=of("moe", moe.ffn, sizes.expert_tensor),
            shared_ffn=None if moe.shared_ffn is None else of("moe", moe.shared_ffn, sizes.tensor),
        )
    if shape.mamba and shape.has("mamba"):
        mamba = shape.mamba
        parts["mamba"] = replace(
            mamba,
            heads=of("mamba", mamba.heads, sizes.tensor),
            head_dim=of("mamba", mamba.head_dim, 1),
            state=of("mamba", mamba.state, 1),
            groups=max(mamba.groups // sizes.tensor, 1),
        )
    rows = shape.vocab_rows // sizes.tensor
    letters = "".join(shape.layer_pattern[layer] for layer in layers)
    return replace(shape, layer_pattern=letters, vocab_size=rows, padded_vocab_size=None, **parts)


def _rank(recipe: Recipe, stage: StageConfig, processes: int, rank: int) -> RankMemory:
    """The needs of the ranks at one place of the pipeline."""
    layout, sizes, number = recipe.parallel, recipe.parallel.sizes, 2 if recipe.precision == "bf16" else 4
    first, last = rank == 0, rank == layout.pipeline - 1
    shape = rank_shape(recipe.model, sizes, _layers(recipe.model.num_layers, layout.pipeline, layout.virtual_pipeline, rank))
    dense, routed = _held(shape, sizes, first=first, last=last)
    dense_copies = processes // (sizes.tensor * sizes.pipeline)
    routed_copies = max(processes // (sizes.expert * sizes.expert_tensor * sizes.pipeline), 1)
    moments = 12 if recipe.precision == "bf16" else 8
    parent = 0.0
    if stage.elastic:
        whole = rank_shape(recipe.model, sizes, _layers(recipe.model.num_layers, layout.pipeline, 1, rank))
        parent = number * sum(_held(whole, sizes, first=first, last=last))
    tokens = stage.micro_batch_size * stage.sequence_length / sizes.context
    return RankMemory(
        weights=number * (dense + routed),
        gradients=4 * (dense + routed),
        optimizer=moments * (dense / dense_copies + routed / routed_copies),
        parent=parent,
        activations=_activations(recipe, stage, shape, tokens, _ahead(recipe, stage, processes, rank)),
        loss=_loss(recipe, stage, shape, tokens) if last else 0.0,
    )


def _layers(count: int, pipeline: int, parts: int, rank: int) -> list[int]:
    """Global numbers of the layers of a pipeline rank; parts go round the pipeline."""
    size = count // (pipeline * parts)
    return [layer for part in range(parts) for layer in range((part * pipeline + rank) * size, (part * pipeline + rank + 1) * size)]


def _held(shape: ModelShape, sizes: LayoutSizes, *, first: bool, last: bool) -> tuple[float, float]:
    """(parameters that all of a rank's copies share, those of routed experts) of a rank's shape at its place in the pipeline."""
    widths, dense, routed = widths_of(parent_plan(shape), shape.num_layers), 0.0, 0.0
    for parameter in parameters(shape):
        here = bool(parameter.part) or (first if parameter.name.startswith("embedding.") else last)
        size = evaluate(shape, widths, {parameter.part: parameter.size}) if here else 0
        dense, routed = (dense, routed + size) if parameter.is_routed else (dense + size, routed)
    if shape.tied_embeddings and last and not first:
        dense += shape.vocab_rows * shape.hidden_size  # the last stage has a copy of its own
    return dense, routed / sizes.expert


def _ahead(recipe: Recipe, stage: StageConfig, processes: int, rank: int) -> float:
    """Microbatches whose activations a pipeline rank keeps at once; parts of an interleaved pipeline count by their share of the layers."""
    layout = recipe.parallel
    replicas = processes // (layout.tensor * layout.pipeline * layout.context)
    count = max(stage.global_batch_size // (stage.micro_batch_size * replicas), 1)
    if layout.virtual_pipeline == 1:
        return min(count, layout.pipeline - rank)
    parts = 2 * (layout.pipeline - rank - 1) + (layout.virtual_pipeline - 1) * layout.pipeline + 1
    return min(count, parts / layout.virtual_pipeline)


def _activations(recipe: Recipe, stage: StageConfig, shape: ModelShape, tokens: float, ahead: float) -> float:
    """Bytes kept for the backward of `ahead` microbatches of `tokens` tokens, and the backward's working memory."""
    number, residual = (2 if recipe.precision == "bf16" else 4), tokens / recipe.parallel.token_shards
    soft = stage.elastic and recipe.router.choice == "learned"
    kept = [
        [_kept(shape.at(n), part, recipe, tokens, soft=soft) for part in LAYER_KINDS[kind]] for n, kind in enumerate(shape.layer_pattern)
    ]
    working = max(size for layer in kept for size in layer) + 2 * tokens * shape.hidden_size * number
    if recipe.parallel.recompute == "full":
        return ahead * len(kept) * residual * shape.hidden_size * number + max(map(sum, kept)) + working
    return ahead * sum(map(sum, kept)) + working


def _kept(shape: ModelShape, part: str, recipe: Recipe, tokens: float, *, soft: bool) -> float:
    """Bytes that one sublayer of a rank keeps of a microbatch for its backward. shape: of the rank, at that layer."""
    sizes, number = recipe.parallel.sizes, 2 if recipe.precision == "bf16" else 4
    residual = tokens / recipe.parallel.token_shards
    total = (3 if soft else 2) * residual * shape.hidden_size  # the norm's input and output; the sublayer's output before its mask

    def long(name: str, dim: int = 0) -> float:
        return sum(_at(shape, polynomial) for polynomial in lengths(shape, part, name, dim))

    if part == "attention":
        context = long("self_attention.linear_proj.weight", 1)
        assert shape.attention is not None
        gathered = 2 * (sizes.context - 1) * shape.attention.kv_groups * shape.attention.head_dim  # keys and values of the other ranks
        total += tokens * (long("self_attention.linear_qkv.weight") + gathered + (2 if soft else 1) * context)
    elif part == "mlp":
        total += tokens * _feed_forward(long("mlp.linear_fc2.weight", 1), gated=shape.gated, soft=soft)
    elif part == "moe":
        assert shape.moe is not None and isinstance(shape.moe.topk, int)
        copies = residual * shape.moe.topk * sizes.expert_tensor
        # What an expert activates is kept before and after it is multiplied by the gate.
        ffn = long("mlp.experts.experts.linear_fc2.weight", 2)
        total += copies * (shape.hidden_size + ffn + _feed_forward(ffn, gated=shape.gated, soft=soft))
        if shape.moe.shared_ffn is not None:
            shared = long("mlp.shared_experts.linear_fc2.weight", 1)
            total += tokens * _feed_forward(shared, gated=shape.gated, soft=soft)
    else:
        assert shape.mamba is not None
        inner = long("mixer.out_proj.weight", 1)
        # The input projection, the convolution's output, the scan's output and that of the gated norm; a state [inner, state] a chunk, in fp32.
        total += tokens * (long("mixer.in_proj.weight") + long("mixer.conv1d.bias") + (3 if soft else 2) * inner)
        state = shape.mamba.state
        assert isinstance(state, int)
        return number * total + 4 * inner * state * tokens / shape.mamba.chunk
    return number * total


def _feed_forward(ffn: float, *, gated: bool, soft: bool) -> float:
    """Numbers that an MLP keeps of a token behind its input: the first projection (both halves, and the activated one), what goes on."""
    return (3 if gated else 1) * ffn + (2 if soft else 1) * ffn


def _loss(recipe: Recipe, stage: StageConfig, shape: ModelShape, tokens: float) -> float:
    """Bytes of the loss on the last stage. shape: of the rank."""
    number, distilled = (2 if recipe.precision == "bf16" else 4), stage.elastic
    state = tokens * shape.hidden_size * number
    states = 2 * state  # the student's, gathered, and their gradient
    if distilled and not recipe.distill.offload and recipe.parallel.pipeline > 1:
        states += max(state / recipe.parallel.token_shards, recipe.distill.teacher_bytes)
    elif distilled:
        states += state
    chunk = CHUNK_TENSORS * min(recipe.distill.chunk_tokens, tokens) * shape.vocab_rows * 4
    return states + chunk + shape.vocab_rows * shape.hidden_size * 4


def _at(shape: ModelShape, polynomial: Polynomial) -> float:
    return value_at(polynomial, _one_layer(shape))


def _one_layer(shape: ModelShape) -> dict[ElasticAxis, int]:
    """The widths of a shape whose layers are all alike."""
    return {axis: width for axis, width in parent_plan(shape).widths if isinstance(width, int)}


def checkpoint_bytes(recipe: Recipe) -> float:
    """Bytes of one checkpoint of the run: weights, master weights and both moments; the router is too small to count."""
    count = total_params(recipe.model, widths_of(parent_plan(recipe.model), recipe.model.num_layers))
    return count * (2 + 12 if recipe.precision == "bf16" else 4 + 12)
