"""`report`: a page, its plots, an aligned table with the baseline beside each budget, the same numbers as JSON, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from megatron_elastic.cli.report import command
from megatron_elastic.errors import CheckpointError, ConfigError
from tests.report.synthetic_run import FEW_AXES, FLOOR, write_run

PLOTS = {"loss_per_budget.png", "cost_vs_target.png", "quality_vs_cost.png", "learning_rate_and_speed.png", "router.png"}


def written(directory):
    """Names of the files of a report, those of plots apart; nothing temporary is left."""
    assert {path.name for path in directory.iterdir()} == {"report.html", "report.json", "plots"}
    return {path.name for path in (directory / "plots").iterdir()}


def report(*arguments):
    """Output of the command in this process. Errors propagate."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def table(output):
    """The table as rows of column -> text, from the positions of words alone."""
    header, *lines = output.split("\n\n")[1].splitlines()
    names = [word.strip() for word in header.split("  ") if word.strip()]
    rows = [[word.strip() for word in line.split("  ") if word.strip()] for line in lines]
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_a_run_alone(tmp_path):
    run = write_run(tmp_path / "run", parent_loss=True)
    output = report(run)
    assert written(run / "report") == PLOTS
    assert output.splitlines()[0] == f"wrote {run}/report/report.html"
    rows = table(output)
    assert rows[0] == {
        "budget": "full",
        "plan": "parent",
        "total": "1.36M",
        "active": "774.58K",
        "cost": "774.58K",
        "target": "774.58K",
        "cost/target": "1.000",
        "loss before": "2.0000",
        "after short": "2.0000",
        "after long": "1.7000",
        "extracted": "2.0000",
        "max diff": "2.0e-06",
    }
    assert [(row["budget"], row["plan"], row["after long"]) for row in rows[1:]] == [
        ("medium", "learned", "1.9000"),
        ("small", "learned", "2.2000"),
    ]
    assert output.split("\n\n")[2].splitlines() == [
        "larger budgets at least as good: yes (full 1.7000, medium 1.9000, small 2.2000)",
        "full within 2% of the parent: yes (1.7000 against 1.7500, -2.9%, on 1,024 tokens)",
        next(line for line in output.splitlines() if line.startswith("each cost within 5% of its target: yes (the farthest: ")),
        "small better after each stage: yes (short 5.0000 to 2.5000, long 2.2500 to 2.2000)",
        "each member part of the larger one: yes (full > medium > small)",
    ]


def test_numbers_stand_under_the_ends_of_their_titles(tmp_path):
    header, *lines = report(write_run(tmp_path / "run", "router.choice=uniform")).split("\n\n")[1].splitlines()
    for title in ("total", "cost/target", "after long", "max diff"):
        end = header.index(title) + len(title)
        assert all(line[end - 1] != " " and line[end : end + 2].strip() == "" for line in lines), title


def test_a_baseline_stands_below_each_budget(tmp_path):
    run = write_run(tmp_path / "run", *FEW_AXES)
    other = write_run(tmp_path / "other", *FEW_AXES, "router.choice=uniform", worse=0.1)
    (other / "verify.json").unlink()
    output = report(run, "--baseline", other)
    rows = table(output)
    assert [(row["budget"], row["run"], row["plan"]) for row in rows] == [
        *(("full", "run", "parent"), ("full", "other", "parent")),
        *(("medium", "run", "learned"), ("medium", "other", "uniform")),
        *(("small", "run", "learned"), ("small", "other", "uniform")),
    ]
    assert [rows[3][column] for column in ("loss before", "after long", "extracted", "max diff")] == ["3.1000", "2.0000", "-", "-"]
    assert not (other / "report").exists()
    assert "each smaller budget better than in other: yes (medium 1.9000 against 2.0000, small 2.2000 against 2.3000)" in output
    page = (run / "report" / "report.html").read_text()
    assert "better than in other" in page and "beside it the baseline other" in page


def test_the_numbers_are_also_json(tmp_path):
    run = write_run(tmp_path / "run", *FEW_AXES)
    other = write_run(tmp_path / "other", *FEW_AXES, "router.choice=uniform", worse=0.1)
    report(run, "--baseline", other, "--out", tmp_path / "out")
    assert not (run / "report").exists()
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["format_version"] == 2 and data["cost"] == "active_params"
    assert set(data["plots"]) == {f"plots/{name}" for name in PLOTS}
    assert data["stages"] == [{"name": "short", "sequence_length": 256}, {"name": "long", "sequence_length": 1024}]
    assert data["parent_loss"] == {"short": 2.0, "long": None}
    assert [(row["run"], row["budget"]) for row in data["rows"]] == [(name, budget) for budget in FLOOR for name in ("run", "other")]
    small = data["rows"][4]
    assert (small["loss_before"], small["loss_after"], small["extracted_loss"]) == (5.0, pytest.approx({"short": 2.5, "long": 2.2}), 2.5)
    assert [fact["holds"] for fact in data["facts"]] == [True, None, False, True, True, True]
    assert [axis["axis"] for axis in small["widths"]] == ["hidden", "ffn", "mamba_heads"]
    assert small["widths"][0]["parent"] == 128 > small["widths"][0]["widths"][0]


def test_a_run_without_a_learned_router(tmp_path):
    run = write_run(tmp_path / "run", "router.choice=uniform")
    (run / "report" / "plots").mkdir(parents=True)
    (run / "report" / "plots" / "router.png").write_bytes(b"of an earlier run")
    output = report(run)
    assert "note: there is no plot of the router: the run has no learned router" in output.splitlines()
    assert written(run / "report") == PLOTS - {"router.png"}


def test_a_narrow_terminal_cuts_nothing(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", "router.choice=uniform")
    wide = report(run)
    monkeypatch.setenv("COLUMNS", "20")
    assert report(run) == wide


def test_mistakes(tmp_path):
    run = write_run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no run at"):
        report(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no run at"):
        report(run, "--baseline", tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"baseline .*other: eval.samples 8 is not the run's 64; train the baseline with the run's"):
        report(run, "--baseline", write_run(tmp_path / "other", "eval.samples=8"))
    assert not (run / "report").exists(), "nothing is written before everything is read"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: no report can be written there: .*; name another directory with --out"):
        report(run, "--out", tmp_path / "file")


def test_torch_is_not_imported(tmp_path):
    run = write_run(tmp_path / "run", *FEW_AXES)
    script = (
        "import sys, typer; from megatron_elastic.cli.report import command; app = typer.Typer(); app.command()(command); "
        "print('matplotlib' in sys.modules, 'numpy' in sys.modules); app(sys.argv[1:], standalone_mode=False); "
        "print('torch' in sys.modules, 'megatron' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(run)], capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("False False", "False False False")
