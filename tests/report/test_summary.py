"""The numbers of a report are those of the files: losses at the ends of stages, exact costs, and facts that can be false."""

from __future__ import annotations

import pytest

from megatron_elastic.errors import ConfigError
from megatron_elastic.report.record import read_run
from megatron_elastic.report.summary import budget_rows, check_comparable, facts
from megatron_elastic.report.units import amount, cost_scale, count, count_scale, duration
from tests.report.synthetic_run import BEFORE, FLOOR, read_rows, write_rows, write_run


def answers(record, baseline_rows=()):
    """Fact -> (holds, detail), by the order in which facts are given."""
    return [(fact.holds, fact.detail) for fact in facts(record, budget_rows(record), baseline_rows)]


def test_rows_hold_losses_sizes_and_costs(tmp_path):
    rows = budget_rows(read_run(write_run(tmp_path / "run")))
    assert [row.budget for row in rows] == ["full", "medium", "small"]
    assert [row.plan_source for row in rows] == ["parent", "learned", "learned"]
    for row in rows:
        assert row.loss_before == BEFORE[row.budget]
        assert row.loss_after == pytest.approx({"short": FLOOR[row.budget], "long": FLOOR[row.budget] - 0.3})
        assert row.last_loss == row.loss_after["long"]
        assert (row.extracted_loss, row.masked_extracted) == (FLOOR[row.budget], 2e-6)
        assert row.cost == row.active_params and row.cost_ratio == row.cost / row.target
    assert (rows[0].total_params, rows[0].active_params, rows[0].target, rows[0].cost_ratio) == (1_364_400, 774_576, 774_576, 1.0)
    assert rows[1].target == pytest.approx(0.62 * 774_576) and rows[0].active_params > rows[1].active_params > rows[2].active_params


def test_plan_sources(tmp_path):
    pinned = "elastic.budgets.medium={plan: {hidden: 96}}"
    assert [row.plan_source for row in budget_rows(read_run(write_run(tmp_path / "a", pinned)))] == ["parent", "pinned", "learned"]
    uniform = budget_rows(read_run(write_run(tmp_path / "b", "router.choice=uniform")))
    assert [row.plan_source for row in uniform] == ["parent", "uniform", "uniform"]


def test_a_stage_that_has_not_ended_has_no_loss_at_its_end(tmp_path):
    run = write_run(tmp_path / "run")
    write_rows(run, [row for row in read_rows(run) if (row["stage"], row["step"]) != ("long", 6)])
    row = budget_rows(read_run(run))[2]
    assert row.loss_after == {"short": 2.5, "long": None}
    assert row.last_loss == pytest.approx(2.25 - 0.05 * 4 / 6)


def test_facts_that_hold(tmp_path):
    record = read_run(write_run(tmp_path / "run", parent_loss=True))
    monotone, full, cost, improved, nested = answers(record)
    assert monotone == (True, "full 1.7000, medium 1.9000, small 2.2000")
    assert full == (True, "1.7000 against 1.7500, -2.9%, on 1,024 tokens")
    assert cost[0] is True and cost[1].startswith("the farthest: ")
    assert improved == (True, "short 5.0000 to 2.5000, long 2.2500 to 2.2000")
    assert nested == (True, "full > medium > small")


def test_facts_that_do_not_hold(tmp_path):
    run = write_run(tmp_path / "run", parent_loss=True)
    rows = read_rows(run)
    last = [row for row in rows if row["kind"] == "eval"][-1]
    last["loss"] = {"full": 1.79, "medium": 1.78, "small": 2.3}
    last["plans"]["medium"], last["plans"]["small"] = last["plans"]["small"], last["plans"]["medium"]
    write_rows(run, rows)
    monotone, full, cost, improved, nested = answers(read_run(run))
    assert monotone == (False, "full 1.7900, medium 1.7800, small 2.3000")
    assert full == (False, "1.7900 against 1.7500, +2.3%, on 1,024 tokens")
    assert cost[0] is False and cost[1].startswith("cost/target: medium 0.5")
    assert improved[0] is False
    assert nested == (False, "small is not part of medium")


def test_a_baseline_that_is_better_is_said(tmp_path):
    record = read_run(write_run(tmp_path / "run", worse=0.1))
    better, worse = (budget_rows(read_run(write_run(tmp_path / str(gap), "router.choice=uniform", worse=gap))) for gap in (0.0, 0.2))
    assert answers(record, better)[-1] == (False, "medium 2.0000 against 1.9000, small 2.3000 against 2.2000")
    assert answers(record, worse)[-1] == (True, "medium 2.0000 against 2.1000, small 2.3000 against 2.4000")


def test_the_full_budget_is_compared_at_equal_sequence_length_or_not_at_all(tmp_path):
    untold = answers(read_run(write_run(tmp_path / "untold")))[1]
    assert untold == (
        None,
        "the parent's held-out loss on 1,024 tokens is known when stage long has ended",
    )
    equal = answers(read_run(write_run(tmp_path / "equal", "stages.long.sequence_length=256")))[1]
    assert equal == (True, "1.7000 against 2.0000, -15.0%, on 256 tokens")


def test_the_baselines_cost_counts_too(tmp_path):
    record, other = read_run(write_run(tmp_path / "run")), write_run(tmp_path / "other", "router.choice=uniform")
    assert answers(record, budget_rows(read_run(other)))[2][0] is True
    rows = read_rows(other)
    rows[-1]["plans"]["small"] = rows[-1]["plans"]["full"]
    write_rows(other, rows)
    holds, detail = answers(record, budget_rows(read_run(other)))[2]
    assert holds is False and detail == "cost/target: small 2.857 in other"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("elastic.cost=total_params", "elastic.cost total_params is not the run's active_params"),
        ("elastic.budgets={full: 1.0, small: 0.35}", "the budgets full, small is not the run's full, medium, small"),
        (
            "stages.long.sequence_length=512",
            r"short \(256 tokens\), long \(512 tokens\) is not the run's short \(256 tokens\), long \(1,024",
        ),
        ("eval.samples=8", "eval.samples 8 is not the run's 64"),
    ],
)
def test_a_baseline_measured_otherwise_is_refused(tmp_path, override, message):
    budgets = ["stages.long.budget_probs=null"] if "budgets" in override else []
    record, other = read_run(write_run(tmp_path / "run")), read_run(write_run(tmp_path / "other", override, *budgets))
    with pytest.raises(ConfigError, match=message):
        check_comparable(record, other)
    check_comparable(record, record)


def test_units():
    assert [count(number) for number in (999, 1_364_400, 31.58e9)] == ["999", "1.36M", "31.58B"]
    assert amount(7.34e9, "flops") == "7.34 GFLOPs" and amount(2**29, "memory") == "0.5 GiB" and amount(2e6, "total_params") == "2.00M"
    assert (count_scale(2e6, "tokens").divisor, count_scale(2e6, "tokens").label) == (1e6, "tokens (millions)")
    assert count_scale(10, "tokens").label == "tokens"
    assert [cost_scale(largest, "flops").label for largest in (7e9, 2e6)] == ["forward GFLOPs per token", "forward MFLOPs per token"]
    assert (cost_scale(2**31, "memory").divisor, cost_scale(2**21, "memory").divisor) == (2**30, 2**20)
    assert cost_scale(3.58e9, "active_params").label == "active parameters (billions)"
    assert [duration(seconds) for seconds in (0.4, 59.6, 307, 3_720, 273_600)] == [
        "0 s",
        "1 min 00 s",
        "5 min 07 s",
        "1 h 02 min",
        "3 d 04 h",
    ]
