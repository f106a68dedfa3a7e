"""Figures show the numbers they are given; their looks are left to the eye."""

import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

import matplotlib
import pytest

from east.lab.reporting import plots, statistics, tables
from tests.made import put_values

GOLDEN = Path(__file__).parent / "golden"


CURVES = partial(plots.curves, [([([0, 1], [0, 1], {})], {})])


def filled(name, value):
    """A table whose cells hold value(cell) for three seeds."""
    table = tables.build(name, "/nowhere")
    for cell in table.cells:
        put_values(cell, {seed: value(cell) + 0.01 * seed for seed in range(3)})
    return table


def test_dots_show_means_and_intervals_of_ours_and_published():
    table = tables.build("btg_4", GOLDEN)
    figure = plots.figure_of(table)
    assert len(figure.axes) == 5
    first = next(cell for cell in table.cells if cell.row == "F1*" and cell.column == "f1")
    bars = figure.axes[0].containers
    assert len(bars) == 3 + 2, "three published, two of ours"
    (theirs, mine) = (next(b for b in bars if b.lines[0].get_color() == c) for c in (plots.GREY, plots.BLUE))
    assert mine.lines[0].get_xdata()[0] == pytest.approx(first.summary.mean)
    (reach,) = mine.lines[2][0].get_segments()
    assert reach[:, 0] == pytest.approx([first.summary.low, first.summary.high])
    (reach,) = theirs.lines[2][0].get_segments()
    expected = statistics.published_interval(first.published.mean, first.published.std)
    assert reach[:, 0] == pytest.approx([expected.low, expected.high])
    words = {text.get_text() for text in figure.axes[0].texts}
    assert f"{len(first.values)}{first.marks}" in words, "n and training stand beside the dot"


def test_dots_leave_out_rows_without_results():
    assert not plots.figure_of(tables.build("east_v2_1", "/nowhere")).axes
    assert not plots.figure_of(tables.build("grid", "/nowhere")).axes
    titles = [axes.get_title(loc="left") for axes in plots.figure_of(tables.build("east_v2_1", GOLDEN)).axes]
    assert [title.partition(":")[0] for title in titles] == ["adult"] * 3 + ["mammography"] * 3


def test_a_mean_far_from_the_others_is_an_arrow():
    table = filled("plugin", lambda cell: 0.5 if cell.row == "CE" else 0.98)
    axes = plots.figure_of(table).axes[0]
    assert axes.get_xlim()[0] > 0.9
    assert "◂ 0.510" in {text.get_text() for text in axes.texts}


def test_the_published_numbers_are_on_the_axis_also_far_below_ours():
    table = filled("east_v2_1", lambda cell: 0.9)
    for axes in plots.figure_of(table).axes:
        arrows = [text for text in axes.texts if "◂" in text.get_text() and text.get_color() == plots.GREY]
        assert len(arrows) <= 2, axes.get_title(loc="left")


def test_published_is_in_the_legend_only_if_something_was_published():
    for name, published in [("east_v2_1", True), ("plugin", False)]:
        legend = plots.figure_of(filled(name, lambda cell: 0.5)).legends[0]
        assert any("published" in text.get_text() for text in legend.get_texts()) == published


def test_curves_have_what_they_are_given_and_one_legend():
    first = ([1, 2, 3], [0.1, 0.3, 0.2], {"label": "one", "color": plots.BLUE})
    bound = ([1, 3], [0.5, 0.4], {"label": "bound", "ls": "--"})
    figure = plots.curves([([first, bound], {"title": "left", "ylim": (0, 1)}), ([first], {"title": "right"})])
    assert [axes.get_title() for axes in figure.axes] == ["left", "right"]
    assert list(figure.axes[0].lines[0].get_ydata()) == first[1]
    assert figure.axes[0].lines[1].get_linestyle() == "--"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "bound"]


def test_save_writes_every_format_and_the_same_bytes(tmp_path):
    first, second = (
        [plots.save(CURVES(), tmp_path / name / f"a.figure.{kind}") for kind in ("svg", "pdf", "png")]
        for name in ("one", "two")
    )
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))
    assert ET.parse(first[0]).getroot().tag.endswith("svg")
    assert first[1].read_bytes().startswith(b"%PDF")


def test_the_global_style_does_not_change():
    before = dict(matplotlib.rcParams)
    CURVES()
    assert dict(matplotlib.rcParams) == before


def test_equal_scores_have_an_interval_of_no_length():
    """NumPy's mean of seven copies of this score is one unit in the last place below it."""
    table = tables.build("ablation", "/nowhere")
    for cell in table.cells:
        put_values(cell, dict.fromkeys(range(7), 0.9666063677707588))
    assert plots.figure_of(table).axes
