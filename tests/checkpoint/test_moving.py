"""A run saved at one parallel layout goes on at another: every weight, moment, expert bias and step number is what was saved, bit for bit,
and the next step's loss is that of a run that never moved.

Public defects covered: G25, G26, G27, G28, G30, G32, G46 (see docs/defects.md).
Run: pytest tests/checkpoint/test_moving.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from megatron_elastic.checkpoint import load_checkpoint, save_checkpoint
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe
from tests.train.harness import different, stored

STATE = {"step": 2, "router": {"weight": torch.arange(3.0)}}
SHAPES = {"hybrid": tiny_run.SHAPE, "moe": tiny_moe(), "tied": tiny_dense(gated=False, tied_embeddings=True)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "EP2": {"expert": 2},
    "DP2": {},
    "VPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "TP2xPP2": {"tensor": 2, "pipeline": 2},
}
ROUTES = {
    "hybrid": ["TP2", "EP2", "PP2"],
    "moe": ["VPP2", "EP2", "TP2"],
    "tied": ["PP2", "TP2", "VPP2", "DP2"],
}
SAME_MATH = 1e-5
"""Relative: other layouts add up in another order."""


def save(run: tiny_run.Run, directory: Path, shape: ModelShape) -> None:
    save_checkpoint(directory, model=run.chunks, optimizer=run.optimizer, state=STATE, shape=shape, parallel=run.parallel)


def load(run: tiny_run.Run, directory: Path, shape: ModelShape) -> dict[str, Any]:
    return load_checkpoint(directory, model=run.chunks, optimizer=run.optimizer, shape=shape, parallel=run.parallel)


def begun(parallel: ParallelContext, directory: Path, shape: ModelShape) -> list[float]:
    """Save a run after two steps; the losses of its third, one for each text."""
    run = tiny_run.start(parallel, shape=shape)
    tiny_run.train(run, 0, 2)
    save(run, directory, shape)
    tiny_run.train(run, 2, 1)
    return run.losses[-2:]


def travel(rank: int, world_size: int, shape: ModelShape, source: str, route: list[str]) -> dict[str, list[float]]:
    """Load and save again on each layout of a route, each from what the one before it saved; this rank's losses of the next step there."""
    losses, previous = {}, Path(source)
    for stop, name in enumerate(route):
        parallel = ParallelContext.initialize(**LAYOUTS[name])
        run = tiny_run.start(parallel, shape=shape, seed=8 + stop)
        assert load(run, previous, shape)["step"] == 2
        previous = Path(source).with_name(f"{stop}-{name}")
        save(run, previous, shape)
        tiny_run.train(run, 2, 1)
        losses[previous.name] = run.losses
        parallel.destroy()
    return losses


def state_of(checkpoint: Path, shape: ModelShape) -> dict[str, torch.Tensor]:
    """What is stored, after a look that it holds what a move could lose: every expert apart, moments of everything, a bias that moved."""
    found = stored(checkpoint)
    for kind in ("exp_avg", "exp_avg_sq", "param"):
        moments = {key.removeprefix(f"optimizer.state.{kind}."): value for key, value in found.items() if f"state.{kind}." in key}
        assert moments.keys() == {key for key in found if key.startswith(("decoder.", "embedding.", "output_layer."))} - {
            key for key in found if key.endswith("expert_bias")
        }
        assert all(value.count_nonzero() for value in moments.values())
    if shape.moe is not None:
        wanted = ("decoder.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
        stacked = [value for key, value in found.items() if ".experts.linear_fc1.weight" in key and key.startswith(wanted)]
        each = [float(expert.double().sum()) for value in stacked for expert in value.flatten(0, -3)]
        assert len(each) == len(set(each)) >= 3 * 2 * 8  # of two layers' experts or more: each has its own, none twice
        assert any(key.endswith("expert_bias") and value.count_nonzero() for key, value in found.items())
    assert found["common.optimizer.step"] == 2
    return found


@pytest.mark.dist
@pytest.mark.parametrize("name", [pytest.param("hybrid", marks=pytest.mark.slow), "moe", "tied"])
def test_a_move_changes_nothing(ranks, parallel, tmp_path, name):
    shape = SHAPES[name]
    route = ROUTES[name]
    expected = begun(parallel, tmp_path / "one", shape)
    losses = ranks(travel, 2, shape, str(tmp_path / "one"), route)
    before = state_of(tmp_path / "one", shape)
    back = tiny_run.start(parallel, shape=shape, seed=20)
    last = f"{len(route) - 1}-{route[-1]}"
    state = load(back, tmp_path / last, shape)
    assert torch.equal(state["router"]["weight"], STATE["router"]["weight"])
    save(back, tmp_path / "back", shape)
    for stop in [*losses[0], "back"]:
        assert different(state_of(tmp_path / stop, shape), before) == [], stop
    for stop in losses[0]:
        found = [one[stop] for one in losses if one[stop]]
        both = [loss for texts in zip(*found, strict=True) for loss in texts] if "DP2" in stop or "EP2" in stop else found[-1]
        assert both == pytest.approx(expected, rel=SAME_MATH), stop


def begin_on_ranks(rank: int, world_size: int, shape: ModelShape, directory: str, layout: str) -> None:
    parallel = ParallelContext.initialize(**LAYOUTS[layout])
    begun(parallel, Path(directory), shape)
    parallel.destroy()


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "apart"), [("TP2", 1e-4), ("VPP2", 1e-6)])
def test_moments_of_two_ranks_are_saved_under_the_names_of_one(ranks, parallel, tmp_path, layout, apart):
    """Trained apart, to rounding: what each rank's optimizer holds is saved as its own parameter's.

    apart: norm of the difference over the norm, about four times the largest of any tensor. VPP2 computes the same numbers but for the norm that
    gradients are clipped by. TP2 adds up in another order, which changes a gradient g by about 1e-9. Adam's first step is g / (|g| + 1e-8) of the
    learning rate, so the few weights with a g below 1e-8 come to differ by up to 2e-4, and with them every gradient of the second step by 3e-5.
    """
    shape = SHAPES["moe"]
    begun(parallel, tmp_path / "one", shape)
    ranks(begin_on_ranks, 2, shape, str(tmp_path / "two"), layout)
    one, two = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert one.keys() == two.keys()
    states = [key for key in one if key.startswith(("optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.param."))]
    assert len(states) >= 3 * 4 * 10  # of four layers, each with more than ten parameters
    differences = {key: float((two[key] - one[key]).norm() / one[key].norm()) for key in states}
    assert {key: value for key, value in differences.items() if not value <= apart} == {}


@pytest.mark.dist
@pytest.mark.slow
def test_four_ranks_to_two_to_one(ranks, parallel, tmp_path):
    """Saved at TP2 x PP2 by its own training, continued at EP2 and at 1; losses there are those of the ranks that never moved."""
    shape = SHAPES["hybrid"]
    stayed = ranks(four_ranks, 4, str(tmp_path / "four"))[-1]
    losses = ranks(travel, 2, shape, str(tmp_path / "four"), ["EP2"])
    alone = tiny_run.start(parallel, shape=shape, seed=9)
    load(alone, tmp_path / "0-EP2", shape)
    save(alone, tmp_path / "one", shape)
    before = state_of(tmp_path / "four", shape)
    for stop in ("0-EP2", "one"):
        assert different(state_of(tmp_path / stop, shape), before) == [], stop
    tiny_run.train(alone, 2, 1)
    assert alone.losses == pytest.approx(stayed, rel=SAME_MATH)
    assert [losses[0]["0-EP2"][0], losses[1]["0-EP2"][0]] == pytest.approx(stayed, rel=SAME_MATH)


def four_ranks(rank: int, world_size: int, directory: str) -> list[float]:
    parallel = ParallelContext.initialize(**LAYOUTS["TP2xPP2"])
    losses = begun(parallel, Path(directory), SHAPES["hybrid"])
    parallel.destroy()
    return losses
