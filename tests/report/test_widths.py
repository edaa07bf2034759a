"""What a plan keeps of each axis, with one width or one a layer; probabilities of both kinds are read alike."""

from __future__ import annotations

import pytest

from megatron_elastic.errors import PlanError
from megatron_elastic.report.record import read_run
from megatron_elastic.report.summary import budget_rows
from megatron_elastic.report.widths import AxisWidths, by_place, expected_shares, mean_over_places
from tests.report.synthetic_run import PER_LAYER, read_rows, write_rows, write_run


@pytest.fixture
def run(tmp_path):
    """A run whose small member has other widths on every layer and skips layer 2, which has a Mamba mixer."""
    run = write_run(tmp_path / "run", *PER_LAYER)
    rows = read_rows(run)
    rows[-1]["plans"]["small"]["widths"] |= {"ffn": [512, 128], "mamba_heads": [4, 4, 8]}
    rows[-1]["plans"]["small"]["dropped_layers"] = [2]
    write_rows(run, rows)
    return run


def test_widths_of_layers(run):
    small = {axis.axis: axis for axis in budget_rows(read_run(run))[2].widths}
    assert small["ffn"] == AxisWidths("ffn", 512, (512, 128), (4, 7))
    assert (small["ffn"].text, small["ffn"].share) == ("128 to 512", 0.625)
    assert small["ffn"].bars == [(4, 512, 1.0), (7, 128, 0.25)]
    assert small["mamba_heads"] == AxisWidths("mamba_heads", 8, (4, 4, 8), (0, 2, 6), (2,))
    assert (small["mamba_heads"].kept, small["mamba_heads"].share) == ((4, 8), 0.75)
    assert small["mamba_heads"].bars == [(0, 4, 0.5), (2, 0, 0.0), (6, 8, 1.0)]
    assert small["layers"] == AxisWidths("layers", 9, (8,), (), (2,))
    assert (small["layers"].text, small["layers"].bars) == ("8", [])


def test_the_cost_counts_every_layer(run):
    rows = read_rows(run)
    rows[-1]["plans"]["medium"] = {**rows[-1]["plans"]["small"]}
    rows[-1]["plans"]["medium"]["widths"] = {**rows[-1]["plans"]["small"]["widths"], "ffn": [512, 512]}
    write_rows(run, rows)
    _, medium, small = budget_rows(read_run(run))
    hidden = small.widths[0].widths[0]
    assert medium.cost - small.cost == 2 * hidden * (512 - 128), "two matrices of the dense MLP in layer 7"
    assert medium.widths[1] == AxisWidths("ffn", 512, (512,)), "equal widths are one"


def test_extremes():
    assert AxisWidths("hidden", 4096, (4096,)).text == "4,096" and AxisWidths("hidden", 4096, (1024,)).share == 0.25
    gone = AxisWidths("heads", 8, (4, 6), (1, 5), (1, 5))
    assert (gone.text, gone.share, gone.bars) == ("skipped", 0.0, [(1, 0, 0.0), (5, 0, 0.0)])
    assert AxisWidths("heads", 8, (4, 6), (1, 5), (5,)).text == "4"


def test_a_plan_of_another_model(run):
    rows = read_rows(run)
    rows[-1]["plans"]["small"]["widths"]["mamba_heads"] = [4, 8]
    write_rows(run, rows)
    with pytest.raises(PlanError, match="axis 'mamba_heads' of a plan has 2 widths for 3 layers; restore the run's recipe"):
        budget_rows(read_run(run))


def test_probabilities_of_one_place_and_of_several():
    one, two = [0.25, 0.75], [[1.0, 0.0], [0.5, 0.5]]
    assert (by_place(one), by_place(two), by_place([one])) == ([one], two, [one])
    assert (mean_over_places(one), mean_over_places(two)) == (one, [0.75, 0.25])
    assert (expected_shares(one, (8, 4)), expected_shares(two, (8, 4))) == ([0.625], [1.0, 0.75])
