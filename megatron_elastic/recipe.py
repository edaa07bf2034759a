"""The dataclasses of a recipe, a sentence under every field. `config.py` loads and checks them. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan, Width, widths_by_place
from megatron_elastic.errors import PlanError
from megatron_elastic.fit import LayoutSizes
from megatron_elastic.memory import MemoryTarget
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import AxisChoices, build_space


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedBudget:
    """A budget whose plan is given; its target is the exact cost of that plan."""

    plan: Mapping[str, int | float | tuple[int | float, ...]]
    """Axis -> width, the parent's where an axis is not named; for a per-layer axis a list with a width for each layer that has it. A fraction
    counts from the parent's."""

    def on(self, space: ElasticSpace) -> SubmodelPlan:
        """The plan in `space`. Raises PlanError listing every width that is no choice."""
        return space.plan({(axis := ElasticAxis(name)): _width_in(space, axis, width) for name, width in self.plan.items()})


def _width_in(space: ElasticSpace, axis: ElasticAxis, given: int | float | tuple[int | float, ...]) -> Width:
    """The width that a recipe gives an axis, its fractions resolved. Raises PlanError for one that is no whole width."""
    spec = space.spec(axis)
    parent = spec.parent if spec else max(widths_by_place(dict(space.parent.widths).get(axis, 1), 1) or (1,))
    return tuple(_whole_width(axis, value, parent) for value in given) if isinstance(given, tuple) else _whole_width(axis, given, parent)


def _whole_width(axis: ElasticAxis, value: int | float, parent: int) -> int:
    width = value if isinstance(value, int) else value * parent
    if abs(width - round(width)) > 1e-9:
        raise PlanError(f"{axis.value}: fraction {value} of {parent} is {width:g}, not a whole width; write the width itself")
    return round(width)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """What can shrink, and the sizes that are asked for."""

    axes: Mapping[str, tuple[int | float, ...] | AxisChoices]
    """Axis -> choices from wide to narrow, the parent's width first; a fraction counts from the parent's. `{choices: [...], per_layer: true}`
    gives every layer that has the axis a width of its own."""
    budgets: Mapping[str, float | int | PinnedBudget]
    """Name -> target cost: up to 1 a fraction of the parent's, above 1 absolute; or a pinned plan. The first must be the parent (1.0)."""
    cost: Literal["total_params", "active_params", "flops", "memory"] = "active_params"
    """What a target is counted in."""
    memory: MemoryTarget | None = None
    """What `cost: memory` counts; null: bf16 weights, one sequence of the last stage's length."""
    shard_groups: int = 8
    """The largest tensor parallelism the family can be trained or served with."""
    expert_groups: int | None = None
    """The largest expert parallelism; null: the largest of 8, 4, 2, 1 that divides every choice."""
    drop_order: tuple[int, ...] = ()
    """Layers (from 0) in the order they are dropped when `layers` shrinks."""
    expert_bias_rate: float = 0.0
    """How far the selection bias of the experts moves in an elastic step, each microbatch counting the experts alive in it; 0: frozen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """The network that chooses a size for each budget."""

    choice: Literal["learned", "uniform"] = "learned"
    """learned: trained with the model; uniform: frozen plans that shrink every axis by about the same fraction."""
    hidden: int = 256
    """Width of its hidden layer."""
    samples_per_decision: int = 8
    """Consecutive samples of the global batch that share one decision."""
    temperature: tuple[float, float] = (1.0, 0.05)
    """Gumbel-softmax temperature at the start and the end of the router's learning (geometric)."""
    logit_scale: tuple[float, float] = (1.0, 10.0)
    """Multiplies the logits, at the start and the end (linear)."""
    budget_weight: float = 1.0
    """Weight of |cost/target - 1| against the distillation loss."""
    tolerance: tuple[float, float] = (0.05, 0.02)
    """Relative deviation from a target without loss, at the start and the end; the end is what a plan must meet."""
    straight_through: bool = False
    """Run the most probable choice alone, with the gradient of the soft mixture."""
    width_threshold: float = 0.0
    """Soft decisions compute an axis only up to its widest choice whose probability is above this; 0: always in full width."""
    learn_share: float = 1.0
    """Share of the elastic steps in which the router learns; then its plans are fixed and trained in slice mode."""
    clip_grad: float = 1.0
    """Largest norm of the router's gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """The loss of elastic stages; a stage without elasticity trains on cross-entropy alone."""

    kl_weight: float = 1.0
    """Weight of the forward KL divergence from the frozen parent."""
    ce_weight: float = 0.0
    """Weight of the cross-entropy with the text."""
    temperature: float = 1.0
    """Softens both distributions; the divergence is multiplied by its square."""
    chunk_tokens: int = 1024
    """Tokens whose logits exist at a time."""
    teacher_bytes: float = 2e9
    """Memory for the frozen parent's final hidden states on a rank of the last stage: with a pipeline the parent runs ahead of the student over
    as many microbatches as fit, at least one (with virtual_pipeline one for each rank of the pipeline). Without one it runs microbatch by microbatch."""
    offload: bool = False
    """Whether those states wait in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the text is."""

    path: str
    """A directory written by `megatron-elastic data`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW on megatron-core's distributed optimizer."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Largest norm of the model's gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How ranks are used; what is left over is data parallelism."""

    tensor: int = 1
    """Ranks that share every layer."""
    sequence_parallel: bool | None = None
    """Whether the ranks of `tensor` divide the tokens of norms and the residual stream; null: when there are several."""
    pipeline: int = 1
    """Ranks in a row that share the layers."""
    virtual_pipeline: int = 1
    """Parts of the model on each pipeline rank, taken in turn (megatron-core's interleaved schedule)."""
    expert: int = 1
    """Ranks that share the experts."""
    expert_tensor: int | None = None
    """Ranks that share every expert; null: as many as `tensor` without expert parallelism, 1 with it."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach their experts: each to the ranks that have its experts, or all to all ranks."""
    context: int = 1
    """Ranks that share the tokens of a sequence."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward computes again instead of keeping it: core attention (selective), or every layer (full)."""

    @property
    def sizes(self) -> LayoutSizes:
        """The sizes of the layout, every default filled in."""
        return LayoutSizes.of(
            tensor=self.tensor,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual_pipeline,
            sequence_parallel=self.sequence_parallel,
            dispatcher=self.dispatcher,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            context=self.context,
        )

    @property
    def token_shards(self) -> int:
        """Tensor-parallel ranks that divide the tokens of the residual stream."""
        return self.tensor if self.sizes.sequence_parallel else 1

    @property
    def replicas_together(self) -> int:
        """Replicas that exchange tokens over their experts, and so compute the same size at the same time."""
        return max(1, self.sizes.expert_tensor * self.expert // (self.tensor * self.context))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """One stage of a run; stages run in order and the optimizer's moments carry over within elastic stages."""

    name: str
    """Its name in the log and on the command line."""
    elastic: bool = True
    """Whether the family is trained; false trains the parent alone."""
    sequence_length: int
    """Tokens of a sample."""
    global_batch_size: int
    """Samples of a step."""
    micro_batch_size: int
    """Samples computed together on one rank."""
    steps: int | None = None
    """Steps; either this or `tokens`."""
    tokens: int | None = None
    """Tokens; either this or `steps`."""
    lr: float
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end (cosine)."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    router_lr: float = 1e-2
    """Learning rate of the router, about a hundred times the model's."""
    budget_probs: Mapping[str, float] | None = None
    """Budget -> probability of being drawn; null: all alike."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole stage."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return -(-self.tokens // (self.global_batch_size * self.sequence_length))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the run is saved."""

    interval: int = 100
    """Steps between checkpoints; a stage's end is always saved."""
    keep_last: int = 2
    """The newest so many checkpoints are kept, beside the end of each stage."""
    asynchronous: bool = False
    """Write while training goes on, except at the end of a stage; takes the size of the checkpoint in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Held-out loss of every budget during training."""

    interval: int = 50
    """Steps between evaluations."""
    samples: int = 32
    """Held-out samples, of the stage's sequence length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is written while training."""

    interval: int = 1
    """Steps between progress lines."""
    tensorboard: bool = True
    """Whether scalars are written for TensorBoard."""
    hang_seconds: float = 1800.0
    """A rank that makes no progress for so long prints every thread's stack and ends with exit code 75, as if lost; 0: never. Progress is the start
    of the run, a step, a window of an evaluation, the beginning and the end of a save: set it well above the longest of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A whole run."""

    format_version: int
    """Version of this format."""
    model: ModelShape
    """The parent."""
    parent: str | None = None
    """A checkpoint of the parent to start from (a run or a checkpoint directory); null: a stage with elastic: false trains it."""
    run_dir: str = "runs/default"
    """Where everything of the run is written."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model; bf16 keeps fp32 master weights, gradients, norm statistics and losses."""
    seed: int = 1234
    """Seed of weights, data order and decisions."""
    elastic: ElasticConfig | None = None
    """The family; null when only a parent is trained."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """The router."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """The objective."""
    data: DataConfig | None = None
    """The text; null in recipes that are only planned."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The layout."""
    stages: tuple[StageConfig, ...] = ()
    """The stages in order."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging."""

    @property
    def space(self) -> ElasticSpace | None:
        """The elastic space, None without an `elastic` block. Raises ConfigError listing every problem."""
        if self.elastic is None:
            return None
        axes = {ElasticAxis(name): choices for name, choices in self.elastic.axes.items()}
        return build_space(
            self.model,
            axes,
            shard_groups=self.elastic.shard_groups,
            num_expert_groups=self.elastic.expert_groups,
            drop_order=self.elastic.drop_order,
        )

    def pinned_plans(self) -> dict[str, SubmodelPlan]:
        """Budget -> plan for the budgets that pin one, and the parent for the first budget."""
        space = self.space
        if self.elastic is None or space is None:
            return {}
        plans = {next(iter(self.elastic.budgets)): space.parent}
        for name, budget in self.elastic.budgets.items():
            if isinstance(budget, PinnedBudget):
                plans[name] = budget.on(space)
        return plans
