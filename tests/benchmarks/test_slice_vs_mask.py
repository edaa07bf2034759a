"""The benchmark of slice and mask mode runs on a tiny family, compares the right plan, and reports counts that the cost model confirms.

Run: pytest tests/benchmarks
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import slice_vs_mask
from benchmarks.paired import Seconds, Spread, Timed, paired, take_turns
from megatron_elastic.config import to_plain
from megatron_elastic.cost import flops_per_token, widths_of
from megatron_elastic.errors import ConfigError
from megatron_elastic.space import parent_plan, resize
from megatron_elastic.testing.tiny import tiny_shape
from tests.elastic.family import tiny_space

pytestmark = pytest.mark.one_release
TOKENS = 36
HALF = {"hidden": 16, "ffn": 28, "moe_ffn": 20, "shared_ffn": 16, "heads": 4, "mamba_heads": 4, "mamba_head_dim": 2, "mamba_state": 2}
HALF |= {"experts": 4, "topk": 1}
"""Nearest to half of the parent's among the choices of the tiny family; some are the narrower of two."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: Any) -> Path:
    """A recipe of the tiny family."""
    elastic = {
        "shard_groups": 4,
        "drop_order": [3, 4, 1, 0, 2],
        "budgets": {"full": 1.0},
        "axes": {spec.axis.value: list(spec.choices) for spec in tiny_space(tiny_shape()).axes},
    }
    path = tmp_path_factory.mktemp("benchmark") / "tiny.yaml"
    path.write_text(yaml.safe_dump({"format_version": 1, "model": to_plain(tiny_shape()), "elastic": elastic}))
    return path


@pytest.fixture(scope="module")
def result(recipe: Path, _one_process: Any) -> dict[str, Any]:
    """The benchmark's result with the fewest pairs."""
    return slice_vs_mask.measure(slice_vs_mask.Options(recipe, pairs=2, tokens=TOKENS), _one_process)


def test_the_last_line_is_the_whole_result(result: dict[str, Any], capsys: Any) -> None:
    slice_vs_mask.print_report(result)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == result
    assert {line.split()[0] for line in lines if "to" in line and line.startswith(slice_vs_mask.VARIANTS)} >= {"slice", "mask", "parent"}
    assert set(result) == {
        *("benchmark", "format_version", "recipe", "shape", "plan", "tokens", "pairs", "warm_up", "threads", "versions"),
        *("largest_logit_difference", "flops", "saved_bytes", "ratios", "cpu_ratios"),
    }
    assert result["versions"].keys() == {"python", "torch", "megatron-core", "megatron-elastic"}
    for clock in ("ratios", "cpu_ratios"):
        assert list(result[clock]) == [f"{name}/{base}" for name, base in slice_vs_mask.PAIRS]
        assert all(0 < ratio["q1"] <= ratio["median"] <= ratio["q3"] for ratio in result[clock].values())


def test_every_axis_is_at_the_choice_nearest_to_half(result: dict[str, Any]) -> None:
    assert result["plan"]["widths"] == HALF
    assert result["plan"]["dropped_layers"] == [0, 1, 3, 4]


def test_flops_are_those_of_the_extracted_shape_and_of_the_parent(result: dict[str, Any]) -> None:
    shape = tiny_shape()
    small = resize(shape, slice_vs_mask.half_width_plan(tiny_space(shape)))

    def flops(of: Any) -> int:
        return TOKENS * flops_per_token(of, widths_of(parent_plan(of), of.num_layers), TOKENS)

    narrow, wide = dict.fromkeys(("slice", "late_soft", "extracted"), flops(small)), dict.fromkeys(("mask", "full", "parent"), flops(shape))
    assert result["flops"] == narrow | wide


def test_slice_mode_saves_what_the_extracted_model_saves(result: dict[str, Any], recipe: Path, _one_process: Any) -> None:
    longer = slice_vs_mask.measure(slice_vs_mask.Options(recipe, pairs=2, tokens=2 * TOKENS), _one_process)["saved_bytes"]
    saved = result["saved_bytes"]
    # Cut copies of small parameters (convolution, per-head vectors) do not grow with the tokens. What is left is the router, which
    # keeps the parent's numbering of the experts: a few values a token and expert, in a family of 16 channels.
    growth = {name: longer[name] - saved[name] for name in saved}
    assert growth["slice"] == pytest.approx(growth["extracted"], rel=0.05)
    assert growth["mask"] > 1.5 * growth["extracted"]
    assert growth["full"] == growth["parent"] > 1.5 * growth["extracted"]


def test_nothing_is_timed_when_the_logits_disagree(recipe: Path, _one_process: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(slice_vs_mask, "TOLERANCE", -1.0)
    with pytest.raises(AssertionError, match="nothing was timed"):
        slice_vs_mask.measure(slice_vs_mask.Options(recipe, pairs=2, tokens=TOKENS), _one_process)


def test_a_recipe_without_a_family_is_refused(tmp_path: Path, _one_process: Any) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump({"format_version": 1, "model": to_plain(tiny_shape())}))
    with pytest.raises(ConfigError, match="no elastic block"):
        slice_vs_mask.measure(slice_vs_mask.Options(path, pairs=2, tokens=TOKENS), _one_process)


def test_a_model_that_does_not_fit_is_refused(_one_process: Any) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "nemotron_3_nano_30b.yaml"
    with pytest.raises(ConfigError, match="needs about 1176 GiB, .* GiB are free; give a smaller one"):
        slice_vs_mask.measure(slice_vs_mask.Options(recipe, pairs=2, tokens=128), _one_process)


def test_one_pair_has_no_quartiles(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        slice_vs_mask.parse(["--pairs", "1"])
    assert "--pairs 1: quartiles need at least 2" in capsys.readouterr().err


def test_the_default_recipe_is_the_one_beside_the_script() -> None:
    options = slice_vs_mask.parse([])
    assert options.shape.is_file() and options.pairs >= 15


def test_variants_take_turns() -> None:
    order: list[str] = []
    variants = {name: Timed(run=lambda name=name: order.append(name), prepare=lambda: order.append("-")) for name in "abc"}
    rounds: list[int] = []
    seconds = take_turns(variants, 3, warm_up=1, done=rounds.append)
    assert "".join(order) == "-c-a-b" + "-a-b-c" + "-b-c-a" + "-c-a-b"
    assert rounds == [1, 2, 3]
    assert all(len(runs) == 3 and isinstance(runs[0], Seconds) for runs in seconds.values())


def test_ratios_are_taken_within_a_round() -> None:
    assert paired([1.0, 20.0, 300.0, 8.0], [1.0, 10.0, 100.0, 2.0]) == Spread(2.5, 1.75, 3.25)
