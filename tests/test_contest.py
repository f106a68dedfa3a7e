"""The contest: its rules are those of a fair comparison, and its arithmetic is right."""

import json
import math
import random
from itertools import pairwise

import pytest
from scipy import stats

from east.lab.data import keel
from east.lab.experiment.record import Record
from east.lab.reporting import plots, specs, tables, writers
from east.lab.reporting.catalogue import Catalogue
from east.lab.reporting.cells import fill
from tests.made import put_values

TABLES = [name for name in specs.names() if name.startswith("contest") and "ensembles" not in name]
DECISIONS = ("", " + plug-in", " + expected")


def sets(table):
    """Block -> datasets of a table, as written on the command line."""
    found = {}
    for columns in specs.spec(table).columns:
        named = columns.dataset.values() if isinstance(columns.dataset, dict) else columns.dataset
        found.setdefault(columns.block, []).extend(named)
    return found


def parent(words):
    """The table that a dataset was cut from: keel set=glass-0-1-6_vs_2 -> glass."""
    name = words.rpartition("set=")[2]
    root = name.replace("_", "-").split("-")[0].rstrip("0123456789")
    return {"new": "newthyroid", "kr": "kr-vs-k", "optdigits": "digits"}.get(root, root)


def test_held_out_datasets_share_no_parent_with_development():
    development = {parent(words) for block in sets("contest_development").values() for words in block}
    held_out = sets("contest")
    assert not development & {parent(words) for block in held_out.values() for words in block}
    assert len(held_out["held out, two classes"]) >= 20
    assert len(held_out["held out, many classes"]) >= 10
    assert all(len(block) == len({*block}) for block in held_out.values())


def test_every_dataset_is_in_the_packages():
    try:
        known = keel.tables()
    except keel.DataError:
        pytest.skip("the KEEL packages are not installed")
    for table in ("contest", "contest_development"):
        for words in (words for block in sets(table).values() for words in block if "set=" in words):
            assert words.rpartition("=")[2].replace("_", "-") in known


@pytest.mark.parametrize("name", TABLES)
def test_all_networks_train_alike(name):
    """Same steps, patience, network, search space and stopping rule; the row's name states any exception."""
    cells = [cell for cell in specs.blank_cells(specs.spec(name), "clean") if cell.trains_networks]
    assert cells
    for cell in cells:
        asked = cell.request
        assert (asked["protocol"], asked["model.hidden"], asked["split.stratify"]) == ("contest", [64, 32], True)
        assert not {"protocol.max_epochs", "protocol.patience", "search"} & asked.keys()
        if asked.get("protocol.stop_by") == "loss":
            row = cell.row.partition(" + ")[0]
            assert row == "EAST as published" or row.endswith("stopped by its loss")


def test_every_loss_has_three_decisions():
    table = tables.build("contest", "/nowhere")
    rows = {cell.row for cell in table.cells}
    assert {"CE" + decision for decision in DECISIONS} <= rows
    losses = {row.removesuffix(" + plug-in").removesuffix(" + expected") for row in rows}
    assert rows == {loss + decision for loss in losses for decision in DECISIONS}
    scores = {cell.row: cell.score for cell in table.cells if cell.block == "held out, two classes"}
    assert [scores["CE" + d] for d in DECISIONS] == ["test.f1_pos", "plugin_f1.test.f1_pos", "expected_f1.test.f1_pos"]
    mcc = {cell.score for cell in tables.build("contest_mcc", "/nowhere").cells}
    assert mcc == {"test.mcc", "plugin_mcc.test.mcc", "expected_mcc.test.mcc"}


def test_runs_with_averaged_weights_are_separate_runs():
    """A record without averaged weights fills no cell that asks for them, and vice versa."""
    plain, averaged = (tables.build(name, "/nowhere").cells[0] for name in ("contest", "contest_averaged"))
    config, other = (c.composed("paper").science("keel-car-good", None) for c in (plain, averaged))
    assert (config.hyper.average, other.hyper.average) == (None, 0.99)
    assert config.family != other.family
    for made, fits in ((config, [True, False]), (other, [False, True])):
        found = Catalogue([Record(made, seed=0, scores={"test": {"f1_pos": 0.5}})])
        for cell, fitting in zip((plain, averaged), fits, strict=True):
            cell.trained = {}
            fill(cell, found, ["paper"])
            assert bool(cell.values) == fitting


def filled(seed=0):
    """The contest with invented scores: CE + plug-in 0.5 everywhere, Metric CE ahead where the class is rare."""
    table, random_ = tables.build("contest", "/nowhere"), random.Random(seed)
    for number, cell in enumerate(table.cells):
        size = 5 if sum(map(ord, cell.column)) % 2 else 40
        value = 0.5 if cell.row == "CE + plug-in" else 0.3 + 0.1 * random_.random()
        if cell.row == "Metric CE":
            value = (0.6 if size == 5 else 0.45) + 0.01 * (number % 3)
        put_values(cell, {0: value, 1: value}, size)
    return table


def test_leads_are_means_over_datasets_grouped_by_the_rarest_class():
    table = filled()
    entry = table.rankings[0]
    reference = {c.column: 0.5 for c in table.cells if c.block == entry.block}
    ours = {c.column: c.summary.mean for c in table.cells if (c.block, c.row) == (entry.block, "Metric CE")}
    differences = [ours[column] - reference[column] for column in entry.columns]
    lead = entry.leads["all"]["Metric CE"]
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (lead.difference, lead.low, lead.high) == pytest.approx(
        (math.fsum(differences) / len(differences), *interval)
    )
    assert (lead.wins, lead.losses) == (sum(d > 0 for d in differences), sum(d < 0 for d in differences))
    rare, common = entry.leads["fewer than 10"]["Metric CE"], entry.leads["30 or more"]["Metric CE"]
    assert rare.difference > 0.09 > 0 > common.difference
    assert rare.n + common.n == lead.n == len(entry.columns)
    assert "10 to 29" not in entry.leads
    assert "CE + plug-in" not in entry.leads["all"]


def test_the_page_shows_ranks_and_leads_but_no_cells():
    table = filled()
    shown = writers.WRITERS["markdown"]([table])
    assert "### held out" not in shown
    assert "Lead: mean difference to CE + plug-in" in shown
    lead = table.rankings[0].leads["all"]["Metric CE"]
    assert f"{lead.difference:+.3f}".replace("-", "−") in shown
    stored = json.loads(writers.WRITERS["json"]([table]))[0]
    assert stored["rankings"][0]["leads"]["all"]["Metric CE"]["difference"] == pytest.approx(lead.difference)
    figure = plots.figure_of(table)
    assert len(figure.axes) == len(table.rankings) == 3
    losses = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ranks = table.rankings[0].ranks
    best = [min(rank for name, rank in ranks.items() if plots.loss_and_decision(name)[0] == loss) for loss in losses]
    assert all(before <= after for before, after in pairwise(best))
    drawn = {round(float(line.get_xdata()[0]), 9) for line in figure.axes[0].lines if line.get_marker() in "osD"}
    assert drawn == {round(lead.difference, 9) for lead in table.rankings[0].leads["all"].values()}


def test_hundreds_of_missing_runs_are_not_listed_one_by_one():
    table = tables.build("contest", "/nowhere")
    assert len(table.missing) > 400
    shown = writers.WRITERS["text"]([table])
    assert shown.count("east-run dataset=") == 3
    assert "east-run task=reproduce table=contest" in shown
    assert len(json.loads(writers.WRITERS["json"]([table]))[0]["missing"]) == len(table.missing)


@pytest.mark.parametrize("metric", ["mcc", "gmean"])
def test_a_contest_for_another_metric_trains_no_loss_for_f1(metric):
    """Exceptions that contest.yaml makes for columns of many classes belong to its own rows."""
    cells = list(specs.blank_cells(specs.spec(f"contest_{metric}"), "clean"))
    assert {cell.block for cell in cells} == {*sets("contest")}
    named = {cell.request.get("loss.metric", cell.loss.removesuffix("_ce")) for cell in cells}
    assert named == {metric, "ce", "ce_weighted", "focal", "dice", "rf", "boosting", "logistic"}


def test_tables_that_change_nothing_but_a_setting_keep_the_exceptions():
    averaged = list(specs.blank_cells(specs.spec("contest_averaged"), "clean"))
    assert {(c.block, c.row) for c in averaged} == {
        (c.block, c.row) for c in specs.blank_cells(specs.spec("contest"), "clean")
    }


def test_the_questions_of_a_contest_are_answered_over_datasets():
    """The difference, its interval and p are SciPy's paired t-test; Holm counts the questions without an answer."""
    draw = random.Random(0)
    table = tables.build("contest_mcc", "/nowhere")
    for cell in table.blocks["held out, two classes"].values():
        put_values(cell, {0: draw.random() + 0.3 * (cell.row == "Metric CE")})
    scores = {row: [*means.values()] for row, means in table.means("held out, two classes").items()}
    pairs = tables.comparisons(table)
    rivals = ["CE + plug-in", "CE stopped by its loss + expected"]
    assert [(p.row, p.against, p.over, p.n) for p in pairs] == [("Metric CE", rival, "dataset", 24) for rival in rivals]
    for pair in pairs:
        test = stats.ttest_rel(scores[pair.row], scores[pair.against])
        low, high = test.confidence_interval(0.95)
        assert (pair.p, pair.low, pair.high) == pytest.approx((test.pvalue, low, high))
    first, second = sorted(pair.p for pair in pairs)
    assert sorted(pair.p_holm for pair in pairs) == pytest.approx([4 * first, max(4 * first, 3 * second)])
    text = " ".join(writers.WRITERS["text"]([table]).split())
    assert "over the 4 questions that the table declares, 2 of which are open" in text
