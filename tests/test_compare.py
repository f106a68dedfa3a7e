"""task=compare and task=predict: the choice is sound, its numbers are right, and the winner is saved."""

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
from east.choices import ConfigError
from east.lab import cli, data, files
from east.lab.data.common import folded
from east.lab.data.csv import from_frame
from east.lab.experiment import budget, records
from east.lab.experiment.ledger import model_folder
from east.lab.experiment.runs import load, split_options, splits_of
from east.lab.files import result_folder, temporary_name
from east.lab.reporting import comparison
from east.lab.reporting.comparison import Candidate, Comparison, JudgedPart, JudgedTrial
from east.lab.reporting.pages import compare as page
from east.lab.settings import compose
from east.lab.settings.command import Command
from east.lab.tasks import compare
from east.lab.training import objective, saved
from east.lab.training.population import Trial

F1 = partial(metrics.f1, average="positive")


def noise(rows=400, seed=0):
    """Probabilities independent of the labels; one label in ten is positive."""
    random = np.random.default_rng(seed)
    p = random.random(rows)
    return torch.from_numpy(np.stack([1 - p, p], 1)), torch.from_numpy((random.random(rows) < 0.1).astype(int))


def test_cross_fitting_takes_the_luck_out_of_a_tuned_threshold():
    """The true balanced accuracy of noise is 1/2; tuned and judged on the same rows it is always higher."""
    honest, tuned = [], []
    for seed in range(40):
        p, y = noise(200, seed)
        rule = decisions.tuned(p, y, metrics.balanced_accuracy, 1)
        for values, decided in (
            (tuned, rule.decide(p)),
            (honest, comparison.cross_fitted(p, y, metrics.balanced_accuracy, 1)),
        ):
            values.append(float(metrics.balanced_accuracy(east.Confusion.from_predictions(decided, y, 2))))
    assert np.mean(tuned) > 0.56
    assert np.mean(honest) == pytest.approx(0.5, abs=0.03)


def test_every_row_is_decided_by_a_rule_tuned_without_it(monkeypatch):
    p, y = noise(100)
    seen = []

    decided_by = {}

    class Rule:
        def __init__(self, fold):
            self.fold = fold

        def decide(self, probabilities):
            decided_by.update({float(value): self.fold for value in probabilities[:, 1]})
            return torch.zeros(len(probabilities), dtype=torch.int64)

    def tuned(probabilities, labels, measure, positive):
        seen.append({float(value) for value in probabilities[:, 1]})
        return Rule(len(seen))

    monkeypatch.setattr(decisions, "tuned", tuned)
    comparison.cross_fitted(p, y, F1, 1)
    assert len(decided_by) == 100
    assert all(value not in seen[fold - 1] for value, fold in decided_by.items())
    assert [len(rows) for rows in seen] == [80] * 5


def part(predicted, labels, score=None):
    predicted, labels = torch.as_tensor(predicted), torch.as_tensor(labels)
    p = torch.nn.functional.one_hot(predicted, int(max(predicted.max(), labels.max(), 1)) + 1).double()
    return JudgedPart(p, labels, predicted, float(f1_score(labels, predicted)) if score is None else score)


def judged(predicted, labels, validation=0.0, seed=0):
    return JudgedTrial(seed, decisions.Argmax(), part(labels, labels, validation), part(predicted, labels))


def comparing(*candidates, measure=F1, score="f1_positive", classes=("ok", "fraud")):
    return Comparison(score, measure, candidates, classes, 1)


def test_a_bootstrap_weighs_rows_as_scikit_learn_does():
    random = np.random.default_rng(0)
    labels, predicted = random.integers(0, 3, (2, 60))
    weights = random.integers(0, 4, (5, 60))
    tensors = map(torch.from_numpy, (predicted, labels))
    confusion = comparison.weighted(*tensors, torch.from_numpy(weights).double(), 3)
    expected = [matthews_corrcoef(labels, predicted, sample_weight=w) for w in weights]
    np.testing.assert_allclose(metrics.mcc(confusion), expected)
    np.testing.assert_allclose(confusion.matrix[0, 1], np.bincount(predicted[labels == 1], weights[0][labels == 1], 3))


def test_the_interval_covers_rows_and_seeds():
    """With one seed its width is that of a binomial proportion: 4 standard errors of sqrt(p q / n)."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 1000)
    one = part(np.where(random.random(1000) < 0.8, labels, 1 - labels), labels)
    other = part(np.where(random.random(1000) < 0.6, labels, 1 - labels), labels)
    samples = comparison.resampled([[one], [one, other]], metrics.accuracy)
    low, high = np.quantile(samples[0], [0.025, 0.975])
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.16 / 1000), rel=0.1)
    a, b = (float((trial.predicted == trial.labels).double().mean()) for trial in (one, other))
    assert samples[0].mean() == pytest.approx(a, abs=0.002)
    assert samples[1].mean() == pytest.approx((a + b) / 2, abs=0.008)
    # The mean of two seeds, drawn with replacement, has the standard deviation |a - b| / (2 sqrt 2); rows add theirs.
    assert samples[1].std() == pytest.approx(np.hypot((a - b) / np.sqrt(8), 0.011), rel=0.06)


def test_rows_of_one_group_are_resampled_and_folded_together():
    """25 copies of every row in a group of their own add no information."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 200)
    predicted = np.where(random.random(200) < 0.8, labels, 1 - labels)
    groups = torch.arange(200).repeat_interleave(25)
    once, repeated = part(predicted, labels), replace(part(predicted.repeat(25), labels.repeat(25)), groups=groups)
    for measure in (metrics.accuracy, F1):
        drawn, expected = (comparison.resampled([[one]], measure) for one in (repeated, once))
        np.testing.assert_allclose(drawn, expected)
    ranked, expected = (comparison.rank_samples(one, 1)["auroc"] for one in (repeated, once))
    np.testing.assert_allclose(ranked, expected)
    fold = folded(labels.repeat(25), 5, groups.numpy()).reshape(200, 25)
    assert (fold == fold[:, :1]).all()
    assert np.array_equal(fold[:, 0], folded(labels, 5))
    judged = Candidate("ce", "CE", "argmax", (JudgedTrial(0, decisions.Argmax(), repeated, repeated),))
    assert comparing(judged).rarest[1] == min(labels.sum(), (1 - labels).sum())


def test_the_decision_rules_of_one_network_share_its_seeds():
    labels = np.arange(1000) % 2
    trials = [part(np.where(np.arange(1000) < 1000 * share, labels, 1 - labels), labels) for share in (0.7, 0.8, 0.9)]
    one, same = comparison.resampled([trials, trials], metrics.accuracy)
    assert (one == same).all()
    assert one.std() > 0.03, "seeds are resampled"


def test_the_winner_is_chosen_on_validation_whatever_the_test_rows_say():
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 500)
    good, bad = (np.where(random.random(500) < share, labels, 1 - labels) for share in (0.9, 0.6))
    lucky = Candidate("rf", "lucky on test", "argmax", (judged(good, labels),))
    chosen = Candidate("ce", "chosen", "plugin", (judged(bad, labels, 0.9),))
    result = comparing(lucky, chosen)
    text = compare.verdict(result)
    assert result.winner is chosen
    assert "winner on f1_positive: chosen + plug-in" in text
    assert "not clearly ahead of any other" in text
    lead = float(re.search(r"lucky on test .* ([+-]\d\.\d+)  [+-]", text).group(1))
    assert lead == pytest.approx(chosen.test - lucky.test, abs=1e-3)
    assert lead < -0.2


def test_networks_are_judged_on_rows_that_did_not_stop_them():
    """Three trials leave out one fold each. They are right on the rows that stopped them and wrong on their fold."""
    labels = np.arange(90) % 3 % 2
    fold = folded(labels, 3)
    trials = []
    for seed in range(3):
        p = np.stack([labels != 1, labels == 1], 1).astype(np.float32)
        p[fold == seed] = [1, 0]
        arrays = {"val_probabilities": p, "val_labels": labels, "test_probabilities": p, "test_labels": labels}
        trials.append(comparison.judge(arrays, seed, "argmax", F1, 1, folds=3))
    network = Candidate("east", "EAST", "argmax", tuple(trials))
    fair = Candidate("rf", "forest", "argmax", (judged(labels, labels, 1.0),))
    assert network.validation == pytest.approx(f1_score(labels, np.where(fold == 0, 0, labels)))
    honest, same = comparison.on_unseen_rows([network, fair], F1)
    assert honest.validation == 0
    assert same.validation == 1
    assert [len(part.labels) for part in (*honest.val, *same.val)] == [90, 90]
    # One trial failed: no other trial can be judged on the rows that only it left out.
    some, same = comparison.on_unseen_rows([replace(network, trials=tuple(trials[:2])), fair], F1)
    assert [len(part.labels) for part in (*some.val, *same.val)] == [60, 60]


def test_a_network_is_stopped_on_other_rows_than_it_is_judged_on(workplace, monkeypatch):
    """The engine gives the fold no weight, and `judge` uses exactly that fold."""
    monkeypatch.chdir(workplace)
    words = Command({"preset": "compare", "dataset": "csv", "dataset.path": "my.csv", "dataset.target": "label"})
    run = compare.planned("ce", words, compare.Score("f1_positive", "f1", "positive"), "table", 400).run
    loaded = load(run.settings.dataset, None)
    trials = [Trial(run.science, seed) for seed in range(3)]
    weights = [one.val.weights.numpy() for one in splits_of(loaded, trials)]
    assert np.array_equal(sum(weights), np.full(96, 2.0))
    for seed, seen in enumerate(weights):
        labels = data.split(loaded, **split_options(run.science.split)).val.labels.numpy()
        assert np.array_equal(seen == 0, folded(labels, 3) == seed)
        assert labels[seen == 0].sum() in (2, 3)  # of eight


def test_few_positives_make_the_choice_uncertain():
    """Two candidates miss one of three positives each; a third is luckier, but has a low likelihood."""
    labels = np.array([0] * 97 + [1] * 3)
    guesses = [np.where(np.arange(100) == missed, 0, labels) for missed in (97, 98)]
    trials = [JudgedTrial(0, decisions.Argmax(), part(guess, labels), part(guess, labels)) for guess in guesses]
    blind = JudgedPart(torch.full((100, 2), 0.5).double(), torch.as_tensor(labels), torch.as_tensor(labels), 1.0)
    trials.append(JudgedTrial(0, decisions.Argmax(), blind, blind))
    result = comparing(*(Candidate(str(k), str(k), "argmax", (trial,)) for k, trial in enumerate(trials)))
    assert result.contenders == [0, 1, 2]
    assert result.winner.key == "0"
    reason = "only 3 validation rows of 'fraud'; the winner has the highest likelihood among the 3 candidates"
    assert f"the choice is uncertain: {reason}" in compare.verdict(result)
    many = np.tile(labels, 20)
    sure = JudgedTrial(0, decisions.Argmax(), part(many, many), part(many, many))
    off = JudgedTrial(0, decisions.Argmax(), part(1 - many, many), part(1 - many, many))
    clear = comparing(Candidate("a", "a", "argmax", (sure,)), Candidate("b", "b", "argmax", (off,)))
    assert clear.uncertain is None
    assert "clearly ahead of all others" in compare.verdict(clear)


def test_a_hopeless_candidate_does_not_make_the_choice_certain():
    """Three candidates miss other positives each and are equally good; a fourth is always wrong."""
    labels = np.array([0] * 300 + [1] * 60)
    missed = [np.where((np.arange(360) >= 300 + 20 * k) & (np.arange(360) < 320 + 20 * k), 0, labels) for k in range(3)]
    trials = [JudgedTrial(0, decisions.Argmax(), *(part(guess, labels),) * 2) for guess in (*missed, 1 - labels)]
    equal, four = (
        comparing(*(Candidate(str(k), str(k), "argmax", (trial,)) for k, trial in enumerate(group)))
        for group in (trials[:3], trials)
    )
    assert four.behind == ["3"]
    assert equal.uncertain is not None
    assert four.uncertain == equal.uncertain


@pytest.mark.parametrize(
    "score, positive, metric, matched",
    [
        ("f1_pos", 1, {"metric": "f1", "average": "positive"}, "f1"),
        ("f1_pos", 2, {"metric": "f1", "average": "positive", "positive": 2}, "f1"),
        ("f1_positive", 1, {"metric": "f1", "average": "positive"}, "f1"),
        ("f1", None, {"metric": "f1", "average": "macro"}, "f1"),
        (None, 1, {"metric": "f1", "average": "positive"}, "f1"),
        (None, None, {"metric": "f1", "average": "macro"}, "f1"),
        ("mcc", 1, {"metric": "mcc"}, "mcc"),
        ("balanced_accuracy", None, {"metric": "balanced_accuracy"}, "metric"),
    ],
)
def test_networks_train_on_the_metric_of_the_score(score, positive, metric, matched):
    classes = ("a", "b", "c") if positive in (None, 2) else ("a", "b")
    loaded = data.Table(
        features=torch.zeros(3, 1), labels=torch.arange(3) % 2, classes=classes, name="t", positive=positive
    )
    parsed = compare.parse_score(score, loaded)
    assert {"metric": parsed.metric, **parsed.parameters} == metric
    dataset = "synthetic" if len(classes) == 2 else "digits"
    plans = [
        compare.planned(name, Command({"preset": "compare", "dataset": dataset}), parsed, "table", 500)
        for name in ("east", "metric_ce", "anyloss")
    ]
    assert [plan.run.settings.loss.name for plan in plans] == [matched, "metric_ce", "anyloss"]
    for plan in plans:
        assert metric.items() <= plan.run.settings.loss.options.items()
        loss = objective.build_loss(plan.run.settings.loss, classes)
        assert loss.metric is metrics.METRICS[metric["metric"]]


def test_candidates_are_tried_in_one_order():
    assert compare.parse_candidates(None, "table") == ["logistic", "boosting", "rf", "metric_ce", "ce", "east"]
    assert compare.parse_candidates(["east", "rf"], "table") == ["rf", "east"]
    assert compare.parse_candidates(None, "graph") == ["metric_ce", "ce", "east"]
    with pytest.raises(ValueError, match="did you mean 'boosting'"):
        compare.parse_candidates(["bosting"], "table")
    with pytest.raises(ValueError, match="expected at least one of logistic"):
        compare.parse_candidates([], "table")


def test_batches_grow_with_the_rows_and_hold_some_of_a_rare_class():
    assert [budget.batch_size(rows) for rows in (20, 300, 10_000, 100_000)] == [32, 32, 128, 512]
    assert [budget.batch_size(10_000, share) for share in (0.5, 0.05, 0.001, 0.0)] == [128, 256, 512, 512]


@pytest.mark.parametrize("rows, batch, trials", [(300, 32, 3), (10_000, 128, 3), (100_000, 512, 1)])
def test_all_networks_get_the_same_number_of_steps(rows, batch, trials):
    """With one stage or six, the number of steps is the same, and patience never ends training."""
    command, score = Command({"preset": "compare"}), compare.Score("f1_macro", "f1", "macro")
    for name in ("ce", "metric_ce", "east"):
        asked = compare.planned(name, command, score, "table", rows).run.settings
        protocol, annealing = asked.protocol, asked.annealing
        assert (protocol.count, protocol.max_epochs, protocol.patience) == ("steps", 2000, 2000)
        assert protocol.stage_epochs == (334 if name == "east" else 2000)
        assert annealing.patience >= (6 if name == "east" else 1)
        assert (asked.hyper.batch_size, asked.trial_count, asked.executor.name) == (batch, trials, "inline")
    forest = compare.planned("rf", command, score, "table", rows).run.settings
    assert forest.trial_count == 1
    assert forest.loss.options.get("max_samples") == (5000 if rows > 20_000 else None)


def test_a_share_of_the_steps_keeps_the_patience_of_other_presets():
    command, score = Command({"preset": "quick"}), compare.Score("f1_macro", "f1", "macro")
    run = compare.planned("ce", command, score, "table", 300).run
    half = budget.shorter(run, 0.5).settings.protocol
    assert half.max_epochs == run.settings.protocol.max_epochs // 2
    assert (half.patience, half.stage_epochs) == (run.settings.protocol.patience, run.settings.protocol.stage_epochs)


@pytest.mark.parametrize("setting", ["protocol.patience=5", "protocol.stage_epochs=5", "annealing.patience=2"])
def test_a_patience_that_has_no_effect_is_refused(setting, capsys):
    assert cli.run(["task=compare", setting]) == 2
    name = setting.partition("=")[0]
    assert f"{name}: task=compare trains all networks for the same number" in capsys.readouterr().err


def test_scores_that_are_unknown_or_do_not_fit_are_refused():
    loaded = data.Table(features=torch.zeros(3, 1), labels=torch.arange(3), classes=("a", "b", "c"), name="t")
    with pytest.raises(ValueError, match="f1_positive needs a positive class"):
        compare.parse_score("f1_pos", loaded)
    with pytest.raises(ValueError, match="did you mean 'mcc'"):
        compare.parse_score("mc", loaded)
    assert compare.parse_score("recall_macro", loaded) == compare.Score("recall_macro", "recall", "macro")
    assert compare.parse_score("f1", loaded).name == "f1_macro"
    assert compare.parse_score("recall", loaded) == compare.Score("recall_macro", "recall", "macro")
    assert compare.parse_score("accuracy", loaded) == compare.Score("accuracy", "accuracy")
    two = replace(loaded, labels=torch.arange(3) % 2, classes=("a", "b"), positive=1)
    assert compare.parse_score("recall", two) == compare.Score("recall_positive", "recall", "positive")
    for path in ("sklearn.metrics.f1_score", "os.system", "math.nope"):
        with pytest.raises(ConfigError, match=f"score={path}: expected a function of a Confusion"):
            compare.parse_score(path, loaded)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
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


COMPARE = ["task=compare", "dataset=csv", "dataset.path=my.csv", "dataset.target=label", "trials=2",
           "protocol.max_epochs=12", "model.hidden=[16]", "device=cpu"]  # fmt: skip
QUICK = ["candidates=[logistic,ce]"]


def test_a_file_is_compared_and_its_winner_predicts_new_rows(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    assert cli.run(COMPARE) == 0
    text = capsys.readouterr().out
    assert "fraud" in text
    assert re.search(r"region +2 categories: north, south", text)
    assert "rows of 'fraud' for validation; expect wide intervals" in text
    rows = re.findall(r"^(\S.*?)(?: \+ (?:plug-in|expected))? {2,}\d\.\d{3}  ", text, re.MULTILINE)
    titles = [*list(compare.CANDIDATES.values())[:5], "EAST f1_positive"]
    assert rows == [title for title in titles for _ in range(3)]
    numbers = dict(re.findall(r"^(\S.*?\S) {2,}(\d\.\d{3})", text, re.MULTILINE))
    winner = re.search(r"winner on f1_positive: (.+?), test", text).group(1)
    assert float(numbers[winner]) > 0.3
    assert "the choice is uncertain: only 8 validation rows of 'fraud'" in text

    command = text.strip().splitlines()[-1].split()
    assert command[:2] == ["east-run", "task=predict"]
    assert cli.run(command[1:]) == 0
    predicted = pd.read_csv("predictions.csv")
    assert [name for name in predicted if name != "rule"] == ["label", "p_ok", "p_fraud"]
    truth = pd.read_csv("labelled.csv")["label"]
    assert f1_score(truth == "fraud", predicted["label"] == "fraud") > 0.4
    capsys.readouterr()
    assert cli.run(command[1:]) == 2
    assert "exists already" in capsys.readouterr().err


def table_cells(shown: str, label: str) -> list[list[str]]:
    """The cells of a page's table, row by row."""
    table = re.search(rf'aria-label="{label}"><table>(.*?)</table>', shown).group(1)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", table)]


def test_the_files_of_an_answer_agree_with_scikit_learn(workplace, monkeypatch, capsys):
    """The page's numbers are those of scores.csv, and those are scikit-learn's on predictions.csv."""
    monkeypatch.chdir(workplace)
    assert cli.run([*COMPARE, *QUICK, "trials=2", "results_dir=files"]) == 0
    folder = workplace / "files/compare/my-f1_positive"
    names = {path.name for path in folder.iterdir()}
    assert names == {"report.html", "scores.csv", "predictions.csv", "command.txt", "made_from.json", "model"}
    scores = pd.read_csv(folder / "scores.csv").set_index("winner")
    best = scores.loc[True]
    rows = pd.read_csv(folder / "predictions.csv")
    fraud = [(own["label"] == "fraud", own["predicted"] == "fraud", own["p_fraud"]) for _, own in rows.groupby("seed")]
    assert len(fraud) == best["seeds"]
    assert best["test"] == best["f1_positive"] == pytest.approx(np.mean([f1_score(a, b) for a, b, _ in fraud]))
    assert best["mcc"] == pytest.approx(np.mean([matthews_corrcoef(a, b) for a, b, _ in fraud]))
    ranked = [average_precision_score(a, p) for a, _, p in fraud]
    assert best["average_precision"] == pytest.approx(np.mean(ranked))
    shown = (folder / "report.html").read_text()
    expected = [
        [f"{row.validation:.3f}", f"{row.test:.3f}", f"{row.test_low:.3f} to {row.test_high:.3f}"]
        + (["", ""] if row.winner else [f"{row.lead:+.3f}", f"{row.lead_low:+.3f} to {row.lead_high:+.3f}"])
        for row in scores.reset_index().itertuples()
    ]
    assert [cells for _, *cells in table_cells(shown, "All candidates")[1:]] == expected
    kept = rows[rows["seed"] == east.load(folder / "model").about["seed"]]
    boxes = dict((name, value) for value, name in re.findall(r"<li><strong>([\d.]+)</strong> (\w+)</li>", shown))
    fraud = kept["label"] == "fraud"
    assert boxes["f1_positive"] == f"{f1_score(fraud, kept['predicted'] == 'fraud'):.3f}"
    assert boxes["auroc"] == f"{roc_auc_score(fraud, kept['p_fraud']):.3f}"
    counts = confusion_matrix(kept["label"], kept["predicted"], labels=["ok", "fraud"])
    assert [cells[1:3] for cells in table_cells(shown, "Confusion matrix")[1:]] == counts.astype(str).tolist()
    text = capsys.readouterr().out
    assert f"<pre>{text.strip().splitlines()[-1].strip()}</pre>" in shown, "the command that uses the model"
    assert re.search(r"(not |)clearly ahead of (any other|all others|\d+ of \d+ others)", shown)
    for heading in ("Most confident mistakes", "How the columns were read", "Precision, recall and calibration"):
        assert f"<h2>{heading}</h2>" in shown
    assert "http" not in shown
    assert (folder / "command.txt").read_text().startswith("east-run task=compare dataset=csv dataset.path=my.csv")

    # The saved model decides the test rows as the winner did, and no other model is kept.
    model, frame = east.load(folder / "model"), pd.read_csv("my.csv")
    assert (model.about["rule"] is not None) == (best["decision"] != "argmax")
    own = rows[rows["seed"] == model.about["seed"]]
    again = frame.iloc[own["row"] - 1]
    assert own["label"].tolist() == again["label"].tolist()
    np.testing.assert_allclose(model.predict_proba(again)[:, 1], own["p_fraud"], atol=1e-6)
    assert model.predict(again).tolist() == own["predicted"].tolist()
    assert len(list((workplace / "files/models").iterdir())) == 1

    # Run again: everything is recorded, so nothing is trained.
    before = {path: path.stat().st_mtime_ns for path in workplace.glob("files/runs/**/*.json")}
    assert cli.run([*COMPARE, *QUICK, "trials=2", "results_dir=files", "keep_models=all"]) == 0
    repeated = capsys.readouterr().out
    assert "everything is on record" in repeated
    assert repeated.partition("validation  ")[2] == text.partition("validation  ")[2]
    assert {path: path.stat().st_mtime_ns for path in workplace.glob("files/runs/**/*.json")} == before
    assert {record.config.preset for record in records.scan("files")} == {"compare"}

    # Deleted probabilities and a deleted model are restored; a model that was there before stays.
    (winner,) = (workplace / "files/models").iterdir()
    key = winner.name.split("-")[-2]
    deleted = min(file for file in workplace.glob("files/runs/**/*.npz") if key in str(file))
    deleted.unlink()
    shutil.rmtree(winner)
    seed = model.about["seed"]
    own = winner.with_name(winner.name.replace(f"-seed{seed}", f"-seed{1 - seed}"))
    own.mkdir()
    (own / "mine").touch()
    assert cli.run([*COMPARE, *QUICK, "trials=2", "results_dir=files"]) == 0
    assert deleted.exists()
    assert {*(workplace / "files/models").iterdir()} == {winner, own}


@pytest.fixture(scope="module")
def fitted(workplace):
    """A saved logistic regression with a threshold for F1."""
    return compared(workplace, "fitted", "candidates=[logistic]")


def compared(workplace, name, *words):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        assert cli.run([*COMPARE, f"results_dir={name}", *words]) == 0
    model = east.load(workplace / name / "compare/my-f1_positive/model")
    return model.deciding("plug-in for f1", decisions.Threshold(0.2)).save(workplace / name / "threshold")


def test_predictions_copy_columns_and_name_their_rule(workplace, fitted, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
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


def test_a_saved_model_is_scored_on_labelled_rows(workplace, fitted, monkeypatch, capsys):
    """Scores match scikit-learn, on the page and in scores.csv."""
    monkeypatch.chdir(workplace)
    assert cli.run(["task=evaluate", f"checkpoint={fitted}", "input=labelled.csv"]) == 0
    text = capsys.readouterr().out
    folder = (workplace / text.strip().splitlines()[-1].removeprefix("report: ")).parent
    rows = pd.read_csv("labelled.csv")
    p = east.load(fitted).predict_proba(rows)[:, 1]
    truth, decided = rows["label"] == "fraud", p >= 0.2
    scores = pd.read_csv(folder / "scores.csv").set_index("score")
    assert scores.loc["f1_positive", "value"] == pytest.approx(f1_score(truth, decided))
    assert scores.loc["mcc", "value"] == pytest.approx(matthews_corrcoef(truth, decided))
    assert scores.loc["average_precision", "value"] == pytest.approx(average_precision_score(truth, p))
    assert (scores["low"] <= scores["value"]).sum() == scores["low"].notna().sum() == 8
    shown = (folder / "report.html").read_text()
    assert all(f"<td>{value:.3f}</td>" in shown for value in scores["value"])
    assert "nan" not in shown
    assert "decides by: fraud if p_fraud >= 0.2, else ok" in text


def test_another_file_of_the_same_name_is_scored_on_a_page_of_its_own(workplace, fitted, monkeypatch, capsys):
    reports = []
    for place in ("here", "there", "here"):
        (workplace / place).mkdir(exist_ok=True)
        shutil.copy(workplace / "labelled.csv", workplace / place / "rows.csv")
        monkeypatch.chdir(workplace / place)
        assert cli.run(["task=evaluate", f"checkpoint={fitted}", "input=rows.csv", "results_dir=../scored"]) == 0
        reports.append(capsys.readouterr().out.strip().splitlines()[-1])
    names = ("rows-threshold", "rows-2-threshold")
    first, second = (f"report: ../scored/evaluate/{name}/report.html" for name in names)
    assert reports == [first, second, first]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows.drop(columns="label"), "expected the labels in a column 'label'"),
        (lambda rows: rows.assign(label="maybe"), "does not know the class 'maybe'; it knows ok, fraud"),
        (lambda rows: rows.assign(label=[None, *rows["label"][1:]]), "the label 'label' is missing in 1 rows"),
    ],
)
def test_rows_that_cannot_be_scored_are_reported(change, message, workplace, fitted, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    change(pd.read_csv("labelled.csv")).to_csv("bad.csv", index=False)
    assert cli.run(["task=evaluate", f"checkpoint={fitted}", "input=bad.csv"]) == 3
    assert message in capsys.readouterr().err


def test_mistakes_are_shown_with_their_values():
    """Most confident first; long cells are cut, markup is escaped, missing values are blank."""
    labels, predicted = torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 0, 1])
    p = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
    columns = {"id": [10**17, 10**17 + 1, 3, 4], "<i>": ["a", "<script>" + "x" * 99_000, "b", None]}
    frame = pd.DataFrame(columns | {name: [0.5, np.nan, 1 / 3, 2.0] for name in "cdefg"}, index=[4, 7, 9, 30])
    one = JudgedPart(p, labels, predicted, 0.0)
    text = page.mistakes(page.Scored(one, decisions.Argmax(), ("ok", "fraud"), 1, frame))
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in text.split("<tr>")[1:]]
    assert rows[0] == ["row", "true class (probability)", "predicted (probability)", "id", "&lt;i&gt;", *"cdef"]
    cut = "&lt;script&gt;xxxxxxxxxxxxxxxxxxxxxx… (99,008 characters)"
    assert rows[1] == ["8", "fraud (0.1000)", "ok (0.9000)", str(10**17 + 1), cut, "", "", "", ""]
    assert rows[2] == ["5", "fraud (0.3000)", "ok (0.7000)", str(10**17), "a", "0.5", "0.5", "0.5", "0.5"]
    assert rows[3] == ["31", "ok (0.4000)", "fraud (0.6000)", "4", "", "2", "2", "2", "2"]
    assert text.count('<td class="word">') == 9  # both classes and the text, in three rows
    assert "3 of 4 rows are wrong" in text
    assert "The first 6 of 7 columns are shown." in text


def test_rows_of_a_limited_file_keep_their_numbers(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    loaded = data.load("csv", path="my.csv", target="label", limit=50)
    rows, file = page.rows_of(loaded, np.arange(50)), pd.read_csv("my.csv")
    pd.testing.assert_frame_equal(rows, file.drop(columns="label").loc[rows.index])
    assert rows.index[-1] > 50
    assert (file["label"][rows.index] == np.array(loaded.classes)[loaded.labels]).all()


@pytest.mark.parametrize("source", ["graphs.csv", "."])
@pytest.mark.parametrize("task", ["predict", "evaluate"])
def test_a_model_of_graphs_takes_no_files(task, source, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(saved, "load", lambda *_: SimpleNamespace(about={"kind": "graph"}))
    assert cli.run([f"task={task}", "checkpoint=model", f"input={source}", "output=new.csv"]) == 3
    assert "graphs have no file format here; use east.load(…).predict_proba(array)" in capsys.readouterr().err


def test_minutes_stop_training_in_time(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    cost = {"logistic": 1.0, "ce": 1000.0, "f1": 10_000.0}
    monkeypatch.setattr(budget, "seconds", lambda run, splits: cost[run.settings.loss.name])
    command = [*COMPARE, "candidates=[logistic,ce,east]", "results_dir=short", "trials=1", "protocol.max_epochs=8"]
    assert cli.run([*command, "minutes=10"]) == 0
    text = capsys.readouterr().out
    assert "; limited by minutes=10" in text
    assert "note: cross-entropy was trained for 50% of the usual steps, to stop in time" in text
    epochs = {r.config.loss.name: r.epochs for r in records.scan("short") if not r.config.loss.classical}
    assert epochs["ce"] == 4
    assert "f1" not in epochs
    assert "note: EAST f1_positive was not trained: it takes about 2.8 h, more than is left" in text


def test_more_than_a_day_on_a_cpu_needs_a_yes_or_a_limit(workplace, monkeypatch, capsys):
    """And the folder of the answer is found before anything is trained."""
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(budget, "seconds", lambda run, splits: 100_000.0)
    trained = []
    monkeypatch.setattr(compare, "trained", lambda *_: trained.append(Path("days/compare").exists()) or 1 / 0)
    command = [*COMPARE, "candidates=[logistic]", "results_dir=days"]
    assert cli.run(command) == cli.BAD_CONFIG
    said = capsys.readouterr().err
    assert "about 28 h on this machine" in said
    assert "yes=true starts it anyway" in said
    assert not Path("days").exists()
    for word in ("yes=true", "minutes=1"):
        assert cli.run([*command, word]) == cli.FAILED  # 1 / 0, in place of training
    assert trained == [True, True]


def test_the_data_are_split_once(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    split, calls = data.split, []
    monkeypatch.setattr(data, "split", lambda *words, **options: calls.append(words) or split(*words, **options))
    compare.described(Command.parse(COMPARE))
    assert len(calls) == 1


def test_work_that_exceeds_its_time_is_stopped():
    with pytest.raises(budget.OutOfTime), budget.stop_after(0.05):
        time.sleep(10)
    with budget.stop_after(None), budget.stop_after(5):
        pass


def test_time_is_estimated_from_a_few_steps(monkeypatch):
    """With a clock that only the probe advances: 0.02 s, plus 0.005 s per step."""
    taken, clock = [], [0.0]

    def probe(count):
        taken.append(count)
        clock[0] += 0.02 + 0.005 * count

    monkeypatch.setattr(budget.time, "perf_counter", lambda: clock[0])
    assert budget.extrapolated(probe, 2, 10, 100) == pytest.approx(0.03 + 0.5)
    assert taken == [2, 10]


@pytest.mark.parametrize(
    "candidate, values, trainings",
    [
        ("ce", {"preset": "quick"}, 2),
        ("ce", {"preset": "budget"}, 2 + 4),
        ("ce", {"preset": "paper"}, 2 + 30),
        ("ce", {"preset": "paper", "search": "halving"}, 2 + 30 * 5 / 20 + 10 * 15 / 20 + 3),
        ("ce", {"preset": "paper", "search.equal_budget": True}, 2 + 2 * 30),
        ("rf", {"preset": "paper"}, 2),
    ],
)
def test_an_estimate_includes_the_search_and_every_trial(candidate, values, trainings, monkeypatch):
    """The trials of a network are timed together, a forest alone."""
    monkeypatch.setattr(budget, "OVERHEAD", 0)
    monkeypatch.setattr(budget, "extrapolated", lambda *_: 10.0 if candidate == "rf" else 20.0)
    command = Command({"dataset": "digits", "protocol.max_epochs": 20, "trials": 2, "device": "cpu"} | values)
    run = compare.planned(candidate, command, compare.Score("f1_macro", "f1", "macro"), "table", 1100).run
    splits = data.split(load(run.settings.dataset, None), **split_options(run.settings.split))
    assert budget.seconds(run, splits) == pytest.approx(10 * trainings)


def test_a_score_of_your_own_in_a_file_of_the_working_directory(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    (workplace / "my_scores.py").write_text(
        "def caught(c):\n    return c.diagonal[..., 1] / c.actual[..., 1] - 0.1 * c.predicted[..., 1] / c.total\n"
    )
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(workplace))])
    words = [
        "east-run",
        *COMPARE,
        "score=my_scores.caught",
        "results_dir=own",
        "candidates=[logistic,east]",
        "trials=1",
    ]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "winner on my_scores.caught" in text
    assert len(re.findall(r"^EAST my_scores.caught", text, re.MULTILINE)) == 3
    assert (workplace / "own/compare/my-my_scores.caught/report.html").exists()

    assert cli.run(words[1:]) == 0
    assert "everything is on record" in capsys.readouterr().out
    with open("my_scores.py", "a") as file:
        file.write("\n# changed\n")
    monkeypatch.delitem(sys.modules, "my_scores")  # as in a new process, which imports the changed code
    assert cli.run(words[1:]) == 0
    assert len(list((workplace / "own/runs/csv/metric").glob("*/seed-0.json"))) == 2, "changed code makes new trials"
    assert len(list((workplace / "own/runs/csv/logistic").glob("*/seed-0.json"))) == 1


def test_a_score_that_is_undefined_counts_as_zero_and_is_noted(workplace, monkeypatch, capsys):
    """The precision of a class that is never predicted is 0/0, of which NumPy and torch make NaN."""
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)
    (workplace / "undefined.py").write_text(
        "def precision(c):\n    m = c.matrix\n    return m[..., 1, 1] / (m[..., 0, 1] + m[..., 1, 1])\n"
    )
    command = [*COMPARE, "score=undefined.precision", "results_dir=undefined", "candidates=[logistic]", "trials=1"]
    assert cli.run(command) == 0
    text = capsys.readouterr().out
    note = "undefined.precision is undefined (0/0) if a class is never predicted; such a score counts as 0"
    assert text.count(note) == 1
    shown = (workplace / "undefined/compare/my-undefined.precision/report.html").read_text()
    assert note in shown
    assert not re.search(r"\bnan\b", text + shown)


def test_a_candidate_with_an_undefined_score_does_not_win(monkeypatch):
    monkeypatch.setitem(metrics.METRICS, "precision", lambda c: c.diagonal[..., 1] / c.predicted[..., 1])
    measure = compare.Score("precision", "precision").measure
    labels = np.arange(400) % 2
    p = np.stack([1 - labels, labels], 1) * 0.6 + 0.2
    candidates = []
    for name, values in (("blind", [[0.9, 0.1]] * 400), ("sharp", p)):
        values = np.array(values)
        arrays = {"val_probabilities": values, "val_labels": labels}
        arrays |= {"test_probabilities": values, "test_labels": labels}
        candidates.append(Candidate(name, name, "argmax", (comparison.judge(arrays, 0, "argmax", measure, 1),)))
    result = comparing(*candidates, measure=measure, score="precision")
    assert [candidate.validation for candidate in result.candidates] == [0, 1]
    assert result.winner.key == "sharp"
    assert "nan" not in compare.verdict(result)


def test_a_metric_that_fails_for_a_constant_prediction_is_refused_before_training(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)
    (workplace / "picky.py").write_text("def score(c):\n    assert c.predicted.all(), 'empty'\n    return c.total\n")
    assert cli.run([*COMPARE, "score=picky.score"]) == 2
    assert "score=picky.score: expected a function of a Confusion; AssertionError: empty" in capsys.readouterr().err


def test_a_comparison_of_many_classes_has_curves_with_a_matching_legend(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "FOLDS", 2)
    arguments = ["task=compare", "dataset=digits", "dataset.limit=300", "score=mcc", "trials=1", "device=cpu"]
    assert cli.run([*arguments, "protocol.max_epochs=3", "model.hidden=[16]", "candidates=[logistic]"]) == 0
    assert "winner on mcc: logistic regression" in capsys.readouterr().out
    shown = next(tmp_path.rglob("report.html")).read_text()
    assert "<h2>Precision, recall and calibration</h2>" in shown
    legend = re.findall(r'<span style="color: (.*?)">&#9632;</span> (\d)', shown)
    curves = re.findall(r'<polyline class="curve " stroke="(.*?)"', shown)
    assert [colour for colour, _ in legend] == curves[: len(legend)], "whose curve is whose"
    assert len({name for _, name in legend}) == page.CURVES


def test_a_candidate_that_predicts_only_one_class_is_reported():
    labels = np.array([0, 0, 1])
    trials = tuple(judged(np.array(predicted), labels, seed=k) for k, predicted in enumerate(([0, 0, 0], [0, 1, 1])))
    result = comparing(*(Candidate("ce", "cross-entropy", decision, trials) for decision in ("argmax", "plugin")))
    note = "predicts the same class for every test row in 1 of 2 trials"
    assert result.notes() == [f"cross-entropy {note}", f"cross-entropy + plug-in {note}"]


def folder_names(parent, commands):
    """The names of the folders of comparisons by mcc, one after another."""
    table = data.Table(features=torch.zeros(2, 1), labels=torch.arange(2), classes=("a", "b"), name="digits")
    folders = []
    for words in commands:
        dataset = compose.settings(Command.parse(words.split())).dataset
        name, values = compare.data_name(dataset, table), compare.data_values(dataset)
        folders.append(result_folder(parent, name, "mcc", values).name)
    return folders


def test_a_comparison_of_other_data_keeps_its_folder(tmp_path):
    """With the same name and score, another file or target still gets its own folder."""
    files = ("my.csv,y", "old/my.csv,y", "my.csv,z", "my.csv,y", "./my.csv,y", "old/../my.csv,z")
    commands = [f"dataset.path={words.replace(',', ' dataset.target=')} candidates=[rf]" for words in files]
    expected = ["my-mcc", "my-2-mcc", "my-3-mcc", "my-mcc", "my-mcc", "my-3-mcc"]
    assert folder_names(tmp_path, commands) == expected


def test_the_same_relative_path_in_another_working_directory_is_another_file(tmp_path, monkeypatch):
    folders = []
    for place in ("first", "second", "first"):
        (tmp_path / place).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / place)
        folders += folder_names(tmp_path / "shared", ["dataset.path=my.csv"])
    assert folders == ["my-mcc", "my-2-mcc", "my-mcc"]


def test_a_folder_that_does_not_say_what_it_was_made_from_is_not_overwritten(tmp_path):
    (tmp_path / "digits-mcc").mkdir()
    (tmp_path / "digits-mcc" / "notes.txt").write_text("mine")
    assert folder_names(tmp_path, ["dataset=digits", "dataset=digits"]) == ["digits-2-mcc", "digits-2-mcc"]


def test_what_a_killed_command_left_does_not_occupy_a_folder(tmp_path):
    (tmp_path / "digits-mcc").mkdir()
    temporary_name(tmp_path / "digits-mcc" / "made_from.json").touch()
    assert folder_names(tmp_path, ["dataset=digits"]) == ["digits-mcc"]


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


@pytest.mark.parametrize("dataset", ["dataset=digits", "dataset.path=digits.csv dataset.target=y", ""])
def test_a_comparison_of_another_problem_keeps_its_folder(dataset, tmp_path):
    """Another positive class or part of the rows is another problem; other candidates are not."""
    commands = ("dataset.positive=3", "dataset.positive=8", "dataset.positive=3 dataset.limit=500", "",
                "dataset.positive=8 candidates=[rf]", "minutes=1 dataset.positive=3", "candidates=[rf]")  # fmt: skip
    folders = folder_names(tmp_path, [f"task=compare {dataset} {words}" for words in commands])
    first, second, third, fourth = "digits-mcc", "digits-2-mcc", "digits-3-mcc", "digits-4-mcc"
    assert folders == [first, second, third, fourth, second, first, fourth]


def test_a_log_says_which_candidate_is_running(monkeypatch):
    monkeypatch.setattr(compare.time, "monotonic", lambda: 100.0)
    plans = [
        compare.CandidatePlan(name, name, None, seconds)
        for name, seconds in (("forest", 5), ("EAST", 20), ("other", 40))
    ]
    turns = compare.Turns(plans)
    each = iter(turns)
    assert [next(each).title, next(each).title] == ["forest", "EAST"]
    monkeypatch.setattr(compare.time, "monotonic", lambda: 108.0)
    assert turns.describe() == "EAST running, about 52 s left"


def test_an_interruption_says_that_finished_candidates_are_saved(monkeypatch):
    """They are recorded, although the interrupted candidate has nothing yet."""
    ends = iter([[], KeyboardInterrupt()])

    def carry_out(_runs):
        end = next(ends)
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(compare, "carry_out", carry_out)
    monkeypatch.setattr(compare, "needs_training", lambda _run: True)
    score, words = compare.Score("f1_macro", "f1", "macro"), Command({"preset": "compare"})
    plans = [compare.planned(name, words, score, "table", 500) for name in ("logistic", "rf")]
    with pytest.raises(KeyboardInterrupt) as caught:
        compare.trained(plans, None, set())
    assert caught.value.__notes__ == ["Finished trials are saved. Rerun the same command to resume."]


def test_an_interrupted_comparison_deletes_the_models_of_its_finished_candidates(workplace, monkeypatch, capsys):
    """A model that was there before stays."""
    monkeypatch.chdir(workplace)
    command = [*COMPARE, "results_dir=interrupted", "model.hidden=[8]", "protocol.max_epochs=2"]
    assert cli.run([*command, "candidates=[logistic]", "trials=1", "keep_models=all"]) == 0
    (before,) = (workplace / "interrupted/models").iterdir()
    ran, real = [], compare.carry_out

    def carry_out(runs):
        if ran:
            raise KeyboardInterrupt
        ran.extend(runs)
        failures = real(runs)
        assert len(list((workplace / "interrupted/models").iterdir())) == 2, "that of the other seed"
        return failures

    monkeypatch.setattr(compare, "carry_out", carry_out)
    assert cli.run([*command, "candidates=[logistic,ce]", "trials=2"]) == 130
    assert "Finished trials are saved." in capsys.readouterr().err
    assert [*(workplace / "interrupted/models").iterdir()] == [before]


def test_models_of_a_candidate_that_ran_out_of_time_are_deleted_with_the_others(tmp_path, monkeypatch):
    words = Command({"preset": "compare", "results_dir": str(tmp_path)})
    plan = compare.planned("logistic", words, compare.Score("f1_macro", "f1", "macro"), "table", 500)

    def carry_out(runs):
        model_folder(Trial(runs[0].science, 0), tmp_path).mkdir(parents=True)
        raise budget.OutOfTime

    monkeypatch.setattr(compare, "carry_out", carry_out)
    with compare.new_models(keep=False) as models:
        assert compare.trained([plan], None, models) == ([], [], ["logistic regression was stopped: time is up"])
        assert list((tmp_path / "models").iterdir())
    assert not list((tmp_path / "models").iterdir())


def test_a_positive_class_missing_from_validation_or_test_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": range(200), "label": ["rare"] + ["usual"] * 199}).to_csv("one.csv", index=False)
    assert cli.run([*COMPARE, "dataset.path=one.csv"]) == 3
    said = capsys.readouterr()
    assert "'rare' has 1 row, none of them for validation" in said.err
    assert "no rows of 'rare' for validation; expect wide intervals" in said.out


def test_resampled_ranking_scores_match_scikit_learn():
    random = np.random.default_rng(0)
    values, truth = random.integers(0, 20, 300) / 20, random.random(300) < 0.2
    weights = random.poisson(1.0, (4, 300))
    for one, (auroc, precision) in zip(weights, comparison.ranking(values, truth, weights).T, strict=True):
        assert auroc == pytest.approx(roc_auc_score(truth, values, sample_weight=one), abs=1e-12)
        assert precision == pytest.approx(average_precision_score(truth, values, sample_weight=one), abs=1e-12)
    p = torch.from_numpy(random.dirichlet([1, 1, 1], 300))
    drawn = comparison.rank_samples(JudgedPart(p, torch.from_numpy(random.integers(0, 3, 300)), p.argmax(1), 0.0), None)
    assert {name: samples.shape for name, samples in drawn.items()} == {"auroc": (1000,), "average_precision": (1000,)}
    assert np.quantile(drawn["auroc"], 0.025) < 0.5 < np.quantile(drawn["auroc"], 0.975)


def test_what_to_check_in_a_file_is_said_before_and_on_the_page(tmp_path, monkeypatch, capsys):
    """A guessed character set, and columns that may give the class away."""
    monkeypatch.chdir(tmp_path)
    rows = pd.DataFrame({"a": np.arange(200) % 7, "city": ["Köln", "Bern"] * 100, "y": [0, 0, 0, 1] * 50})
    rows["paid"] = [f"day {k}" if y else None for k, y in enumerate(rows["y"])]
    rows["approved"] = np.where(rows["y"], "no", "yes")
    rows.to_csv("my.csv", index=False, encoding="latin-1")
    assert cli.run(["task=compare", "dataset.path=my.csv", "dataset.target=y", "candidates=[logistic]"]) == 0
    text = capsys.readouterr().out
    shown = next(tmp_path.rglob("report.html")).read_text()
    for note in (
        "the text is not UTF-8 and was read as Windows-1252 (Latin-1)",
        "one column alone determines the class of every row: approved. If it is known only after the class (leakage)",
    ):
        assert f"note: {note}" in text
        assert note in shown
    assert "balance      0 150 (75.00%), 1 50 (25.00%)" in shown


def test_classes_that_differ_only_in_capital_letters_are_named():
    rows = pd.DataFrame({"a": np.arange(60), "y": ["Yes", "No", "yes"] * 20})
    assert compare.file_notes(from_frame("csv", rows, "y")) == [
        "these classes differ only in capital letters: Yes, yes"
    ]


def test_the_command_for_new_rows_can_be_pasted_into_a_shell():
    words = shlex.split(compare.predict_command(Path("my results/it's me"), "table", trust=True))
    assert (words[0], Command.parse(words[1:]).values) == ("east-run", {
        "task": "predict", "checkpoint": "my results/it's me/model", "input": "new.csv", "output": "predictions.csv",
        "trust": True,
    })  # fmt: skip


def test_too_few_rows_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": range(6), "label": [0, 1] * 3}).to_csv("six.csv", index=False)
    assert cli.run([*COMPARE, "dataset.path=six.csv"]) == 3
    assert "csv has too few rows to compare: 6 leave 1 for validation" in capsys.readouterr().err


def test_a_single_validation_group_is_reported():
    """A rule tuned without that group would be tuned on no rows at all."""
    rows = pd.DataFrame({"a": np.arange(70), "patient": np.arange(70) % 7, "label": [0, 1] * 35})
    loaded = from_frame("csv", rows, "label", group="patient")
    with pytest.raises(data.DataError, match="too few groups to compare: 7 leave 1 for validation"):
        compare.description("", loaded, data.split(loaded))
    compare.description("", loaded, data.split(loaded, fractions=(0.5, 0.25, 0.25)))


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ([*COMPARE, "loss=ce"], 2, "task=compare does not take loss"),
        ([*COMPARE, "candidates=[bosting]"], 2, "did you mean 'boosting'"),
        ([*COMPARE, "minutes=0"], 2, "minutes"),
        pytest.param(
            [*COMPARE, "candidates=[logistic,catboost]"],
            2,
            "catboost is not installed: pip install catboost",
            marks=pytest.mark.skipif(find_spec("catboost") is not None, reason="catboost is installed"),
        ),
        ([*COMPARE, "split.seed=trial"], 2, "task=compare judges all candidates on one split"),
        ([*COMPARE, "protocol=btg"], 2, "task=compare judges all candidates on one split"),
        ([*COMPARE, "score=f2"], 2, "unknown score 'f2'"),
        (["task=compare", "dataset=csv"], 3, "dataset.path"),
        (["task=predict", "input=new.csv"], 2, "needs checkpoint=… output=…"),
        (["task=evaluate", "input=new.csv"], 2, "needs checkpoint=…"),
        (["task=predict", "checkpoint=no", "input=new.csv", "output=o.csv"], 3, "is not a saved model"),
    ],
)
def test_a_mistake_gives_an_exit_code_and_an_explanation(arguments, code, message, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    assert cli.run(arguments) == code
    assert message in capsys.readouterr().err


def test_an_output_in_the_home_folder_is_not_overwritten_either(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keep.csv").write_text("mine")
    assert cli.run(["task=predict", "checkpoint=no", "input=new.csv", "output='~/keep.csv'"]) == 2
    assert "output=~/keep.csv exists already; force=true replaces it" in capsys.readouterr().err


def test_candidates_take_turns_cheapest_first_and_networks_as_the_contest_ranks_them():
    plans = [compare.CandidatePlan(key, key, None, seconds) for key, seconds in
             (("ce", 5.0), ("rf", 9.0), ("east", 6.0), ("logistic", 0.1), ("metric_ce", 5.5))]  # fmt: skip
    plans = sorted(plans, key=lambda plan: list(compare.CANDIDATES).index(plan.key))
    assert [plan.key for plan in compare.cheapest_first(plans)] == ["logistic", "metric_ce", "ce", "east", "rf"]


def test_a_network_that_could_not_be_saved_is_refused_before_anything_is_trained(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    Path("made_by.py").write_text("def network(features, outputs):\n    return None\n")
    monkeypatch.syspath_prepend(workplace)
    network = ["model=custom", "model.target=made_by.network"]
    assert cli.run(["task=compare", "dataset.path=my.csv", "dataset.target=label", *network]) == 2
    assert "task=compare saves its winner: model.target 'made_by.network'" in capsys.readouterr().err
