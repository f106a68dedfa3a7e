"""Schedules against their formulas; two-level early stopping against a plain implementation for one trial."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from east.lab.experiment import budget
from east.lab.settings.command import Command
from east.lab.settings.compose import settings as composed
from east.lab.settings.sections import AnnealingSection, DatasetSection, LossSection, ModelSection, Science, Training
from east.lab.training.annealing import Annealing, temperatures
from east.lab.training.scores import Best

FILES = sorted((Path(__file__).parent.parent / "conf/annealing").glob("*.yaml"))


def config(schedule="geometric", patience=3, stage_epochs=None, max_epochs=1000, outer_patience=3, warmup=0,
           count="epochs", **others):  # fmt: skip
    defaults = {"T0": 0.2, "r": 0.5, "T_min": 0.01, "patience": outer_patience}
    return Science(
        dataset=DatasetSection(name="toy"),
        model=ModelSection(name="mlp"),
        loss=LossSection(name="f1", target="east.losses.MetricLoss"),
        annealing=AnnealingSection(name=schedule, schedule=schedule, **{**defaults, **others}),
        protocol=Training(
            name="east",
            patience=patience,
            stage_epochs=stage_epochs,
            max_epochs=max_epochs,
            warmup=warmup,
            count=count,
        ),
    )


def run(annealing, curve):
    """Feed scripted numbers curve(p, epoch, T) -> (val_loss, val_metric); return temperatures and verdicts."""
    visited, verdicts = [[] for _ in annealing.schedules], []
    while annealing.active.any():
        T, trials = annealing.temperature, range(len(annealing.schedules))
        epoch = int(annealing.epochs[annealing.active][0]) + 1
        for p in trials:
            if annealing.active[p]:
                visited[p].append(T[p])
        numbers = np.array([curve(p, epoch, T[p]) for p in trials])
        verdicts.append(annealing.update(numbers[:, 0], numbers[:, 1]))
    return visited, verdicts


def plain_loop(curve, T0, r, T_min, P_in, P_out, d_out, E_T, E_max, outer):
    """One trial with nested loops: the temperature of each epoch, and the epoch whose weights are kept."""
    T, k, epochs, best_out, bad_out, final, visited = T0, 0, 0, math.inf, 0, None, []
    while True:
        best, bad, e, snap = math.inf, 0, 0, None
        while bad < P_in and e < E_T and epochs < E_max:
            visited.append(T)
            v, h = curve(epochs + 1, T)
            e, epochs = e + 1, epochs + 1
            if v < best:
                best, bad, snap = v, 0, (epochs, h)
            else:
                bad += 1
        score = best if outer == "soft" else snap[1]
        if score < best_out - d_out:
            best_out, bad_out, final = score, 0, snap[0]
        else:
            bad_out += 1
        if bad_out >= P_out or T0 * r ** (k + 1) < T_min or epochs >= E_max:
            return visited, final
        k += 1
        T = T0 * r**k


def test_geometric_temperatures_are_t0_r_to_the_k():
    assert temperatures("geometric", 0.2, 0.8, 0.01) == [0.2 * 0.8**k for k in range(14)]
    assert 0.2 * 0.8**13 >= 0.01 > 0.2 * 0.8**14


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_ablation_schedules_fall_from_t0_to_t_min_in_as_many_stages_as_geometric(schedule):
    T = temperatures(schedule, 0.2, 0.8, 0.01)
    assert len(T) == len(temperatures("geometric", 0.2, 0.8, 0.01))
    assert T[0] == pytest.approx(0.2)
    assert T[-1] == pytest.approx(0.01)
    assert all(a > b for a, b in pairwise(T))
    middle = {"linear": 0.2 - 0.19 * 3 / 13, "cosine": 0.01 + 0.19 * (1 + math.cos(math.pi * 3 / 13)) / 2}
    assert T[3] == pytest.approx(middle[schedule])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_annealing_config_is_complete(file):
    section = OmegaConf.to_container(OmegaConf.load(file))
    assert section["name"] == section["schedule"] == file.stem
    annealing = Annealing([config().but(annealing=AnnealingSection(**section))], temperature=0.2)
    assert annealing.temperature.tolist() == [0.2]
    assert len(annealing.schedules[0]) == (1 if file.stem == "none" else 51)  # 0.2 x 0.9^50 = 0.00103


def test_the_temperature_does_not_fall_during_warm_up():
    setting = config("per_epoch", max_epochs=6, patience=9, warmup=3)
    annealing = Annealing([setting])
    visited, verdicts = run(annealing, lambda p, epoch, T: (1 / epoch, 0.5))
    assert visited == [[0.2, 0.2, 0.2, 0.2, 0.1, 0.05]]
    assert [verdict.cooled[0] for verdict in verdicts] == [False, False, True, False, False, False]
    assert annealing.best_of(0).epoch == 6


@pytest.mark.parametrize("warmup", [3, 4, 99])
def test_warm_up_ends_before_the_last_epoch(warmup):
    setting = config("none", max_epochs=4, warmup=warmup)
    annealing = Annealing([setting])
    visited, _ = run(annealing, lambda p, epoch, T: (1 / epoch, 0.5))
    assert len(visited[0]) == 4
    assert annealing.stopped == ["max_epochs"]
    assert annealing.best_of(0).epoch == 4


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match="did you mean 'geometric'"):
        temperatures("geometrc")
    with pytest.raises(ValueError, match="0 < r < 1"):
        temperatures("geometric", r=1.0)


def test_a_curve_that_never_falls_again_ends_after_p_out_coolings():
    annealing = Annealing([config(patience=3, outer_patience=2, r=0.8, T_min=0.001)])
    visited, verdicts = run(annealing, lambda p, epoch, T: (1.0, 0.5))
    # Stage 1: one new minimum, then P_in = 3 epochs without one. So do stages 2 and 3, but neither beats stage 1.
    assert visited[0] == [0.2] * 4 + [0.2 * 0.8] * 4 + [0.2 * 0.8**2] * 4
    assert annealing.stopped == ["coolings"]
    assert [bool(v.cooled[0]) for v in verdicts] == [e in (4, 8) for e in range(1, 13)]
    assert annealing.best_of(0) == Best(val_loss=1.0, val_metric=0.5, temperature=0.2, epoch=1)


@pytest.mark.parametrize("outer", ["soft", "hard"])
def test_population_follows_the_plain_loop_on_random_curves(outer):
    rng = np.random.default_rng(0)
    settings, curves = [], []
    for _ in range(60):
        setting = {"r": rng.choice([0.5, 0.8, 0.9]), "d_out": rng.choice([0, 1e-2])}
        ranges = {"P_in": (1, 6), "P_out": (1, 4), "E_T": (4, 15), "E_max": (10, 80)}
        settings.append(setting | {name: int(rng.integers(*bounds)) for name, bounds in ranges.items()})
        numbers = np.cumsum(rng.normal(-0.01, 0.1, (200, 2)), axis=0)
        curves.append(lambda epoch, T, numbers=numbers: (numbers[epoch, 0] + T, numbers[epoch, 1]))
    names = {
        "P_in": "patience",
        "P_out": "outer_patience",
        "d_out": "delta",
        "E_T": "stage_epochs",
        "E_max": "max_epochs",
    }
    annealing = Annealing([config(outer=outer, **{names.get(k, k): v for k, v in s.items()}) for s in settings])
    visited, _ = run(annealing, lambda p, epoch, T: curves[p](epoch, T))
    for p, s in enumerate(settings):
        expected, final = plain_loop(curves[p], T0=0.2, T_min=0.01, outer=outer, **s)
        assert visited[p] == pytest.approx(expected)
        assert annealing.best_of(p).epoch == final
    assert {"coolings", "max_epochs", "coldest"} <= set(annealing.stopped)


def test_without_annealing_patience_ends_the_single_stage():
    annealing = Annealing([config("none", patience=2, T0=None)], temperature=0.15)
    losses = [0, 5, 4, 3, 3.5, 3.2, 1]
    visited, _ = run(annealing, lambda p, epoch, T: (losses[epoch], 0.0))
    assert visited == [[0.15] * 5]
    assert annealing.stopped == ["patience"]
    assert annealing.best_of(0).epoch == 3


def test_a_loss_without_temperature_has_one_stage_whatever_the_schedule():
    annealing = Annealing([config("geometric", patience=1)], anneals=False)
    run(annealing, lambda p, epoch, T: (1.0, 0.0))
    assert annealing.epochs[0] == 2
    assert annealing.stopped == ["patience"]


def test_per_epoch_cools_every_epoch_and_stays_at_the_coldest():
    annealing = Annealing([config("per_epoch", patience=100, max_epochs=8)])
    visited, _ = run(annealing, lambda p, epoch, T: (-epoch, 0.0))
    assert visited[0] == pytest.approx([0.2, 0.1, 0.05, 0.025, 0.0125, 0.0125, 0.0125, 0.0125])


def test_per_epoch_with_the_hard_rule_keeps_the_best_decisions():
    annealing = Annealing([config("per_epoch", patience=100, max_epochs=8, outer="hard")])
    run(annealing, lambda p, epoch, T: (-epoch, abs(epoch - 3)))
    assert annealing.best_of(0).epoch == 3


def test_ties_in_the_metric_go_to_the_lower_cross_entropy():
    annealing = Annealing([config("none", patience=3)], anneals=False, by_metric=True)
    epochs = [(0.1, 0.5, 0.9), (0.9, 0.4, 0.8), (0.9, 0.4, 0.7), (0.1, 0.4, 0.7), (0.1, 0.5, 0.1), (0.1, 0.4, 0.75)]
    for loss, metric, tie in epochs:
        annealing.update(np.array([loss]), np.array([metric]), np.array([tie]))
    assert annealing.stopped == ["patience"]
    assert annealing.best_of(0).epoch == 3


def test_the_state_survives_json_in_mid_training():
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=(100, 4, 2))
    configs = [config(patience=2, max_epochs=40, r=r) for r in (0.5, 0.8, 0.9, 0.7)]
    whole, half = Annealing(configs), Annealing(configs)
    for epoch in range(7):
        half.update(*numbers[epoch].T)
    resumed = Annealing(configs)
    resumed.restore(json.loads(json.dumps(half.state())))
    for annealing, first in ((whole, 0), (resumed, 7)):
        for epoch in range(first, 40):
            annealing.update(*numbers[epoch].T)
    assert whole.state() == resumed.state()


def test_a_failed_trial_stops_and_has_no_best_epoch():
    annealing = Annealing([config(patience=1), config(patience=1)], anneals=False)
    annealing.fail(0)
    annealing.update(np.array([np.nan, 1.0]), np.array([np.nan, 1.0]))
    assert annealing.active.tolist() == [False, True]
    assert annealing.stopped == ["diverged", None]
    assert annealing.best_of(0) == Best()


def test_lengths_in_steps_are_rounded_up_to_whole_epochs():
    """Seven steps per epoch: 30 steps are five epochs. Lengths in epochs do not depend on the steps."""
    lengths = {"patience": 30, "stage_epochs": 70, "max_epochs": 701, "warmup": 8}
    by_steps = Annealing([config(count="steps", **lengths)], steps=7)
    assert [by_steps.patience, by_steps.max_stage_epochs, by_steps.max_epochs, by_steps.warmup] == [5, 10, 101, 2]
    by_epochs = Annealing([config(**lengths)], steps=7)
    assert [by_epochs.patience, by_epochs.max_stage_epochs, by_epochs.max_epochs, by_epochs.warmup] == [30, 70, 701, 8]


def test_a_metric_that_stops_training_also_chooses_the_kept_epoch():
    """The epoch with the best metric is kept, ties broken by the lowest tie-breaker; a search compares its 1 - M."""
    annealing = Annealing([config("none", patience=3)], anneals=False, by_metric=True)
    numbers = [(0.9, 0.5, 0.7), (0.8, 0.4, 0.6), (0.1, 0.4, 0.5), (0.0, 0.45, 0.1), (0.0, 0.4, 0.5), (0.0, 0.6, 0.0)]
    for row in numbers:
        annealing.update(*(np.array([value]) for value in row))
    best = annealing.best_of(0)
    assert best == Best(epoch=3, val_loss=0.4, val_metric=0.4, tie=0.5)
    assert annealing.stopped == ["patience"]


@pytest.mark.parametrize("steps, stages", [(50, 6), (125, 6), (300, 4), (625, 4), (1250, 2), (3000, 1)])
def test_all_temperatures_of_a_comparison_are_reached_in_whole_epochs(steps, stages):
    """Of 2,000 steps; 625 of them are an epoch of 320,000 rows."""
    words = ["dataset=digits", "loss=f1", "preset=compare", "hyper.batch_size=32"]
    settings = budget.equally_long(composed(Command.parse(words)), rows=32 * steps)
    annealing = Annealing([settings.science("digits", None)], steps=steps)
    visited = []
    while annealing.active.any():
        visited.append(float(annealing.temperature[0]))
        annealing.update(np.array([1 / len(visited)]), np.array([0.5]))
    assert len(visited) == math.ceil(2000 / steps)  # no epoch is left unused
    assert len(set(visited)) == stages
    if stages < 6:
        assert visited[-1] == pytest.approx(settings.annealing.T_min if stages > 1 else 0.2)
    else:
        assert settings.annealing.r == 0.6
