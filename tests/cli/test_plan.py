"""`plan`: the published sizes, from numbers alone: within two seconds of work and without importing torch; columns stay whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_elastic.cli.plan import command
from megatron_elastic.errors import ConfigError, PlanError

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = Path(__file__).parent / "tiny.yaml"
SCRIPT = """
import sys, time, typer
from megatron_elastic.cli.plan import command
app = typer.Typer()
app.command()(command)
app(sys.argv[1:], standalone_mode=False)
print("torch" in sys.modules, "megatron" in sys.modules, "transformers" in sys.modules, time.process_time(), file=sys.stderr)
"""


def plan(*arguments):
    """Output of the command in this process. Errors propagate."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def table(output):
    """The first table as budget -> column -> text, from the positions of words alone."""
    lines = output.split("\n\n")[0].splitlines()
    header, *rows = [line.split("  ") for line in lines]
    names = [word.strip() for word in header if word.strip()]
    found = {}
    for row in rows:
        cells = [word.strip() for word in row if word.strip()]
        assert len(cells) == len(names), row
        found[cells[0]] = dict(zip(names, cells, strict=True))
    return found


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("nemotron_3_nano_30b", {"full": ("31.58B", "3.58B"), "medium": ("23.92B", "2.82B"), "small": ("12.23B", "2.01B")}),
        ("nemotron_nano_v2_12b", {"full": ("12.31B", "12.31B"), "medium": ("8.83B", "8.83B"), "small": ("5.95B", "5.95B")}),
        ("nemotron_nano_v2_9b", {"full": ("8.89B", "8.89B"), "medium": ("6.02B", "6.02B"), "small": ("3.99B", "3.99B")}),
    ],
)
def test_published_sizes_in_two_seconds_without_torch(name, sizes):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(RECIPES / f"{name}.yaml")], capture_output=True, text=True, check=True, timeout=60
    )
    assert {budget: (row["total"], row["active"]) for budget, row in table(done.stdout).items()} == sizes
    *imported, seconds = done.stderr.split()
    assert imported == ["False"] * 3
    assert float(seconds) < 2  # of work: the wall clock also shows what else the machine does


def test_columns():
    full = table(plan(RECIPES / "nemotron_3_nano_30b.yaml", "--sequence-length", "8192"))["full"]
    assert full == {
        "budget": "full",
        "total": "31.58B",
        "active": "3.58B",
        "target": "3.58B",
        "cost/target": "1.000",
        "GFLOPs/token": "7.34",
        "weight GiB": "58.82",
        "hidden": "2688",
        "moe_ffn": "1856",
        "shared_ffn": "3712",
        "heads": "32",
        "mamba_heads": "64",
        "mamba_head_dim": "64",
        "mamba_state": "128",
        "experts": "128",
        "topk": "6",
        "layers": "52",
    }


def test_formats_and_lengths():
    path = RECIPES / "nemotron_3_nano_30b.yaml"
    assert table(plan(path, "--format", "nvfp4"))["full"]["weight GiB"] == "17.50"
    assert table(plan(path, "--format", "fp32"))["full"]["weight GiB"] == "117.64"
    short, long = (float(table(plan(path, "--sequence-length", n))["full"]["GFLOPs/token"]) for n in (128, 262144))
    assert long - short == pytest.approx(4 * (262144 - 128) * 32 * 128 * 6 / 1e9, abs=0.02)  # six attention layers
    assert "49,152-token sequences. Weights: bf16." in plan(path), "the last stage's length is the default"


def test_targets_get_a_nested_uniform_plan():
    rows = table(plan(TINY))
    assert [row["cost/target"] for row in rows.values()][0] == "1.000"
    assert all(abs(float(row["cost/target"]) - 1) <= 0.02 for row in rows.values())
    assert all(
        int(rows["full"][axis]) >= int(rows["medium"][axis]) >= int(rows["small"][axis])
        for axis in ("hidden", "moe_ffn", "heads", "layers")
    )


def test_the_space_is_printed_with_its_reach():
    output = plan(TINY)
    axes = output.split("\n\n")[1]
    assert [line.split() for line in axes.splitlines()][:2] == [
        ["axis", "groups", "choices"],
        ["hidden", "1", "128", "112", "96", "80", "64"],
    ]
    assert "8,640 plans; active_params from 182.68K to 774.58K." in output


PER_LAYER = (
    "elastic.axes.moe_ffn={choices: [192, 144, 96, 64], per_layer: true}",
    "elastic.budgets.small={plan: {hidden: 64, moe_ffn: [96, 64]}}",
)


def test_per_layer_widths_are_ranges():
    output = plan(TINY, *PER_LAYER)
    rows = table(output)
    assert rows["small"]["moe_ffn"] == "64..96 (2 layers)" and rows["full"]["moe_ffn"] == "192"
    assert "moe_ffn (2 layers)       2  192 144 96 64" in output and "34,560 plans;" in output
    # The layer that is dropped has no say in the range.
    dropped = table(plan(TINY, PER_LAYER[0], "elastic.drop_order=[1]", "elastic.budgets.small={plan: {layers: 5, moe_ffn: [96, 64]}}"))
    assert dropped["small"]["moe_ffn"] == "64"


def test_the_widths_of_every_layer():
    full, small = [part.splitlines() for part in plan(TINY, "--layers", "elastic.budgets.medium=0.9", *PER_LAYER).split("\n\n")[3:6:2]]
    assert (full[0], small[0]) == ("full, layer by layer:", "small, layer by layer:")
    head, *rows = [line.split() for line in small[1:]]
    assert head[:3] == ["layer", "sublayers", "ffn"]
    layers = [dict(zip(head, row, strict=True)) for row in rows]
    assert [layer["sublayers"] for layer in layers] == ["mamba", "moe", "attention", "mlp", "mamba", "moe"]
    assert [layer["moe_ffn"] for layer in layers] == ["-", "96", "-", "-", "-", "64"]
    assert [layer["heads"] for layer in layers] == ["-", "-", "8", "-", "-", "-"]
    gone = plan(TINY, "--layers", "elastic.budgets.medium=0.9", "elastic.budgets.small={plan: {layers: 5}}").split("\n\n")[5].splitlines()
    assert gone[5].split() == ["3", "dropped", *["-"] * 9]


def test_targets_between_budgets_get_nested_plans():
    rows = table(plan(TINY, "--target", "0.5", "--target", "580000"))
    assert list(rows) == ["full", "medium", "small", "target 0.5", "target 580000"]
    assert rows["target 0.5"]["target"] == "387.29K" and rows["target 580000"]["target"] == "580.00K"
    assert all(abs(float(rows[name]["cost/target"]) - 1) <= 0.02 for name in rows)
    for axis in ("hidden", "moe_ffn", "heads", "mamba_heads", "experts", "layers"):
        widths = [int(rows[name][axis]) for name in ("full", "target 580000", "medium", "target 0.5", "small")]
        assert widths == sorted(widths, reverse=True)
    assert table(plan(TINY, "--target", "1"))["target 1"]["hidden"] == "128"


def test_targets_out_of_reach():
    with pytest.raises(
        PlanError, match=r"target 7745\.76: no plan nested in budget 'small' costs that within 0\.02; the nearest reachable"
    ):
        plan(TINY, "--target", "0.01")
    with pytest.raises(PlanError, match="target 9e\\+06 is above the parent's cost 774576; ask for less"):
        plan(TINY, "--target", "9e6")
    with pytest.raises(PlanError, match="the recipe has no elastic block"):
        plan(TINY, "elastic=null", "stages=[]", "--target", "0.5")
    pair = ("elastic.budgets.medium={plan: {ffn: 256}}", "elastic.budgets.small={plan: {ffn: 128}}", "router.tolerance=[0.05, 1e-6]")
    with pytest.raises(
        PlanError, match="no plan between budgets 'medium' and 'small' costs that within 1e-06; the nearest reachable cost is"
    ):
        plan(TINY, *pair, "--target", "700000")


def test_many_plans_are_counted_roughly():
    axes = [
        "elastic.axes.moe_ffn={choices: [192, 144, 96, 64], per_layer: true}",
        "elastic.axes.ffn={choices: [512, 256], per_layer: true}",
    ]
    exact = 5 * 2**2 * 4**7 * 3 * 3 * 2 * 3 * 2
    assert f"{exact:,} plans;" in plan(TINY, "model.layer_pattern=ME*-E5-E", "elastic.axes.layers=[11, 10]", *axes)
    many = 5 * 2 * 4**16 * 3 * 3 * 2 * 3 * 2
    assert 10**12 < many and "about 10^12 plans;" in plan(TINY, "model.layer_pattern=ME*-E15", "elastic.axes.layers=[19, 18]", *axes)


@pytest.mark.parametrize("columns", ["20", "80"])
def test_a_narrow_terminal_cuts_nothing(monkeypatch, columns):
    wide = plan(TINY)
    monkeypatch.setenv("COLUMNS", columns)
    assert plan(TINY) == wide


def test_overrides_and_recipes_without_a_family():
    changed = table(plan(TINY, "elastic.budgets.small=0.5"))
    assert changed["small"]["target"] == "387.29K"
    alone = plan(TINY, "elastic=null", "stages=[]")
    assert list(table(alone)) == ["parent"] and "target" not in table(alone)["parent"] and "plans" not in alone


@pytest.mark.parametrize("cost", ["total_params", "flops", "memory"])
def test_targets_in_other_units(cost):
    # Keys, values and activations do not shrink as the weights do, so that half the memory is a small model.
    rows = table(plan(TINY, f"elastic.cost={cost}", *(["elastic.budgets.small=0.5"] if cost == "memory" else [])))
    unit = {"total_params": "M", "flops": "GFLOPs", "memory": "GiB"}[cost]
    assert rows["full"]["target"].endswith(unit) and abs(float(rows["small"]["cost/target"]) - 1) <= 0.02


def test_mistakes():
    path = TINY
    with pytest.raises(ConfigError, match="weight format 'int3' is unknown; use fp32, bf16, fp8, nvfp4"):
        plan(path, "--format", "int3")
    with pytest.raises(ConfigError, match="sequence length 100 is not a multiple of model.mamba.chunk 32; use 96"):
        plan(path, "--sequence-length", "100")
    with pytest.raises(ConfigError, match="sequence length 0 "):
        plan(path, "--sequence-length", "0")
    with pytest.raises(ConfigError, match="no recipe at"):
        plan("nothing.yaml")


def test_help_has_examples():
    output = plan("--help")
    assert "Examples:" in output and "megatron-elastic plan recipes/nemotron_3_nano_30b.yaml" in output
