"""How much to train when time is short: batch size, seeds, trees; how long it takes on this machine; when to stop.

All networks of a comparison get the same number of gradient steps, whatever their loss: the best weights on validation
are kept, and no loss is stopped early for having fewer stages than another.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from east.data.common import Part, Splits
from east.experiment.runs import Run
from east.settings.settings import Settings
from east.training import classical, engine
from east.training.annealing import temperatures
from east.training.population import Trial

BATCHES = (32, 512)
IN_BATCH = 10  # rows of the rarest class
MANY = 20_000  # training rows above which one seed and no dropout are enough, and each tree of a forest sees a sample
FOREST = {"n_estimators": 50, "max_samples": 5_000}  # then
PROBE_STEPS = (2, 20)  # of a network, to estimate its training time
PROBE_TREES = (1, 4)
PROBE_ROWS = 256  # of validation and test, which are not what is timed
SHORTER = (1.0, 0.5, 0.25)  # shares of the steps to fall back to when time is short
MOST_FOLDS = 5  # of the validation rows
OVERHEAD = 0.5  # seconds to evaluate and record a trial


def batch_size(rows: int, rarest: float = 0.5) -> int:
    """A power of two near rows / 64: small data get many steps per epoch, large data steady gradients.

    rarest: share of the rarest class; a batch should hold some of its rows.

    >>> [batch_size(rows) for rows in (500, 6_400, 64_000)]
    [32, 128, 512]
    """
    least, most = BATCHES
    wanted = max(rows / 64, least, min(IN_BATCH / max(rarest, 1e-9), most))
    return int(min(most, 2 ** round(math.log2(wanted))))


def seeds(rows: int, classical: bool) -> int:
    """Trials of a candidate; logistic regression and boosting have nothing random, a forest averages over trees."""
    return 1 if classical or rows > MANY else 3


def equally_long(settings: Settings) -> Settings:
    """A network's settings such that all steps are used: an annealed loss divides them among its temperatures."""
    most, annealing = settings.protocol.max_epochs, settings.annealing
    stages = 1
    if settings.loss.anneals and annealing.schedule not in ("none", "per_epoch"):
        stages = len(temperatures(annealing.schedule, annealing.T0 or 0.2, annealing.r or 0.9, annealing.T_min))
    protocol = settings.protocol.but(stage_epochs=math.ceil(most / stages), patience=most)
    return settings.but(protocol=protocol, annealing=annealing.but(patience=max(stages, 1)))


def judged_apart(settings: Settings) -> Settings:
    """A network's settings such that each trial leaves out one fold of the validation rows, on which it is judged."""
    return settings.but(split=settings.split.but(folds=max(2, min(settings.trial_count, MOST_FOLDS))))


def shorter(run: Run, share: float) -> Run:
    """The same training with a share of its steps."""
    settings = run.settings
    most = max(1, round(settings.protocol.max_epochs * share))
    return Run.of(equally_long(settings.but(protocol=settings.protocol.but(max_epochs=most))))


def seconds(run: Run, splits: Splits) -> float:
    """How long a run will take on this machine, measured on its first steps or trees."""
    trial = Trial(run.science, run.settings.seed)
    if run.settings.loss.classical:
        return seconds_to_fit(trial, splits) + OVERHEAD
    rows, batch = len(splits.train), run.science.hyper.batch_size or 1
    protocol, in_epoch = run.science.protocol, math.ceil(rows / batch)
    steps = protocol.max_epochs if protocol.count == "steps" else protocol.max_epochs * in_epoch
    short = run.science.but(protocol=protocol.but(max_epochs=1, stage_epochs=1, patience=1, warmup=0))
    trials = [Trial(short, seed) for seed in run.settings.seeds]

    def probe(some: int) -> None:
        val, test = first(splits.val, PROBE_ROWS), first(splits.test, PROBE_ROWS)
        part = replace(splits, train=first(splits.train, some * batch), val=val, test=test)
        engine.train(trials, part, device=run.settings.device, progress=False)

    few, more = (min(number, in_epoch) for number in PROBE_STEPS)
    return extrapolated(probe, few, more, steps) + OVERHEAD


def seconds_to_fit(trial: Trial, splits: Splits) -> float:
    """Seconds to fit a classical model, judged by its first trees; a model without trees is quick."""
    model = classical.build(trial.config.loss)
    inputs, labels = classical.features(splits, model.pca)["train"], splits.train.labels.numpy()
    if isinstance(model, classical.GradientBoosting):
        trees = model.counts[-1] * sum(model.leaves) / max(model.leaves)
    elif isinstance(model, classical.RandomForest):
        trees = model.n_estimators
    else:
        return 0.0

    def probe(count: int) -> None:
        some: classical.Classifier
        if isinstance(model, classical.GradientBoosting):
            some = classical.GradientBoosting(leaves=max(model.leaves), iterations=count)
        else:
            some = classical.RandomForest(count, model.min_samples_leaf, max_samples=model.max_samples)
        some.fit(inputs, labels, len(splits.classes))

    return extrapolated(probe, *PROBE_TREES, trees)


def extrapolated(probe: Callable[[int], object], few: int, more: int, total: float) -> float:
    """Seconds for `total` units, extrapolated from two smaller counts."""
    times = []
    for number in (few, more):
        started = time.perf_counter()
        probe(number)
        times.append(time.perf_counter() - started)
    each = (times[1] - times[0]) / (more - few) if more > few else times[1] / more
    return times[0] + max(each, times[1] / more / 4) * total  # the first is slow for other reasons


def first(part: Part, rows: int) -> Part:
    return Part(part.inputs[:rows], part.labels[:rows], part.index[:rows])


class OutOfTime(BaseException):
    """Time is up. Like KeyboardInterrupt it is not a job's error, so no job may catch it."""


@contextmanager
def stop_after(left: float | None) -> Iterator[None]:
    """Raise OutOfTime inside this block after `seconds`; without timers (Windows, threads) it never comes."""
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if left is None or not usable:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
