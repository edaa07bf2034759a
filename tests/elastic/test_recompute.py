"""Activation recompute changes nothing but memory: gradients of weights and of soft decisions and what routers count stay bit for bit, also
when other microbatches with other decisions ran in between, as 1F1B and interleaved schedules do.

Run: pytest tests/elastic/test_recompute.py
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.moe.router import TopKRouter

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.elastic.attach import ElasticHandle, elasticize
from megatron_elastic.elastic.decision import Decision, Mode, Slot, soft_decision
from megatron_elastic.models.build import build_model
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import Generation, forget_router_losses, megatron_generation
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import randomize_, tiny_moe
from tests.elastic.family import PARENTS, forward_backward, layer_axes, narrowed, staggered, text, tiny_space

RECOMPUTED = ("selective", "full")


@pytest.fixture(autouse=True)
def _forget_losses(_one_process: Any) -> Any:
    """megatron's record of auxiliary losses is as long as the first model of the process is deep, and these tests read it."""
    forget_router_losses()
    yield
    forget_router_losses()


def shape_of(parent: str, **moe: Any) -> ModelShape:
    """A parent whose routers have every kind of loss; moe: fields to replace."""
    shape = PARENTS[parent]()
    return shape if shape.moe is None else replace(shape, moe=replace(shape.moe, aux_loss=0.05, z_loss=0.01, **moe))


def elastic_model(shape: ModelShape, parallel: Any, recompute: str) -> tuple[Any, ElasticSpace, ElasticHandle]:
    """A randomised model in training, every axis elastic, per layer where it can be."""
    model = build_model(shape, parallel, recompute=recompute).train()
    randomize_(model, seed=5)
    space = tiny_space(shape, layer_axes(shape))
    return model, space, elasticize(model, space, parallel, shape)


@dataclass
class Soft:
    """A router's decision. pi: its leaves."""

    pi: dict[ElasticAxis, torch.Tensor]
    decision: Decision


def soft(space: ElasticSpace, layers: int, seed: int, threshold: float = 0.0) -> Soft:
    """A soft decision over all axes."""
    rng = torch.Generator().manual_seed(seed)
    pi = {s.axis: torch.randn(s.places, len(s.choices), generator=rng).softmax(-1).requires_grad_() for s in space.axes}
    return Soft(pi, soft_decision(space, pi, layers, threshold))


def microbatches(space: ElasticSpace, layers: int) -> list[tuple[SubmodelPlan | Soft | None, Mode]]:
    """Decisions of every kind, none like the one before it; the threshold of 0.4 drops widths, and layers too."""
    return [
        (narrowed(space, None, 2), Mode.SLICE),
        (soft(space, layers, seed=1), Mode.MASK),
        (None, Mode.SLICE),
        (staggered(space, None, 1), Mode.MASK),
        (soft(space, layers, seed=2, threshold=0.4), Mode.MASK),
        (narrowed(space, None, 1), Mode.MASK),
        (staggered(space, None), Mode.SLICE),
    ]


def loss_of(model: Any, number: int) -> torch.Tensor:
    """The loss of microbatch `number`, whose text is its own."""
    tokens, positions = text()
    logits = model((tokens + 17 * number) % 131, positions, None)
    weight = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(number))
    return (logits.tanh() * weight).sum()


@dataclass
class Seen:
    """What must not depend on recompute, by name."""

    losses: list[torch.Tensor]
    grads: dict[str, torch.Tensor]
    leaves: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor]
    recorded: dict[str, torch.Tensor]


def step(model: Any, space: ElasticSpace, handle: ElasticHandle) -> Seen:
    """All forwards first, each under its decision; then all backwards, under a decision that is none of theirs."""
    forget_router_losses()
    batches = microbatches(space, handle.shape.num_layers)
    losses = []
    for number, (decision, mode) in enumerate(batches):
        with handle.use(decision.decision if isinstance(decision, Soft) else decision, mode):
            losses.append(loss_of(model, number))
    with handle.use(narrowed(space, ElasticAxis.HIDDEN, 1)):
        current = handle.decision
        for loss in losses:
            loss.backward()
        assert handle.decision is current
    softs = {str(n): decision for n, (decision, _) in enumerate(batches) if isinstance(decision, Soft)}
    leaves = {f"{n}.{axis}": leaf.grad for n, decision in softs.items() for axis, leaf in decision.pi.items() if leaf.grad is not None}
    assert len(leaves) > len(space.axes)  # the threshold drops layers, and leaves of theirs get none
    return Seen(
        [loss.detach() for loss in losses],
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        leaves,
        {name: value.clone() for name, value in model.named_buffers()},
        recorded_losses(),
    )


def recorded_losses() -> dict[str, torch.Tensor]:
    """What megatron has recorded of auxiliary losses: kind -> [layers]."""
    if megatron_generation() is Generation.V0_16:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return {name: entry["values"].clone() for name, entry in get_moe_layer_wise_logging_tracker().items()}
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker  # pyright: ignore[reportMissingImports]

    return {name: entry.values.clone() for name, entry in get_moe_metrics_tracker().metrics.items()}


def check_same(seen: Seen, expected: Seen) -> None:
    """Bit for bit."""
    assert all(torch.equal(a, b) for a, b in zip(seen.losses, expected.losses, strict=True))
    for mine, theirs in ((getattr(seen, kind), getattr(expected, kind)) for kind in ("grads", "leaves", "counts", "recorded")):
        assert mine.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("parent", PARENTS)
def test_u10_every_microbatch_is_computed_again_under_its_own_decision(_one_process: Any, parent: str, recompute: str) -> None:
    shape = shape_of(parent)
    expected = step(*elastic_model(shape, _one_process, "none"))
    model, space, handle = elastic_model(shape, _one_process, recompute)
    check_same(step(model, space, handle), expected)
    if shape.moe is not None:
        assert {"load_balancing_loss", "z_loss"} <= expected.recorded.keys()
        assert any(name.endswith("local_tokens_per_expert") and value.any() for name, value in expected.counts.items())


@pytest.mark.parametrize("parent", PARENTS)
def test_u10_a_decision_that_is_not_replayed_is_seen(_one_process: Any, parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(parent)
    expected = step(*elastic_model(shape, _one_process, "none"))
    monkeypatch.setattr(Slot, "replaying", lambda slot, decision: nullcontext())
    with pytest.raises((AssertionError, RuntimeError)):  # other gradients, or torch finds other tensors than it saved
        check_same(step(*elastic_model(shape, _one_process, "full")), expected)


def test_vectors_that_a_forward_derived_are_derived_again(_one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the tensors that each run saves: a replay that finds them cached saves fewer."""

    @contextmanager
    def cached(slot: Slot, decision: Decision | None) -> Any:
        with slot.holding(held[0]):
            yield

    model, space, handle = elastic_model(shape_of("dense"), _one_process, "full")
    held = [soft(space, 4, seed=1).decision]
    monkeypatch.setattr(Slot, "replaying", cached)
    with handle.use(held[0]):
        loss = loss_of(model, 0)
    with pytest.raises(RuntimeError, match="different number of tensors"):
        loss.backward()


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_g51_a_token_goes_to_the_same_experts_again(_one_process: Any, kind: str) -> None:
    model, space, handle = elastic_model(shape_of("moe"), _one_process, "full")
    maps: list[torch.Tensor] = []
    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        router.register_forward_hook(lambda module, args, output: maps.append(output[1].clone()))
    with handle.use(soft(space, 4, seed=1).decision if kind == "soft" else narrowed(space, None, 1)):
        loss = loss_of(model, 0)
    layers = len(maps)
    with handle.use(narrowed(space, ElasticAxis.EXPERTS)), torch.no_grad():
        loss_of(model, 1)
    forward, maps[:] = maps[:layers], []
    loss.backward()
    assert layers == len(maps) > 0
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(maps), strict=True))


def test_g50_what_is_counted_in_a_forward_is_counted_once(_one_process: Any) -> None:
    """Statistics come from forwards without gradient or in evaluation, which are not run again, and a layer's own hooks see one run."""
    model, _, _ = elastic_model(shape_of("hybrid"), _one_process, "full")
    calls = {"layer": 0, "linear": 0}
    layer = model.decoder.layers[0]
    layer.register_forward_hook(lambda *args: calls.__setitem__("layer", calls["layer"] + 1))
    layer.mixer.in_proj.register_forward_hook(lambda *args: calls.__setitem__("linear", calls["linear"] + 1))
    counters = {name: value.clone() for name, value in model.named_buffers()}
    with torch.no_grad():
        loss_of(model, 0)
    assert calls == {"layer": 1, "linear": 1}
    assert all(torch.equal(value, counters[name]) for name, value in model.named_buffers())
    loss_of(model.eval(), 0).backward()
    assert calls == {"layer": 2, "linear": 2}
    loss_of(model.train(), 0).backward()
    assert calls == {"layer": 3, "linear": 4}


@pytest.mark.parametrize("parent", PARENTS)
def test_models_that_are_not_elastic(_one_process: Any, parent: str) -> None:
    shape, expected = shape_of(parent), None
    for recompute in ("none", *RECOMPUTED):
        forget_router_losses()
        model = build_model(shape, _one_process, recompute=recompute).train()
        randomize_(model, seed=5)
        losses = [loss_of(model, number) for number in range(3)]
        for loss in losses:
            loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        seen = Seen([loss.detach() for loss in losses], grads, {}, dict(model.named_buffers()), recorded_losses())
        expected = expected or seen
        check_same(seen, expected)


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("parent", PARENTS)
def test_the_full_budget_is_the_parent_and_so_is_what_is_left_after_remove(_one_process: Any, parent: str, recompute: str) -> None:
    shape = shape_of(parent)
    plain = build_model(shape, _one_process).train()
    randomize_(plain, seed=5)
    logits, grads = forward_backward(plain)
    model, space, handle = elastic_model(shape, _one_process, recompute)
    with handle.use(space.parent):
        _check_parent(model, logits, grads)
    handle.remove()
    _check_parent(model, logits, grads)


def _check_parent(model: Any, logits: torch.Tensor, grads: dict[str, torch.Tensor]) -> None:
    mine, mine_grads = forward_backward(model)
    assert torch.equal(mine, logits)
    assert mine_grads.keys() == grads.keys()
    assert all(torch.equal(mine_grads[name], grads[name]) for name in grads)


@pytest.mark.parametrize("parent", PARENTS)
def test_a_graph_that_is_kept_can_go_backward_twice(_one_process: Any, parent: str) -> None:
    model, space, handle = elastic_model(shape_of(parent), _one_process, "full")
    with handle.use(soft(space, handle.shape.num_layers, seed=1).decision):
        loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * once[name]) for name, p in model.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("parent", PARENTS)
def test_main_grad_is_written_once(_one_process: Any, parent: str) -> None:
    shape, buffers = shape_of(parent), []
    for recompute in ("none", "full"):
        model, space, handle = elastic_model(shape, _one_process, recompute)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True)
        chunk = DistributedDataParallel(model.config, config, model)
        chunk.zero_grad_buffer()
        losses = []
        for number, plan in enumerate((narrowed(space, None, 1), None, soft(space, shape.num_layers, seed=1).decision)):
            with handle.use(plan):
                losses.append(loss_of(model, number))
        for number, loss in enumerate(losses):
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.is_last_microbatch = number == len(losses) - 1
            loss.backward()
        chunk.finish_grad_sync()
        buffers.append({name: p.main_grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[0])
    assert any(value.any() for value in buffers[0].values())


def saved_bytes(model: Any, handle: ElasticHandle, plan: SubmodelPlan | Decision | None) -> int:
    """Bytes that a forward leaves for the backward, parameters not counted."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), handle.use(plan):
        loss_of(model, 0)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("kind", ["parent", "hard", "soft"])
@pytest.mark.parametrize("parent", PARENTS)
def test_less_is_saved(_one_process: Any, parent: str, kind: str) -> None:
    shape, sizes = shape_of(parent), {}
    for recompute in ("none", *RECOMPUTED):
        model, space, handle = elastic_model(shape, _one_process, recompute)
        decisions = {"parent": None, "hard": narrowed(space, None, 1), "soft": soft(space, shape.num_layers, seed=1).decision}
        sizes[recompute] = saved_bytes(model, handle, decisions[kind])
    assert sizes["selective"] < sizes["none"]
    assert sizes["full"] < sizes["none"] / 3


def _expert_parallel(rank: int, world: int) -> list[str]:
    """Names of what differs with recompute over two ranks that exchange tokens."""
    parallel = ParallelContext.initialize(expert=world)
    shape, steps = replace(tiny_moe(), moe=replace(tiny_moe().moe, aux_loss=0.05, z_loss=0.01)), []  # pyright: ignore[reportArgumentType]
    for recompute in ("none", "full"):
        model, space, handle = elastic_model(shape, parallel, recompute)
        steps.append(step(model, space, handle))
    parallel.destroy()
    plain, again = steps
    pairs = [(again.grads, plain.grads), (again.leaves, plain.leaves), (again.counts, plain.counts), (again.recorded, plain.recorded)]
    return [f"rank {rank}: {name}" for mine, theirs in pairs for name in theirs if not torch.equal(mine[name], theirs[name])]


def test_tokens_are_exchanged_again_over_expert_parallel_ranks(ranks: Any) -> None:
    assert ranks(_expert_parallel, 2) == [[], []]
