"""How much to train when time is short, how long that takes on this machine, and when to stop.

All networks of a comparison get the same number of gradient steps, whatever their loss: each keeps its best weights on
validation, and no loss is stopped early for having fewer stages than another.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from types import FrameType

from east.lab.data.common import Part, Splits, assign
from east.lab.experiment import protocols
from east.lab.experiment.runs import Run, load, split_options
from east.lab.settings.settings import Settings
from east.lab.training import classical, engine
from east.lab.training.annealing import schedule_of, stages_of
from east.lab.training.boosters import Booster
from east.lab.training.population import Trial

BATCHES = (32, 512)
IN_BATCH = 10  # rows of the rarest class that a batch should hold
MANY = 20_000  # training rows above which one seed and no dropout are enough, and each tree of a forest sees a sample
FOREST = {"n_estimators": 50, "max_samples": 5_000}  # the forest's options above MANY rows
PROBE_STEPS = (2, 20)  # gradient steps that are timed to estimate how long a network trains
PROBE_TREES = (1, 4)  # trees that are timed
PROBE_ROWS = 256  # validation and test rows while timing; only training is timed
SHORTER = (1.0, 0.5, 0.25)  # shares of the steps to fall back to when time is short
MOST_FOLDS = 5  # of the validation rows
OVERHEAD = 0.5  # seconds to evaluate and record the trials of a candidate


def batch_size(rows: int, rarest: float = 0.5) -> int:
    """A power of two near rows / 64: small data get many steps per epoch, large data steady gradients.

    rarest: share of the rarest class; a batch should hold about IN_BATCH of its rows.

    >>> [batch_size(rows) for rows in (500, 6_400, 64_000)]
    [32, 128, 512]
    """
    least, most = BATCHES
    size = max(rows / 64, least, min(IN_BATCH / max(rarest, 1e-9), most))
    return int(min(most, 2 ** round(math.log2(size))))


def seeds(rows: int, classical: bool) -> int:
    """Trials of a candidate. Classical models need one: logistic regression and boosting are deterministic, and a
    forest averages over its trees."""
    return 1 if classical or rows > MANY else 3


def equally_long(settings: Settings) -> Settings:
    """Settings under which a network uses all of its steps: an annealed loss divides them among its temperatures.

    A stage lasts at least an epoch, so large data get fewer stages, cooled faster, down to T_min as well.
    """
    most, annealing = settings.protocol.max_epochs, settings.annealing
    stages = stages_of(annealing) if settings.loss.anneals else 1
    if stages > 1 and "r" not in settings.fixed:
        fewer = fitting_stages(stages, most, steps_per_epoch(settings))
        if 1 < fewer < stages:
            stages = fewer
            annealing = annealing.but(r=(annealing.T_min / schedule_of(annealing)[0]) ** (1 / (stages - 1)))
    protocol = settings.protocol.but(stage_epochs=math.ceil(most / stages), patience=most)
    return settings.but(protocol=protocol, annealing=annealing.but(patience=stages))


def steps_per_epoch(settings: Settings) -> int:
    """Gradient steps per epoch; 1 if the protocol counts epochs."""
    if settings.protocol.count == "epochs":
        return 1
    loaded = load(settings.dataset, settings.data_dir)
    train, *_ = assign(loaded, **split_options(settings.split.at(0)))
    return engine.batches_of(len(train), settings.hyper.batch_size or 1)


def fitting_stages(most: int, length: int, epoch: int) -> int:
    """How many stages, at most `most`, are all reached in a training of `length` steps, with `epoch` steps per epoch.

    Training and stages are rounded up to whole epochs: of 4 epochs, 6 stages would leave out the last two.

    >>> [fitting_stages(6, 2000, epoch) for epoch in (50, 625, 1250)]
    [6, 4, 2]
    """
    epochs = math.ceil(length / epoch)
    return next(k for k in range(most, 0, -1) if (k - 1) * math.ceil(math.ceil(length / k) / epoch) < epochs)


def judged_apart(settings: Settings) -> Settings:
    """Settings under which each trial of a network leaves out one fold of the validation rows and is judged on it."""
    return settings.but(split=settings.split.but(folds=max(2, min(settings.trial_count, MOST_FOLDS))))


def shorter(run: Run, share: float) -> Run:
    """The same training with a share of its steps; only preset=compare divides them among the stages."""
    protocol = run.settings.protocol
    settings = run.settings.but(protocol=protocol.but(max_epochs=max(1, round(protocol.max_epochs * share))))
    return Run.of(equally_long(settings) if settings.preset.name == "compare" else settings)


def seconds(run: Run, splits: Splits) -> float:
    """Estimated seconds of a run on this machine, search included, extrapolated from a few steps or trees."""
    settings = run.settings
    if settings.loss.classical:
        return seconds_to_fit(Trial(run.science, settings.seed), splits) * settings.trial_count + OVERHEAD
    searches = len(protocols.search_seeds(settings)) * protocols.whole_searches(settings, settings.protocol.max_epochs)
    trainings = searches + settings.trial_count
    return seconds_to_train(run, splits) * trainings / settings.trial_count


def seconds_to_train(run: Run, splits: Splits) -> float:
    """Estimated seconds of the trials of a network, without a search."""
    rows, batch = len(splits.train), run.science.hyper.batch_size or 1
    protocol, steps_per_epoch = run.science.protocol, engine.batches_of(rows, batch)
    total = protocol.max_epochs if protocol.count == "steps" else protocol.max_epochs * steps_per_epoch
    one_epoch = run.science.but(protocol=protocol.but(max_epochs=1, stage_epochs=1, patience=1, warmup=0))
    trials = [Trial(one_epoch, seed) for seed in run.settings.seeds]

    def probe(steps: int) -> None:
        val, test = first_rows(splits.val, PROBE_ROWS), first_rows(splits.test, PROBE_ROWS)
        part = replace(splits, train=first_rows(splits.train, steps * batch), val=val, test=test)
        engine.train(trials, part, device=run.settings.device, progress=False)

    few, many = (min(number, steps_per_epoch) for number in PROBE_STEPS)
    return extrapolated(probe, few, many, total) + OVERHEAD


def seconds_to_fit(trial: Trial, splits: Splits) -> float:
    """Estimated seconds to fit a classical model, extrapolated from a few trees; 0 for a model without trees."""
    model = classical.build(trial.config.loss)
    inputs, labels = classical.features(splits, model.pca)["train"], splits.train.labels.numpy()
    if isinstance(model, classical.GradientBoosting):
        trees = model.counts[-1] * sum(model.leaves) / max(model.leaves)
    elif isinstance(model, classical.RandomForest):
        trees = model.n_estimators
    elif isinstance(model, Booster):
        trees = model.iterations
    else:
        return 0.0

    def probe(count: int) -> None:
        small: classical.Classifier
        if isinstance(model, classical.GradientBoosting):
            small = classical.GradientBoosting(leaves=max(model.leaves), iterations=count)
        elif isinstance(model, Booster):
            small = copy(model)
            small.iterations = count
        else:
            small = classical.RandomForest(count, model.min_samples_leaf, max_samples=model.max_samples)
        small.fit(inputs, labels, len(splits.classes))

    return extrapolated(probe, *PROBE_TREES, trees)


def extrapolated(probe: Callable[[int], object], few: int, many: int, total: float) -> float:
    """Seconds for `total` units, extrapolated from the time that `probe` takes for `few` and for `many`."""
    times = []
    for count in (few, many):
        started = time.perf_counter()
        probe(count)
        times.append(time.perf_counter() - started)
    each = (times[1] - times[0]) / (many - few) if many > few else times[1] / many
    return times[0] + max(each, times[1] / many / 4) * total  # a slow first probe makes the difference too small


def first_rows(part: Part, rows: int) -> Part:
    return Part(part.inputs[:rows], part.labels[:rows], part.index[:rows])


class OutOfTime(BaseException):
    """Time is up. Like KeyboardInterrupt it is no Exception, so that no job catches it."""


@contextmanager
def stop_after(seconds: float | None) -> Iterator[None]:
    """Raise OutOfTime inside this block after `seconds`; never without timers (on Windows, or in other threads)."""
    has_timer = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not has_timer:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
