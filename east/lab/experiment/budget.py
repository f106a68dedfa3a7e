"""How much each candidate of a comparison trains, and when the comparison stops.

All networks get the same number of gradient steps, whatever their loss: each keeps its best weights on validation, and
no loss is stopped early for having fewer stages than another.
"""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from east.lab.settings.settings import Settings
from east.lab.training.annealing import schedule_of, stages_of
from east.lab.training.population import batches_of

BATCHES = (32, 512)
IN_BATCH = 10  # rows of the rarest class that a batch should hold
MANY = 20_000  # training rows above which one seed and no dropout are enough, and each tree of a forest sees a sample
FOREST = {"loss.n_estimators": 50, "loss.max_samples": 5_000}  # the forest's options above MANY rows
HIDDEN = [128, 64]  # smaller than the papers' network: as good on tables of this size, and faster
LEARNING_RATE = 0.003
SHORTER = (1.0, 0.5, 0.25)  # shares of the steps to fall back to when time is short
MOST_FOLDS = 5  # of the validation rows


def suited(name: str, classical: bool, rows: int, rarest: float, kind: str) -> dict[str, Any]:
    """Settings of a candidate for `rows` training rows of which `rarest` is the share of the rarest class.

    Classical models need one trial: logistic regression and boosting are deterministic, a forest averages over trees.
    """
    many = rows > MANY
    if classical:
        return {"trials": 1} | (FOREST if name == "rf" and many else {})
    network = {"trials": 1 if many else 3, "hyper.batch_size": batch_size(rows, rarest)}
    of_table = {"hyper.lr": LEARNING_RATE, "model.hidden": HIDDEN} | ({"hyper.dropout": 0.0} if many else {})
    return network | (of_table if kind == "table" else {})


def batch_size(rows: int, rarest: float = 0.5) -> int:
    """A power of two near rows / 64: small data get many steps per epoch, large data steady gradients.

    rarest: share of the rarest class; a batch should hold about IN_BATCH of its rows.

    >>> [batch_size(rows) for rows in (500, 6_400, 64_000)]
    [32, 128, 512]
    """
    least, most = BATCHES
    size = max(rows / 64, least, min(IN_BATCH / max(rarest, 1e-9), most))
    return int(min(most, 2 ** round(math.log2(size))))


def equally_long(settings: Settings, rows: int) -> Settings:
    """Settings under which a network uses all of its steps: an annealed loss divides them among its temperatures.

    A stage lasts at least an epoch, so large data get fewer stages, cooled faster, down to T_min as well. rows: of the
    training part.
    """
    length, annealing = settings.protocol.max_epochs, settings.annealing
    steps = 1 if settings.protocol.count == "epochs" else batches_of(rows, settings.hyper.batch_size or 1)
    stages = stages_of(annealing) if settings.loss.anneals else 1
    if stages > 1 and "r" not in settings.fixed:
        fewer = fitting_stages(stages, length, steps)
        if 1 < fewer < stages:
            stages = fewer
            annealing = annealing.but(r=(annealing.T_min / schedule_of(annealing)[0]) ** (1 / (stages - 1)))
    protocol = settings.protocol.but(stage_epochs=math.ceil(length / stages), patience=length)
    return settings.but(protocol=protocol, annealing=annealing.but(patience=stages))


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


def shorter(settings: Settings, share: float, rows: int) -> Settings:
    """The same training with a share of its steps; only preset=compare divides them among the stages."""
    steps = max(1, round(settings.protocol.max_epochs * share))
    settings = settings.but(protocol=settings.protocol.but(max_epochs=steps))
    return equally_long(settings, rows) if settings.preset.name == "compare" else settings


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
