"""Proves that a recipe and a running layout mean the same sizes, that what an installed release lacks is said without importing it, and that
`validate`, building and `elasticize` refuse with the same words.

Run: pytest tests/test_fit.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_elastic import fit
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.errors import ConfigError, UnsupportedError
from megatron_elastic.fit import LayoutSizes, model_problems, release_problems, space_problems
from megatron_elastic.models.build import build_model
from megatron_elastic.models.config import model_configs
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform import versions
from megatron_elastic.platform.versions import Generation
from megatron_elastic.preflight import recipe_problems
from megatron_elastic.recipe import ParallelConfig, Recipe
from megatron_elastic.testing.tiny import tiny_moe, tiny_shape
from tests.elastic.family import tiny_space

INTERLEAVED = ParallelConfig(pipeline=2, virtual_pipeline=3)
WHOLE_EXPERTS = ParallelConfig(tensor=2, expert_tensor=1)


def context(parallel: ParallelContext, layout: ParallelConfig) -> ParallelContext:
    """A context of one process that takes itself for part of `layout`."""
    return replace(parallel, **{name: getattr(layout.sizes, name) for name in LayoutSizes.__dataclass_fields__})


def sizes_of(rank: int, world: int, layout: dict[str, Any]) -> LayoutSizes:
    parallel = ParallelContext.initialize(**layout)
    found = parallel.sizes
    parallel.destroy()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"expert": 2}, {"tensor": 2, "expert_tensor": 1, "sequence_parallel": False}])
def test_a_recipe_and_a_running_layout_have_the_same_sizes(ranks: Any, layout: dict[str, Any]) -> None:
    assert ranks(sizes_of, 2, layout) == [ParallelConfig(**layout).sizes] * 2


def test_defaults_follow_the_other_sizes() -> None:
    layouts = ParallelConfig(), ParallelConfig(tensor=2), ParallelConfig(tensor=2, expert=2)
    assert [(layout.sizes.sequence_parallel, layout.sizes.expert_tensor) for layout in layouts] == [(False, 1), (True, 2), (True, 1)]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (INTERLEAVED, "parallel.virtual_pipeline 3: the hybrid stack of megatron-core 0.16.1 has one part"),
        (WHOLE_EXPERTS, "parallel.expert 1 with expert_tensor 1 and tensor 2: megatron-core 0.16.1 never sums these experts' gradients"),
    ],
)
def test_what_the_older_release_lacks_is_said_before_and_when_building(
    layout: ParallelConfig, message: str, _one_process: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, recipe = tiny_shape(), Recipe(format_version=1, model=tiny_shape(), parallel=layout)
    monkeypatch.setattr(versions, "megatron_generation", lambda: Generation.V0_16)
    (problem,) = recipe_problems(recipe)
    assert problem.startswith(message)
    with pytest.raises(UnsupportedError) as caught:
        model_configs(shape, context(_one_process, layout))
    assert caught.value.problems == [problem]
    monkeypatch.setattr(versions, "megatron_generation", lambda: Generation.V0_19)
    assert recipe_problems(recipe) == []


def test_without_megatron_core_nothing_is_said_of_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "megatron_generation", lambda: Generation.V0_16)
    assert release_problems(tiny_shape(), INTERLEAVED.sizes)
    monkeypatch.setattr(fit, "installed_release", lambda: None)
    assert release_problems(tiny_shape(), INTERLEAVED.sizes) == release_problems(tiny_moe(), WHOLE_EXPERTS.sizes) == []


def test_building_and_attaching_refuse_with_the_words_of_the_recipe(_one_process: ParallelContext) -> None:
    shape, layout = tiny_shape(), ParallelConfig(tensor=3, sequence_parallel=False, pipeline=4, virtual_pipeline=2, expert=3, context=3)
    space, parallel = tiny_space(shape), context(_one_process, layout)
    of_model, of_space = model_problems(shape, layout.sizes), space_problems(space, shape, layout.sizes)
    assert len(of_model) >= 6 and len(of_space) >= 4 and len(set(of_model)) == len(of_model)
    with pytest.raises(ConfigError) as caught:
        model_configs(shape, parallel)
    assert caught.value.problems == of_model
    assert recipe_problems(Recipe(format_version=1, model=shape, parallel=layout))[: len(of_model)] == of_model
    with pytest.raises(ConfigError) as caught:
        elasticize(build_model(shape, _one_process), space, parallel, shape)
    assert caught.value.problems == of_space
