"""A member with one width an axis in place of one a layer is the family's member of that wider plan, to transformers too; a model of another size
is refused, and what is no number agrees with nothing.

Run: pytest tests/export/test_verify.py
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.axes import ElasticAxis, SubmodelPlan
from megatron_elastic.checkpoint import write_named
from megatron_elastic.elastic.attach import ElasticHandle
from megatron_elastic.errors import CheckpointError, PlanError
from megatron_elastic.export.member import homogenise
from megatron_elastic.export.sources import open_source
from megatron_elastic.export.verify import Agreement, Verifier
from megatron_elastic.export.write import Options, write_member
from megatron_elastic.space import AxisChoices, build_space, resize
from tests.elastic.family import narrowed, staggered, tiny_space
from tests.export.pretrained import family_shapes
from tests.export.random_family import write_family

TEXT = torch.randint(0, 131, (2, 22), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def family(tmp_path_factory: Any) -> Path:
    """A mixture of experts that may have another width in every layer, with random weights."""
    root, shape = tmp_path_factory.mktemp("family"), family_shapes()["qwen3_moe"]
    write_family(root / "same", shape)
    space = tiny_space(shape, (ElasticAxis.MOE_FFN, ElasticAxis.HEADS))
    tensors = open_source(root / "same").tensors
    write_named(root / "family", tensors.items(), shape, space=space, plans={"full": space.parent, "small": staggered(space, None, 1)})
    return root / "family"


def test_homogenise_takes_the_widest_layer_that_is_kept() -> None:
    shape = family_shapes()["qwen3_moe"]
    space = tiny_space(shape, (ElasticAxis.MOE_FFN,))
    assert space.spec(ElasticAxis.MOE_FFN).layers == (1, 2, 3)  # type: ignore[union-attr]
    drops = narrowed(space, ElasticAxis.LAYERS, 1).dropped_layers
    plan = SubmodelPlan.of(dict(space.parent.widths) | {ElasticAxis.MOE_FFN: (20, 56, 40)}, drops)
    assert drops == (2,)
    even = homogenise(space, plan)
    assert even.width(ElasticAxis.MOE_FFN) == 40 and even.dropped_layers == drops and even.homogeneous
    assert homogenise(space, replace(plan, dropped_layers=())).width(ElasticAxis.MOE_FFN) == 56
    assert homogenise(space, even) == even and homogenise(space, space.parent).homogeneous


def test_homogenise_where_no_layer_is_kept() -> None:
    """The width is that of `resize`, the widest."""
    shape = family_shapes()["qwen3_moe"]
    axes = {ElasticAxis.MOE_FFN: AxisChoices(choices=(56, 40, 24), per_layer=True), ElasticAxis.LAYERS: AxisChoices(choices=(4, 1))}
    space = build_space(shape, axes, shard_groups=4, drop_order=(3, 2, 1))
    plan = SubmodelPlan.of(dict(space.parent.widths) | {ElasticAxis.MOE_FFN: (24, 40, 24)}, (1, 2, 3))
    assert homogenise(space, plan).width(ElasticAxis.MOE_FFN) == 40
    assert resize(shape, homogenise(space, plan)) == resize(shape, plan)


def test_homogenise_checks_the_plan_first() -> None:
    space = tiny_space(family_shapes()["qwen3_moe"], (ElasticAxis.MOE_FFN,))
    plan = SubmodelPlan.of(dict(space.parent.widths) | {ElasticAxis.MOE_FFN: (56, 40)})
    with pytest.raises(PlanError, match="moe_ffn names 2 widths, but it has 3 layers"):
        homogenise(space, plan)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra hf")
def test_one_width_an_axis_is_a_wider_member(family: Path, parallel: Any, tmp_path: Path) -> None:
    source = open_source(family)
    assert source.space is not None
    uneven = source.plans["small"]
    write_member(source, uneven, tmp_path / "uneven", Options())
    write_member(source, uneven, tmp_path / "even", Options(hugging_face=True, homogenise=True))
    verifier = Verifier(source, parallel, TEXT, (), 22)
    even = verifier.check(homogenise(source.space, uneven), tmp_path / "even")
    assert even.holds and even.reader == "transformers" and even.loss is None and even.extracted_loss is None
    assert verifier.check(uneven, tmp_path / "uneven").holds
    assert verifier.check(uneven, tmp_path / "uneven").notes == even.notes == ()
    wider = verifier.check(uneven, tmp_path / "even")
    assert wider.holds and wider.notes == ("written with one width an axis, and compared with that wider member",)
    with pytest.raises(CheckpointError, match="does not have the sizes of its plan: decoder.layers.0.* is missing, not|is .*, not"):
        verifier.check(source.plans["full"], tmp_path / "even")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra hf")
def test_members_of_every_type_are_compared_in_turn(family: Path, parallel: Any, tmp_path: Path) -> None:
    """Rounded weights serve the members that are stored so, and no others."""
    source = open_source(family)
    small, verifier = source.plans["small"], Verifier(source, parallel, TEXT, (), 22)
    for dtype in ("float32", "bfloat16", "float16"):
        write_member(source, small, tmp_path / dtype, Options(dtype=dtype))
    write_member(source, small, tmp_path / "both", Options(dtype="bfloat16", hugging_face=True, homogenise=True))
    notes = {name: verifier.check(small, tmp_path / name) for name in ("bfloat16", "float32", "float16", "both")}
    assert all(found.holds for found in notes.values())
    assert [len(found.notes) for found in notes.values()] == [1, 0, 1, 2] and "stored in float16" in notes["float16"].notes[0]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra hf")
def test_the_family_computes_a_plan_once_for_both_formats(family: Path, parallel: Any, tmp_path: Path, monkeypatch: Any) -> None:
    source = open_source(family)
    assert source.space is not None
    plan, decisions = source.space.parent, []
    write_member(source, plan, tmp_path / "megatron", Options())
    write_member(source, plan, tmp_path / "hf", Options(hugging_face=True))
    use = ElasticHandle.use
    monkeypatch.setattr(ElasticHandle, "use", lambda handle, *args: decisions.append(args) or use(handle, *args))
    verifier = Verifier(source, parallel, TEXT, [TEXT[0].numpy()], 22)
    ours, theirs = verifier.check(plan, tmp_path / "megatron"), verifier.check(plan, tmp_path / "hf")
    assert decisions == [(plan, "mask"), (plan, "slice"), (plan,)]
    assert ours.holds and theirs.holds and ours.loss == theirs.loss and ours.reader != theirs.reader
    write_member(source, source.plans["small"], tmp_path / "small", Options())
    assert verifier.check(source.plans["small"], tmp_path / "small").holds and len(decisions) == 6, "another plan is computed"


def test_a_model_of_another_size_is_refused(family: Path, parallel: Any, tmp_path: Path) -> None:
    shape = replace(family_shapes()["qwen3_moe"], vocab_size=130)
    write_family(tmp_path / "other", shape)
    source = open_source(family)
    assert source.space is not None
    with pytest.raises(
        CheckpointError, match=r"sizes of its plan: embedding.word_embeddings.weight is \[130, 80\], not \[131, 80\]; extract"
    ):
        Verifier(source, parallel, TEXT.clamp(max=129), (), 22).check(source.space.parent, tmp_path / "other")


def test_what_is_no_number_agrees_with_nothing() -> None:
    for sliced, extracted in ((math.nan, 0.0), (0.0, math.nan), (2e-4, 0.0), (0.0, 2e-4)):
        assert not Agreement("megatron", sliced, extracted, None, None).holds
    assert Agreement("megatron", 9e-5, 9e-5, None, None).holds
    assert Agreement("megatron", 2e-4, 2e-4, None, None, largest_logit=30.0).holds
    assert not Agreement("megatron", 2e-4, 4e-3, None, None, largest_logit=30.0).holds
