"""A run is read from its files: the last row of a step counts, in the order of the stages; what is missing is named with its remedy."""

from __future__ import annotations

import json

import pytest
import yaml

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import CheckpointError, ConfigError
from megatron_elastic.report.record import read_run
from tests.report.synthetic_run import read_rows, write_rows, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def test_rows_by_stage_and_step(run):
    record = read_run(run)
    assert [stage.name for stage in record.stages] == ["short", "long"] and record.budgets == ("full", "medium", "small")
    assert [row.step for row in record.rows_of("eval", record.stages[0])] == [0, 4, 8, 12]
    assert [row.step for row in record.rows_of("train", record.stages[1])] == list(range(6))
    assert (record.last_eval.stage, record.last_eval.step, record.last_stage.name) == ("long", 6, "long")
    assert record.elastic_step(record.last_eval) == 18
    assert record.first_token(record.stages[0]) == 20 * 32 * 256 == record.rows_of("eval", record.stages[0])[0].tokens
    assert record.last_token(record.stages[1]) == record.last_eval.tokens
    assert record.notes == ()


def test_a_resumed_run_counts_the_last_row_of_a_step(run):
    rows = read_rows(run)
    cut = next(n for n, row in enumerate(rows) if row["stage"] == "short" and row["step"] == 6)
    lost = [row | {"loss": {"full": 99.0}, "tokens": -1} for row in rows[cut : cut + 8]]
    write_rows(run, rows[: cut + 8] + lost + rows[cut:])
    assert read_run(run).rows == read_run(write_run(run.parent / "straight")).rows
    write_rows(run, rows + lost)  # the last one counts, wherever the first stood
    record = read_run(run)
    assert [row.tokens for row in record.rows_of("train", record.stages[0])].count(-1) == sum(row["kind"] == "train" for row in lost)


def test_rows_are_ordered_by_stage_and_step_not_by_line(run):
    straight = read_run(run).rows
    write_rows(run, read_rows(run)[::-1])
    assert read_run(run).rows == straight


def test_a_line_cut_by_a_kill_is_left_out_and_said(run):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text + '{"kind": "train", "sta')
    record = read_run(run)
    assert len(record.rows) == len(text.splitlines())
    assert len(record.notes) == 1 and f"line {len(text.splitlines()) + 1} cannot be read" in record.notes[0]


def test_an_unfinished_run_says_how_far_it_is(run):
    write_rows(run, [row for row in read_rows(run) if row["stage"] != "long" and (row["stage"] != "short" or row["step"] <= 5)])
    record = read_run(run)
    assert (record.last_stage.name, record.last_eval.step) == ("short", 4)
    assert record.notes == (f"{run} is not finished: last evaluated in stage short at step 4 of 12",)


def test_the_parents_loss_is_told_or_that_of_the_full_budget_before_training(tmp_path):
    short, long = read_run(write_run(tmp_path / "untold")).stages
    assert [read_run(tmp_path / "untold").parent_loss(stage) for stage in (short, long)] == [2.0, None]
    write_run(tmp_path / "told", parent_loss=True)
    assert [read_run(tmp_path / "told").parent_loss(stage) for stage in (short, long)] == [2.0, 1.75]
    equal = read_run(write_run(tmp_path / "equal", "stages.long.sequence_length=256"))
    assert [equal.parent_loss(stage) for stage in equal.stages] == [2.0, 2.0]


def test_verify_is_optional_and_of_the_last_checkpoint(run):
    assert [found["reader"] for found in read_run(run).verified["small"]] == ["megatron", "transformers"]
    assert read_run(run).worst_verified("small")["extracted_loss"] == 2.5
    data = json.loads((run / "verify.json").read_text())
    (run / "verify.json").write_text(json.dumps(data | {"checkpoint": "stage-short"}))
    assert "is of checkpoint stage-short, not of stage-long" in read_run(run).notes[0]
    (run / "verify.json").write_text(json.dumps(data | {"format_version": 3}))
    with pytest.raises(CheckpointError, match=r"verify.json: format_version 3 is not 1 or 2; run `megatron-elastic verify"):
        read_run(run)
    (run / "verify.json").write_text("{")
    with pytest.raises(CheckpointError, match="verify.json is not JSON; run `megatron-elastic verify"):
        read_run(run)
    (run / "verify.json").unlink()
    assert read_run(run).verified == {} and read_run(run).worst_verified("small") == {}


@pytest.mark.parametrize("wrong", [0.3, float("nan")])
def test_a_member_that_one_reader_found_to_differ_is_said(run, wrong):
    data = json.loads((run / "verify.json").read_text())
    data["budgets"]["small"][0] |= {"masked_extracted": wrong, "holds": False}
    (run / "verify.json").write_text(json.dumps(data))
    record = read_run(run)
    assert (
        "verify.json: small (megatron): the member was not the family's; extract it and run" in record.notes[0] and len(record.notes) == 1
    )
    assert record.worst_verified("small")["reader"] == "megatron"


def test_verify_of_an_earlier_release_has_one_reader(run):
    old = {"small": {"masked_sliced": 1e-6, "masked_extracted": 3e-6, "loss": 2.1, "extracted_loss": 2.4}}
    (run / "verify.json").write_text(json.dumps({"format_version": 1, "checkpoint": "stage-long", "budgets": old}))
    record = read_run(run)
    assert record.worst_verified("small") == old["small"] and record.worst_verified("full") == {} and record.notes == ()


def test_no_run(tmp_path):
    with pytest.raises(CheckpointError, match=r"no run at '.*nothing'; name the run_dir of a recipe"):
        read_run(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"is not a run \(it has no recipe.yaml\); name the run_dir"):
        read_run(tmp_path)


def test_no_metrics(run):
    (run / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"no metrics.jsonl: nothing has been trained yet; run `megatron-elastic train`"):
        read_run(run)


def test_no_elastic_stage(run):
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    for stage in recipe["stages"]:
        stage["elastic"] = False
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(ConfigError, match="its recipe has no elastic stage, so there is no family to report; report a run with"):
        read_run(run)


def test_no_elastic_stage_evaluated_yet(run):
    write_rows(run, [row for row in read_rows(run) if row["stage"] == "parent"])
    with pytest.raises(CheckpointError, match=r"no elastic stage \(short, long\) has been evaluated yet; continue with"):
        read_run(run)


def test_rows_of_something_else(run):
    rows = read_rows(run)
    write_rows(run, [*rows, rows[-1] | {"stage": "other"}])
    with pytest.raises(ConfigError, match=rf"line {len(rows) + 1}: stage 'other' is not in recipe.yaml \(parent, short, long\); restore"):
        read_run(run)
    write_rows(run, [{"kind": "eval", "stage": "short"}])
    with pytest.raises(CheckpointError, match="line 1: no step, tokens, loss; the file is not one of `megatron-elastic train`"):
        read_run(run)


def test_steps_without_what_a_report_needs(run):
    rows = read_rows(run)
    del next(row for row in rows if row["kind"] == "train")["lr"]
    write_rows(run, rows)
    with pytest.raises(CheckpointError, match=r"line \d+: no lr; the file is not one of `megatron-elastic train`, restore it"):
        read_run(run)


def test_time_versions_and_the_end(run):
    record = read_run(run)
    assert record.finished and record.versions == {"torch": "9.8.7", "megatron-core": "0.99"}
    assert record.step_seconds(record.stages[0]) == pytest.approx(12 * 32 * 256 / 4096)
    (run / "versions.json").unlink()
    write_rows(run, read_rows(run)[:-1])
    assert not read_run(run).finished and read_run(run).versions == {}
    (run / "versions.json").write_text("[]")
    with pytest.raises(CheckpointError, match="versions.json holds a list, not a mapping; restore it, or remove it"):
        read_run(run)


def test_a_plan_of_an_earlier_release_has_the_parents_width_on_axes_that_came_later(run):
    rows = read_rows(run)
    plan = rows[-1]["plans"]["small"]
    plan["format_version"] = 1
    kept = plan["widths"].pop("mamba_state")
    write_rows(run, rows)
    assert dict(read_run(run).plan_of("small").widths)[ElasticAxis.MAMBA_STATE] == kept
