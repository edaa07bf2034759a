"""A member with one width a layer in place of many is the family's member of that wider plan, to transformers too; a model of another size agrees
with nothing.

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
from megatron_elastic.export.member import homogenise
from megatron_elastic.export.sources import open_source
from megatron_elastic.export.verify import Agreement, Verifier
from megatron_elastic.export.write import Options, write_member
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


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra hf")
def test_one_width_a_layer_is_a_wider_member(family: Path, parallel: Any, tmp_path: Path) -> None:
    source = open_source(family)
    assert source.space is not None
    uneven = source.plans["small"]
    write_member(source, uneven, tmp_path / "uneven", Options())
    write_member(source, uneven, tmp_path / "even", Options(hugging_face=True, homogenise=True))
    verifier = Verifier(source, parallel, TEXT, (), 22)
    even = verifier.check(homogenise(source.space, uneven), tmp_path / "even")
    assert even.holds and even.reader == "transformers" and even.loss is None and even.extracted_loss is None
    assert verifier.check(uneven, tmp_path / "uneven").holds
    other = verifier.check(uneven, tmp_path / "even")
    assert not other.holds and other.masked_sliced < 1e-4 and 0.1 < other.masked_extracted < 100


def test_what_is_no_number_or_of_another_size_agrees_with_nothing(family: Path, parallel: Any, tmp_path: Path) -> None:
    shape = replace(family_shapes()["qwen3_moe"], vocab_size=130)
    write_family(tmp_path / "other", shape)
    source = open_source(family)
    assert source.space is not None
    found = Verifier(source, parallel, TEXT.clamp(max=129), (), 22).check(source.space.parent, tmp_path / "other")
    assert found.masked_extracted == math.inf and not found.holds
    for sliced, extracted in ((math.nan, 0.0), (0.0, math.nan), (2e-4, 0.0), (0.0, 2e-4)):
        assert not Agreement("megatron", sliced, extracted, None, None).holds
    assert Agreement("megatron", 9e-5, 9e-5, None, None).holds
    assert Agreement("megatron", 2e-4, 2e-4, None, None, largest_logit=30.0).holds
    assert not Agreement("megatron", 2e-4, 4e-3, None, None, largest_logit=30.0).holds
