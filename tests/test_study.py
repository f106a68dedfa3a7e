"""Studies: simulations against derivations, their files, and what they refuse."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from east.choices import ConfigError
from east.lab import cli
from east.lab.settings import compose
from east.lab.settings.command import Command
from east.lab.tasks import study

SMALL = ["dataset=digits", "dataset.limit=200", "device=cpu"]


def test_the_simulated_classifier_is_calibrated():
    """A true posterior is right as often as it says: the mean of its largest probability is its accuracy."""
    for classes in (2, 10, 100):
        logits, labels = study.calibrated(classes, rows=20_000)
        assert float((logits.argmax(-1) == labels).float().mean()) == pytest.approx(study.ACCURACY, abs=1e-3)
        assert float(logits.softmax(-1).amax(-1).mean()) == pytest.approx(study.ACCURACY, abs=0.01)


def test_the_gap_closes_as_the_temperature_falls(monkeypatch):
    monkeypatch.setattr(study, "CLASSES", (2, 30))
    frame = study.gap(Command())
    assert len(frame) == 2 * 2 * len(study.TEMPERATURES)
    assert frame.gap.to_numpy() == pytest.approx(frame.hard - frame.soft)
    for _, part in frame.groupby(["classes", "metric"]):
        assert (part.gap.diff().dropna() < 0).all(), "temperatures come from high to low"
        assert 0 < part.gap.iloc[-1] < 0.005
    figure = study.draw_gap(frame)
    drawn = {line.get_label(): line.get_ydata() for line in figure.axes[1].lines}
    assert list(drawn["T = 0.1"]) == pytest.approx(frame.query("metric == 'f1' and temperature == 0.1").gap)


@pytest.fixture(scope="module")
def bias():
    return study.bias(Command())


def soft_counts(prevalence):
    """Expected tp, fp, fn of the population at T = 0.2 by numerical integration; H of eq. 4 at tau = 1/2."""
    x = np.linspace(-10, 13, 200_001)
    p = 1 / (1 + np.exp(-(3 * (x - 1.5) + math.log(prevalence / (1 - prevalence)))))
    H = np.interp(p, [0, 0.25, 0.5, 0.75, 1], [0, 0.2, 0.5, 0.8, 1])
    normal = lambda mean: np.exp(-((x - mean) ** 2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])  # noqa: E731
    positive, negative = prevalence * normal(3), (1 - prevalence) * normal(0)
    return float(positive @ H), float(negative @ H), float(positive @ (1 - H))


@pytest.mark.parametrize("prevalence", study.PREVALENCES)
def test_bias_is_measured_against_the_populations_f1(bias, prevalence):
    """F1 = 2tp/D with D = 2tp + fp + fn; the derivatives 2(fp+fn)/D², -2tp/D², -2tp/D² have the absolute sum 2/D."""
    part = bias[bias.prevalence == prevalence]
    tp, fp, fn = soft_counts(prevalence)
    assert part.population.to_numpy() == pytest.approx(2 * tp / (2 * tp + fp + fn), abs=0.005)
    assert (part.bound_score / part.bound_entries).to_numpy() == pytest.approx(2 / (2 * tp + fp + fn), rel=0.01)


def test_both_bounds_hold_and_fall_with_the_square_root_of_the_batch_size(bias):
    """Theorem 5.8 at n = 16, d = 2, delta = 0.05: sqrt(log(160) / 32) = 0.398."""
    assert bias.bound_entries[bias.n == 16].to_numpy() == pytest.approx(0.3982, abs=1e-4)
    assert (bias.entries <= bias.bound_entries).all()
    assert (bias.score <= bias.bound_score).all()
    for _, part in bias.groupby("prevalence"):
        assert np.polyfit(np.log(part.n), np.log(part.entries), 1)[0] == pytest.approx(-0.5, abs=0.05)


def test_small_batches_underestimate_the_rare_class(bias):
    """At 1 % a batch of 16 has no positive with probability 0.99^16 = 0.85, and then F1 is 0."""
    worst = bias[(bias.prevalence == 0.01) & (bias.n == 16)].iloc[0]
    assert worst.bias < -0.75 * worst.population
    assert bias.bias[bias.n == max(study.BATCHES)].abs().max() < 0.005


def test_the_bias_figure_shows_measurement_and_bound(bias):
    left, middle, right = study.draw_bias(bias).axes
    assert [t.get_text() for t in left.get_legend().get_texts()] == ["1% positive", "10% positive", "50% positive"]
    assert list(middle.lines[-1].get_ydata()) == pytest.approx(bias.bound_entries[bias.prevalence == 0.5])
    dashed = [line for line in right.lines if line.get_linestyle() == "--" and len(line.get_xdata())]
    assert len(dashed) == 3


def test_chunks_add_up_to_all_batches():
    memberships, labels = study.population(0.1, rows=1000)
    found = torch.cat([c.matrix for c in study.sampled(memberships, labels, 3000)])
    assert found.shape == (study.DRAWS, 2, 2)
    assert found.sum((-2, -1)).tolist() == pytest.approx([3000] * study.DRAWS)


def test_soft_and_hard_come_from_one_run(tmp_path):
    files = study.run("soft_hard", Command.parse([*SMALL, "preset=quick", "hyper.batch_size=32"]), tmp_path)
    assert [file.name for file in files] == [f"soft_hard.{end}" for end in ("csv", "svg", "pdf", "png")]
    frame = pd.read_csv(files[0])
    assert frame.temperature.iloc[0] == 0.2
    assert (frame.temperature.diff().dropna() <= 0).all()
    assert frame[["soft", "hard"]].stack().between(0, 1).all()
    assert frame.hard.iloc[-1] > frame.hard.iloc[0]
    assert frame.dataset.unique().tolist() == ["digits"]


def test_balanced_curves_have_the_same_length_for_both_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "EPOCHS", 8)
    frame = study.balanced(Command.parse([*SMALL, "hyper.batch_size=32"]))
    counts = frame.groupby(["loss", "seed"]).epoch.agg(["min", "max", "count"])
    assert len(counts) == 2 * 5
    assert (counts == [1, 8, 8]).all().all()
    axes = study.draw_balanced(frame).axes[0]
    mean = frame[frame.loss == "ce"].groupby("epoch").f1_macro.mean()
    assert list(axes.lines[1].get_ydata()) == pytest.approx(list(mean))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("gap", ["dataset=digits"], "dataset: study=gap takes no settings"),
        ("balanced", ["loss=mcc"], "loss: study=balanced takes dataset, split"),
        ("balanced", ["dataset=synthetic"], "more than two classes; synthetic has two"),
        ("soft_hard", ["loss=ce"], "needs a loss with a temperature; ce has none"),
        ("soft-hard", [], "did you mean 'soft_hard'"),
    ],
)
def test_settings_that_a_study_cannot_use_are_refused(name, words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        study.run(name, Command.parse(words), tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "typed, expected",
    [
        ({"hyper.lr": 0.01}, {"dataset": "synthetic", "dataset.classes": 5, "hyper.batch_size": 128, "hyper.lr": 0.01}),
        ({"dataset.classes": 3}, {"dataset": "synthetic", "dataset.classes": 3, "hyper.batch_size": 128}),
        ({"dataset": "digits"}, {"dataset": "digits", "hyper.batch_size": 128}),
    ],
)
def test_a_setting_replaces_only_its_own_default(typed, expected):
    defaults = {"dataset": "synthetic", "dataset.classes": 5, "hyper.batch_size": 128}
    assert study.with_defaults(Command(typed), defaults).values == expected


def test_the_default_data_of_a_study_can_be_changed(monkeypatch):
    """dataset.classes=3 is an option of the study's dataset, and leaves its imbalance as it is."""
    seen = []
    monkeypatch.setattr(study, "trained", lambda command, seeds: seen.append(compose.settings(command)) or 1 / 0)
    for word in ("dataset.classes=3", "hyper.lr=0.01"):
        with pytest.raises(ZeroDivisionError):
            study.soft_hard(Command.parse([word]))
    assert [(one.dataset.options["classes"], one.dataset.options["imbalance"]) for one in seen] == [(3, 10), (5, 10)]


def test_the_command_writes_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "CLASSES", (2,))
    monkeypatch.setattr(study, "STUDIES", {"gap": study.STUDIES["gap"]})
    assert cli.run(["task=study", "study=all", f"results_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "studies" / "gap.csv")
    assert cli.run(["task=study", f"results_dir={tmp_path}"]) == 2
    assert "task=study needs study=…: gap, or all" in capsys.readouterr().err


def test_all_studies_are_checked_before_the_first_one_trains(east_run, monkeypatch):
    trained = []
    monkeypatch.setattr(study, "trained", lambda *given: trained.append(given))
    answer = east_run("task=study", "study=all", *SMALL)
    assert (answer.code, trained) == (cli.BAD_CONFIG, [])
    assert "dataset: study=gap takes no settings" in answer.err
