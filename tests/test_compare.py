"""task=compare, task=evaluate and task=predict: the choice is sound, its numbers are right, and the winner is saved."""

import io
import re
import shlex
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import make_classification
from sklearn.metrics import average_precision_score, confusion_matrix, f1_score, matthews_corrcoef, roc_auc_score

import east
from east import decisions, metrics
from east.lab import cli, data, files
from east.lab.data.common import folded
from east.lab.experiment import budget, records
from east.lab.experiment.runs import split_options, splits_of
from east.lab.files import result_folder, temporary_name
from east.lab.reporting import comparison, model_page
from east.lab.reporting.comparison import Candidate, Decided
from east.lab.settings.command import Command
from east.lab.tasks import compare, plan
from east.lab.training import objective, saved
from east.lab.training.population import Trial

F1 = partial(metrics.f1, average="positive")


# The judge


def test_cross_fitting_takes_the_luck_out_of_a_tuned_threshold():
    """The true balanced accuracy of noise is 1/2; tuned and judged on the same rows it is always higher."""
    honest, tuned = [], []
    for seed in range(40):
        random = np.random.default_rng(seed)
        values = random.random(200)
        p, y = torch.from_numpy(np.stack([1 - values, values], 1)), torch.from_numpy((random.random(200) < 0.1) * 1)
        by_rule = decisions.tuned(p, y, metrics.balanced_accuracy, 1).decide(p)
        by_others = comparison.cross_fitted(p, y, metrics.balanced_accuracy, 1)
        for values, predicted in ((tuned, by_rule), (honest, by_others)):
            values.append(float(metrics.balanced_accuracy(Decided(p, y, predicted).confusion)))
    assert np.mean(tuned) > 0.56
    assert np.mean(honest) == pytest.approx(0.5, abs=0.03)


def decided(predicted, labels, groups=None):
    predicted, labels = torch.as_tensor(predicted), torch.as_tensor(labels)
    return Decided(torch.nn.functional.one_hot(predicted, 2).double(), labels, predicted, groups)


def candidate(key, val, test, labels, decision="argmax"):
    every_row = torch.ones(len(labels), dtype=torch.bool)
    parts = (decided(val, labels), decided(test, labels))
    return Candidate(key, key, decision, 0, decisions.Argmax(), *parts, every_row)


def compared(*candidates, measure=F1):
    return comparison.compared("f1_positive", measure, candidates, ("ok", "fraud"), 1)


def test_the_interval_is_that_of_a_binomial_proportion_and_counts_groups_once():
    """Its width is 4 standard errors of sqrt(p q / n); 25 copies of every row, in groups, add no information."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 1000)
    one = decided(np.where(random.random(1000) < 0.8, labels, 1 - labels), labels)
    (samples,) = comparison.resampled([one], metrics.accuracy)
    low, high = np.quantile(samples, [0.025, 0.975])
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.16 / 1000), rel=0.1)
    assert samples.mean() == pytest.approx(float(metrics.accuracy(one.confusion)), abs=0.002)
    groups = torch.arange(1000).repeat_interleave(25)
    repeated = decided(one.predicted.repeat_interleave(25), one.labels.repeat_interleave(25), groups)
    for measure in (metrics.accuracy, F1, metrics.mcc):
        np.testing.assert_allclose(*(comparison.resampled([part], measure) for part in (repeated, one)))
    np.testing.assert_allclose(*(comparison.rank_samples(part, 1)["auroc"] for part in (repeated, one)))
    fold = folded(repeated.labels.numpy(), 5, groups.numpy()).reshape(1000, 25)
    assert (fold == fold[:, :1]).all()


def test_resampled_ranking_scores_match_scikit_learn():
    random = np.random.default_rng(0)
    values, truth = random.integers(0, 20, 300) / 20, random.random(300) < 0.2
    weights = random.poisson(1.0, (4, 300))
    for one, (auroc, precision) in zip(weights, comparison.ranking(values, truth, weights).T, strict=True):
        assert auroc == pytest.approx(roc_auc_score(truth, values, sample_weight=one), abs=1e-12)
        assert precision == pytest.approx(average_precision_score(truth, values, sample_weight=one), abs=1e-12)
    p = torch.from_numpy(random.dirichlet([1, 1, 1], 300))
    drawn = comparison.rank_samples(Decided(p, torch.from_numpy(random.integers(0, 3, 300)), p.argmax(1)), None)
    assert np.quantile(drawn["auroc"], 0.025) < 0.5 < np.quantile(drawn["auroc"], 0.975)


def test_the_winner_is_chosen_on_validation_whatever_the_test_rows_say():
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 500)
    good, bad = (np.where(random.random(500) < share, labels, 1 - labels) for share in (0.9, 0.6))
    result = compared(candidate("lucky", bad, good, labels), candidate("chosen", good, bad, labels, "plugin"))
    assert result.winner.key == "chosen"
    assert "chosen + plug-in, test" in result.summary
    assert "not clearly ahead of any other" in result.summary
    assert result.scores["lead"][0] == result.scores["test"][1] - result.scores["test"][0] < -0.2
    assert result.uncertain is None
    assert (
        "clearly ahead of all others"
        in compared(candidate("good", good, good, labels), candidate("bad", bad, bad, labels)).summary
    )


def test_few_positives_make_the_choice_uncertain():
    """Two candidates miss one of three positives each; a third is luckier, but has a low likelihood."""
    labels = np.array([0] * 97 + [1] * 3)
    guesses = [np.where(np.arange(100) == missed, 0, labels) for missed in (97, 98)]
    candidates = [candidate(str(k), guess, guess, labels) for k, guess in enumerate(guesses)]
    blind = replace(decided(labels, labels), probabilities=torch.full((100, 2), 0.5).double())
    result = compared(*candidates, replace(candidates[0], key="blind", val=blind, test=blind))
    assert result.winner.key == "0"
    assert result.uncertain.startswith("only 3 validation rows of 'fraud'")
    assert "among the 3 candidates" in result.uncertain


def test_networks_are_judged_on_rows_that_did_not_stop_them():
    """Three trials leave out one fold each. They are right on the rows that stopped them and wrong on their fold."""
    labels = np.arange(90) % 3 % 2
    fold, trials = folded(labels, 3), {}
    for seed in range(3):
        p = np.stack([labels != 1, labels == 1], 1).astype(np.float32)
        p[fold == seed] = [1, 0]
        trials[seed] = {f"{part}_probabilities": p for part in ("val", "test")}
        trials[seed] |= {f"{part}_labels": labels for part in ("val", "test")}
    fair = candidate("rf", labels, labels, labels)
    for kept, rows in ((3, 90), (2, 60)):  # if a trial failed, no other can be judged on the rows that only it left out
        some = {seed: trials[seed] for seed in range(kept)}
        network = comparison.judge("east", "EAST", some, 3, {"val": None, "test": None}, F1, 1)[0]
        result = compared(network, fair)
        assert result.scores["validation"].tolist() == [0, 1]
        assert [len(c.val.labels) for c in result.candidates] == [rows, rows]
        assert result.scores["test"][0] == pytest.approx(f1_score(labels, np.where(fold == 0, 0, labels)))


def test_a_candidate_that_predicts_one_class_is_reported_and_an_undefined_score_does_not_win():
    labels = np.arange(400) % 2
    blind = candidate("blind", 0 * labels, 0 * labels, labels)
    undefined = decisions.defined(lambda c: c.diagonal[..., 1] / c.predicted[..., 1])
    result = compared(blind, candidate("sharp", labels, labels, labels), measure=undefined)
    assert result.notes() == ["blind predicts the same class for every test row"]
    assert result.scores["validation"].tolist() == [0, 1]
    assert result.winner.key == "sharp"


# What is trained


def problem(*words):
    return compare.described(*compare.checked(Command.parse([*words, "device=cpu"])))


@pytest.mark.parametrize(
    "score, classes, positive, expected",
    [
        (None, 2, 1, ("f1_positive", "f1", "positive", None)),
        (None, 3, None, ("f1_macro", "f1", "macro", None)),
        ("f1_pos", 2, 1, ("f1_positive", "f1", "positive", None)),
        ("f1_pos", 3, 2, ("f1_positive", "f1", "positive", 2)),
        ("f1", 3, None, ("f1_macro", "f1", "macro", None)),
        ("recall_macro", 2, 1, ("recall_macro", "recall", "macro", None)),
        ("recall", 2, 1, ("recall_positive", "recall", "positive", None)),
        ("mcc", 2, 1, ("mcc", "mcc", None, None)),
        ("accuracy", 3, None, ("accuracy", "accuracy", None, None)),
        ("f1_pos", 3, None, "f1_positive needs a positive class"),
        ("mc", 3, None, "did you mean 'mcc'"),
        ("sklearn.metrics.f1_score", 3, None, "expected a function of a Confusion"),
        ("os.system", 3, None, "expected a function of a Confusion"),
        ("math.nope", 3, None, "expected a function of a Confusion"),
    ],
)
def test_a_score_has_a_metric_and_an_average_or_is_refused(score, classes, positive, expected):
    labels, names = torch.arange(classes), tuple("abc"[:classes])
    loaded = data.Table(features=torch.zeros(classes, 1), labels=labels, classes=names, name="t", positive=positive)
    if isinstance(expected, tuple):
        assert compare.parse_score(score, loaded) == compare.Score(*expected)
    else:
        with pytest.raises(ValueError, match=expected):
            compare.parse_score(score, loaded)


@pytest.mark.parametrize(
    "words, metric, matched",
    [
        (["dataset=digits"], {"metric": "f1", "average": "macro"}, "f1"),
        (["dataset=digits", "dataset.positive=8", "score=f1"], {"metric": "f1", "average": "positive"}, "f1"),
        (["dataset=synthetic", "score=mcc"], {"metric": "mcc"}, "mcc"),
        (["dataset=digits", "score=balanced_accuracy"], {"metric": "balanced_accuracy"}, "metric"),
    ],
)
def test_networks_train_on_the_metric_of_the_score(words, metric, matched):
    asked = problem(*words)
    losses = [compare.settings_of(name, asked).loss for name in ("east", "metric_ce", "anyloss")]
    assert [loss.name for loss in losses] == [matched, "metric_ce", "anyloss"]
    for loss in losses:
        assert metric.items() <= loss.options.items()
        assert objective.build_loss(loss, asked.loaded.classes).metric is metrics.METRICS[metric["metric"]]


@pytest.mark.parametrize(
    "names, kind, expected",
    [
        (None, "table", ["logistic", "boosting", "rf", "metric_ce", "ce", "east"]),
        (["east", "rf"], "table", ["rf", "east"]),
        (None, "graph", ["metric_ce", "ce", "east"]),
        (["bosting"], "table", "did you mean 'boosting'"),
        ([], "table", "expected at least one of logistic"),
    ],
)
def test_candidates_are_tried_in_one_order(names, kind, expected):
    if isinstance(expected, list):
        assert compare.parse_candidates(names, kind) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            compare.parse_candidates(names, kind)


@pytest.mark.parametrize("rows, batch, trials", [(300, 32, 3), (10_000, 128, 3), (100_000, 512, 1)])
def test_all_networks_get_the_same_number_of_steps(rows, batch, trials):
    """With one stage or six, the number of steps is the same, and patience never ends training."""
    asked = problem("dataset=synthetic", "dataset.imbalance=1")
    asked = replace(asked, splits=SimpleNamespace(train=range(rows)))
    for name in ("ce", "metric_ce", "east"):
        settings = compare.settings_of(name, asked)
        protocol, stages = settings.protocol, 6 if name == "east" else 1
        assert (protocol.count, protocol.max_epochs, protocol.patience) == ("steps", 2000, 2000)
        assert (protocol.stage_epochs, settings.annealing.patience) == (-(-2000 // stages), stages)
        assert (settings.hyper.batch_size, settings.trial_count, settings.executor.name) == (batch, trials, "inline")
    forest = compare.settings_of("rf", asked)
    assert (forest.trial_count, forest.loss.options.get("max_samples")) == (1, 5000 if rows > 20_000 else None)


def test_batches_grow_with_the_rows_and_hold_some_of_a_rare_class():
    assert [budget.batch_size(rows) for rows in (20, 300, 10_000, 100_000)] == [32, 32, 128, 512]
    assert [budget.batch_size(10_000, share) for share in (0.5, 0.05, 0.001, 0.0)] == [128, 256, 512, 512]


def test_a_share_of_the_steps_keeps_the_patience_of_other_presets():
    settings = compare.settings_of("ce", problem("dataset=digits", "preset=quick"))
    half = budget.shorter(settings, 0.5, rows=1000).protocol
    assert half == settings.protocol.but(max_epochs=settings.protocol.max_epochs // 2)


def test_a_network_is_stopped_on_other_rows_than_it_is_judged_on(workplace):
    """The engine gives the fold no weight, and `judge` uses exactly that fold."""
    asked = problem("dataset.path=my.csv", "dataset.target=label")
    run = plan.made([compare.settings_of("ce", asked)]).items[0].run
    labels = data.split(asked.loaded, **split_options(run.science.split)).val.labels.numpy()
    weights = [one.val.weights.numpy() for one in splits_of(asked.loaded, [Trial(run.science, k) for k in range(3)])]
    assert np.array_equal(sum(weights), np.full(96, 2.0))
    for seed, seen in enumerate(weights):
        assert np.array_equal(seen == 0, folded(labels, 3) == seed)
        assert labels[seen == 0].sum() in (2, 3)  # of eight


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


COMPARE = ["task=compare", "dataset=csv", "dataset.path=my.csv", "dataset.target=label", "trials=2",
           "protocol.max_epochs=12", "model.hidden=[16]", "device=cpu"]  # fmt: skip
LOGISTIC = [*COMPARE, "candidates=[logistic]", "trials=1"]


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
    rows = (
        re.findall(r"<tr.*?</tr>", table, re.DOTALL) for table in re.findall(r"<table.*?</table>", shown, re.DOTALL)
    )
    return [[re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table] for table in rows]


def test_a_file_is_compared_and_its_winner_predicts_new_rows(answer, workplace, capsys):
    text, _ = answer
    assert re.search(r"region +2 categories: north, south", text)
    assert "rows of 'fraud' for validation; expect wide intervals" in text
    rows = re.findall(r"^(\S.*?)(?: \+ (?:plug-in|expected))? {2,}\d\.\d{3}  ", text, re.MULTILINE)
    assert rows == [t for t in [*list(compare.CANDIDATES.values())[:5], "EAST f1_positive"] for _ in range(3)]
    assert float(re.search(r"winner on f1_positive: .+?, test (\d\.\d+)", text).group(1)) > 0.3
    assert "the choice is uncertain: only 8 validation rows of 'fraud'" in text
    command = text.strip().splitlines()[-1].split()
    assert command[:2] == ["east-run", "task=predict"]
    assert cli.run(command[1:]) == 0
    predicted, truth = pd.read_csv("predictions.csv"), pd.read_csv("labelled.csv")["label"]
    assert [name for name in predicted if name != "rule"] == ["label", "p_ok", "p_fraud"]
    assert f1_score(truth == "fraud", predicted["label"] == "fraud") > 0.4
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
    candidates, values, matrix, mistakes = tables(shown)
    for row, (_, *cells) in zip(scores.itertuples(), candidates[1:], strict=True):
        assert cells[:3] == [f"{row.validation:.3f}", f"{row.test:.3f}", f"{row.test_low:.3f} to {row.test_high:.3f}"]
        lead = [f"{row.lead:+.3f}", f"{row.lead_low:+.3f} to {row.lead_high:+.3f}"]
        assert cells[3:] == (["winner", ""] if row.winner else lead)
    assert dict(values[1:])["auroc"] == f"{best.auroc:.3f}"
    counts = confusion_matrix(rows["label"], rows["predicted"], labels=["ok", "fraud"])
    assert [cells[1:3] for cells in matrix[1:]] == counts.astype(str).tolist()
    assert len(mistakes) == 1 + min(model_page.WRONG, (rows["label"] != rows["predicted"]).sum())
    for content in (
        text.strip().splitlines()[-1].strip(),  # the command that uses the model
        "clearly ahead of",
        "The choice is uncertain",
        "the chosen cut",
        "Calibration",
        "2 categories: north, south",
        "dataset.path=my.csv",
    ):
        assert content in shown
    assert not re.search(r'(src|href)="?http|<script|\bnan\b', shown)
    assert (place / "command.txt").read_text().startswith("east-run task=compare dataset=csv dataset.path=my.csv")

    # The saved model decides the test rows as the winner did, and no other model is kept.
    model, again = east.load(place / "model"), pd.read_csv("my.csv").iloc[rows["row"] - 1]
    assert (model.about.rule is not None) == (best.decision != "argmax")
    assert rows["label"].tolist() == again["label"].tolist()
    np.testing.assert_allclose(model.predict_proba(again)[:, 1], rows["p_fraud"], atol=1e-6)
    assert model.predict(again).tolist() == rows["predicted"].tolist()
    assert len(list(Path("files/models").iterdir())) == 1


def test_a_comparison_that_is_on_record_trains_nothing_and_restores_what_was_deleted(answer, workplace, capsys):
    text, place = answer
    files = {path: path.stat().st_mtime_ns for path in Path("files").glob("runs/**/*.json")}
    command = [*COMPARE, "results_dir=files"]
    assert cli.run([*command, "keep_models=all"]) == 0
    repeated = capsys.readouterr().out
    assert "everything is on record" in repeated
    assert repeated.partition("validation  ")[2] == text.partition("validation  ")[2]
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert {record.config.preset for record in records.scan("files")} == {"compare"}

    # Probabilities and a model are deleted; a model that was there before stays.
    (winner,) = Path("files/models").iterdir()
    key, seed = winner.name.split("-")[-2], east.load(place / "model").about.seed
    deleted = min(file for file in Path("files").glob("runs/**/*.npz") if key in str(file))
    deleted.unlink()
    shutil.rmtree(winner)
    mine = winner.with_name(winner.name.replace(f"-seed{seed}", f"-seed{1 - seed}"))
    mine.mkdir()
    (mine / "mine").touch()
    assert cli.run(command) == 0
    assert deleted.exists()
    assert {*Path("files/models").iterdir()} == {winner, mine}


@pytest.fixture(scope="module")
def fitted(answer, folder):
    """A saved model with a threshold for F1."""
    model = east.load(answer[1] / "model")
    return model.deciding("plug-in for f1", decisions.Threshold(0.2)).save(folder / "threshold")


def test_predictions_copy_columns_and_name_their_rule(workplace, fitted, capsys):
    predict = ["task=predict", f"checkpoint={fitted}", "input=labelled.csv"]
    assert cli.run([*predict, "output=kept.csv", "keep=[region,label]"]) == 0
    kept, rows = pd.read_csv("kept.csv"), pd.read_csv("labelled.csv")
    assert list(kept) == ["region", "input_label", "label", "rule", "p_ok", "p_fraud"]
    assert kept["region"].tolist() == rows["region"].tolist()
    assert kept["input_label"].tolist() == rows["label"].tolist()
    assert kept["rule"].unique().tolist() == ["fraud if p_fraud >= 0.2, else ok"]
    np.testing.assert_array_equal(kept["label"] == "fraud", kept["p_fraud"] >= 0.2)
    assert cli.run([*predict, "output=whole.csv", "keep=all"]) == 0
    assert list(pd.read_csv("whole.csv"))[:7] == [*list(rows)[:6], "input_label"]
    assert cli.run([*predict, "output=none.csv", "keep=[id]"]) == 3
    assert "keep: expected columns of the input, got id; it has a, b, c" in capsys.readouterr().err


def test_a_saved_model_is_scored_on_labelled_rows(workplace, fitted, capsys):
    """Scores match scikit-learn; another file of the same name gets a page of its own."""
    reports = []
    for place in ("here", "there", "here"):
        Path(place).mkdir(exist_ok=True)
        shutil.copy("labelled.csv", f"{place}/rows.csv")
        assert cli.run(["task=evaluate", f"checkpoint={fitted}", f"input={place}/rows.csv"]) == 0
        text = capsys.readouterr().out
        reports.append(text.strip().splitlines()[-1].removeprefix("report: "))
    assert reports[0] == reports[2] == "results/evaluate/rows-threshold/report.html"
    assert reports[1] == "results/evaluate/rows-2-threshold/report.html"
    rows = pd.read_csv("labelled.csv")
    p, truth = east.load(fitted).predict_proba(rows)[:, 1], rows["label"] == "fraud"
    scores = pd.read_csv(Path(reports[0]).with_name("scores.csv")).set_index("score")
    assert scores.loc["f1_positive", "value"] == pytest.approx(f1_score(truth, p >= 0.2))
    assert scores.loc["mcc", "value"] == pytest.approx(matthews_corrcoef(truth, p >= 0.2))
    assert scores.loc["average_precision", "value"] == pytest.approx(average_precision_score(truth, p))
    assert (scores["low"] <= scores["value"]).all()
    assert (scores["value"] <= scores["high"]).all()
    shown = Path(reports[0]).read_text()
    assert [cells[1] for cells in tables(shown)[0][1:]] == [f"{value:.3f}" for value in scores["value"]]
    assert not re.search(r"\bnan\b", shown)
    assert "decides by: fraud if p_fraud >= 0.2, else ok" in text


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows.drop(columns="label"), "expected the labels in a column 'label'"),
        (lambda rows: rows.assign(label="maybe"), "does not know the class 'maybe'; it knows ok, fraud"),
        (lambda rows: rows.assign(label=[None, *rows["label"][1:]]), "the label 'label' is missing in 1 rows"),
    ],
)
def test_rows_that_cannot_be_scored_are_reported(change, message, workplace, fitted, capsys):
    change(pd.read_csv("labelled.csv")).to_csv("bad.csv", index=False)
    assert cli.run(["task=evaluate", f"checkpoint={fitted}", "input=bad.csv"]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("source", ["graphs.csv", "."])
@pytest.mark.parametrize("task", ["predict", "evaluate"])
def test_a_model_of_graphs_takes_no_files(task, source, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(saved, "load", lambda *_: SimpleNamespace(about=SimpleNamespace(kind="graph")))
    assert cli.run([f"task={task}", "checkpoint=model", f"input={source}", "output=new.csv"]) == 3
    assert "graphs have no file format here; use east.load(…).predict_proba(array)" in capsys.readouterr().err


# The page


def test_mistakes_are_shown_with_their_values():
    """Most confident first; long cells are cut, markup is escaped, missing values are blank."""
    labels, predicted = torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 0, 1])
    p = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
    columns = {"id": [10**17, 10**17 + 1, 3, 4], "<i>": ["a", "<script>" + "x" * 99_000, "b", None]}
    frame = pd.DataFrame(columns | {name: [0.5, np.nan, 1 / 3, 2.0] for name in "cdefg"}, index=[4, 7, 9, 30])
    text = model_page.mistakes(
        model_page.Scored(Decided(p, labels, predicted), decisions.Argmax(), ("ok", "fraud"), 1, frame)
    )
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


@pytest.mark.parametrize("classes", [3, 25])
def test_a_page_of_many_classes_has_curves_of_the_rarest_and_their_mistakes(classes):
    random = np.random.default_rng(0)
    labels = torch.from_numpy(random.integers(0, classes, 500))
    p = torch.softmax(
        3 * torch.nn.functional.one_hot(labels).double() + torch.from_numpy(random.normal(size=(500, classes))), 1
    )
    names = tuple(f"kind ${k}$" for k in range(classes))
    part = Decided(p, labels, p.argmax(1))
    sections = model_page.of_model(model_page.Scored(part, decisions.Argmax(), names, None, None), "Scores", "")
    assert sections["Precision, recall and calibration"].count("<svg") == 2
    assert "the most probable class is right" in sections["Precision, recall and calibration"]
    (rows,) = tables(sections["Scores"])
    counts = confusion_matrix(labels, part.predicted)
    if classes == 3:
        assert [row[1:-1] for row in rows[1:]] == counts.astype(str).tolist()
    else:
        np.fill_diagonal(counts, 0)
        assert len(rows) == 1 + model_page.MATRIX
        assert int(rows[1][-1]) == counts.max()


# Time


def test_minutes_shorten_networks_and_leave_out_what_does_not_fit(workplace, monkeypatch, capsys):
    cost = {"logistic": 1.0, "ce": 1000.0, "f1": 10_000.0}
    monkeypatch.setattr(plan.Plan, "costs", property(lambda self: [cost[one.settings.loss.name] for one in self.items]))
    command = [*COMPARE, "candidates=[logistic,ce,east]", "results_dir=short", "trials=1", "protocol.max_epochs=8"]
    assert cli.run([*command, "minutes=10"]) == 0
    text = capsys.readouterr().out
    assert "; limited by minutes=10" in text
    assert "note: cross-entropy was trained for 50% of the usual steps, to stop in time" in text
    epochs = {r.config.loss.name: r.epochs for r in records.scan("short")}
    assert epochs == {"logistic": 0, "ce": 4}
    assert "note: EAST f1_positive was not trained: it takes about 2.8 h, more than is left" in text


@pytest.mark.parametrize("end, code", [(KeyboardInterrupt, 130), (budget.OutOfTime, 0)])
def test_what_ends_a_comparison_early_leaves_no_new_models(end, code, workplace, monkeypatch, capsys):
    """The first candidate is finished and counts; a model that was there before stays."""
    command = [*COMPARE, f"results_dir={end.__name__}", "model.hidden=[8]", "protocol.max_epochs=2", "minutes=60"]
    assert cli.run([*command, "candidates=[logistic]", "trials=1", "keep_models=all"]) == 0
    models = Path(end.__name__, "models")
    (before,) = models.iterdir()
    real = compare.carry_out

    def carry_out(runs):
        real(runs[:1])
        assert len(list(models.iterdir())) == 2, "that of the other seed"
        raise end

    monkeypatch.setattr(compare, "carry_out", carry_out)
    assert cli.run([*command, "candidates=[logistic,ce]", "trials=2"]) == code
    said = capsys.readouterr()
    assert ("cross-entropy was stopped: time is up" in said.out) == (code == 0)
    assert before in models.iterdir()
    assert len(list(models.iterdir())) <= 1 + (code == 0), "at most the winner's"


def test_more_than_a_day_on_a_cpu_needs_a_yes_or_a_limit(workplace, monkeypatch, capsys):
    """And the folder of the answer is found before anything is trained."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(plan.Plan, "costs", property(lambda self: [100_000.0]))
    reached = []
    monkeypatch.setattr(compare, "carry_out", lambda *_: reached.append(Path("days/compare").exists()) or 1 / 0)
    command = [*LOGISTIC, "results_dir=days"]
    assert cli.run(command) == cli.BAD_CONFIG
    said = capsys.readouterr().err
    assert "about 28 h on this machine" in said
    assert "yes=true starts it anyway" in said
    assert not Path("days").exists()
    for word in ("yes=true", "minutes=1"):
        assert cli.run([*command, word]) == cli.FAILED  # 1 / 0, in place of training
    assert reached == [True, True]


def test_work_that_exceeds_its_time_is_stopped():
    with pytest.raises(budget.OutOfTime), budget.stop_after(0.05):
        time.sleep(10)
    with budget.stop_after(None), budget.stop_after(5):
        pass


# Scores of the user's own


def test_a_score_of_your_own_in_a_file_of_the_working_directory(workplace, monkeypatch, capsys):
    Path("my_scores.py").write_text(
        "def caught(c):\n    return c.diagonal[..., 1] / c.actual[..., 1] - 0.1 * c.predicted[..., 1] / c.total\n"
    )
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(workplace))])
    words = [*COMPARE, "score=my_scores.caught", "results_dir=own", "candidates=[logistic,east]", "trials=1"]
    monkeypatch.setattr(sys, "argv", ["east-run", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "winner on my_scores.caught" in text
    assert len(re.findall(r"^EAST my_scores.caught", text, re.MULTILINE)) == 3
    assert Path("own/compare/my-my_scores.caught/report.html").exists()
    with open("my_scores.py", "a") as file:
        file.write("\n# changed\n")
    monkeypatch.delitem(sys.modules, "my_scores")  # as in a new process, which imports the changed code
    assert cli.run(words) == 0
    assert len(list(Path("own/runs/csv/metric").glob("*/seed-0.json"))) == 2, "changed code makes new trials"
    assert len(list(Path("own/runs/csv/logistic").glob("*/seed-0.json"))) == 1


def test_a_score_that_is_undefined_counts_as_zero_and_is_noted(workplace, capsys):
    """The precision of a class that is never predicted is 0/0, of which NumPy and torch make NaN."""
    Path("undefined.py").write_text(
        "def precision(c):\n    m = c.matrix\n    return m[..., 1, 1] / (m[..., 0, 1] + m[..., 1, 1])\n"
    )
    assert cli.run([*LOGISTIC, "score=undefined.precision", "results_dir=undefined"]) == 0
    text = capsys.readouterr().out
    shown = Path("undefined/compare/my-undefined.precision/report.html").read_text()
    note = "undefined.precision is undefined (0/0) if a class is never predicted; such a score counts as 0"
    assert text.count(note) == shown.count(note) == 1
    assert not re.search(r"\bnan\b", text + shown)


# Folders, notes and mistakes


@pytest.mark.parametrize("dataset", ["dataset=digits", "dataset.path=digits.csv dataset.target=y"])
def test_a_comparison_of_another_problem_keeps_its_folder(dataset, tmp_path):
    """Another file, target, positive class or part of the rows is another problem; other candidates are not."""
    words = ["", "dataset.positive=8", "dataset.positive=3 dataset.limit=500", "candidates=[rf]", "dataset.positive=8"]
    assert folder_names(tmp_path, [f"{dataset} {more}" for more in words]) == [
        "digits-mcc", "digits-2-mcc", "digits-3-mcc", "digits-mcc", "digits-2-mcc"
    ]  # fmt: skip


def folder_names(parent, commands):
    """The names of the folders of comparisons by mcc, one after another."""
    folders = []
    for words in commands:
        settings = compare.compose.settings(Command.parse(["task=compare", *words.split(), f"results_dir={parent}"]))
        asked = SimpleNamespace(
            settings=settings, loaded=SimpleNamespace(name="digits"), score=SimpleNamespace(name="mcc")
        )
        folders.append(compare.answer_folder(asked).name)
    return folders


def test_files_are_told_apart_by_where_they_are(tmp_path, monkeypatch):
    files = ("my.csv", "old/my.csv", "./my.csv", "old/../my.csv")
    for place, expected in (("first", ["", "-2", "", ""]), ("second", ["-3", "-4", "-3", "-3"])):
        (tmp_path / place / "old").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / place)
        names = folder_names(tmp_path / "shared", [f"dataset.path={file}" for file in files])
        assert names == [f"my{number}-mcc" for number in expected]


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


def test_what_to_check_in_a_file_is_said_before_and_on_the_page(tmp_path, monkeypatch, capsys):
    """A guessed character set, classes that differ in capitals, and columns that may give the class away."""
    monkeypatch.chdir(tmp_path)
    rows = pd.DataFrame({"a": np.arange(200) % 7, "city": ["Köln", "Bern"] * 100, "y": ["no", "no", "no", "No"] * 50})
    rows["paid"] = [f"day {k}" if y == "No" else None for k, y in enumerate(rows["y"])]
    rows["approved"] = np.where(rows["y"] == "No", "off", "on")
    rows.to_csv("my.csv", index=False, encoding="latin-1")
    assert cli.run(["task=compare", "dataset.path=my.csv", "dataset.target=y", "candidates=[logistic]"]) == 0
    text, shown = capsys.readouterr().out, next(tmp_path.rglob("report.html")).read_text()
    for note in (
        "the text is not UTF-8 and was read as Windows-1252 (Latin-1)",
        "these classes differ only in capital letters: no, No",
        "one column alone determines the class of every row: approved. If it is known only after the class (leakage)",
    ):
        assert f"note: {note}" in text
        assert note in shown
    assert "(75.00%)" in shown


def test_the_command_for_new_rows_can_be_pasted_into_a_shell():
    words = shlex.split(compare.predict_command(Path("my results/it's me"), "table", trust=True))
    assert (words[0], Command.parse(words[1:]).values) == ("east-run", {
        "task": "predict", "checkpoint": "my results/it's me/model", "input": "new.csv", "output": "predictions.csv",
        "trust": True,
    })  # fmt: skip


SMALL = {
    "six": (pd.DataFrame({"a": range(6), "label": [0, 1] * 3}), "csv has too few rows to compare: 6 leave 1"),
    "seven": (
        pd.DataFrame({"a": np.arange(70), "patient": np.arange(70) % 7, "label": [0, 1] * 35}),
        "too few groups to compare: 7 leave 1 for validation",
    ),
    "one": (pd.DataFrame({"a": range(200), "label": ["rare"] + ["usual"] * 199}), "'rare' has 1 row, none of them for"),
}


@pytest.mark.parametrize("name", SMALL)
def test_data_that_cannot_be_judged_are_refused(name, tmp_path, monkeypatch, capsys):
    """A rule tuned without the only validation group would be tuned on no rows at all."""
    monkeypatch.chdir(tmp_path)
    frame, message = SMALL[name]
    frame.to_csv("my.csv", index=False)
    group = ["dataset.group=patient"] if "patient" in frame else []
    assert cli.run([*LOGISTIC, *group]) == 3
    assert message in capsys.readouterr().err
    if group:
        assert cli.run([*LOGISTIC, *group, "split.fractions=[0.5,0.25,0.25]"]) == 0


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ([*COMPARE, "loss=ce"], 2, "task=compare does not take loss"),
        ([*COMPARE, "candidates=[bosting]"], 2, "did you mean 'boosting'"),
        ([*COMPARE, "minutes=0"], 2, "minutes"),
        pytest.param(
            [*COMPARE, "candidates=[logistic,catboost]"], 2, "catboost is not installed: pip install catboost",
            marks=pytest.mark.skipif(find_spec("catboost") is not None, reason="catboost is installed"),
        ),
        ([*COMPARE, "split.seed=trial"], 2, "task=compare judges all candidates on one split"),
        ([*COMPARE, "protocol=btg"], 2, "task=compare judges all candidates on one split"),
        ([*COMPARE, "score=f2"], 2, "unknown score 'f2'"),
        ([*COMPARE, "score=picky.score"], 2, "expected a function of a Confusion; AssertionError: empty"),
        ([*COMPARE, "protocol.patience=5"], 2, "protocol.patience: task=compare trains all networks"),
        ([*COMPARE, "protocol.stage_epochs=5"], 2, "protocol.stage_epochs: task=compare trains all networks"),
        ([*COMPARE, "annealing.patience=2"], 2, "annealing.patience: task=compare trains all networks"),
        ([*COMPARE[:4], "model=custom", "model.target=made_by.network"], 2, "saves its winner: model.target"),
        (["task=compare", "dataset=csv"], 3, "dataset.path"),
        (["task=predict", "input=new.csv"], 2, "needs checkpoint=… output=…"),
        (["task=evaluate", "input=new.csv"], 2, "needs checkpoint=…"),
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
