"""The benchmark of balance counts what it says: shares of work against brute force, real routers on a tiny family, and the whole command.

Run: pytest tests/benchmarks
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import balance
from benchmarks.shares import BAR, SCHEMES, Balance, expert_flops, imbalance, kept_on_rank, live_experts, per_rank, prefix_flops, spaces_of
from megatron_elastic.axes import ElasticAxis
from megatron_elastic.config import load_recipe, to_plain
from megatron_elastic.cost import flops_per_token, widths_of
from megatron_elastic.errors import ConfigError
from megatron_elastic.recipe import Recipe
from megatron_elastic.shape import AttentionShape
from megatron_elastic.space import build_space
from megatron_elastic.testing.tiny import tiny_dense, tiny_shape

ROOT = Path(__file__).parents[2]
SEQUENCE, TOKENS = 72, 1440
AXES = {"hidden": [40, 24], "ffn": [72, 36], "moe_ffn": {"choices": [56, 28], "per_layer": True}, "shared_ffn": [48, 24], "heads": [12, 8]}
AXES |= {"mamba_heads": [16, 8], "experts": [8, 4]}
SMALL = {"hidden": 24, "ffn": 36, "moe_ffn": [28, 56], "shared_ffn": 24, "heads": 8, "mamba_heads": 8, "experts": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    """A recipe of a tiny family that reads bytes, in groups for four ranks."""
    attention = AttentionShape(heads=12, kv_groups=4, head_dim=10, qkv_bias=True)
    shape = tiny_shape(vocab_size=257, padded_vocab_size=264, attention=attention)
    elastic = {"shard_groups": 4, "expert_groups": 4, "axes": AXES, "budgets": {"full": 1.0, "small": {"plan": SMALL}}}
    path = tmp_path_factory.mktemp("balance") / "tiny.yaml"
    path.write_text(yaml.safe_dump({"format_version": 1, "model": to_plain(shape), "elastic": elastic}))
    return path


@pytest.fixture(scope="module")
def recipe(path: Path) -> Recipe:
    return load_recipe(path)


@pytest.fixture(scope="module")
def result(path: Path) -> dict[str, Any]:
    """What the command prints last. In a process of its own: it simulates ranks, and this one has its process group."""
    command = [sys.executable, "-m", "benchmarks.balance", "--shape", str(path), "--tokens", str(TOKENS), "--sequence", str(SEQUENCE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "EP 8 is left out: parallel.expert 8 does not divide the 4 groups" in done.stdout
    assert any(line.split()[:2] == ["small", "4"] and "1.00 | 2.00 (2)" in line for line in lines), done.stdout
    return json.loads(lines[-1])


def rows(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    found = [row for row in result["balances"] if all(row[key] == value for key, value in wanted.items())]
    assert found, wanted
    return found


def test_a_prefix_on_a_rank_is_what_counting_gives() -> None:
    for whole, ranks in ((8, 4), (24, 3), (6, 1)):
        for kept in range(whole + 1):
            shards = [range(rank * whole // ranks, (rank + 1) * whole // ranks) for rank in range(ranks)]
            brute = [len(set(shard) & set(range(kept))) for shard in shards]
            assert [kept_on_rank(kept, whole, ranks, rank) for rank in range(ranks)] == brute


def test_every_layer_waits_for_its_busiest_rank() -> None:
    assert imbalance([[3, 3, 3]]) == 1.0
    assert imbalance([[4, 2], [2, 4]]) == 8 / 6  # not 1, though both ranks have 6 in all
    found = Balance.of("small", "EP", "tokens", "grouped", [[4, 0], [2, 4]])
    assert (found.per_rank, found.idle, found.is_miss) == ((6, 4), 1, True)
    assert not replace(found, imbalance=BAR).is_miss and not replace(found, scheme="prefix").is_miss
    assert per_rank([1, 2, 3, 4, 5, 6], 3) == [3, 7, 11]


@pytest.mark.parametrize("gated", [True, False])
def test_flops_of_a_plain_prefix_are_those_of_every_shard_by_hand(gated: bool) -> None:
    shape = tiny_dense(gated=gated, attention=AttentionShape(heads=12, kv_groups=4, head_dim=10))
    space = build_space(
        shape, {ElasticAxis.HIDDEN: (40, 24), ElasticAxis.FFN: (72, 36), ElasticAxis.HEADS: (12, 8)}, shard_groups=4, drop_order=()
    )
    plan = space.plan({ElasticAxis.HIDDEN: 24, ElasticAxis.FFN: 36, ElasticAxis.HEADS: 8})
    by_hand = []
    for rank in range(4):
        context = 10 * sum(head < 8 for head in range(3 * rank, 3 * rank + 3))
        neurons = sum(neuron < 36 for neuron in range(18 * rank, 18 * rank + 18))
        layer = (context + 2 * 10) * 24 + 24 * context + (3 if gated else 2) * 24 * neurons + 2 * SEQUENCE * context
        by_hand.append(2 * SEQUENCE * (4 * layer + 136 // 4 * 24))
    assert prefix_flops(shape, space, plan, SEQUENCE, 4) == by_hand
    assert sum(by_hand) == SEQUENCE * flops_per_token(shape, widths_of(plan, 4), SEQUENCE)
    assert imbalance([by_hand]) > BAR


def test_flops_of_expert_ranks_are_those_of_their_tokens(recipe: Recipe) -> None:
    shape, space = recipe.model, recipe.space
    assert space is not None
    plan = balance.plans_of(recipe, space)["small"]
    counts = {1: [30, 0, 20, 0, 10, 0, 0, 0], 5: [0, 0, 0, 0, 15, 15, 15, 15]}  # 20 tokens, 3 experts each, in the two layers with experts
    first, second, rest = expert_flops(shape, plan, counts, 20, SEQUENCE, 2)
    assert (first, second) == ([2 * 2 * 24 * 28 * n for n in (50, 10)], [2 * 2 * 24 * 56 * n for n in (0, 60)])
    assert rest[0] == rest[1] > 0
    assert sum(first) + sum(second) + sum(rest) == 20 * flops_per_token(shape, widths_of(plan, shape.num_layers), SEQUENCE)


def test_groups_make_live_experts_even_and_without_them_it_is_a_miss(recipe: Recipe) -> None:
    shape, space = recipe.model, recipe.space
    assert space is not None
    plan = balance.plans_of(recipe, space)["small"]
    schemes = spaces_of(space, shape)
    assert list(schemes) == list(SCHEMES)
    assert live_experts(shape, schemes["grouped"], plan, 4) == [[1, 1, 1, 1]] * 2
    broken = live_experts(shape, schemes["prefix"], plan, 4)
    assert broken == [[2, 2, 0, 0]] * 2
    assert Balance.of("small", "EP", "live experts", "grouped", broken).is_miss


def test_routers_send_every_token_and_none_to_a_dropped_expert(recipe: Recipe, path: Path, _one_process: Any) -> None:
    space = recipe.space
    assert space is not None
    plans, schemes = balance.plans_of(recipe, space), spaces_of(space, recipe.model)
    routing = balance.Routing(recipe, _one_process, balance.Options(path, TOKENS, SEQUENCE))
    alive = {"grouped": [1, 0, 1, 0, 1, 0, 1, 0], "prefix": [1, 1, 1, 1, 0, 0, 0, 0]}
    for source in balance.SOURCES:
        for scheme in SCHEMES:
            counts = routing.counts(source, schemes[scheme], plans["small"])
            assert list(counts) == [1, 5]
            for count in counts.values():
                assert sum(count) == 3 * TOKENS and [int(n > 0) for n in count] == alive[scheme]


def test_a_balanced_parent_is_more_even_than_one_that_is_not(recipe: Recipe, path: Path, _one_process: Any) -> None:
    space = recipe.space
    assert space is not None
    routing = balance.Routing(recipe, _one_process, balance.Options(path, 20 * TOKENS, SEQUENCE))
    for router in routing.routers.values():
        router.weight.data[:4] *= 1.5  # louder experts are chosen more often
    before = routing.counts("drawn", space, space.parent)
    routing.balance_parent()
    after = routing.counts("drawn", space, space.parent)
    assert imbalance(list(after.values())) - 1 < (imbalance(list(before.values())) - 1) / 2
    routing.reset_bias()
    assert routing.counts("drawn", space, space.parent) == before


def test_the_last_line_is_the_whole_result(result: dict[str, Any]) -> None:
    described = {"benchmark", "format_version", "recipe", "shape", "tokens", "sequence", "versions", "plans", "bar"}
    assert set(result) == described | {"left_out", "balances", "misses"}
    assert list(result["plans"]) == ["parent", "small"] and result["plans"]["small"]["widths"]["moe_ffn"] == [28, 56]
    assert set(result["left_out"]) == {"EP 8", "TP 8"}
    assert result["misses"] == [row for row in result["balances"] if row["scheme"] == "grouped" and row["imbalance"] > BAR]


def test_every_rank_has_the_same_live_experts_and_flops_at_every_budget(result: dict[str, Any]) -> None:
    for layout, quantity, uneven in (
        ("EP", "live experts", 1.5),
        ("TP", "FLOPs", 1.4),
    ):  # keys, values and vocabulary are even in any scheme
        for row in rows(result, layout=layout, quantity=quantity, scheme="grouped"):
            assert row["imbalance"] == 1.0 and len(set(row["per_rank"])) == 1 and row["idle"] == 0, row
        assert max(row["imbalance"] for row in rows(result, layout=layout, quantity=quantity, scheme="prefix")) > uneven


def test_no_expert_rank_idles_at_the_smallest_budget(result: dict[str, Any]) -> None:
    for quantity in ("live experts", "drawn tokens", "text tokens"):
        for row in rows(result, budget="small", layout="EP", quantity=quantity, scheme="grouped"):
            assert row["idle"] == 0 and min(row["per_rank"]) > 0, row
        assert any(row["idle"] for row in rows(result, budget="small", layout="EP", quantity=quantity, scheme="prefix"))


def test_both_schemes_are_the_same_parent(result: dict[str, Any]) -> None:
    grouped, prefix = (rows(result, budget="parent", scheme=scheme) for scheme in SCHEMES)
    assert [{**row, "scheme": ""} for row in grouped] == [{**row, "scheme": ""} for row in prefix]


def test_what_cannot_be_counted_is_refused(tmp_path: Path, capsys: Any) -> None:
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump({"format_version": 1, "model": to_plain(tiny_shape())}))
    assert balance.main(["--shape", str(plain)]) == 2
    assert "no elastic block" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        balance.parse(["--sequence", "12"])
    assert "--sequence 12" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        balance.parse(["--tokens", "300"])
    assert "--tokens 300 is not a multiple of --sequence 256" in capsys.readouterr().err


def test_more_ranks_than_kv_groups_are_left_out() -> None:
    recipe = load_recipe(ROOT / "recipes" / "nemotron_3_nano_30b.yaml")
    assert balance._reason_against(recipe, "TP", 2) == ""
    assert "4 ranks compute keys and values of 2 KV groups" in balance._reason_against(recipe, "TP", 4)


def test_a_vocabulary_without_all_bytes_is_refused(recipe: Recipe, path: Path, _one_process: Any) -> None:
    small = replace(recipe, model=replace(recipe.model, vocab_size=131, padded_vocab_size=136))
    with pytest.raises(ConfigError, match="vocab_size 131 does not hold every byte"):
        balance.Routing(small, _one_process, balance.Options(path, TOKENS, SEQUENCE))


def test_the_default_family_runs_on_every_layout() -> None:
    recipe = load_recipe(balance.parse([]).shape)
    assert recipe.space is not None and all(not recipe.space.check_shards(n, n) for n in balance.RANKS)
