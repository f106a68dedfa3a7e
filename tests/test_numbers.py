"""The committed tables and those in docs/, recomputed from confusion matrices. test_texts.py has the prose."""

import json
from collections import defaultdict

import numpy as np
import pytest
import yaml
from scipy import stats

from tests.recomputed import (
    ROOT,
    TABLES,
    cell,
    holm,
    in_table,
    matrices,
    scored,
    scores_of,
    sign_flip,
    signed,
    tables,
    trials,
    welch,
    word,
)  # fmt: skip
from tests.tracked import tracked

CONTESTS = [file.stem for file in TABLES if file.stem.startswith("contest")]
OTHERS = [file.stem for file in TABLES if file.stem not in CONTESTS]


@pytest.mark.parametrize("name", OTHERS)
def test_cells_follow_from_their_confusion_matrices(name):
    """Every trial's score; then mean, deviation, Welch's interval with its word, and whether the cell is capped."""
    for shown in tables()[name]["cells"]:
        if not shown["values"]:
            continue
        done = trials(shown["key"])
        values = dict(zip((str(r["seed"]) for r in done), scored(shown["key"], shown["score"]), strict=True))
        assert values == pytest.approx(shown["values"], abs=1e-9)
        ours = list(values.values())
        assert shown["mean"] == pytest.approx(np.mean(ours), abs=1e-9)
        assert shown["capped"] == (2 * sum(r["stopped"] in ("max_epochs", "stage_epochs") for r in done) > len(done))
        if len(ours) > 1:
            assert shown["std"] == pytest.approx(np.std(ours, ddof=1), abs=1e-9)
        if shown["word"]:
            ends = welch(ours, shown["published_mean"], shown["published_std"])
            assert (shown["difference_low"], shown["difference_high"]) == pytest.approx(ends, abs=1e-9)
            assert shown["word"] == word(*ends)


@pytest.mark.parametrize("name", OTHERS)
def test_comparisons_follow_from_the_scores(name):
    """Sign flips of differences over seeds, and Holm's correction of the questions that the table declares."""
    file = ROOT / "conf" / "table" / f"{name.removesuffix('_released')}.yaml"
    declared = yaml.safe_load(file.read_text(encoding="utf-8")).get("questions", [])
    questions = [(block, q["column"], q["row"], q["against"]) for q in declared for block in q["blocks"]]
    answered = {}
    for pair in tables()[name]["comparisons"]:
        block, column, row, against = question = tuple(pair[k] for k in ("block", "column", "row", "against"))
        if question in questions and question not in answered:
            answered[question] = pair
        else:
            assert pair["p_holm"] is None
        if pair["over"] == "seed" and pair["training"] is None:
            ours, theirs = (in_table(name, block, label, column)["values"] for label in (row, against))
            differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
            assert (pair["n"], pair["difference"]) == (len(differences), pytest.approx(np.mean(differences), abs=1e-9))
            assert pair["p"] == pytest.approx(sign_flip(differences), abs=1e-9)
            if pair["low"] is not None:
                ends = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
                assert (pair["low"], pair["high"]) == pytest.approx(tuple(ends), abs=1e-9)
    unanswered = [1.0] * (len(questions) - len(answered))
    corrected = holm([pair["p"] for pair in answered.values()] + unanswered)[: len(answered)]
    assert [pair["p_holm"] for pair in answered.values()] == pytest.approx(corrected)


DATASETS = {"Adult, with": "adult_released", "Adult, read": "adult", "Mammography": "mammography", "Kaggle": "kaggle"}
DATASETS |= {"CocktailParty": "cocktailparty"}
LOSSES = {"F1*": "f1", "CE": "ce"}


def headline():
    """The lines of the table in docs/reproduce.md: dataset, loss, published, ours, n, interval, word."""
    dataset = ""
    for line in (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[1] in LOSSES:
            dataset = next((name for label, name in DATASETS.items() if cells[0].startswith(label)), dataset)
            yield (dataset, LOSSES[cells[1]], *cells[2:])


def test_the_headline_has_the_datasets_of_the_paper():
    assert {(dataset, loss) for dataset, loss, *_ in headline()} == {
        (dataset, loss) for dataset in DATASETS.values() for loss in LOSSES.values()
    }


@pytest.mark.parametrize("line", list(headline()), ids=lambda line: f"{line[0]} {line[1]}")
def test_the_headline_is_that_of_table_1(line):
    """Published and our mean and deviation, n, Welch's interval and the word."""
    dataset, loss, published, mean_and_deviation, n, interval, verdict = line
    name = "east_v2_1_released" if dataset == "adult_released" else "east_v2_1"
    ours = cell(name, dataset.removesuffix("_released"), next(row for row, known in LOSSES.items() if known == loss))
    assert (published, mean_and_deviation, int(n)) == (f"{ours:p}", f"{ours}", len(ours.values))
    known, their_deviation = map(float, published.split(" ± "))
    low, high = welch(ours.values, known, their_deviation)
    assert interval == f"{signed(ours.mean - known)} [{signed(low)}, {signed(high)}]"
    assert verdict == word(low, high)


@pytest.fixture(scope="module")
def contest():
    """(key, seed) -> rule -> the confusion matrix of the test rows, for the trials of the contest."""
    trials = {}
    for file in tracked("results/records"):
        for line in file.read_text().splitlines():
            if '"name":"contest"' in line and '"stage":"trial"' in line:
                record = json.loads(line)
                rules = {"argmax": record} | record["decisions"]
                trials[record["key"], record["seed"]] = {
                    rule: matrices(judged["confusion"]["test"]) for rule, judged in rules.items()
                }
    return trials


@pytest.mark.parametrize("name", CONTESTS)
def test_the_contest_follows_from_its_confusion_matrices(name, contest):
    """Every score of every trial; then leads: mean over splits, minus the reference, t interval over datasets."""
    table = tables()[name]
    means = defaultdict(dict)
    for shown in table["cells"]:
        rule, _, score = ("argmax." + shown["score"]).rsplit(".", 2)
        rule = rule.rpartition(".")[2]
        scores = [scores_of(contest[shown["key"], int(seed)][rule])[score] for seed in shown["values"]]
        assert list(shown["values"].values()) == pytest.approx(scores, abs=1e-9)
        if scores:
            means[shown["block"], shown["row"]][shown["column"]] = np.mean(scores)
    assert table["rankings"]
    for entry in table["rankings"]:
        reference = means[entry["block"], entry["reference"]]
        for row, lead in entry["leads"]["all"].items():
            ours = means[entry["block"], row]
            differences = [ours[column] - reference[column] for column in entry["columns"]]
            ends = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
            assert (lead["mean"], lead["low"], lead["high"]) == pytest.approx((np.mean(differences), *ends), abs=1e-9)


METHODS = {
    "metric cross-entropy, most probable class": "Metric CE",
    "metric cross-entropy, tuned rule": "Metric CE + plug-in",
    "metric cross-entropy, rule without labels (`east.decide`)": "Metric CE + expected",
    "metric cross-entropy stopped by its own loss": "Metric CE stopped by its loss",
    "cross-entropy stopped by its own loss, rule without labels (`east.decide`)": "CE stopped by its loss + expected",
    "cross-entropy stopped by its own loss, tuned rule": "CE stopped by its loss + plug-in",
    "cross-entropy stopped by its own loss, most probable class": "CE stopped by its loss",
    "cross-entropy stopped by F1, rule without labels (`east.decide`)": "CE + expected",
    "cross-entropy stopped by F1, most probable class": "CE",
    "class-weighted cross-entropy": "CE weighted",
    "EAST": "EAST",
    "EAST, F1 of the positive class": "EAST positive",
    "EAST, macro F1 as in the paper": "EAST macro",
    "EAST after a cross-entropy warm-up": "EAST after warm-up",
    "gradient boosting, rule without labels": "Boosting + expected",
    "random forest, rule without labels": "Random forest + expected",
}


def leads_in_which_loss():
    """Metric -> row of its table in docs/which_loss.md -> the cells for two and for many classes."""
    shown, metric = defaultdict(dict), ""
    for line in (ROOT / "docs" / "which_loss.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].endswith("on held-out datasets"):
            metric = cells[0].partition(" ")[0]
        elif len(cells) == 3 and metric and not cells[0].startswith("---"):
            shown[metric][cells[0]] = cells[1:]
        elif len(cells) != 3:
            metric = ""
    return shown


@pytest.mark.parametrize("metric, name", [("F1", "contest"), ("MCC", "contest_mcc"), ("G-mean", "contest_gmean")])
def test_the_tables_of_which_loss_show_the_contests(metric, name):
    leads = {entry["block"]: entry["leads"]["all"] for entry in tables()[name]["rankings"]}
    blocks = ("held out, two classes", "held out, many classes")
    rows = leads_in_which_loss()[metric]
    assert len(rows) >= 6
    for words, cells in rows.items():
        expected = [leads[block].get(METHODS[words]) for block in blocks]
        assert cells == [
            f"{signed(x['mean'])} [{signed(x['low'])}, {signed(x['high'])}]" if x else "" for x in expected
        ]
