"""What the tests of the Transformer Engine layers run in a process of its own, where the stand-in is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from megatron_elastic.axes import ElasticSpace, SubmodelPlan
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.elastic.decision import Decision, soft_decision
from megatron_elastic.export.extract import extract
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors, scatter_tensors
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import canonical_name, packed_documents
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import resize
from megatron_elastic.testing.experts import stack_experts, unstack_experts
from megatron_elastic.testing.tiny import randomize_, tiny_dense, tiny_moe, tiny_shape
from tests.elastic.family import forward_backward, layer_axes, narrowed, relative, run, text, tiny_space

VARIANTS: dict[str, Callable[[], ModelShape]] = {
    "hybrid": tiny_shape,
    "hybrid-biases": lambda: tiny_shape(layer_pattern="M*-M-*", linear_bias=True, gated=True, activation="silu"),
    "dense": tiny_dense,
    "dense-layernorm": lambda: tiny_dense(gated=False, tied_embeddings=True),
    "moe": tiny_moe,
}
Gradients = dict[str, torch.Tensor]


@contextmanager
def one_layout(**layout: Any) -> Iterator[ParallelContext]:
    """A parallel layout for the length of a task."""
    parallel = ParallelContext.initialize(**layout)
    try:
        yield parallel
    finally:
        parallel.destroy()


def built(shape: ModelShape, parallel: ParallelContext, layers: str = "te") -> Any:
    """A randomised model: the same full model whatever its layers."""
    model = build_model(shape, parallel, layers=layers)
    randomize_(model, seed=7)  # with these weights no token's choice of experts hangs on rounding
    return model


def elastic(
    shape: ModelShape, parallel: ParallelContext, layers: str = "te", per_layer: bool = False
) -> tuple[Any, ElasticSpace, ElasticHandle]:
    """A randomised model, made elastic."""
    model = built(shape, parallel, layers)
    space = tiny_space(shape, layer_axes(shape) if per_layer else ())
    return model, space, elasticize(model, space, parallel, shape)


def mixed(space: ElasticSpace, shape: ModelShape, threshold: float) -> tuple[Decision, list[torch.Tensor]]:
    """A soft decision that cuts every second axis a little (with a threshold), and its leaves."""
    leaves = {}
    for number, spec in enumerate(space.axes):
        pi = torch.linspace(1.0, 2.0, len(spec.choices)).repeat(spec.places, 1)
        pi[:, 0] = 0.05 if number % 2 == 0 and len(spec.choices) > 1 else pi[:, 0]
        leaves[spec.axis] = (pi / pi.sum(-1, keepdim=True)).requires_grad_()
    return soft_decision(space, leaves, shape.num_layers, threshold), list(leaves.values())


def worst(actual: Gradients, expected: Gradients) -> float:
    """The largest relative difference of any gradient that is not zero."""
    return max(relative(actual[name], gradient) for name, gradient in expected.items() if float(gradient.norm()) > 1e-6)


def parameters_and_parent(rank: int, world: int, variant: str) -> Any:
    """(shapes by name with TE, with local layers, difference of logits, of gradients, loads the local model's tensors)."""
    with one_layout() as parallel:
        shape = VARIANTS[variant]()
        local, te = built(shape, parallel, "local"), build_model(shape, parallel, layers="te")
        scatter_tensors(te, gather_tensors(local))
        logits, grads = forward_backward(local)
        te_logits, te_grads = forward_backward(te)
        names = [{canonical_name(name): tuple(p.shape) for name, p in model.named_parameters()} for model in (te, local)]
        saved = [_saved_keys(model) for model in (te, local)]
        return *names, *saved, relative(te_logits, logits), worst(te_grads, grads)


def _saved_keys(model: Any) -> set[str]:
    from megatron_elastic.checkpoint.sharded.state import drop_extra_states

    keys: set[str] = set()
    todo: list[Any] = [drop_extra_states(model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp}))]
    while todo:
        item = todo.pop()
        todo += item.values() if isinstance(item, dict) else item if isinstance(item, list) else []
        keys |= set() if isinstance(item, dict | list) else {item.key}
    return keys


def agreement(rank: int, world: int, variant: str) -> dict[str, dict[str, float]]:
    """Axis (or "all") -> differences: of logits and gradients, masked from sliced and sliced from extracted; from the parent."""
    with one_layout() as parallel:
        shape = VARIANTS[variant]()
        model, space, handle = elastic(shape, parallel)
        whole, found = forward_backward(model)[0], {}
        for axis in [*(spec.axis for spec in space.axes), None]:
            plan = narrowed(space, axis, 1 if axis is None else 2)
            masked, masked_grads = run(model, handle, plan, "mask")
            sliced, sliced_grads = run(model, handle, plan, "slice")
            small = _extracted(model, space, shape, plan, parallel)
            logits, grads = forward_backward(small)
            kept = extract(stack_experts(_complete(model, sliced_grads)).items(), shape, space, plan)
            small_grads = stack_experts(grads)
            found["all" if axis is None else axis.value] = {
                "masked = sliced": relative(masked, sliced),
                "masked = sliced, gradients": worst(masked_grads, sliced_grads),
                "sliced = extracted": relative(sliced, logits),
                "sliced = extracted, gradients": worst(dict(kept), small_grads),
                "another model than the parent": relative(sliced, whole),
            }
        return found


def _complete(model: Any, grads: Gradients) -> Gradients:
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    return {name: grads.get(name, torch.zeros_like(parameter)) for name, parameter in named.items()}


def _extracted(model: Any, space: ElasticSpace, shape: ModelShape, plan: SubmodelPlan, parallel: ParallelContext) -> Any:
    small = build_model(resize(shape, plan), parallel, layers="te")
    scatter_tensors(small, unstack_experts(dict(extract(stack_experts(gather_tensors(model)).items(), shape, space, plan))))
    return small


def full_budget(rank: int, world: int, variant: str) -> bool:
    """Whether the parent, before and after, with no plan and with the parent's, is the same bit for bit."""
    with one_layout() as parallel:
        shape = VARIANTS[variant]()
        model = built(shape, parallel)
        before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
        logits, grads = forward_backward(model)
        space = tiny_space(shape)
        handle = elasticize(model, space, parallel, shape)
        runs = [run(model, handle, plan, mode) for plan in (None, space.parent) for mode in ("mask", "slice")]
        run(model, handle, narrowed(space, None), "slice")
        handle.remove()
        runs.append(forward_backward(model))
        same = all(torch.equal(other, logits) and all(torch.equal(g[name], grads[name]) for name in grads) for other, g in runs)
        return same and [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()] == before


def soft_against_local(rank: int, world: int, variant: str, threshold: float) -> dict[str, float]:
    """Differences from the local layers under a router's decision, gradients to the probabilities included."""
    with one_layout() as parallel:
        shape, results = VARIANTS[variant](), []
        for layers in ("local", "te"):
            model, space, handle = elastic(shape, parallel, layers, per_layer=True)
            decision, leaves = mixed(space, shape, threshold)
            logits, grads = run(model, handle, decision, "mask")
            results.append((logits, grads, {str(n): leaf.grad for n, leaf in enumerate(leaves) if leaf.grad is not None}))
        (logits, grads, slopes), (te_logits, te_grads, te_slopes) = results
        assert slopes.keys() == te_slopes.keys() and len(slopes) > 3
        return {"logits": relative(te_logits, logits), "weights": worst(te_grads, grads), "leaves": worst(te_slopes, slopes)}


def microbatches(rank: int, world: int, variant: str, overlap: bool) -> dict[str, float]:
    """Parameter -> difference of `main_grad` after microbatches in slice, mask and full width from the sum of their gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    with one_layout() as parallel:
        shape = VARIANTS[variant]()
        (reference, space, other), (model, _, handle) = elastic(shape, parallel, per_layer=True), elastic(shape, parallel, per_layer=True)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=overlap, grad_reduce_in_fp32=True)
        chunk = DistributedDataParallel(model.config, config, model)
        plans = [
            (narrowed(space, None, 1), "slice"),
            (space.parent, "slice"),
            (narrowed(space, None), "mask"),
            (narrowed(space, None), "slice"),
        ]
        expected: Gradients = {}
        for plan, mode in plans:
            for name, grad in run(reference, other, plan, mode)[1].items():
                expected[name] = expected.get(name, torch.zeros_like(grad)) + grad
        chunk.zero_grad_buffer()
        for number, (plan, mode) in enumerate(plans):
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.is_last_microbatch = number == len(plans) - 1
            with handle.use(plan, mode):
                logits = model(*text(), None)
            weight = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(3))
            (logits.tanh() * weight).sum().backward()
        chunk.finish_grad_sync()
        return {name: relative(p.main_grad, expected[canonical_name(name)]) for name, p in model.named_parameters()}


def kernel_calls(rank: int, world: int, variant: str) -> dict[str, int]:
    """How many linears there are, and how many of them run Transformer Engine's kernel in mask mode and in slice mode."""
    from transformer_engine.pytorch import Linear  # pyright: ignore[reportMissingImports] - the stand-in

    calls: list[Any] = []
    kernel = Linear._linear
    Linear._linear = lambda self, x: (calls.append(self), kernel(self, x))[1]
    try:
        with one_layout() as parallel:
            model, space, handle = elastic(VARIANTS[variant](), parallel)
            counts = {"linears": sum(isinstance(module, Linear) for module in model.modules())}
            plan = replace(narrowed(space, None, 1), dropped_layers=())
            for mode in ("mask", "slice"):
                calls.clear()
                run(model, handle, plan, mode)
                counts[mode] = len(calls)
            return counts
    finally:
        Linear._linear = kernel


def on_a_layout(rank: int, world: int, variant: str, layout: dict[str, int]) -> dict[str, float]:
    """Mode -> difference of logits and gradients of this rank from the local layers on the same layout."""
    with one_layout(**layout) as parallel:
        shape, found = VARIANTS[variant](), {}
        (local, space, local_handle), (te, _, te_handle) = elastic(shape, parallel, "local"), elastic(shape, parallel)
        for plan, mode in [(None, "slice"), (narrowed(space, None, 1), "mask"), (narrowed(space, None, 1), "slice")]:
            with local_handle.use(plan, mode):
                logits, grads = _even_forward_backward(local)
            with te_handle.use(plan, mode):
                te_logits, te_grads = _even_forward_backward(te)
            found[f"{mode} {'parent' if plan is None else 'plan'}"] = max(relative(te_logits, logits), worst(te_grads, grads))
        return found


def _even_forward_backward(model: Any) -> tuple[torch.Tensor, Gradients]:
    """As `forward_backward`, with a length that two ranks share."""
    model.zero_grad()
    logits = model(*text(length=24), None)
    (logits.tanh() * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def packed(rank: int, world: int, variant: str) -> float:
    """Difference from the local layers on packed documents, in slice mode."""
    with one_layout() as parallel:
        shape, logits = VARIANTS[variant](), []
        for layers in ("local", "te"):
            model, space, handle = elastic(shape, parallel, layers)
            documents = packed_documents(torch.tensor([0, 1, 10, 17, 23], dtype=torch.int32), 9, 23)
            with torch.no_grad(), handle.use(narrowed(space, None, 1)):
                logits.append(model(*text(batch=1), None, packed_seq_params=documents))
        return relative(logits[1], logits[0])


def zero_centered(rank: int, world: int, variant: str) -> dict[str, float]:
    """Mode -> difference made by storing every norm's weight less one, and saying so."""
    with one_layout() as parallel:
        shape, found = VARIANTS[variant](), {}
        model, space, handle = elastic(shape, parallel)
        plans = {"parent": (None, "slice"), "mask": (narrowed(space, None, 1), "mask"), "slice": (narrowed(space, None, 1), "slice")}
        before = {name: run(model, handle, *plan)[0] for name, plan in plans.items()}
        with torch.no_grad():
            for module in model.modules():
                if "zero_centered_gamma" in vars(module):
                    module.zero_centered_gamma = True
                    weight = module.layer_norm_weight if "layer_norm_weight" in module._parameters else module.weight
                    weight.sub_(1.0)
        for name, plan in plans.items():
            found[name] = relative(run(model, handle, *plan)[0], before[name])
        return found


def refusal(rank: int, world: int, what: str) -> str:
    """The message with which `elasticize` or `use` refuses a model."""
    from transformer_engine.pytorch import GroupedLinear  # pyright: ignore[reportMissingImports] - the stand-in

    from megatron_elastic.errors import UnsupportedError

    with one_layout() as parallel:
        shape = VARIANTS["moe"]()
        model, space = built(shape, parallel), tiny_space(shape)
        if what == "grouped module":
            model.decoder.layers[1].mlp.experts.linear_fc1 = GroupedLinear(2, 4, 4)
        elif what != "fp8":
            vars(model.config)[what] = {"softmax_type": "off-by-one"}.get(what, True)
        try:
            handle = elasticize(model, space, parallel, shape)
            model.config.fp8 = "hybrid"
            with handle.use(narrowed(space, None), "slice"):
                return "not refused"
        except UnsupportedError as error:
            return str(error)


def chosen(rank: int, world: int, layers: str) -> str:
    """The kind of the first projection of a model."""
    with one_layout() as parallel:
        model: Any = build_model(VARIANTS["dense"](), parallel, layers=layers)
        return type(model.decoder.layers[0].mlp.linear_fc1).__name__
