"""Every plot is a PNG of the size it should have, with something on it in each budget's colour; odd runs draw too."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from megatron_elastic.report.plots import ROUTER_COLOUR, plot_costs, plot_losses, plot_quality, plot_rates
from megatron_elastic.report.record import read_run
from megatron_elastic.report.router_plots import plot_layers, plot_router
from megatron_elastic.report.style import DPI, colours, running_mean
from megatron_elastic.report.summary import budget_rows
from tests.report.synthetic_run import FEW_AXES, PER_LAYER, read_rows, write_rows, write_run


def pixels(path):
    """[height, width, 3] of a PNG file, from 0 to 1; checks its signature and header."""
    from matplotlib.image import imread

    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    image = imread(path)[..., :3]
    assert struct.unpack(">II", data[16:24]) == (image.shape[1], image.shape[0])
    return image


def share_of(image, colour):
    """Share of pixels that are nearly of a colour such as "#0072B2"."""
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return float((np.abs(image - wanted).max(-1) < 0.05).mean())


def draw_all(record, directory, baseline_rows=()):
    """Plot -> pixels of everything that is drawn of a run."""
    directory.mkdir(exist_ok=True)
    plot_losses(record, directory / "losses.png")
    plot_costs(record, directory / "costs.png")
    plot_quality(record, budget_rows(record), baseline_rows, directory / "quality.png")
    plot_rates(record, directory / "rates.png")
    plot_router(record, directory / "router.png")
    plot_layers(record, directory / "layers.png")
    return {path.stem: pixels(path) for path in directory.glob("*.png")}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    baseline = budget_rows(read_run(write_run(folder / "uniform", "router.choice=uniform", worse=0.1)))
    return draw_all(read_run(write_run(folder / "run", parent_loss=True)), folder / "out", baseline)


def test_sizes_and_contents(drawn):
    assert set(drawn) == {"losses", "costs", "quality", "rates", "router"}
    assert drawn["losses"].shape[:2] == (int(6.2 * DPI), int(7.6 * DPI))
    for image in drawn.values():
        assert min(image.shape[:2]) >= 4 * DPI and image.std() > 0.02
        assert np.allclose(image[0], 1) and np.allclose(image[:, 0], 1), "something is cut at the border"


@pytest.mark.parametrize("plot", ["losses", "costs", "quality"])
def test_every_budget_has_its_colour_in_every_plot(drawn, plot):
    image = drawn[plot]
    panels = [image[: len(image) // 2], image[len(image) // 2 :]] if plot == "losses" else [image]
    below_legend = [panels[0][len(image) // 8 :], *panels[1:]]
    for name, colour in colours(["full", "medium", "small"]).items():
        assert all(share_of(panel, colour) > 1e-4 for panel in below_legend), name


def test_the_router_plot_grows_with_its_axes(drawn, tmp_path):
    few = read_run(write_run(tmp_path / "few", *FEW_AXES))
    assert plot_router(few, tmp_path / "few.png")
    assert drawn["router"].shape[0] - pixels(tmp_path / "few.png").shape[0] == pytest.approx(5 * 0.95 * DPI, abs=1)


def test_without_a_learned_router_there_is_no_router_plot(tmp_path):
    assert not plot_router(read_run(write_run(tmp_path / "run", "router.choice=uniform")), tmp_path / "router.png")
    assert not (tmp_path / "router.png").exists()


def test_layers_have_a_plot_of_their_own_when_an_axis_is_per_layer(drawn, tmp_path):
    images = draw_all(read_run(write_run(tmp_path / "run", *PER_LAYER)), tmp_path / "out")
    assert set(images) == {*drawn, "layers"}
    image = images["layers"]
    assert min(image.shape[:2]) >= 2 * DPI and np.allclose(image[0], 1) and np.allclose(image[:, [0, -1]], 1)
    # The later layers of an axis commit later, so that the heat maps run from the colour of every width alike to dark blue.
    assert share_of(image, "#081D58") > 0.01


def test_names_with_signs_of_mathematics_are_drawn_as_they_are(tmp_path):
    rows = budget_rows(read_run(write_run(tmp_path / "a$b^$", *FEW_AXES)))
    assert set(draw_all(read_run(tmp_path / "a$b^$"), tmp_path / "out", rows)) == {"losses", "costs", "quality", "rates", "router"}


def test_learning_rates_of_the_model_and_of_the_router(drawn, tmp_path):
    run = write_run(tmp_path / "run", *FEW_AXES)
    write_rows(run, [{key: value for key, value in row.items() if key != "router_lr"} for row in read_rows(run)])
    plot_rates(read_run(run), tmp_path / "rates.png")
    assert share_of(drawn["rates"], ROUTER_COLOUR) > 1e-4 > share_of(pixels(tmp_path / "rates.png"), ROUTER_COLOUR)


def test_a_run_that_has_just_begun(tmp_path):
    run = write_run(tmp_path / "run", *FEW_AXES)
    write_rows(run, [row for row in read_rows(run) if row["stage"] == "parent" or (row["stage"], row["step"]) == ("short", 0)])
    assert set(draw_all(read_run(run), tmp_path / "out")) == {"losses", "costs", "quality", "rates", "router"}


def test_many_budgets_and_other_costs(tmp_path, monkeypatch):
    from tests.report import synthetic_run

    names = {f"a_rather_long_name_{number}": 2.0 + 0.1 * number for number in range(9)}
    monkeypatch.setattr(synthetic_run, "FLOOR", names)
    monkeypatch.setattr(synthetic_run, "BEFORE", {name: loss + 1 for name, loss in names.items()})
    budgets = ", ".join(f"{name}: {1 - 0.06 * number}" for number, name in enumerate(names))
    overrides = [f"elastic.budgets={{{budgets}}}", "stages.long.budget_probs=null", "elastic.cost=flops", "router.choice=uniform"]
    images = draw_all(read_run(write_run(tmp_path / "run", *overrides)), tmp_path / "out")
    assert set(images) == {"losses", "costs", "quality", "rates"}
    for name, image in images.items():
        assert np.allclose(image[:, [0, -1]], 1), f"{name} is cut at the border"


def test_drawing_leaves_no_global_state(drawn):
    import matplotlib

    assert matplotlib.rcParams["axes.grid"] is False and matplotlib.rcParams["legend.frameon"] is True


def test_running_mean():
    assert running_mean([0, 3, 6, 9], 3) == [1.5, 3, 6, 7.5]
    assert running_mean([5.0], 5) == [5.0]
