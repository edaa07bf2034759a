"""Which layout a model fits: the one place for these rules. `validate`, a run's start, `build_model` and `elasticize` all ask here.

Plain Python: no torch and no megatron-core, whose installed release is read from its metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_elastic.axes import ElasticAxis, ElasticSpace, Width
from megatron_elastic.platform.versions import installed_release, interleaves_hybrid, sums_expert_gradients
from megatron_elastic.shape import AttentionShape, ModelShape, MoeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSizes:
    """The numbers of a layout, without the processes it runs on. The fields are those of `ParallelContext`, every default filled in."""

    tensor: int
    pipeline: int
    virtual_pipeline: int
    sequence_parallel: bool
    dispatcher: Literal["alltoall", "allgather"]
    expert: int
    expert_tensor: int
    context: int

    @classmethod
    def of(
        cls,
        *,
        tensor: int,
        pipeline: int,
        virtual_pipeline: int,
        sequence_parallel: bool | None,
        dispatcher: Literal["alltoall", "allgather"],
        expert: int,
        expert_tensor: int | None,
        context: int,
    ) -> LayoutSizes:
        """The sizes that were asked for.

        sequence_parallel: None means with tensor parallelism. expert_tensor: None means that of the other layers, but whole experts with
        expert parallelism.
        """
        return cls(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual_pipeline,
            sequence_parallel=tensor > 1 if sequence_parallel is None else sequence_parallel,
            dispatcher=dispatcher,
            expert=expert,
            expert_tensor=(tensor if expert == 1 else 1) if expert_tensor is None else expert_tensor,
            context=context,
        )

    def problems(self) -> list[str]:
        """Why these sizes do not go together whatever the model is, one line each."""
        found = []
        if self.sequence_parallel and self.tensor == 1:
            found.append("parallel.sequence_parallel true needs parallel.tensor above 1; remove it")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            found.append(f"parallel.virtual_pipeline {self.virtual_pipeline} needs parallel.pipeline above 1; set it to 1")
        return found

    def process_problems(self, world: int) -> list[str]:
        """Why `world` processes cannot be divided this way, one line each."""
        dense, experts, found = self.tensor * self.pipeline * self.context, self.expert_tensor * self.expert * self.pipeline, []
        if world % dense:
            found.append(
                f"parallel.tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} does not divide the {world} processes; "
                f"start a multiple of {dense}"
            )
        if world % experts:
            found.append(
                f"parallel.expert {self.expert} x expert_tensor {self.expert_tensor} x pipeline {self.pipeline} does not divide the {world} "
                f"processes; start a multiple of {experts} or lower parallel.expert"
            )
        return found


def replica_problems(global_batch_size: int, micro_batch_size: int, replicas: int) -> list[str]:
    """Why a step cannot be divided over the data-parallel replicas; one line, or none."""
    together = micro_batch_size * replicas
    if global_batch_size % together == 0:
        return []
    return [
        f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} x {replicas} data-parallel "
        f"replicas; use a multiple of {together}"
    ]


def round_problems(global_batch_size: int, micro_batch_size: int, replicas: int, sizes: LayoutSizes) -> list[str]:
    """Why the interleaved schedule cannot run a replica's microbatches in whole rounds of the pipeline; one line, or none."""
    count = global_batch_size // (micro_batch_size * replicas)
    if sizes.virtual_pipeline == 1 or count % sizes.pipeline == 0:
        return []
    return [
        f"global_batch_size {global_batch_size} gives each of {replicas} replicas {count} microbatches, not a multiple of "
        f"parallel.pipeline {sizes.pipeline}; change it, or set virtual_pipeline to 1"
    ]


def model_problems(shape: ModelShape, sizes: LayoutSizes) -> list[str]:
    """What megatron-core cannot say of a shape, and what its shards need that the shape does not give, one line each.

    shape: without problems of its own. Of sizes that differ from layer to layer, every one must fit.
    """
    found = _unsayable(shape) + sizes.problems()
    found += [
        f"parallel.tensor {sizes.tensor} does not divide model.{key} {size}"
        for key, width in _tensor_widths(shape).items()
        for size in _distinct(width)
        if size % sizes.tensor
    ]
    if shape.attention and shape.has("attention"):
        found += _key_value_problems(shape.attention, sizes.tensor)
    found += _expert_problems(shape.moe, sizes) if shape.moe and shape.has("moe") else _no_expert_problems(sizes)
    return found + context_problems(shape, None, sizes.tensor, sizes.context) + _parts_problems(shape, sizes)


def space_problems(space: ElasticSpace, shape: ModelShape, sizes: LayoutSizes) -> list[str]:
    """What a plan of `space` would cut apart that one rank must hold whole, one line each."""
    return (
        space.check_shards(sizes.tensor, sizes.expert, sizes.expert_tensor)
        + attention_problems(shape, space, sizes.tensor)
        + context_problems(shape, space, sizes.tensor, sizes.context)
    )


def attention_problems(shape: ModelShape, space: ElasticSpace, tensor: int) -> list[str]:
    """Why `tensor` tensor-parallel ranks cannot share the query heads that a plan keeps; one line, or none.

    With more ranks than KV groups a rank's rows of linear_qkv end inside a group, wherever they happen to (megatron-core gathers the
    activations and cuts them again), so that no rank holds whole groups of heads. Other axes do not touch these rows.
    """
    if space.spec(ElasticAxis.HEADS) is None or shape.attention is None or tensor <= shape.attention.kv_groups:
        return []
    kv = shape.attention.kv_groups
    return [
        f"parallel.tensor {tensor} above model.attention.kv_groups {kv}: elastic.axes.heads cannot be cut there; lower parallel.tensor to {kv} or "
        "less, or remove the axis"
    ]


def context_problems(shape: ModelShape, space: ElasticSpace | None, tensor: int, context: int) -> list[str]:
    """Why `context` context-parallel ranks cannot share the Mamba layers of a model on `tensor` tensor-parallel ranks; one line each.

    Tokens are exchanged for heads (megatron-core's MambaContextParallel): a rank scans whole SSM groups or, with more ranks than groups, an
    equal share of the heads of one group, of which a plan keeps a prefix. Nothing else in a model is divided by context parallelism.
    """
    if not shape.has("mamba"):
        return []
    spec, found = space.spec(ElasticAxis.MAMBA_HEADS) if space is not None else None, []
    for layer in shape.layers_with("mamba"):
        mamba = shape.at(layer).mamba
        assert mamba is not None and isinstance(mamba.heads, int)
        groups = mamba.groups // tensor
        if mamba.groups % tensor:
            continue  # `model_problems` says so for every size that tensor parallelism divides
        if max(groups, context) % min(groups, context):
            found.append(
                f"parallel.context {context}: a tensor-parallel rank has {groups} of the {mamba.groups} model.mamba.groups, and one number "
                "must divide the other; change parallel.context or parallel.tensor"
            )
            continue
        ranks = max(context // groups, 1)
        widths = [("model.mamba.heads", mamba.heads)] + [("elastic.axes.mamba_heads", n) for n in (spec.choices[1:] if spec else ())]
        found += [
            f"parallel.context {context}: {ranks} ranks cannot share the {width // mamba.groups} heads of a group that {key} {width} keeps; "
            f"use a multiple of {ranks * mamba.groups}, or lower parallel.context"
            for key, width in widths
            if width // mamba.groups % ranks
        ]
    return list(dict.fromkeys(found))


def release_problems(shape: ModelShape, sizes: LayoutSizes) -> list[str]:
    """What only a newer megatron-core than the installed one computes, one line each; none where there is none to ask."""
    found = []
    if installed_release() is None:
        return found
    if sizes.virtual_pipeline > 1 and not shape.is_gpt and not interleaves_hybrid():
        found.append(
            f"parallel.virtual_pipeline {sizes.virtual_pipeline}: the hybrid stack of megatron-core 0.16.1 has one part on a pipeline rank; "
            "use 1 or megatron-core 0.19 (Python 3.12)"
        )
    if shape.has("moe") and not sums_expert_gradients(sizes.tensor, sizes.expert, sizes.expert_tensor):
        found.append(
            f"parallel.expert 1 with expert_tensor {sizes.expert_tensor} and tensor {sizes.tensor}: megatron-core 0.16.1 never sums "
            f"these experts' gradients; set expert_tensor to {sizes.tensor} or raise parallel.expert"
        )
    return found


def _unsayable(shape: ModelShape) -> list[str]:
    """What a shape can say and megatron-core's config cannot."""
    found = []
    if shape.attention and shape.has("attention") and shape.linear_bias and not shape.attention.qkv_bias:
        found.append(
            "model.linear_bias true gives megatron-core's query/key/value projection a bias too; set model.attention.qkv_bias to true"
        )
    if shape.moe and shape.has("moe") and shape.moe.score == "softmax" and not shape.moe.pre_softmax:
        if 1 in _distinct(shape.moe.topk):
            found.append("model.moe.topk 1 with a softmax over the chosen makes every gate 1; set model.moe.pre_softmax to true")
    return found


def _tensor_widths(shape: ModelShape) -> dict[str, Width]:
    """Key -> width of what is cut over the tensor-parallel ranks."""
    widths: dict[str, Width] = {"padded_vocab_size" if shape.padded_vocab_size else "vocab_size": shape.vocab_rows}
    if shape.attention and shape.has("attention"):
        widths["attention.heads"] = shape.attention.heads
    if shape.mlp and shape.has("mlp"):
        widths["mlp.ffn"] = shape.mlp.ffn
    if shape.moe and shape.has("moe") and shape.moe.shared_ffn:
        widths["moe.shared_ffn"] = shape.moe.shared_ffn
    if shape.mamba and shape.has("mamba"):
        widths |= {"mamba.heads": shape.mamba.heads, "mamba.groups": shape.mamba.groups}
    return widths


def _key_value_problems(attention: AttentionShape, tensor: int) -> list[str]:
    """A rank has whole KV groups or, with more ranks than groups, an equal share of the rows of megatron-core's linear_qkv."""
    kv, rows = attention.kv_groups, 2 * attention.kv_groups * attention.head_dim
    if kv % tensor and tensor % kv:
        return [f"parallel.tensor {tensor} is neither a divisor nor a multiple of model.attention.kv_groups {kv}; change one"]
    if rows % tensor:
        return [
            f"parallel.tensor {tensor} does not divide the {rows} keys and values of a token (2 x model.attention.kv_groups {kv} x head_dim "
            f"{attention.head_dim}); lower it"
        ]
    return []


def _expert_problems(moe: MoeShape, sizes: LayoutSizes) -> list[str]:
    found = [
        f"parallel.{key} {ranks} does not divide model.moe.{name} {size}"
        for key, ranks, name, width in (
            ("expert", sizes.expert, "experts", moe.experts),
            ("expert_tensor", sizes.expert_tensor, "ffn", moe.ffn),
        )
        for size in _distinct(width)
        if size % ranks
    ]
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        found.append(
            f"parallel.sequence_parallel false with tensor {sizes.tensor}: megatron-core trains experts under tensor parallelism with it "
            "only; remove it"
        )
    experts, dense = sizes.expert * sizes.expert_tensor, sizes.tensor * sizes.context
    if experts % dense and dense % experts:
        found.append(
            f"parallel.expert {sizes.expert} x expert_tensor {sizes.expert_tensor} = {experts} ranks and tensor {sizes.tensor} x context "
            f"{sizes.context} = {dense} ranks: one must divide the other, so that whole replicas exchange tokens"
        )
    return found


def _no_expert_problems(sizes: LayoutSizes) -> list[str]:
    """What is asked for experts of a model that has none."""
    found = [f"parallel.expert {sizes.expert} needs a mixture of experts; set it to 1"] * (sizes.expert > 1)
    if sizes.expert_tensor not in (1, sizes.tensor):
        found.append(f"parallel.expert_tensor {sizes.expert_tensor} needs a mixture of experts; set it to 1")
    if sizes.dispatcher != "alltoall":
        found.append(f"parallel.dispatcher {sizes.dispatcher!r} needs a mixture of experts; remove it")
    return found


def _parts_problems(shape: ModelShape, sizes: LayoutSizes) -> list[str]:
    """Layers are dealt evenly over all parts of the pipeline (megatron-core 0.16.1 would drop the rest without a word)."""
    if shape.num_layers % (sizes.pipeline * sizes.virtual_pipeline) == 0:
        return []
    parts = f"parallel.pipeline {sizes.pipeline}" + (f" x virtual_pipeline {sizes.virtual_pipeline}" if sizes.virtual_pipeline > 1 else "")
    return [f"{parts} does not divide the {shape.num_layers} layers of model.layer_pattern"]


def _distinct(width: Width) -> tuple[int, ...]:
    """The different widths of all layers, widest first."""
    return tuple(sorted(set(width), reverse=True)) if isinstance(width, tuple) else (width,)
