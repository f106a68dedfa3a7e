"""task=compare, task=evaluate and task=predict: the choice is sound, its numbers are right, and the winner is saved."""

import io
import re
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import beta
from sklearn.datasets import make_classification
from sklearn.metrics import average_precision_score, confusion_matrix, f1_score, matthews_corrcoef, roc_auc_score

import east
from east import decisions, metrics
from east.confusion import Confusion
from east.lab import cli, data, files
from east.lab.experiment import candidates
from east.lab.files import result_folder, temporary_name
from east.lab.reporting import comparison, model_page
from east.lab.reporting.comparison import Candidate, DecidedRows
from east.lab.settings.command import Command
from east.lab.tasks import compare
from east.lab.training import saved
from tests.made import RowNumbers

F1 = partial(metrics.f1, average="positive")


# The judge


def decided(predicted, labels, groups=None):
    predicted, labels = torch.as_tensor(predicted), torch.as_tensor(labels)
    p = torch.nn.functional.one_hot(predicted, 2).double()
    return DecidedRows(p, labels, decisions.Argmax(), ("ok", "fraud"), 1, groups)


def candidate(name, held_out, test, labels):
    return Candidate(name, decided(held_out, labels), decided(test, labels))


def compared(*candidates, measure=F1):
    return comparison.compared("f1_positive", measure, candidates)


def test_the_interval_is_that_of_a_binomial_proportion_and_counts_groups_once():
    """Its width is 4 standard errors of sqrt(p q / n); 25 copies of every row, in groups, add no information."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 1000)
    one = decided(np.where(random.random(1000) < 0.8, labels, 1 - labels), labels)
    low, high = comparison.interval(comparison.drawn_scores([one], metrics.accuracy), 1000)
    assert high[0] - low[0] == pytest.approx(2 * 1.96 * np.sqrt(0.16 / 1000), rel=0.1)
    assert (low[0] + high[0]) / 2 == pytest.approx(float(metrics.accuracy(one.confusion)), abs=0.003)
    groups = torch.arange(1000).repeat_interleave(25)
    repeated = decided(one.predicted.repeat_interleave(25), one.labels.repeat_interleave(25), groups)
    for measure in (metrics.accuracy, F1, metrics.mcc):
        ends = [comparison.interval(comparison.drawn_scores([part], measure), 1000) for part in (repeated, one)]
        np.testing.assert_allclose(*ends, atol=0.01)


def test_a_model_without_a_mistake_on_few_rows_is_not_certain_to_be_perfect():
    """With ten rows, the interval of the accuracy is the posterior's by Jeffreys' prior, or a little wider."""
    part = decided([0] * 5 + [1] * 5, [0] * 5 + [1] * 5)
    low, high = comparison.interval(comparison.drawn_scores([part], metrics.accuracy), 10_000)
    assert low[0] == pytest.approx(beta(11, 1).ppf(0.025), abs=0.03)
    assert 0.97 < high[0] < 1
    assert comparison.interval(comparison.drawn_scores([part], metrics.accuracy), 5)[0] < low[0], "five groups"


COVERAGE = [
    pytest.param(positives, recall, false, id=f"{positives}-{recall}", marks=[pytest.mark.nightly] * (positives != 8))
    for positives in (8, 20, 100)
    for recall, false in ((0.6, 0.1), (0.95, 0.001))
]


@pytest.mark.parametrize("positives, recall, false", COVERAGE)
def test_intervals_hold_for_good_and_weak_classifiers_of_rare_classes(positives, recall, false):
    """At least 93 % of nominal 95 % intervals hold the true score, within two errors of the simulation."""
    random, runs, share = np.random.default_rng(positives), 150, 1 / 11
    truth = np.array([[(1 - share) * (1 - false), (1 - share) * false], [share * (1 - recall), share * recall]])
    costs = partial(metrics.cost, costs=[[0, 1], [10, 0]])
    measures = (F1, metrics.mcc, metrics.balanced_accuracy, metrics.gmean, costs)
    true = [float(measure(Confusion.from_matrix(torch.from_numpy(truth)))) for measure in measures]
    held = np.zeros(len(measures))
    for _ in range(runs):
        counts = random.multinomial(positives * 11, truth.ravel())
        part = decided(np.repeat([0, 1, 0, 1], counts), np.repeat([0, 0, 1, 1], counts))
        for k, measure in enumerate(measures):
            low, high = comparison.interval(comparison.drawn_scores([part], measure), len(part.labels))
            held[k] += low[0] <= true[k] <= high[0]
    assert (held / runs >= 0.93 - 2 * np.sqrt(0.93 * 0.07 / runs)).all(), held / runs


def test_the_winner_is_chosen_out_of_fold_whatever_the_test_rows_say():
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 500)
    good, bad = (np.where(random.random(500) < share, labels, 1 - labels) for share in (0.9, 0.6))
    result = compared(candidate("lucky", bad, good, labels), candidate("chosen", good, bad, labels))
    assert result.winner.name == "chosen"
    assert "not clearly ahead of any other" in result.summary
    assert result.scores["lead"][1] == result.scores["test"][0] - result.scores["test"][1] < -0.2
    clear = compared(candidate("good", good, good, labels), candidate("bad", bad, bad, labels))
    assert "clearly ahead of all others" in clear.summary
    assert compared(*(candidate(name, good, good, labels) for name in "ab")).winner.name == "a", "the first of equals"


def test_leads_over_many_candidates_need_more_evidence():
    """The same lead has a wider interval among twelve candidates, and one of identical candidates is never clear."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 300)
    good, bad = (np.where(random.random(300) < share, labels, 1 - labels) for share in (0.8, 0.7))
    few, many = (
        compared(candidate("good", good, good, labels), *(candidate(str(k), bad, bad, labels) for k in range(count)))
        for count in (1, 11)
    )
    low, lower = (result.scores["lead_low"][1] for result in (few, many))
    assert lower < low < few.scores["lead"][1]
    same = compared(*(candidate(str(k), good, good, labels) for k in range(12)))
    assert "not clearly ahead of any other" in same.summary
    assert (same.scores["lead"] == 0).all()


# What is fitted


def problem(*words):
    command, (settings,) = cli.checked_command(Command.parse(["task=compare", *words, "device=cpu"]))
    return compare.described(command, settings)[1]


@pytest.mark.parametrize(
    "score, classes, positive, expected",
    [
        (None, 2, 1, "f1_positive"),
        (None, 3, None, "f1_macro"),
        ("f1_pos", 3, 2, "f1_positive"),
        ("recall_macro", 2, 1, "recall_macro"),
        ("recall", 2, 1, "recall_positive"),
        ("mcc", 2, 1, "mcc"),
        ("accuracy", 3, None, "accuracy"),
        ("f1_pos", 3, None, "needs a positive class"),
        ("mc", 3, None, "did you mean 'mcc'"),
        ("sklearn.metrics.f1_score", 3, None, "f1_score needs y_pred"),
        ("os.system", 3, None, "expected a function of a Confusion"),
        ("math.nope", 3, None, "cannot be imported"),
    ],
)
def test_a_score_has_a_metric_and_an_average_or_is_refused(score, classes, positive, expected):
    labels, names = torch.arange(classes), tuple("abc"[:classes])
    loaded = data.Table(features=torch.zeros(classes, 1), labels=labels, classes=names, name="t", positive=positive)
    if " " in expected:
        with pytest.raises(ValueError, match=expected):
            compare.parse_score(score, None, loaded)
        return
    parsed, counts = compare.parse_score(score, None, loaded), Confusion.from_matrix(torch.rand(classes, classes))
    assert parsed.name == expected
    metric, options = metrics.parse(expected)
    options |= {"positive": positive} if expected.endswith("positive") else {}
    assert parsed.measure(counts) == metric(counts, **options)


@pytest.mark.parametrize(
    "costs, expected",
    [
        ([[0, 1], [10, 0]], [[0, 1], [10, 0]]),
        ("costs.csv", [[0, 2], [5, 0]]),
        ([[0, 1]], "expected 2 rows of 2 numbers"),
        ([[0, "x"], [1, 0]], "could not convert"),
        ("none.csv", "none.csv"),
    ],
)
def test_costs_are_typed_or_read_from_a_file(costs, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("costs.csv").write_text("0,2\n5,0\n")
    if isinstance(expected, list):
        assert compare.cost_matrix(costs, 2) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            compare.cost_matrix(costs, 2)


@pytest.mark.parametrize(
    "names, kind, expected",
    [
        (None, "table", list(compare.USUAL)),
        (["f1_ce", "rf", "rf"], "table", ["constant", "f1_ce", "rf"]),
        (["sklearn.svm.SVC"], "table", ["constant", "sklearn.svm.SVC"]),
        (None, "image", ["constant", "networks"]),
        (["rf"], "image", "rf takes no images"),
        (["bosting"], "table", "did you mean 'boosting'"),
        ([], "table", "expected at least one of constant"),
        (["nowhere.Classifier"], "table", "nowhere"),
    ],
)
def test_candidates_are_components_losses_or_classifiers(names, kind, expected):
    if isinstance(expected, list):
        assert compare.parse_candidates(names, kind) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            compare.parse_candidates(names, kind)


@pytest.mark.parametrize("by", ["", "dataset.group=patient", "dataset.time=when"])
def test_no_row_is_judged_by_a_model_that_knows_it(by, tmp_path, monkeypatch):
    """Whoever remembers rows would be certain of them; with a time, of rows older than those of training."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"x": random.random(300), "patient": np.arange(300) // 5, "when": np.arange(300)})
    frame.assign(y=random.integers(0, 2, 300)).to_csv("my.csv", index=False)
    remembering = SimpleNamespace(unfitted=lambda seed: RowNumbers())
    monkeypatch.setattr(candidates.Contest, "estimator", lambda self, name: remembering)
    asked = problem("dataset.path=my.csv", "dataset.target=y", *by.split())
    held_out = asked.contest.fit("any").held_out
    assert np.isin(held_out, [0.5]).all(1)[~np.isnan(held_out).any(1)].all()
    assert np.isnan(held_out).any() == ("time" in by), "the older half has no older rows to learn from"
    assert asked.testing.sum() == pytest.approx(60, abs=5)


SLOW = """
import os
import time
from sklearn.dummy import DummyClassifier

class Slow(DummyClassifier):
    def fit(self, X, y):
        if len(y) > 300:
            time.sleep(600)
        return super().fit(X, y)

class Killed(DummyClassifier):
    def fit(self, X, y):
        if len(y) > 300:
            os.kill(os.getpid(), 9)
        return super().fit(X, y)

class Broken(DummyClassifier):
    def predict_proba(self, X):
        raise RuntimeError("no")
"""


def test_candidates_that_fail_die_or_take_too_long_leave_the_others(workplace, capsys):
    """A process that is still at work when time is up is killed; one that dies takes no other candidate with it."""
    Path("slow.py").write_text(SLOW)
    began = time.monotonic()
    words = [*COMPARE[:4], "candidates=[logistic,slow.Broken,slow.Killed,slow.Slow]", "minutes=1"]
    assert cli.run([*words, "results_dir=failing"]) == 0
    assert time.monotonic() - began < 120
    text = capsys.readouterr().out
    for note in ("Broken: RuntimeError: no", "Killed: its process ended 2 times, with code -9", "Slow: time was up"):
        assert f"note: slow.{note}" in text
    assert re.search("^logistic regression +0", text, re.MULTILINE)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an imbalanced file of numbers, categories and gaps, and new rows without labels."""
    folder = tmp_path_factory.mktemp("work")
    X, y = make_classification(900, 5, n_informative=4, n_redundant=0, weights=[0.9], class_sep=1.5, random_state=0)
    frame = pd.DataFrame(X, columns=list("abcde"))
    frame["region"] = np.where(X[:, 0] > 0, "north", "south")
    frame.loc[::13, "b"] = np.nan
    frame["label"] = np.where(y, "fraud", "ok")
    frame[:600].to_csv(folder / "my.csv", index=False)
    frame[600:].to_csv(folder / "labelled.csv", index=False)
    frame[600:].drop(columns="label").to_csv(folder / "new.csv", index=False)
    return folder


@pytest.fixture
def workplace(folder, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


COMPARE = ["task=compare", "dataset=csv", "dataset.path=my.csv", "dataset.target=label", "protocol.max_epochs=200",
           "model.hidden=[16]", "device=cpu", "executor=inline"]  # fmt: skip
LOGISTIC = [*COMPARE, "candidates=[logistic]"]


@pytest.fixture(scope="module")
def answer(folder):
    """What a comparison of the usual candidates prints, and its folder."""
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as output:
        patch.chdir(folder)
        output.setattr(sys, "stdout", text := io.StringIO())
        assert cli.run([*COMPARE, "results_dir=files"]) == 0
    return text.getvalue(), folder / "files/compare/my-f1_positive"


def tables(shown):
    """The tables of a page, each as rows of cells."""
    found = re.findall(r"<table.*?</table>", shown, re.DOTALL)
    rows = (re.findall(r"<tr.*?</tr>", table, re.DOTALL) for table in found)
    return [[re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table] for table in rows]


def test_a_file_is_compared_and_its_winner_predicts_new_rows(answer, workplace, capsys):
    text, _ = answer
    assert re.search(r"region +2 categories: north, south", text)
    assert "rows of 'fraud' among the test rows: " in text
    rows = re.findall(r"^(\S.*?) {2,}-?\d\.\d{3}  ", text, re.MULTILINE)
    assert sorted(rows) == sorted([*map(candidates.title, [*compare.USUAL, candidates.STACK])])
    assert float(re.search(r"winner on f1_positive: .+?, test (\d\.\d+)", text).group(1)) > 0.3
    assert re.search(r"^note: the stack: \S.* \d+%", text, re.MULTILINE)
    command = text.strip().splitlines()[-1].split()
    assert command[:2] == ["east-run", "task=predict"]
    assert cli.run(command[1:]) == 0
    predicted, truth = pd.read_csv("predictions.csv"), pd.read_csv("labelled.csv")["label"]
    assert [name for name in predicted if name != "rule"] == ["label", "p_ok", "p_fraud"]
    assert f1_score(truth == "fraud", predicted["label"] == "fraud") > 0.5
    assert cli.run(command[1:]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_files_of_an_answer_agree_with_scikit_learn(answer, workplace):
    """The page's numbers are those of scores.csv, and those are scikit-learn's on predictions.csv."""
    text, place = answer
    names = {path.name for path in place.iterdir()}
    assert names == {"report.html", "scores.csv", "predictions.csv", "command.txt", "made_from.json", "model"}
    scores, rows = pd.read_csv(place / "scores.csv"), pd.read_csv(place / "predictions.csv")
    (best,) = (row for row in scores.itertuples() if row.winner)
    truth, guess = rows["label"] == "fraud", rows["predicted"] == "fraud"
    assert best.test == best.f1_positive == pytest.approx(f1_score(truth, guess))
    assert best.mcc == pytest.approx(matthews_corrcoef(truth, guess))
    assert best.auroc == pytest.approx(roc_auc_score(truth, rows["p_fraud"]))
    assert best.average_precision == pytest.approx(average_precision_score(truth, rows["p_fraud"]))
    shown = (place / "report.html").read_text()
    candidates, values, matrix, mistakes, *_ = tables(shown)
    for row, (_, *cells) in zip(scores.itertuples(), candidates[1:], strict=True):
        assert cells[:3] == [f"{row.held_out:.3f}", f"{row.test:.3f}", f"{row.test_low:.3f} to {row.test_high:.3f}"]
        lead = [f"{row.lead:+.3f}", f"{row.lead_low:+.3f} to {row.lead_high:+.3f}"]
        assert cells[3:] == (["winner", ""] if row.winner else lead)
    assert dict(values[1:])["auroc"] == f"{best.auroc:.3f}"
    counts = confusion_matrix(rows["label"], rows["predicted"], labels=["ok", "fraud"])
    assert [cells[1:3] for cells in matrix[1:]] == counts.astype(str).tolist()
    assert len(mistakes) == 1 + min(model_page.WRONG, (rows["label"] != rows["predicted"]).sum())
    for content in (
        text.strip().splitlines()[-1].strip(),  # the command that uses the model
        "clearly ahead of",
        "the chosen cut",
        "Calibration",
        "What each decision costs",
        "2 categories: north, south",
        "dataset.path=my.csv",
    ):
        assert content in shown
    assert not re.search(r'(src|href)="?http|<script|\bnan\b', shown)
    assert (place / "command.txt").read_text().startswith("east-run task=compare dataset=csv dataset.path=my.csv")
    model, again = east.load(place / "model"), pd.read_csv("my.csv").iloc[rows["row"] - 1]
    assert rows["label"].tolist() == again["label"].tolist()
    assert not np.allclose(model.predict_proba(again)[:, 1], rows["p_fraud"]), "it knows these rows"


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """Compare candidates on a table whose class is y, in this process; returns what is printed."""
    monkeypatch.chdir(tmp_path)

    def run(frame, *words, candidates="logistic"):
        frame.to_csv("my.csv", index=False)
        asked = ["task=compare", "dataset.path=my.csv", "dataset.target=y", f"candidates=[{candidates}]", *words]
        assert cli.run([*asked, "executor=inline"]) == 0
        return capsys.readouterr()

    return run


def test_copied_rows_stay_together_and_promise_nothing(ask, tmp_path):
    """400 coin flips, five times each: apart, their copies would give every answer away."""
    random = np.random.default_rng(0)
    flips = pd.DataFrame(random.normal(size=(400, 5)), columns=list("abcde")).assign(y=random.integers(0, 2, 400))
    text = ask(pd.concat([flips] * 5), "score=accuracy", candidates="constant,logistic,rf").out
    note = "1,600 of 2,000 rows repeat an earlier one"
    assert f"note: {note}" in text
    assert note in next(tmp_path.rglob("report.html")).read_text()
    assert float(re.search(r"winner on accuracy: .+?, test (\d\.\d+)", text).group(1)) == pytest.approx(0.5, abs=0.12)


def test_a_column_of_patients_is_suggested_with_what_it_changes(ask):
    random = np.random.default_rng(1)
    patient = np.arange(900) // 15
    frame = pd.DataFrame(random.normal(size=(60, 3))[patient] + random.normal(0, 0.05, (900, 3)), columns=list("abc"))
    frame = frame.assign(patient=[f"p{k}" for k in patient], y=random.integers(0, 2, 60)[patient])
    suggested = r"dataset.group=patient \(.*?: f1_positive (\d\.\d+) without, (\d\.\d+) with it"
    found = re.search(suggested, ask(frame, "dry_run=true").out)
    assert float(found.group(1)) > float(found.group(2)) + 0.1


def test_a_date_is_suggested_as_time_and_a_constant_learns_nothing_from_the_folds(ask):
    """The share of a class in the other folds tells its share in this one: enough for an MCC that is not 0."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"x": random.normal(size=203), "y": (np.arange(203) < 31).astype(int)})
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(random.integers(0, 300, 203), "D")
    said = ask(frame.assign(day=days.strftime("%Y-%m-%d")), "score=mcc")
    assert "warning" not in said.err
    assert re.search(r"chosen on 16\d / tested on 4\d$", said.out, re.MULTILINE)
    assert re.search(r"dataset.time=day \(.*?: mcc -?\d\.\d+ without, -?\d\.\d+ with it", said.out)
    assert re.search(r"^always the same +0\.000 +0\.000 ", said.out, re.MULTILINE)


@pytest.mark.parametrize("seen", ["every 17th is missing", "all are equal"])
def test_dates_that_cannot_split_the_rows_are_a_note_at_most(seen, ask):
    days, random = pd.date_range("2020-01-01", periods=200).strftime("%Y-%m-%d").to_series(), np.random.default_rng(0)
    days = days[:1].repeat(200) if seen == "all are equal" else days.where(np.arange(200) % 17 > 0)
    frame = pd.DataFrame({"x": random.normal(size=200), "y": random.integers(0, 2, 200), "seen": [*days]})
    printed = ask(frame, "dry_run=true")
    assert ("use dataset.time=seen" in printed.out) == (seen != "all are equal")
    assert "gradient boosting: " not in printed.out
    assert "not writable" not in printed.err


def test_a_model_of_the_future_knows_the_newest_rows(ask, tmp_path):
    """The class turns round with time; a model of the oldest rows would be wrong on new ones."""
    frame = pd.DataFrame({"x": np.random.default_rng(0).normal(size=600), "when": np.arange(600)})
    frame["y"] = ((frame["x"] > 0) ^ (frame["when"] < 420)).astype(int)
    ask(frame, "dataset.time=when", "dataset.keep=[when]", candidates="boosting")
    (place,) = (tmp_path / "results/compare").iterdir()
    assert "classifiers are fitted again, to all rows" in (place / "report.html").read_text()
    new = pd.DataFrame({"x": [-1.0, 1.0], "when": [601, 602]})
    assert east.load(place / "model").predict(new).tolist() == ["0", "1"]


@pytest.fixture(scope="module")
def fitted(answer, folder):
    """A saved model with a threshold for F1."""
    model = east.load(answer[1] / "model")
    return model.deciding("plug-in for f1", decisions.Threshold(0.2)).save(folder / "threshold")


def test_predictions_name_their_rule_and_keep_columns_of_the_input(workplace, fitted, capsys):
    predict = ["task=predict", f"checkpoint={fitted}", "input=labelled.csv"]
    assert cli.run([*predict, "output=kept.csv", "keep=[region,label]"]) == 0
    kept, rows = pd.read_csv("kept.csv"), pd.read_csv("labelled.csv")
    assert list(kept) == ["region", "input_label", "label", "rule", "p_ok", "p_fraud"]
    assert kept["input_label"].tolist() == rows["label"].tolist()
    assert kept["rule"].unique().tolist() == ["fraud if p_fraud >= 0.2, else ok"]
    np.testing.assert_array_equal(kept["label"] == "fraud", kept["p_fraud"] >= 0.2)
    assert cli.run([*predict, "output=none.csv", "keep=[id]"]) == 3
    assert "keep: expected columns of the input, got id; it has a, b, c" in capsys.readouterr().err


def test_a_saved_model_is_scored_on_labelled_rows(workplace, fitted, capsys):
    """Scores match scikit-learn; the score that the model was chosen by comes first."""
    east.load(fitted).deciding("expected mcc", decisions.Threshold(0.2)).save("for_mcc")
    assert cli.run(["task=evaluate", "checkpoint=for_mcc", "input=labelled.csv"]) == 0
    text, rows = capsys.readouterr().out, pd.read_csv("labelled.csv")
    report = Path(text.strip().splitlines()[-1].removeprefix("report: "))
    assert report == Path("results/evaluate/labelled-for_mcc/report.html")
    assert text.splitlines()[1].startswith("mcc ")
    p, truth = east.load(fitted).predict_proba(rows)[:, 1], rows["label"] == "fraud"
    scores = pd.read_csv(report.with_name("scores.csv")).set_index("score")
    assert scores.loc["f1_positive", "value"] == pytest.approx(f1_score(truth, p >= 0.2))
    assert scores.loc["mcc", "value"] == pytest.approx(matthews_corrcoef(truth, p >= 0.2))
    assert scores.loc["average_precision", "value"] == pytest.approx(average_precision_score(truth, p))
    known = scores.dropna()
    assert [*scores.index.difference(known.index)] == ["auroc", "average_precision"]
    assert known["value"].between(known["low"], known["high"]).all()
    assert [cells[1] for cells in tables(report.read_text())[0][1:]] == [f"{value:.3f}" for value in scores["value"]]
    assert not re.search(r"\bnan\b", report.read_text())
    assert "decides by: fraud if p_fraud >= 0.2, else ok" in text


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows.drop(columns="label"), "expected the labels in a column 'label'"),
        (lambda rows: rows.assign(label="maybe"), "does not know the class 'maybe'; it knows ok, fraud"),
        (lambda rows: rows.assign(label=[None, *rows["label"][1:]]), "the label 'label' is missing in 1 row\n"),
    ],
)
def test_rows_that_cannot_be_scored_are_reported(change, message, workplace, fitted, capsys):
    change(pd.read_csv("labelled.csv")).to_csv("bad.csv", index=False)
    assert cli.run(["task=evaluate", f"checkpoint={fitted}", "input=bad.csv"]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["task=predict", "output=new.csv"], ["task=evaluate"]])
def test_a_model_of_graphs_takes_no_files(words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(saved, "load", lambda *_: SimpleNamespace(about=SimpleNamespace(kind="graph")))
    assert cli.run([*words, "checkpoint=model", "input=graphs.csv"]) == 3
    assert "graphs have no file format here; use east.load(…).predict_proba(array)" in capsys.readouterr().err


# The page


def test_mistakes_are_shown_with_their_values():
    """Most confident first; long cells are cut, markup is escaped, missing values are blank."""
    labels = torch.tensor([1, 1, 0, 0])
    p = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
    columns = {"id": [10**17, 10**17 + 1, 3, 4], "<i>": ["a", "<script>" + "x" * 99_000, "b", None]}
    frame = pd.DataFrame(columns | {name: [0.5, np.nan, 1 / 3, 2.0] for name in "cdefg"}, index=[4, 7, 9, 30])
    text = model_page.mistakes(DecidedRows(p, labels, decisions.Argmax(), ("ok", "fraud"), 1, frame=frame))
    (rows,) = tables(text)
    cut = "&lt;script&gt;xxxxxxxxxxxxxxxxxxxxxx… (99,008 characters)"
    assert rows == [
        ["row", "true class (probability)", "predicted (probability)", "id", "&lt;i&gt;", *"cdef"],
        ["8", "fraud (0.1000)", "ok (0.9000)", str(10**17 + 1), cut, "", "", "", ""],
        ["5", "fraud (0.3000)", "ok (0.7000)", str(10**17), "a", "0.5", "0.5", "0.5", "0.5"],
        ["31", "ok (0.4000)", "fraud (0.6000)", "4", "", "2", "2", "2", "2"],
    ]
    assert "3 of 4 rows are wrong" in text
    assert "The first 6 of 7 columns are shown." in text


def test_rows_of_a_limited_file_keep_their_numbers(workplace):
    loaded = data.load("csv", path="my.csv", target="label", limit=50)
    rows, file = model_page.rows_of(loaded, np.arange(50)), pd.read_csv("my.csv")
    pd.testing.assert_frame_equal(rows, file.drop(columns="label").loc[rows.index])
    assert rows.index[-1] > 50


def test_a_page_of_many_classes_has_curves_of_the_rarest_and_their_mistakes():
    random = np.random.default_rng(0)
    labels = torch.from_numpy(random.integers(0, 25, 500))
    noise = torch.from_numpy(random.normal(size=(500, 25)))
    p = torch.softmax(3 * torch.nn.functional.one_hot(labels).double() + noise, 1)
    names = tuple(f"kind ${k}$" for k in range(25))
    part = DecidedRows(p, labels, decisions.Argmax(), names, None, frame=pd.DataFrame(index=range(500)))
    sections = model_page.of_model(part, "Scores", "")
    assert sections["Precision, recall and calibration"].count("<svg") == 2
    assert "the most probable class is right" in sections["Precision, recall and calibration"]
    (rows,) = tables(sections["Scores"])
    counts = confusion_matrix(labels, part.predicted)
    np.fill_diagonal(counts, 0)
    assert len(rows) == 1 + model_page.MATRIX
    assert int(rows[1][-1]) == counts.max()


# Time


def test_minutes_shorten_networks_and_leave_out_what_does_not_fit(monkeypatch):
    seconds = {"logistic": 1.0, "networks": 1000.0, "rf": 10_000.0}
    contest = SimpleNamespace(seconds=seconds.get, estimator=lambda name: None if name == "networks" else name)
    monkeypatch.setattr(candidates, "cores", lambda: 2)
    planned = candidates.Timetable.within(contest, [*seconds], 300)
    assert planned.shares == {"logistic": 1.0, "networks": 0.5}
    assert planned.notes == (
        "shortened: networks, to 50% of the usual steps",
        "left out: random forest, about 2.8 h",
    )
    assert candidates.Timetable.within(contest, ["rf"], 1).shares == {"rf": 1.0}, "something is always tried"
    assert candidates.Timetable.within(contest, [*seconds], None).shares == dict.fromkeys(seconds, 1.0)


def test_more_than_a_day_on_a_cpu_needs_a_yes_or_a_limit(workplace, monkeypatch, capsys):
    """An interrupted comparison leaves no folder of an answer."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(candidates.Contest, "seconds", lambda self, name: 100_000.0)
    monkeypatch.setattr(candidates, "fitted", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    command = [*LOGISTIC, "results_dir=days"]
    assert cli.run(command) == cli.BAD_CONFIG
    said = capsys.readouterr().err
    assert "about 28 h on this machine" in said
    assert "yes=true starts it anyway" in said
    for word in ("yes=true", "minutes=1"):
        assert cli.run([*command, word]) == cli.INTERRUPTED
    assert not any(Path("days").iterdir())


# Scores of the user's own


def test_a_score_of_your_own_is_found_in_the_working_directory_and_counts_as_zero_where_it_is_undefined(
    workplace, monkeypatch, capsys
):
    """The precision of a class that is never predicted is 0/0, of which NumPy and torch make NaN."""
    Path("my_scores.py").write_text(
        "def precise(c):\n    m = c.matrix\n    return m[..., 1, 1] / (m[..., 0, 1] + m[..., 1, 1])\n"
    )
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(workplace))])
    monkeypatch.setattr(sys, "argv", ["east-run", *LOGISTIC, "score=my_scores.precise", "results_dir=own"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    text, shown = capsys.readouterr().out, Path("own/compare/my-my_scores.precise/report.html").read_text()
    assert "winner on my_scores.precise" in text
    of_model, of_each_metric = (table for table in tables(shown) if table[0][0] in ("score", "best for"))
    assert of_model[1][0] == of_each_metric[1][0] == of_each_metric[0][2] == "my_scores.precise"
    assert of_model[1][1] == of_each_metric[1][2], "its value on the test rows"
    note = "my_scores.precise is undefined (0/0) if a class is never predicted; such a score counts as 0"
    assert text.count(note) == shown.count(note) == 1
    assert not re.search(r"\bnan\b", text + shown)


# Folders, notes and mistakes


def folder_names(parent, commands):
    """The names of the folders of comparisons by mcc, one after another."""
    folders = []
    for words in commands:
        settings = compare.compose.settings(Command.parse(["task=compare", *words.split(), f"results_dir={parent}"]))
        named = {"loaded": SimpleNamespace(name="digits"), "score": SimpleNamespace(name="mcc")}
        folders.append(compare.answer_folder(SimpleNamespace(settings=settings, **named)).name)
    return folders


def test_a_comparison_of_another_problem_keeps_its_folder(tmp_path, monkeypatch):
    """Another file, target, positive class or part of the rows is another problem; other candidates are not."""
    words = ["", "dataset.positive=8", "dataset.positive=3 dataset.limit=500", "candidates=[rf]", "dataset.positive=8"]
    assert folder_names(tmp_path, [f"dataset=digits {more}" for more in words]) == [
        "digits-mcc", "digits-2-mcc", "digits-3-mcc", "digits-mcc", "digits-2-mcc"
    ]  # fmt: skip
    files = ("my.csv", "old/my.csv", "./my.csv", "old/../my.csv")
    for place, expected in (("first", ["", "-2", "", ""]), ("second", ["-3", "-4", "-3", "-3"])):
        (tmp_path / place / "old").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / place)
        names = folder_names(tmp_path / "shared", [f"dataset.path={file}" for file in files])
        assert names == [f"my{number}-mcc" for number in expected], "files are told apart by where they are"


def test_a_folder_that_does_not_say_what_it_was_made_from_is_not_overwritten(tmp_path):
    for name, file in (("digits-mcc", "notes.txt"), ("iris-mcc", None)):
        (tmp_path / "compare" / name).mkdir(parents=True)
        left = tmp_path / "compare" / name / (file or "made_from.json")
        (left if file else temporary_name(left)).touch()  # a killed command leaves a temporary file
    assert folder_names(tmp_path, ["dataset=digits", "dataset.path=iris.csv"]) == ["digits-2-mcc", "iris-mcc"]


def test_commands_that_start_together_share_the_folder_of_their_input(tmp_path, monkeypatch):
    """Another one makes the folder, and has not yet written what it is for."""
    written = files.write_atomically

    def slowly(target, fill, replace):
        target.parent.mkdir(parents=True)
        monkeypatch.setattr(files, "write_atomically", written)
        assert result_folder(tmp_path, "a", "b", {"x": 1}) == tmp_path / "a-b"
        written(target, fill, replace)

    monkeypatch.setattr(files, "write_atomically", slowly)
    assert result_folder(tmp_path, "a", "b", {"x": 1}) == tmp_path / "a-b"


def test_a_long_name_is_shortened(tmp_path):
    """A folder's name has at most 255 bytes."""
    folders = [result_folder(tmp_path, letter * 240, "m" * 240, {"file": letter}) for letter in "aé"]
    folders += [result_folder(tmp_path, "a" * 239, "m" * 240, {"file": "another"})]
    assert len(set(folders)) == 3
    assert all(folder.is_dir() for folder in folders)


def test_the_command_for_new_rows_can_be_pasted_into_a_shell():
    words = shlex.split(compare.predict_command(Path("my results/it's me"), "table", trust=True))
    assert (words[0], dict(Command.parse(words[1:]))) == ("east-run", {
        "task": "predict", "checkpoint": "my results/it's me/model", "input": "new.csv", "output": "predictions.csv",
        "trust": True,
    })  # fmt: skip


def test_a_score_of_a_class_without_test_rows_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": range(200), "label": ["rare"] + ["usual"] * 199}).to_csv("my.csv", index=False)
    assert cli.run(LOGISTIC) == 3
    assert "'rare': 0 of 1 rows are for testing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ([*COMPARE, "minutes=0"], 2, "minutes"),
        ([*COMPARE, "split.seed=trial"], 2, "task=compare judges all candidates on one split"),
        ([*COMPARE, "split.folds=3"], 2, "in folds of its own"),
        ([*COMPARE, "protocol=btg"], 2, "task=compare judges all candidates on one split"),
        ([*COMPARE, "trials=3"], 2, "trials=3: task=compare does not read it"),
        ([*COMPARE, "score=picky.score"], 2, "that returns a tensor; AssertionError: empty"),
        ([*COMPARE[:4], "model=custom", "model.target=made_by.network"], 2, "saves its winner: model.target"),
        (["task=predict", "checkpoint=no", "input=new.csv", "output=o.csv"], 3, "is not a saved model"),
        (["task=predict", "checkpoint=no", "input=new.csv", "output='~/keep.csv'"], 2, "keep.csv exists already"),
    ],
)  # fmt: skip
def test_a_mistake_gives_an_exit_code_and_an_explanation(arguments, code, message, workplace, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(workplace))
    Path("keep.csv").write_text("mine")
    Path("made_by.py").write_text("def network(features, outputs):\n    return None\n")
    Path("picky.py").write_text("def score(c):\n    assert c.predicted.all(), 'empty'\n    return c.total\n")
    assert cli.run(arguments) == code
    assert message in capsys.readouterr().err
