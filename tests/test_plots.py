"""Figures show the numbers they are given; their looks are left to the eye."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from east.lab.reporting import plots, statistics, tables

GOLDEN = Path(__file__).parent / "golden"


def lines(figure, axes=0):
    return {line.get_label(): line.get_xydata() for line in figure.axes[axes].lines}


def test_the_step_goes_through_its_corner_points():
    """tau = 0.3, T = 0.1: lo = 0.3 (1 - 0.25) = 0.225 with H = T, H(tau) = 1/2, hi = 0.375 with H = 1 - T."""
    p, heights = plots.step_heights([0.2, 0.1], threshold=0.3)
    figure = plots.steps(p, heights, 0.3)
    curve = lines(figure)["T = 0.1"]
    for x, y in [(0, 0), (0.225, 0.1), (0.3, 0.5), (0.375, 0.9), (1, 1)]:
        assert np.interp(x, *curve.T) == pytest.approx(y, abs=0.01)
    assert len(figure.axes[0].get_legend().get_texts()) == 2


def test_soft_metrics_approach_the_hard_ones_as_the_temperature_falls():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 300)
    logits = rng.normal(size=(300, 3)) + 2 * np.eye(3)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    temperatures = [0.2, 0.05, 0.001]
    soft, hard = plots.softened(probabilities, labels, temperatures, ["f1", "mcc"])
    assert hard["f1"] == pytest.approx(np.mean([_f1(labels, probabilities.argmax(1), k) for k in range(3)]))
    gaps = np.abs(np.array(soft["f1"]) - hard["f1"])
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.005
    figure = plots.soft_against_hard(temperatures, soft, hard)
    assert list(lines(figure)["soft f1"][:, 1]) == pytest.approx(soft["f1"])
    assert figure.axes[0].get_xlim()[0] > figure.axes[0].get_xlim()[1], "the temperature falls to the right"


def _f1(labels, predicted, k):
    return 2 * np.sum((labels == k) & (predicted == k)) / (np.sum(labels == k) + np.sum(predicted == k))


def test_curves_show_the_history_and_every_cooling():
    history = {
        "epoch": [0, 1, 2, 3],
        "temperature": [0.2, 0.2, 0.1, 0.05],
        "train_loss": [0.5, 0.4, 0.3, 0.2],
        "val_loss": [0.6, None, 0.4, 0.3],
        "val_metric": [0.5, 0.4, 0.3, 0.2],
    }
    figure = plots.curves(history, "a trial")
    drawn = lines(figure)
    assert list(drawn["training loss"][:, 1]) == history["train_loss"]
    assert np.isnan(drawn["validation loss"][1, 1])
    assert sorted(line.get_xdata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":") == [2, 3]


def test_curves_work_for_a_loss_without_temperature():
    figure = plots.curves({"epoch": [0, 1], "temperature": [None, None], "val_loss": [0.6, 0.5]})
    assert not figure.axes[0].collections


def test_tradeoff_has_a_point_per_beta():
    figure = plots.tradeoff(tables.build("east_v2_6", GOLDEN))
    drawn = {c.get_label(): c for c in figure.axes[0].containers}
    published, ours = drawn["published"].lines[0].get_xydata(), drawn["ours"].lines[0].get_xydata()
    assert list(published[0]) == [0.652, 0.719], "recall and precision of dog at beta 0.1"
    assert len(published) == 7
    assert len(ours) == 3
    plots.tradeoff(tables.build("east_v2_6", "/nowhere"))


def test_dots_show_means_and_intervals_of_ours_and_published():
    table = tables.build("btg_4", GOLDEN)
    figure = plots.dots(table)
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
    assert not plots.dots(tables.build("east_v2_1", "/nowhere")).axes
    assert not plots.dots(tables.build("grid", "/nowhere")).axes
    titles = [axes.get_title(loc="left") for axes in plots.dots(tables.build("east_v2_1", GOLDEN)).axes]
    assert [title.partition(":")[0] for title in titles] == ["adult"] * 3 + ["mammography"] * 3


def test_adult_is_shown_with_both_loaders():
    clean, released = (tables.build("east_v2_1", GOLDEN, variant=variant) for variant in ("clean", "released"))
    adult = plots.dots(clean, released).axes[0]
    drawn = {b.lines[0].get_color(): b.lines[0].get_xdata()[0] for b in adult.containers}
    means = [
        next(c.summary.mean for c in table.cells if (c.block, c.row, c.column) == ("adult", "CE", "f1"))
        for table in (clean, released)
    ]
    assert [drawn[plots.BLUE], drawn[plots.ORANGE]] == pytest.approx(means)
    alone = plots.dots(clean).axes[0]
    assert plots.ORANGE not in {b.lines[0].get_color() for b in alone.containers}


def test_a_mean_far_from_the_others_is_an_arrow():
    table = filled("plugin", lambda cell: 0.5 if cell.row == "CE" else 0.98)
    axes = plots.dots(table).axes[0]
    assert axes.get_xlim()[0] > 0.9
    assert "◂ 0.510" in {text.get_text() for text in axes.texts}
    assert plots.near([]) == (0.0, 1.0)
    assert plots.near([0.0] * 3 + [0.7, 0.72]) == (0.0, 0.72), "what most have is not left out"


def test_the_published_numbers_are_on_the_axis_also_far_below_ours():
    table = filled("east_v2_1", lambda cell: 0.9)
    for axes in plots.dots(table).axes:
        arrows = [text for text in axes.texts if "◂" in text.get_text() and text.get_color() == plots.GREY]
        assert len(arrows) <= 2, axes.get_title(loc="left")


def filled(name, value):
    """A table whose cells hold value(cell) for three seeds."""
    table = tables.build(name, "/nowhere")
    for cell in table.cells:
        cell.values = {seed: value(cell) + 0.01 * seed for seed in range(3)}
    return table


def test_lines_have_a_point_per_column():
    ratios = ["1:10", "1:100", "1:1,000", "1:10,000"]
    table = filled("imbalance", lambda cell: 0.9 - 0.2 * ratios.index(cell.column))
    figure = plots.lines(table)
    assert [axes.get_title() for axes in figure.axes] == ["f1_positive", "mcc"]
    drawn = {container.get_label(): container.lines[0].get_ydata() for container in figure.axes[0].containers}
    assert list(drawn) == ["F1*", "CE", "CE + plug-in", "CE weighted", "AnyLoss"]
    assert list(drawn["CE"]) == pytest.approx([0.91, 0.71, 0.51, 0.31])
    plots.lines(tables.build("imbalance", "/nowhere"))


def test_a_row_has_one_colour_in_all_panels_and_every_row_is_in_the_legend():
    table = filled("imbalance", lambda cell: 0.5)
    left_out = {"f1_positive": "CE weighted", "mcc": "F1*"}  # other rows in each block
    table = replace(table, cells=[cell for cell in table.cells if left_out[cell.block] != cell.row])
    figure = plots.lines(table)
    colours = [{drawn.get_label(): drawn.lines[0].get_color() for drawn in axes.containers} for axes in figure.axes]
    shared = colours[0].keys() & colours[1].keys()
    assert len(shared) == 3
    assert all(colours[0][row] == colours[1][row] for row in shared)
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(named) == sorted(colours[0] | colours[1])


def test_ranks_are_drawn_at_their_positions():
    order = ["RF", "F1*", "CE"]
    table = filled("keel", lambda cell: 0.9 - 0.1 * order.index(cell.row) if cell.row in order else 0.3)
    figure = plots.ranks(table)
    (entry, _) = table.rankings
    assert (entry.ranks["RF"], entry.ranks["CE"], entry.ranks["Dice"]) == (1, 3, 7)
    stems = {line.get_xdata()[0] for line in figure.axes[0].lines if len(line.get_xdata()) == 3}
    assert stems == {1, 2, 3, 7}
    words = [text.get_text().strip() for text in figure.axes[0].texts]
    assert {"RF", "F1*", "CE + plug-in", "7.00", f"critical difference {entry.critical_difference:.2f}"} <= set(words)
    assert not plots.ranks(tables.build("keel", "/nowhere")).axes


def test_cliques_are_the_longest_runs():
    assert plots.cliques([1, 2, 3, 4], reach=0.5) == []
    assert plots.cliques([1, 2, 3, 4], reach=9) == [(0, 3)]
    assert plots.cliques([1, 1.5, 2.2, 2.4, 4], reach=1.0) == [(0, 1), (1, 3)]


def test_published_is_in_the_legend_only_if_something_was_published():
    for name, published in [("east_v2_1", True), ("plugin", False)]:
        legend = plots.dots(filled(name, lambda cell: 0.5)).legends[0]
        assert any("published" in text.get_text() for text in legend.get_texts()) == published


def test_confusion_writes_counts_while_they_fit():
    figure = plots.confusion([[8, 2], [1, 9]], ["no", "yes"])
    assert [text.get_text() for text in figure.axes[0].texts] == ["8", "2", "1", "9"]
    assert figure.axes[0].images[0].get_array().tolist() == [[0.8, 0.2], [0.1, 0.9]]
    assert not plots.confusion(np.eye(257)).axes[0].texts
    plots.confusion([[0, 0], [0, 3]])  # a class without rows


def test_save_writes_every_format_and_the_same_bytes(tmp_path):
    first, second = (
        plots.save(plots.confusion([[8, 2], [1, 9]]), tmp_path / name / "a.figure", ["svg", "pdf", "png"])
        for name in ("one", "two")
    )
    assert [file.name for file in first] == ["a.figure.svg", "a.figure.pdf", "a.figure.png"]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))
    assert ET.parse(first[0]).getroot().tag.endswith("svg")
    assert first[1].read_bytes().startswith(b"%PDF")


def test_the_global_style_does_not_change():
    before = dict(matplotlib.rcParams)
    plots.confusion([[1, 0], [0, 1]])
    assert dict(matplotlib.rcParams) == before


def test_equal_scores_have_an_interval_of_no_length():
    """NumPy's mean of seven copies of this score is one unit in the last place below it."""
    table = tables.build("ablation", "/nowhere")
    for cell in table.cells:
        cell.values = dict.fromkeys(range(7), 0.9666063677707588)
    assert plots.figure_of(table).axes
