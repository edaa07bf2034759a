"""Defects of public elastic training on several ranks, each by its number in docs/defects.md, do not happen here.

Whole steps on every layout are in test_steps.py; these look at one part each, where a step would not say what is wrong.

Run: pytest tests/parallel/test_public_defects.py
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.checkpoint import save_checkpoint
from megatron_elastic.checkpoint.sharded.storage import Shards
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.elastic.decision import Decision, Mode
from megatron_elastic.errors import CheckpointError
from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import shards
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import forget_router_losses
from megatron_elastic.recipe import CheckpointConfig, DistillConfig, Recipe
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import randomize_, tiny_moe, tiny_shape
from megatron_elastic.train.data import MicroBatch
from megatron_elastic.train.decide import Decider
from megatron_elastic.train.loop import check_teacher, start_parallel
from megatron_elastic.train.run import Run, parent_checkpoint
from megatron_elastic.train.step import accumulate_gradients
from tests.elastic.family import PARENTS, build_family, layer_axes, narrowed, relative, run, staggered, tiny_space
from tests.parallel.layouts import LAYOUTS, models
from tests.parallel.steps import gathered, outcome, recipe_of, rows, sample
from tests.parallel.test_steps import differences

Layouts = list[dict[str, Any]]


def on_layouts(rank: int, world: int, task: Any, layouts: Layouts, *args: Any) -> list[Any]:
    """task(parallel, *args) on each of the layouts, one after another on the same ranks."""
    found = []
    for layout in layouts:
        parallel = ParallelContext.initialize(**layout)
        try:
            found.append(task(parallel, *args))
        finally:
            parallel.destroy()
    return found


# U2, G66: what a module of a stage follows


def attachments(parallel: ParallelContext, parent: str) -> dict[str, Any]:
    """Every place where a module of this rank asks for a decision, by its name in the whole model -> what it is told there.

    The name comes from the place of the part in the pipeline, not from what the modules think their number is.
    """
    shape = PARENTS[parent]()
    parts = [build_model(shape, parallel, part=part) for part in range(parallel.virtual_pipeline)]
    space = tiny_space(shape, layer_axes(shape))
    handle, found = elasticize(parts, space, parallel, shape), {}
    layers = shape.num_layers // (parallel.pipeline * parallel.virtual_pipeline)
    for mode in Mode:
        with handle.use(staggered(space, None, 1), mode):
            assert handle.decision is not None
            for number, part in enumerate(parts):
                first = layers * (number * parallel.pipeline + parallel.pipeline_rank)
                for name, module in part.named_modules():
                    full = re.sub(r"^decoder\.layers\.(\d+)", lambda match, first=first: f"layer {first + int(match[1])}", name)
                    for key, site in vars(module).items():
                        if key.endswith("site") and name != "decoder":  # a stack is elastic between stages only
                            found[f"{full}, {key}, {mode.value}"] = told(site, handle.decision)
    return found


def told(site: Any, decision: Decision) -> tuple[Any, ...]:
    """Global layer, kept entries of each dim, whether the layer is kept."""
    like = torch.zeros(1)
    dims = [dim for key in ("dim", "rows", "cols", "experts") if (dim := vars(site).get(key)) is not None]
    kept = [None if (entries := decision.numbered(dim, site.layer, like)) is None else entries.tolist() for dim in dims]
    gate = decision.gate(site.layer, like)
    return site.layer, kept, gate is None or float(gate), site.layer in decision.skipped


@pytest.mark.dist
@pytest.mark.parametrize(("parent", "layout"), [("hybrid", "PP2"), ("dense", "PP2"), ("moe", "PP2"), ("moe", "VPP2")])
def test_u2_g66_a_module_of_a_stage_follows_the_layer_it_is_in_the_whole_model(ranks: Any, parallel: Any, parent: str, layout: str) -> None:
    expected = attachments(parallel, parent)
    first, second = (found for (found,) in ranks(on_layouts, 2, attachments, [dict(LAYOUTS[layout].parallel)], parent))
    assert not first.keys() & second.keys()
    assert first | second == expected
    by_kind: dict[str, set[str]] = {}
    for name, (_, kept, *_) in expected.items():
        by_kind.setdefault(re.sub(r"\d+", "", name), set()).add(str(kept))
    assert any(len(answers) > 1 for answers in by_kind.values()), "all layers are told the same: the test proves nothing"


# U3, U16, G75: who decides


def decisions(parallel: ParallelContext, layout: dict[str, Any] | None = None) -> tuple[list[tuple[str, dict[str, torch.Tensor]]], bool]:
    """The decisions of three steps after every global generator of this rank was moved, and whether none of them moved further."""
    torch.manual_seed(100 + parallel.rank)
    random.seed(100 + parallel.rank)
    before = (torch.get_rng_state(), random.getstate())
    recipe = recipe_of(tiny_moe(), None, "soft", layout or {})
    assert recipe.space is not None
    decider, found = Decider(recipe, recipe.space, parallel.device), []
    for step in range(3):
        for group in decider.decide(recipe.stages[0], step, 0.2):
            found.append((group.budget, {axis.value: leaf.detach() for axis, leaf in group.leaves.items()}))
    return found, torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.dist
def test_u3_every_rank_of_every_layout_decides_the_same_whatever_its_generators(ranks: Any, parallel: Any) -> None:
    expected, unmoved = decisions(parallel)
    assert unmoved and len({budget for budget, _ in expected}) == 4
    for by_layout in ranks(on_layouts, 2, decisions, [{}, {"tensor": 2}, {"pipeline": 2}, {"expert": 2}, {"context": 2}]):
        for found, unmoved in by_layout:
            assert unmoved
            for (budget, pi), (wanted, expected_pi) in zip(found, expected, strict=True):
                assert budget == wanted and pi.keys() == expected_pi.keys()
                assert all(torch.equal(pi[axis], expected_pi[axis]) for axis in pi)


# G8: the strength of a router's own losses


def router_gradients(parallel: ParallelContext) -> dict[str, torch.Tensor]:
    """The gradient of a router's weight from its auxiliary loss alone and from its z loss alone, as the parent and with fewer experts."""
    moe, found = tiny_moe().moe, {}
    assert moe is not None
    shares = parallel.tensor * parallel.context
    tokens = torch.randn(24, 2, 40, generator=torch.Generator().manual_seed(4)).chunk(shares)[parallel.rank % shares]
    for losses in ({"aux_loss": 0.02}, {"z_loss": 0.03}):
        forget_router_losses()
        model: Any = build_model(tiny_moe(moe=replace(moe, **losses)), parallel)
        randomize_(model, seed=5)
        space = tiny_space(tiny_moe())
        handle = elasticize(model, space, parallel, tiny_moe())
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
        for plan in (None, narrowed(space, ElasticAxis.EXPERTS)):
            layer = model.decoder.layers[1].mlp
            model.zero_grad()
            with handle.use(plan):
                (layer(tokens)[0] * 0.0).sum().backward()
            gradient = layer.router.weight.grad.clone()
            for group in (parallel.tp, parallel.cp):
                dist.all_reduce(gradient, group=group)
            found[f"{next(iter(losses))}, {'parent' if plan is None else 'fewer experts'}"] = gradient
    forget_router_losses()
    return found


@pytest.mark.dist
def test_g8_auxiliary_losses_weigh_the_same_however_many_ranks_share_a_microbatch(ranks: Any, parallel: Any) -> None:
    expected = router_gradients(parallel)
    assert len(expected) == 4 and all(gradient.norm() > 1e-3 for gradient in expected.values())
    for by_layout in ranks(on_layouts, 2, router_gradients, [{"tensor": 2}, {"context": 2}]):
        for found in by_layout:
            assert {name: error for name in expected if (error := relative(found[name], expected[name])) > 1e-5} == {}


# G10, G12 to G16: experts without tokens


def expert_gradients(parallel: ParallelContext) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients by full name when every token goes to the first half of the experts: as the parent, and under a plan in both modes.

    Each twice, because what is wrong after the first backward shows in the second.
    """
    model, space, handle, shape = build_family(parallel)
    for layer in shape.layers_with("moe"):
        router = model.decoder.layers[layer].mlp.router
        router.expert_bias[: len(router.expert_bias) // 2] += 100.0
    plan, found = (
        space.plan({ElasticAxis.EXPERTS: 4, ElasticAxis.TOPK: 2, ElasticAxis.MOE_FFN: space.plan({}).width(ElasticAxis.MOE_FFN)}),
        {},
    )
    for name, chosen, mode in (("parent", None, "slice"), ("slice", plan, "slice"), ("mask", plan, "mask")):
        for _ in range(2):
            run(model, handle, chosen, mode)
            mine = {shard.name: shard.tensor for shard in shards(model) if shard.tensor.requires_grad}
            found[name] = {key: tensor.grad for key, tensor in mine.items() if tensor.grad is not None}
            assert found[name].keys() == mine.keys(), "a parameter got no gradient"
    return found


@pytest.mark.dist
def test_g10_g12_to_g16_an_expert_rank_without_tokens_takes_part_with_gradients_of_zero(ranks: Any, parallel: Any) -> None:
    expected = expert_gradients(parallel)
    both = [found for (found,) in ranks(on_layouts, 2, expert_gradients, [{"expert": 2}])]
    for way, wanted in expected.items():
        assert both[0][way].keys() | both[1][way].keys() == wanted.keys()
        for rank, found in enumerate(both):
            for name, gradient in found[way].items():
                assert gradient.isfinite().all(), f"{way}: {name} on rank {rank}"
                expert = re.search(r"local_experts\.(\d+)\.", name)
                if expert is None:
                    assert gradient.any() and relative(gradient, wanted[name]) < 1e-5, f"{way}: {name} on rank {rank}"
                elif int(expert[1]) < (4 if way == "parent" else 2):
                    # both ranks send it the same text
                    assert gradient.any() and relative(gradient, 2 * wanted[name]) < 1e-5, f"{way}: {name} on rank {rank}"
                else:
                    assert not gradient.any(), f"{way}: {name} got no token on rank {rank}"


# G33, G35, G67: the teacher and the loss


@pytest.fixture(scope="module")
def parent(tmp_path_factory: Any, _one_process: Any) -> Any:
    """shape -> a checkpoint of it, weights moved off their start."""
    root = tmp_path_factory.mktemp("parents")

    def of(name: str, shape: ModelShape) -> Path:
        if not (root / name).exists():
            model = build_model(shape, _one_process)
            randomize_(model, seed=5)
            save_checkpoint(root / name, model=model, shape=shape, parallel=_one_process)
        return root / name

    return of


def started(recipe: Recipe) -> Run:
    """A run at its first step, elastic."""
    found = Run(recipe, start_parallel(recipe))
    found.resume()
    found.become_elastic(parent_checkpoint(found.recipe))
    return found


def unequal(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """The loss counts in 1 to 22 tokens of a sample."""
    for batch in batches:
        mask = (torch.arange(batch.row_tokens) < 1 + 3 * (batch.first_sample % 8)).float()[None]
        yield replace(batch, loss_mask=mask)


def step_gradients(rank: int, world: int, recipe: Recipe) -> tuple[list[tuple[str, float, int]], dict[str, torch.Tensor]]:
    """What this rank reports of each of its microbatches (budget, loss, tokens), and every gradient of the step."""
    this = started(recipe)
    try:
        assert this.decider is not None
        groups = this.decider.decide(this.stage, 0, 0.0)
        for chunk in this.chunks:
            chunk.zero_grad_buffer()
        outputs = accumulate_gradients(this, groups, unequal(rows(recipe.model.vocab_size, this.parallel)))
        return [(out["budget"], float(out["sum"]), int(out["tokens"])) for out in outputs], gathered(this, "main_grad")
    finally:
        this.parallel.destroy()


@pytest.fixture(scope="module")
def distilled(ranks: Any, parent: Any) -> Any:
    """layout -> `step_gradients` of every rank; the loss is the distillation loss alone."""
    shape = models()["moe"]
    checkpoint, known = parent("moe", shape), {}

    def on(layout: str | None) -> Any:
        if layout not in known:
            recipe = recipe_of(shape, checkpoint, "hard", {} if layout is None else dict(LAYOUTS[layout].parallel))
            recipe = replace(recipe, distill=DistillConfig(kl_weight=1.0, ce_weight=0.0, chunk_tokens=7, teacher_bytes=2e4))
            known[layout] = ranks(step_gradients, 1 if layout is None else 2, recipe)
        return known[layout]

    return on


def assert_same_gradients(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert {name: error for name in expected if (error := relative(found[name], expected[name])) > 1e-5} == {}


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["PP2", "VPP2"])
def test_g67_every_microbatch_meets_its_own_teacher_through_a_pipeline(distilled: Any, layout: str) -> None:
    ((alone, expected),) = distilled(None)
    (first, gradients), (last, _) = distilled(layout)
    assert first == [] and [row[::2] for row in last] == [row[::2] for row in alone]
    losses = [loss for _, loss, _ in alone]
    assert [loss for _, loss, _ in last] == pytest.approx(losses, rel=1e-5, abs=1e-5)
    assert sum(loss > 0.1 for loss in losses) >= 4, "the teacher is the student: the test proves nothing"
    assert_same_gradients(gradients, expected)


@pytest.mark.dist
def test_g35_the_loss_is_a_mean_over_the_tokens_of_the_global_batch(distilled: Any) -> None:
    ((alone, expected),) = distilled(None)
    assert [tokens for *_, tokens in alone] == [1, 4, 7, 10, 13, 16, 19, 22]
    (even, gradients), (odd, _) = distilled("DP2")
    both = [row for pair in zip(even, odd, strict=True) for row in pair]
    assert [row[::2] for row in both] == [row[::2] for row in alone]
    assert [loss for _, loss, _ in both] == pytest.approx([loss for _, loss, _ in alone], rel=1e-5, abs=1e-5)
    assert_same_gradients(gradients, expected)


def teacher_refusals(rank: int, world: int, recipe: Recipe) -> list[str]:
    """What is said of the right teacher, and of one that has zeros for a weight of the first stage, then of the last."""
    this, said = started(recipe), []
    texts: Any = type("Texts", (), {"valid": [sample(recipe.model.vocab_size, 0)]})
    this.datasets = lambda: texts
    try:
        for stage in (None, 0, 1):
            teacher = dict(this.teacher.named_parameters())
            weight = next(p for name, p in teacher.items() if name.endswith("linear_proj.weight"))
            before = weight.detach().clone()
            if stage == this.parallel.pipeline_rank:
                weight.data.zero_()
            try:
                check_teacher(this)
                said.append("")
            except CheckpointError as error:
                said.append(str(error))
            weight.data.copy_(before)
    finally:
        this.parallel.destroy()
    return said


@pytest.mark.dist
def test_g33_a_teacher_that_was_not_loaded_is_refused_on_every_rank_of_a_pipeline(ranks: Any, parent: Any) -> None:
    shape = models()["moe"]
    first, second = ranks(teacher_refusals, 2, recipe_of(shape, parent("moe", shape), "hard", {"pipeline": 2}))
    assert first == second
    assert [message.startswith("KL(parent || full budget) is") for message in first] == [False, True, True] and first[0] == ""


# G76, G77: saves in the background


def overlapping_saves(rank: int, world: int, recipe: Recipe) -> list[str]:
    """What happens in order: a file is written, or `latest` is looked at: after each of two saves has begun, and at the end."""
    this, write, order = started(recipe), Shards.write, []

    def slow(self: Shards) -> Any:
        time.sleep(0.5)
        order.append("written")
        return write(self)

    def look() -> None:
        pointer = this.checkpoints / "latest"
        order.append(pointer.read_text(encoding="utf-8").strip() if pointer.exists() else "nothing yet")

    Shards.write = slow
    try:
        for this.step in (1, 2):
            this.save(stage_end=False)
            look()
        this.finish_save(block=True)
        look()
    finally:
        Shards.write = write
        this.parallel.destroy()
    return order


@pytest.mark.dist
def test_g76_g77_a_save_waits_for_the_one_before_it_and_latest_for_what_it_names(ranks: Any, parent: Any, tmp_path: Path) -> None:
    shape = models()["moe"]
    recipe = recipe_of(shape, parent("moe", shape), "hard", {}, run_dir=str(tmp_path), checkpoint=CheckpointConfig(asynchronous=True))
    (order,) = ranks(overlapping_saves, 1, recipe)
    assert order == ["nothing yet", "written", "step-short-0000001", "written", "step-short-0000002"]


# G70: stages with experts and stages without


@pytest.mark.dist
@pytest.mark.parametrize(("pattern", "layout"), [("ME*M-M", "PP2xEP2"), ("M-ME*M", "PP2")])
def test_g70_a_stage_without_experts_beside_one_with_them_takes_the_same_steps(ranks: Any, parent: Any, pattern: str, layout: str) -> None:
    shape = tiny_shape(layer_pattern=pattern, tied_embeddings=False)
    checkpoint = parent(pattern.replace("*", "A"), shape)
    (expected,) = ranks(outcome, 1, recipe_of(shape, checkpoint, "soft", {}))
    found = ranks(outcome, LAYOUTS[layout].ranks, recipe_of(shape, checkpoint, "soft", dict(LAYOUTS[layout].parallel)))[0]
    wrong = differences(found, expected)
    assert not wrong, "\n".join(wrong[:40])
