"""The study of small batches: a simulation against derivations, and its files."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from east.lab.tasks import study


@pytest.fixture(scope="module")
def bias():
    return study.bias()


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
    figure = study.draw_bias(bias)
    left, middle, right = (axes.lines for axes in figure.axes)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["1% positive", "10% positive", "50% positive", "bounds of Theorems 5.8 and 5.9"]
    assert list(middle[-1].get_ydata()) == pytest.approx(bias.bound_entries[bias.prevalence == 0.5])
    assert list(left[0].get_ydata()) == pytest.approx(bias.bias[bias.prevalence == 0.01])
    assert len([line for line in right if line.get_linestyle() == "--"]) == 3


def test_chunks_add_up_to_all_batches():
    memberships, labels = study.population(0.1, rows=1000)
    found = torch.cat([c.matrix for c in study.sampled(memberships, labels, 3000)])
    assert found.shape == (study.DRAWS, 2, 2)
    assert found.sum((-2, -1)).tolist() == pytest.approx([3000] * study.DRAWS)


def test_soft_f1_and_its_best_classifier_approach_f1_and_its_own():
    """At temperatures of at most 0.2; by hand the mean error of the step is 1.125 T."""
    found = study.temperature()
    assert found.step.to_numpy() == pytest.approx(1.125 * found["T"].to_numpy(), abs=1e-3)
    for _, part in found[found["T"] <= 0.2].groupby("prevalence"):
        for name in ("f1", "offset", "regret"):
            sizes = part[name].abs().to_numpy()  # T falls
            assert (np.diff(sizes) <= 1e-12).all(), name
        assert sizes[-1] < 1e-4
        assert part.f1.abs().iloc[-1] < 0.005


def test_the_command_writes_its_files(tmp_path, monkeypatch, east_run):
    monkeypatch.setattr(study, "BATCHES", (16,))
    monkeypatch.setattr(study, "PREVALENCES", (0.1,))
    answer = east_run("task=study", f"results_dir={tmp_path}")
    assert answer.code == 0, answer.err
    written = sorted(str(file) for file in tmp_path.rglob("*.*"))
    assert sorted(answer.out.split()) == written
    assert [Path(file).name for file in written] == [
        *("study_bias.svg", "study_temperature.svg", "bias.csv", "temperature.csv")
    ]
