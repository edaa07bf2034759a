"""Random recipes on random layouts: refused by name before anything is built, or every part of a rank builds, becomes elastic and runs; and
one step of the smallest on real ranks equals one process. More tensor-parallel ranks than KV groups, whose rows are cut inside a group.

A rank stands alone in most of these (torch's fake process group, in a process of its own), so that layouts of 64 ranks cost one: values mean
nothing there, and an all-to-all returns a constant. Run: pytest tests/parallel/test_random_layouts.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.axes import ElasticAxis, ElasticSpace
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.errors import ConfigError
from megatron_elastic.models.build import build_model
from megatron_elastic.models.config import model_configs
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform import prepare_platform
from megatron_elastic.preflight import recipe_problems
from megatron_elastic.recipe import ParallelConfig, Recipe
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import build_space, parent_plan
from megatron_elastic.testing.tiny import tiny_dense
from tests.elastic.family import tiny_choices
from tests.parallel.random_layouts import Case, Summary, recipe_of, save_parent, steps, try_layouts
from tests.train.harness import in_new_process

EXAMPLES, SMALLEST = 1500, 20
"""Of the examples more than 200 are different layouts or kinds of model; hypothesis likes to change little."""


def in_fake_ranks(examples: int) -> Summary:
    """`try_layouts` in a process where no distributed run has been started."""
    prepare_platform()
    return try_layouts(examples)


@pytest.fixture(scope="module")
def summary() -> Summary:
    """What became of the random cases."""
    return in_new_process(in_fake_ranks, EXAMPLES)


def test_what_is_not_refused_builds_and_runs(summary: Summary) -> None:
    assert not summary.failures, f"{len(summary.failures)} layouts failed; the smallest:\n{summary.failures[0]}"


def test_the_cases_are_of_all_kinds(summary: Summary) -> None:
    built = [case.recipe.parallel for case in summary.built]
    assert len(built) + sum(summary.refused.values()) == summary.tried >= 200
    assert len(built) >= 60 and sum(summary.refused.values()) >= 60
    for key, sizes in (("tensor", {1, 2, 3, 4, 8}), ("pipeline", {1, 2, 3, 4}), ("context", {1, 2, 4}), ("expert", {1, 2, 4, 8})):
        assert {getattr(parallel, key) for parallel in built} >= sizes, key


@pytest.mark.dist
@pytest.mark.slow
def test_a_step_of_the_smallest_equals_one_process(summary: Summary, ranks: Any, _one_process: Any, tmp_path: Path) -> None:
    small = [case for case in summary.built if case.world in (2, 4)]
    small = sorted(small, key=lambda case: (case.recipe.model.num_layers, len(str(case))))[:SMALLEST]
    assert {case.world for case in small} == {2, 4} and len(small) >= SMALLEST // 2
    wrong = []
    for world in (2, 4):
        mine = [save_parent(case.recipe, tmp_path / str(number), _one_process) for number, case in enumerate(small) if case.world == world]
        found = ranks(steps, world, mine, timeout=300)[0]
        alone = ranks(steps, 1, [replace(recipe, parallel=ParallelConfig()) for recipe in mine], timeout=300)[0]
        wrong += [
            f"{got} is not {expected}: {Case(recipe, world, 0)}"
            for recipe, got, expected in zip(mine, found, alone, strict=True)
            if got != pytest.approx(expected, rel=1e-4)
        ]
    assert not wrong, "\n".join(wrong)


def _few_groups(*axes: ElasticAxis) -> tuple[ModelShape, ElasticSpace]:
    """A parent of 2 KV groups and a space of it for up to 4 ranks."""
    shape = tiny_dense()
    assert shape.attention is not None and shape.attention.kv_groups == 2
    choices = {axis: tiny_choices(shape, axis, width) for axis, width in parent_plan(shape).widths if isinstance(width, int)}
    return shape, build_space(shape, {axis: choices[axis] for axis in axes}, shard_groups=4)


@pytest.mark.dist
@pytest.mark.slow
def test_more_ranks_than_kv_groups_equal_one_process(ranks: Any, _one_process: ParallelContext, tmp_path: Path) -> None:
    shape, space = _few_groups(ElasticAxis.HIDDEN, ElasticAxis.FFN)
    recipe = recipe_of(shape, space, ParallelConfig(tensor=4), length=12, micro=2)
    assert recipe_problems(recipe) == []
    recipe = save_parent(recipe, tmp_path, _one_process)
    found, alone = ranks(steps, 4, [recipe])[0], ranks(steps, 1, [replace(recipe, parallel=ParallelConfig())])[0]
    assert found[0] == pytest.approx(alone[0], rel=1e-5)


def test_heads_are_not_cut_over_more_ranks_than_kv_groups(_one_process: ParallelContext) -> None:
    shape, space = _few_groups(ElasticAxis.HIDDEN, ElasticAxis.HEADS)
    message = (
        "parallel.tensor 4 above model.attention.kv_groups 2: elastic.axes.heads cannot be cut there; lower parallel.tensor to 2 or less"
    )
    assert message in "".join(recipe_problems(recipe_of(shape, space, ParallelConfig(tensor=4), length=12, micro=2)))
    assert recipe_problems(recipe_of(shape, space, ParallelConfig(tensor=2), length=12, micro=2)) == []
    with pytest.raises(ConfigError, match=message):
        elasticize(build_model(shape, _one_process), space, replace(_one_process, tensor=4), shape)


def test_keys_and_values_must_divide(_one_process: ParallelContext) -> None:
    shape = tiny_dense()
    assert shape.attention is not None
    for head_dim, fits in ((1, False), (2, True)):
        narrow = replace(shape, attention=replace(shape.attention, heads=8, kv_groups=1, head_dim=head_dim, rope_base=None))
        problems = recipe_problems(Recipe(format_version=1, model=narrow, parallel=ParallelConfig(tensor=4)))
        message = "parallel.tensor 4 does not divide the 2 keys and values of a token"
        assert (message in "".join(problems)) != fits
        if not fits:
            with pytest.raises(ConfigError, match=message):
                model_configs(narrow, replace(_one_process, tensor=4))
