"""The page is one whole HTML file: nothing is fetched, every text is escaped, plots are those beside it, misses stand as plainly as hits."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_elastic.errors import ConfigError
from megatron_elastic.report.figures import draw_plots
from megatron_elastic.report.page import Report, render_page, write_whole
from megatron_elastic.report.record import read_run
from megatron_elastic.report.summary import budget_rows, facts
from megatron_elastic.report.tables import recipe_differences
from tests.report.synthetic_run import FEW_AXES, PER_LAYER, read_rows, write_rows, write_run

VOID = {"meta", "img", "br"}
HOSTILE = "<script>alert(1)<&script>\"'$x"


class Page(HTMLParser):
    """The elements of a page as (tag, attributes, pieces of text inside); fails on tags that do not nest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.handle_data(" ")
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        assert self._open and self.elements[self._open[-1]][0] == tag, f"</{tag}> closes nothing"
        self._open.pop()

    def handle_data(self, data):
        for place in self._open:
            self.elements[place][2].append(data)

    def texts(self, tag, **attributes):
        """Text of every element of a kind, with single spaces."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [" ".join("".join(text).split()) for name, given, text in self.elements if name == tag and wanted.items() <= given.items()]


def page(run, directory, *, baseline=None):
    """The parsed page of a run, and its text."""
    record, other = read_run(run), baseline and read_run(baseline)
    rows, others = budget_rows(record), budget_rows(other) if other else []
    directory.mkdir()
    plots = draw_plots(record, rows, others, directory)
    beside = [row for pair in zip(rows, others, strict=True) for row in pair] if others else rows
    found = facts(record, rows, others)
    text = render_page(Report(record, other, beside, found, record.notes, plots, datetime(2031, 5, 6, 7, 8, tzinfo=UTC)), directory)
    return Page(text), text


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The page of a run beside a uniform baseline that is better, from directories with names of evil intent."""
    folder = tmp_path_factory.mktemp("page")
    run = write_run(folder / HOSTILE, *FEW_AXES, "data.path='\"><img src=x onerror=alert(2)>'", worse=0.1)
    other = write_run(folder / "uniform", *FEW_AXES, "router.choice=uniform", "stages.parent=null", "parent=p")
    return *page(run, folder / "plots", baseline=other), folder / "plots"


def test_nothing_is_fetched_and_nothing_runs(shown):
    parsed, text, _ = shown
    tags = {tag for tag, _, _ in parsed.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form", "a"}
    for tag, attributes, _ in parsed.elements:
        assert all(not name.startswith("on") and name not in ("href", "srcset", "action") for name in attributes), (tag, attributes)
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
    assert "url(" not in text and "@import" not in text and "http:" not in text and "https:" not in text
    policy = next(attributes for _, attributes, _ in parsed.elements if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"].startswith("default-src 'none'")


def test_every_text_is_escaped(shown):
    parsed, text, _ = shown
    assert "<script" not in text and "<img src=x" not in text
    assert parsed.texts("h1") == [HOSTILE] and parsed.texts("title") == [f"{HOSTILE}: family report"]
    assert '"><img src=x onerror=alert(2)>' in parsed.texts("dd")
    assert HOSTILE in parsed.texts("pre")[0]


def test_plots_are_the_files_beside_it(shown):
    parsed, _, plots = shown
    images = [attributes for tag, attributes, _ in parsed.elements if tag == "img"]
    inside = {base64.b64decode(attributes["src"].partition(",")[2]) for attributes in images}
    assert inside == {path.read_bytes() for path in plots.glob("*.png")} and len(inside) == 5
    assert all(attributes["alt"] for attributes in images)


def test_misses_stand_as_plainly_as_hits(shown):
    parsed, _, _ = shown
    answers = parsed.texts("li")
    assert [answer.split()[1] for answer in answers] == ["yes", "unknown", "NO", "yes", "yes", "NO"]
    assert answers[0].startswith("✓ yes larger budgets at least as good full 1.7000")
    assert answers[-1] == "✗ NO each smaller budget better than in uniform medium 2.0000 against 1.9000, small 2.3000 against 2.2000"
    missed = parsed.texts("td", class_="missed")
    assert missed and all(text.startswith("✗ ") and abs(float(text[2:]) - 1) > 0.05 for text in missed)


def test_the_family_and_the_uniform_rows(shown):
    parsed, _, _ = shown
    rows = [row.split() for row in parsed.texts("tr") if row.startswith(("full", "medium", "small"))]
    family, plans = rows[:6], rows[6:12]
    assert [(row[0], row[2]) for row in family] == [
        *(("full", "parent"), ("full", "parent")),
        *(("medium", "learned"), ("medium", "uniform")),
        *(("small", "learned"), ("small", "uniform")),
    ]
    assert plans[0][2:] == ["128", "100%", "512", "100%", "8", "100%"]
    assert len(parsed.texts("tr", class_="other")) == 6


def test_what_the_run_is(shown):
    parsed, text, _ = shown
    told = dict(zip(parsed.texts("dt"), parsed.texts("dd"), strict=True))
    assert told["Parent"] == "ME*-ME: 6 layers, 1.36M parameters, 774.58K active for a token"
    assert told["Versions"] == "torch 9.8.7, megatron-core 0.99"
    assert told["Tokens"] == "360.45K of 360.45K" and told["Time in steps"].startswith("1 min 28 s")
    stage = next(row for row in parsed.texts("tr") if row.startswith("short"))
    assert stage == "short the family 256 32 12 of 12 98.30K 0.001 to 0.0003 0.01 all alike 4.10K 24 s"
    assert parsed.texts("summary") == ["The whole recipe"] and "samples_per_decision: 8" in parsed.texts("details")[0]
    assert "finished" in parsed.texts("span", class_="badge yes") and "2031-05-06 07:08 UTC" in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text and "width=device-width" in text


def test_how_the_baseline_differs(shown, tmp_path):
    parsed, _, _ = shown
    rows = parsed.texts("tr")
    assert "router.choice learned uniform" in rows and "stages.parent trained -" in rows and "parent None p" in rows
    assert not [row for row in rows if row.startswith(("elastic.", "stages.short"))]
    recipe = read_run(write_run(tmp_path / "run", *FEW_AXES)).recipe
    assert recipe_differences(recipe, recipe) == []


def test_layers_have_bars(tmp_path):
    run = write_run(tmp_path / "run", *PER_LAYER)
    rows = read_rows(run)
    rows[-1]["plans"]["small"] |= {"dropped_layers": [2]}
    rows[-1]["plans"]["small"]["widths"] |= {"ffn": [512, 128], "mamba_heads": [4, 4, 8]}
    write_rows(run, rows)
    parsed, text = page(run, tmp_path / "plots")
    titles = parsed.texts("title")[-5:]
    assert titles == ["layer 4: 512", "layer 7: 128", "layer 0: 4", "layer 2: skipped", "layer 6: 8"]
    assert "128 to 512" in text and "without 2" in text
    assert "What the router chooses in each layer" in parsed.texts("h3")


def test_an_unfinished_run(tmp_path):
    run = write_run(tmp_path / "run", *FEW_AXES)
    (run / "versions.json").unlink()
    write_rows(run, [row for row in read_rows(run) if row["stage"] == "parent" or (row["stage"], row["step"]) == ("short", 0)])
    parsed, _ = page(run, tmp_path / "plots")
    assert parsed.texts("span", class_="badge no")[0] == "not finished"
    assert any("is not finished: last evaluated in stage short at step 0 of 12" in note for note in parsed.texts("li"))
    assert "not recorded" in parsed.texts("dd")
    assert next(row for row in parsed.texts("tr") if row.startswith("long")).split()[4:8] == ["16", "0", "of", "6"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_whole(path, "old")
    write_text = Path.write_text

    def fill_up(self, text, encoding):
        write_text(self, text[:1], encoding=encoding)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_up)
    with pytest.raises(ConfigError, match=r"report.html cannot be written: No space left on device; free space there or name another"):
        write_whole(path, "new")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]
