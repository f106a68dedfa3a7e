"""Schedules against their formulas; two-level early stopping against a plain implementation with nested loops."""

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from east.lab.settings.settings import AnnealingSection
from east.lab.training.annealing import Annealing, temperatures
from east.lab.training.checkpoint import COURSES
from east.lab.training.scores import Best
from tests.made import science

FILES = sorted((Path(__file__).parent.parent / "conf/annealing").glob("*.yaml"))


def config(schedule="geometric", outer_patience=3, annealing=None, **protocol):
    defaults = {"T0": 0.2, "r": 0.5, "T_min": 0.01, "patience": outer_patience}
    return science(
        loss={"name": "f1", "_target_": "east.losses.MetricLoss"},
        annealing={"name": schedule, "schedule": schedule, **defaults, **(annealing or {})},
        protocol={"name": "east", "patience": 3, "max_epochs": 1000, **protocol},
    )


def run(annealing, curve):
    """Feed scripted numbers curve(epoch, T) -> (val_loss, val_metric[, tie]); return temperatures and verdicts."""
    visited, verdicts = [], []
    while annealing.course.stopped is None:
        visited.append(annealing.temperature)
        verdicts.append(annealing.update(*curve(len(visited), visited[-1])))
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
    assert (T[0], T[-1]) == (pytest.approx(0.2), pytest.approx(0.01))
    assert all(a > b for a, b in pairwise(T))
    middle = {"linear": 0.2 - 0.19 * 3 / 13, "cosine": 0.01 + 0.19 * (1 + math.cos(math.pi * 3 / 13)) / 2}
    assert T[3] == pytest.approx(middle[schedule])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_annealing_config_is_complete(file):
    section = OmegaConf.to_container(OmegaConf.load(file))
    assert section["name"] == section["schedule"] == file.stem
    annealing = Annealing(config().but(annealing=AnnealingSection(**section)), temperature=0.2)
    assert annealing.temperature == 0.2
    assert len(annealing.schedule) == (1 if file.stem == "none" else 51)  # 0.2 x 0.9^50 = 0.00103


@pytest.mark.parametrize("name, r, message", [("geometrc", 0.9, "did you mean 'geometric'"), ("linear", 1.0, "r < 1")])
def test_bad_schedules_are_refused(name, r, message):
    with pytest.raises(ValueError, match=message):
        temperatures(name, r=r)


# Settings, the losses of the epochs from the first on, and what follows: temperatures, why it stops, the kept epoch.
FALLING = range(0, -99, -1)
RUNS = {
    "patience ends a single stage": (
        Annealing(config("none", patience=2, annealing={"T0": None}), temperature=0.15),
        [5, 4, 3, 3.5, 3.2, 1], [0.15] * 5, "patience", 3,
    ),
    "a loss without a temperature has one stage whatever the schedule": (
        Annealing(config("geometric", patience=1), anneals=False), [1, 1], [None] * 2, "patience", 1,
    ),
    "one new minimum, then P_in = 3 epochs without, in each of three stages": (
        Annealing(config(outer_patience=2, annealing={"r": 0.8})),
        [1] * 99, [0.2 * 0.8**k for k in range(3) for _ in range(4)], "coolings", 1,
    ),
    "per_epoch cools every epoch and stays at the coldest": (
        Annealing(config("per_epoch", patience=100, max_epochs=8)),
        FALLING, [0.2, 0.1, 0.05, 0.025, 0.0125, 0.0125, 0.0125, 0.0125], "max_epochs", 8,
    ),
    "the temperature does not fall during warm-up": (
        Annealing(config("per_epoch", max_epochs=6, patience=9, warmup=3)),
        FALLING, [0.2, 0.2, 0.2, 0.2, 0.1, 0.05], "max_epochs", 6,
    ),
    **{f"a warm-up of {n} ends before the last of 4 epochs": (
        Annealing(config("none", max_epochs=4, warmup=n)), FALLING, [0.2] * 4, "max_epochs", 4,
    ) for n in (3, 4, 99)},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_scripted_losses_give_the_expected_stages(name):
    annealing, losses, expected, stopped, kept = RUNS[name]
    visited, _ = run(annealing, lambda epoch, T: (losses[epoch - 1], 0.5))
    assert visited == pytest.approx(expected)
    assert (annealing.course.stopped, annealing.course.best.epoch) == (stopped, kept)
    assert annealing.course.history["temperature"] == visited


@pytest.mark.parametrize("protocol, cooled", [({}, [4, 8]), ({"warmup": 2}, [2, 6, 10])])
def test_weights_are_restored_after_each_stage_and_after_warm_up(protocol, cooled):
    annealing = Annealing(config(outer_patience=2, **protocol))
    _, verdicts = run(annealing, lambda epoch, T: (1.0, 0.5))
    assert [epoch for epoch, verdict in enumerate(verdicts, start=1) if verdict.cooled] == cooled
    first = protocol.get("warmup", 0) + 1
    assert annealing.course.best == Best(val_loss=1.0, val_metric=0.5, temperature=0.2, epoch=first)


@pytest.mark.parametrize("outer", ["soft", "hard"])
def test_early_stopping_follows_the_plain_loop_on_random_curves(outer):
    rng, reasons = np.random.default_rng(0), set()
    for _ in range(60):
        r, d_out = float(rng.choice([0.5, 0.8, 0.9])), float(rng.choice([0, 1e-2]))
        P_in, P_out, E_T, E_max = (int(rng.integers(*bounds)) for bounds in ((1, 6), (1, 4), (4, 15), (10, 80)))
        numbers = np.cumsum(rng.normal(-0.01, 0.1, (200, 2)), axis=0).tolist()
        rules = {"r": r, "delta": d_out, "outer": outer}
        annealing = Annealing(config("geometric", P_out, rules, patience=P_in, stage_epochs=E_T, max_epochs=E_max))

        def curve(epoch, T, numbers=numbers):
            return numbers[epoch][0] + T, numbers[epoch][1]

        visited, _ = run(annealing, curve)
        expected, final = plain_loop(curve, 0.2, r, 0.01, P_in, P_out, d_out, E_T, E_max, outer)
        assert visited == pytest.approx(expected)
        assert annealing.course.best.epoch == final
        reasons.add(annealing.course.stopped)
    assert {"coolings", "max_epochs", "coldest"} <= reasons


def test_per_epoch_with_the_hard_rule_keeps_the_best_decisions():
    annealing = Annealing(config("per_epoch", patience=100, max_epochs=8, annealing={"outer": "hard"}))
    run(annealing, lambda epoch, T: (-epoch, abs(epoch - 3)))
    assert annealing.course.best.epoch == 3


def test_a_metric_that_stops_training_also_chooses_the_kept_epoch():
    """The epoch with the best metric is kept, ties broken by the lowest tie-breaker; a search compares its 1 - M."""
    annealing = Annealing(config("none", patience=3), anneals=False, by_metric=True)
    numbers = [(0.1, 0.5, 0.9), (0.9, 0.4, 0.8), (0.9, 0.4, 0.7), (0.1, 0.4, 0.7), (0.1, 0.5, 0.1), (0.1, 0.4, 0.75)]
    run(annealing, lambda epoch, T: numbers[epoch - 1])
    assert annealing.course.stopped == "patience"
    assert annealing.course.best == Best(epoch=3, val_loss=0.4, val_metric=0.4, tie=0.7)


def through_json(course):
    return COURSES.validate_python([json.loads(json.dumps(dataclasses.asdict(course)))])[0]


def test_the_course_survives_json_in_mid_training():
    numbers = np.random.default_rng(1).normal(size=(100, 2)).tolist()
    whole, resumed = (Annealing(config(patience=2, max_epochs=40, annealing={"r": 0.8})) for _ in range(2))
    for row in numbers[:7]:
        whole.update(*row)
    resumed.course = through_json(whole.course)
    for row in numbers[7:]:
        for annealing in (whole, resumed):
            if annealing.course.stopped is None:
                annealing.update(*row)
    assert whole.course.stopped
    assert whole.course == resumed.course


@pytest.mark.parametrize("val_loss, train_loss", [(math.nan, 0.1), (math.inf, 0.1), (0.1, math.nan)])
def test_a_loss_that_is_not_finite_ends_a_trial(val_loss, train_loss):
    annealing = Annealing(config(patience=1), anneals=False)
    assert not any(annealing.update(val_loss, 0.5, train_loss=train_loss))
    assert annealing.course.stopped == "diverged"
    assert "epoch 1" in annealing.course.error
    assert annealing.course.best == Best()
    assert str(through_json(annealing.course)) == str(annealing.course)  # nan is not equal to itself


def test_lengths_in_steps_are_rounded_up_to_whole_epochs():
    """Seven steps per epoch: 30 steps are five epochs. Lengths in epochs do not depend on the steps."""
    lengths = {"patience": 30, "stage_epochs": 70, "max_epochs": 701, "warmup": 8}
    for count, expected in (("steps", (5, 10, 101, 2)), ("epochs", (30, 70, 701, 8))):
        a = Annealing(config(count=count, **lengths), steps=7)
        assert (a.patience, a.max_stage_epochs, a.max_epochs, a.warmup) == expected
