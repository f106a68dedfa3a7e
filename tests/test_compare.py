"""task=compare and task=predict: the choice is sound, its numbers are right, and the winner is what is saved."""

import re
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import make_classification
from sklearn.metrics import f1_score, matthews_corrcoef

import east
from east import cli, data, metrics
from east.experiment import records
from east.settings.command import Command
from east.settings.compose import settings
from east.tasks import compare
from east.tasks.compare import Candidate, Judged
from east.training import decisions
from tests.made import science

F1 = partial(metrics.f1, average="positive")


def noise(rows=400, seed=0):
    """Probabilities that know nothing of the labels, one in ten of which is positive."""
    random = np.random.default_rng(seed)
    p = random.random(rows)
    return torch.from_numpy(np.stack([1 - p, p], 1)), torch.from_numpy((random.random(rows) < 0.1).astype(int))


def test_cross_fitting_takes_the_luck_out_of_a_tuned_threshold():
    """Balanced accuracy of noise is 1/2 in truth; tuned and judged on the same rows it is always more."""
    honest, tuned = [], []
    for seed in range(40):
        p, y = noise(200, seed)
        rule = decisions.tuned(p, y, metrics.balanced_accuracy, 1)
        for values, decided in (
            (tuned, rule.decide(p)),
            (honest, compare.cross_fitted(p, y, metrics.balanced_accuracy, 1)),
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
    compare.cross_fitted(p, y, F1, 1)
    assert len(decided_by) == 100
    assert all(value not in seen[fold - 1] for value, fold in decided_by.items())
    assert [len(rows) for rows in seen] == [80] * 5


def judged(predicted, labels):
    return Judged(None, 0.0, f1_score(labels, predicted), torch.from_numpy(predicted), torch.from_numpy(labels))


def test_a_bootstrap_weighs_rows_as_scikit_learn_does():
    random = np.random.default_rng(0)
    labels, predicted = random.integers(0, 3, (2, 60))
    weights = random.integers(0, 4, (5, 60))
    trial = Judged(None, 0.0, 0.0, torch.from_numpy(predicted), torch.from_numpy(labels))
    confusion = compare.weighted(trial, torch.from_numpy(weights).double(), 3)
    expected = [matthews_corrcoef(labels, predicted, sample_weight=w) for w in weights]
    np.testing.assert_allclose(metrics.mcc(confusion), expected)
    np.testing.assert_allclose(confusion.matrix[0, 1], np.bincount(predicted[labels == 1], weights[0][labels == 1], 3))


def test_the_interval_covers_rows_and_seeds():
    """With one seed its width is that of a binomial share: 4 standard errors of sqrt(p q / n)."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 1000)
    one = judged(np.where(random.random(1000) < 0.8, labels, 1 - labels), labels)
    other = judged(np.where(random.random(1000) < 0.6, labels, 1 - labels), labels)
    single, both = Candidate(None, "a", "argmax", [one], [0]), Candidate(None, "b", "argmax", [one, other], [0, 1])
    samples = compare.resampled([single, both], metrics.accuracy, 2)
    low, high = np.quantile(samples[0], [0.025, 0.975])
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.16 / 1000), rel=0.1)
    a, b = (float((trial.predicted == trial.labels).double().mean()) for trial in (one, other))
    assert samples[0].mean() == pytest.approx(a, abs=0.002)
    assert samples[1].mean() == pytest.approx((a + b) / 2, abs=0.008)
    # The mean of two seeds, drawn with replacement, has the standard deviation |a - b| / (2 sqrt 2); rows add theirs.
    assert samples[1].std() == pytest.approx(np.hypot((a - b) / np.sqrt(8), 0.011), rel=0.06)


def test_the_winner_is_chosen_on_validation_whatever_the_test_rows_say():
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 500)
    good, bad = (np.where(random.random(500) < share, labels, 1 - labels) for share in (0.9, 0.6))
    lucky = Candidate(None, "lucky on test", "argmax", [judged(good, labels)], [0])
    chosen = Candidate(
        None, "chosen", "plugin", [Judged(None, 0.9, f1_score(labels, bad), *map(torch.from_numpy, (bad, labels)))], [0]
    )
    winner, text = compare.verdict([lucky, chosen], F1, "f1_pos", 2)
    assert winner is chosen
    assert "winner on f1_pos: chosen + plug-in" in text
    assert "not clearly ahead of any other" in text
    lead = float(re.search(r"lucky on test .* ([+-]\d\.\d+)  [+-]", text).group(1))
    assert lead == pytest.approx(chosen.test - lucky.test, abs=1e-3)
    assert lead < -0.2


@pytest.mark.parametrize(
    "score, positive, metric, matched",
    [
        ("f1_pos", 1, {"metric": "f1", "average": "positive"}, "f1"),
        ("f1_pos", 2, {"metric": "f1", "average": "positive", "positive": 2}, "f1"),
        (None, 1, {"metric": "f1", "average": "positive"}, "f1"),
        (None, None, {"metric": "f1", "average": "macro"}, "f1"),
        ("mcc", 1, {"metric": "mcc"}, "mcc"),
        ("balanced_accuracy", None, {"metric": "balanced_accuracy"}, "metric"),
    ],
)
def test_losses_are_those_of_the_score(score, positive, metric, matched):
    classes = ("a", "b", "c") if positive in (None, 2) else ("a", "b")
    loaded = data.Table(
        features=torch.zeros(3, 1), labels=torch.arange(3) % 2, classes=classes, name="t", positive=positive
    )
    assert compare.wanted_score(score, loaded)[1] == metric
    configs = [compare.aimed(settings(Command(loss)), metric) for loss in compare.candidate_losses(metric, "table")]
    assert [config.loss.name for config in configs] == [matched, "ce", "anyloss", "rf"]
    for config in (configs[0], configs[2]):
        assert metric.items() <= config.loss.options.items()
        loss = east.losses.build(config.loss, classes)
        assert loss.metric is metrics.METRICS[metric["metric"]]


def test_scores_that_make_no_sense_are_refused():
    loaded = data.Table(features=torch.zeros(3, 1), labels=torch.arange(3), classes=("a", "b", "c"), name="t")
    with pytest.raises(ValueError, match="f1_pos needs a positive class"):
        compare.wanted_score("f1_pos", loaded)
    with pytest.raises(ValueError, match="did you mean 'mcc'"):
        compare.wanted_score("mc", loaded)


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
           "protocol.max_epochs=25", "model.hidden=[32]", "executor=inline", "device=cpu"]  # fmt: skip


def test_from_a_file_to_predictions(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    assert cli.run(COMPARE) == 0
    text = capsys.readouterr().out
    assert "fraud" in text
    assert re.search(r"region +2 categories: north, south", text)
    assert "rows of 'fraud' for val; expect wide intervals" in text
    rows = re.findall(r"^(EAST f1_pos|cross-entropy|AnyLoss|random forest)( \+ plug-in)? ", text, re.MULTILINE)
    assert len(rows) == 8
    numbers = dict(re.findall(r"^(\S.*?\S) {2,}(\d\.\d{3})", text, re.MULTILINE))
    winner = re.search(r"winner on f1_pos: (.+?), test", text).group(1)
    assert float(numbers[winner]) == max(map(float, numbers.values()))

    command = text.strip().splitlines()[-1].split()
    assert command[:2] == ["east-run", "task=predict"]
    assert cli.run(command[1:]) == 0
    predicted = pd.read_csv("predictions.csv")
    assert list(predicted) == ["label", "p_ok", "p_fraud"]
    truth = pd.read_csv("labelled.csv")["label"]
    assert f1_score(truth == "fraud", predicted["label"] == "fraud") > 0.5

    # The model decides as the winner did: its record's test rows get the predictions that were scored.
    model = east.load(command[2].partition("=")[2])
    assert (model.about["rule"] is not None) == winner.endswith("plug-in")
    capsys.readouterr()
    assert cli.run(command[1:]) == 2
    assert "exists already" in capsys.readouterr().err

    # Again: everything is on record and saved, so that nothing is trained.
    before = {path: path.stat().st_mtime_ns for path in workplace.glob("results/runs/**/*.json")}
    assert cli.run(COMPARE) == 0
    assert capsys.readouterr().out == text
    assert {path: path.stat().st_mtime_ns for path in workplace.glob("results/runs/**/*.json")} == before

    # Probabilities that were deleted come back, by that trial alone.
    deleted = min(workplace.glob("results/runs/**/*.npz"))
    deleted.unlink()
    assert cli.run(COMPARE) == 0
    assert capsys.readouterr().out == text
    assert deleted.exists()
    after = {path: path.stat().st_mtime_ns for path in workplace.glob("results/runs/**/*.json")}
    assert {path for path in before if after[path] != before[path]} == {deleted.with_suffix(".json")}
    assert {record.config.preset for record in records.scan("results")} == {"compare"}


def test_a_score_of_your_own_in_a_file_of_the_working_directory(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    (workplace / "my_scores.py").write_text(
        "def caught(c):\n    return c.diagonal[..., 1] / c.actual[..., 1] - 0.1 * c.predicted[..., 1] / c.total\n"
    )
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(workplace))])
    monkeypatch.setattr(sys, "argv", ["east-run", *COMPARE, "score=my_scores.caught", "results_dir=own"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "winner on my_scores.caught" in text
    assert len(re.findall(r"^EAST my_scores.caught", text, re.MULTILINE)) == 2


def test_many_classes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["task=compare", "dataset=digits", "dataset.limit=400", "score=mcc", "trials=1", "device=cpu"]
    assert cli.run([*arguments, "protocol.max_epochs=5", "model.hidden=[32]", "executor=inline"]) == 0
    text = capsys.readouterr().out
    assert "winner on mcc:" in text


@pytest.mark.parametrize("warmup, advice", [(0, "; try protocol.warmup=10, cross-entropy first"), (5, "")])
def test_a_metric_loss_that_collapses_is_told(warmup, advice):
    labels = np.array([0, 0, 1])
    trials = [judged(np.array(predicted), labels) for predicted in ([0, 0, 0], [0, 1, 1])]
    found = [
        Candidate(
            SimpleNamespace(science=science(loss=loss, protocol={"name": "east", "warmup": warmup})),
            title,
            decision,
            trials,
            [0, 1],
        )
        for title, loss in (
            ("EAST mcc", {"name": "mcc", "_target_": "east.losses.MetricLoss", "metric": "mcc"}),
            ("cross-entropy", {"name": "ce", "_target_": "east.losses.CrossEntropy"}),
        )
        for decision in ("argmax", "plugin")
    ]
    assert compare.collapses(found) == [f"note: EAST mcc predicts one class only in 1 of 2 trials{advice}"]


def test_too_few_rows_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": range(6), "label": [0, 1] * 3}).to_csv("six.csv", index=False)
    assert cli.run([*COMPARE, "dataset.path=six.csv"]) == 3
    assert "csv has too few rows to compare: 6 leave 1 for validation" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ([*COMPARE, "loss=ce"], 2, "the losses follow from the score"),
        ([*COMPARE, "split.seed=trial"], 2, "task=compare judges all losses on one split"),
        ([*COMPARE, "protocol=btg"], 2, "task=compare judges all losses on one split"),
        ([*COMPARE, "score=f2"], 2, "unknown metric 'f2'"),
        (["task=compare", "dataset=csv"], 3, "dataset.path"),
        (["task=predict", "input=new.csv"], 2, "needs checkpoint=… output=…"),
        (["task=predict", "checkpoint=no", "input=new.csv", "output=o.csv"], 3, "is not a saved model"),
    ],
)
def test_mistakes_are_told(arguments, code, message, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    assert cli.run(arguments) == code
    assert message in capsys.readouterr().err


def test_an_output_in_the_home_folder_is_not_replaced_either(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keep.csv").write_text("mine")
    assert cli.run(["task=predict", "checkpoint=no", "input=new.csv", "output='~/keep.csv'"]) == 2
    assert "output=~/keep.csv exists already; force=true replaces it" in capsys.readouterr().err
