"""The candidates of a comparison: what each is, how long it takes here, and fitting them side by side until time is up.

All are cross-fitted in the same folds of all rows, so that every row has probabilities by models that did not see it.
With a time, folds go forward, and the models for new rows are those that know the newest rows.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from east.lab import bars
from east.lab.data.common import Splits
from east.lab.experiment.executors import Lost, Place, execute, slots
from east.lab.settings import compose
from east.lab.settings.command import Command
from east.lab.settings.settings import Executor, Science
from east.lab.training import crossfit, ensemble, timing
from east.lab.training.annealing import stages_of
from east.lab.training.classical import Estimator
from east.lab.training.devices import pick_device
from east.lab.training.ensemble import COMPONENTS, NETWORKS, Component
from east.lab.training.population import Trial

STACK = "stack"
TITLES = {
    STACK: "stack of all",
    "constant": "always the same",
    "logistic": "logistic regression",
    "boosting": "gradient boosting",
    "rf": "random forest",
    "extratrees": "extremely randomised trees",
}
MANY = 20_000  # rows above which there are fewer folds and trees, and each tree sees a sample
TREES, OF_ROWS = 50, 5_000  # of a forest above MANY rows: its trees, and the rows that each of them sees
BATCHES = (32, 512)
IN_BATCH = 10  # rows of the rarest class that a batch should hold
SHARES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)  # of the steps that networks are cut to when time is short
SHORT = 10  # seconds of work that are not worth the start of processes


@dataclass(frozen=True)
class Contest:
    """The data and folds that all candidates share. Every row is in the training part of `splits`; some also test."""

    command: Command
    splits: Splits
    folds: Sequence[crossfit.Fold]
    independent: bool
    device: str = "cpu"
    seed: int = 0

    @property
    def rows(self) -> int:
        return len(self.splits.train)

    @property
    def members(self) -> int:
        """Networks of a candidate: two for each fold, one where training is long."""
        return len(self.folds) * (1 if self.rows > MANY or self.splits.kind != "table" else 2)

    def estimator(self, name: str) -> Estimator | None:
        """The classifier of a candidate, by its name or dotted path; None for networks."""
        options = COMPONENTS.get(name, {"target": name})
        if "." not in options["target"]:
            return None
        if "n_estimators" in options and self.rows > MANY:
            options = options | {"n_estimators": TREES, "max_samples": OF_ROWS / self.rows}
        return Estimator(pca=None, **options)

    def config(self, name: str, share: float = 1.0) -> Science:
        """The setting of a candidate of networks, by the name of its loss, with a share of the usual steps."""
        labels = self.splits.train.labels
        rarest = float(torch.bincount(labels, minlength=len(self.splits.classes)).min()) / len(labels)
        usual = {"loss": "ce" if name == NETWORKS else name, "hyper.batch_size": batch_size(len(labels), rarest)}
        settings = compose.settings(self.command.but({k: v for k, v in usual.items() if k not in self.command}))
        steps = math.ceil(settings.protocol.max_epochs * share)
        stages = stages_of(settings.annealing) if settings.loss.anneals else 1
        protocol = settings.protocol.but(max_epochs=steps, stage_epochs=math.ceil(steps / stages))
        return settings.but(protocol=protocol).science(self.splits.name, self.splits.fingerprint)

    def fit(self, name: str, share: float = 1.0) -> Component:
        """Cross-fit a candidate."""
        estimator, newest = self.estimator(name), self.splits.train.time is not None
        if estimator is not None:
            fitted = self.fitted(estimator, self.folds)
            everything = np.arange(self.rows), np.arange(1)
            return replace(fitted, predictors=self.fitted(estimator, [everything]).predictors) if newest else fitted
        trial = Trial(self.config(name, share), self.seed)
        judging = np.isin(self.splits.train.index, self.splits.test.index)  # or test scores would be too good
        fitted = ensemble.cross_fit_networks(
            trial, self.splits, self.folds, self.members, unseen=judging, device=self.device, progress=False
        )
        last = self.members // len(self.folds)  # members are in the order of their training rows
        return replace(fitted, predictors=fitted.predictors[-last:]) if newest else fitted

    def fitted(self, estimator: Estimator, folds: Sequence[crossfit.Fold]) -> Component:
        return ensemble.cross_fit_estimator(estimator, self.splits, folds, self.independent, self.seed)

    def seconds(self, name: str) -> float:
        """How long a candidate takes on one core: networks by a few steps, others by fits of two small samples."""
        estimator, part = self.estimator(name), self.splits.train
        if estimator is None:
            size = timing.Size(self.rows, tuple(part.inputs.shape[1:]), len(self.splits.classes), self.splits.kind)
            config = self.config(name)
            each = timing.trial_seconds(config, size, timing.usual_epochs(config, size), pick_device(self.device))
            return self.members * each
        lengths = [self.rows] if ensemble.out_of_bag(estimator, self.independent) else [len(t) for t, _ in self.folds]
        inputs, labels = part.inputs.numpy(), part.labels.numpy()
        return timing.fit_seconds(
            lambda rows: estimator.unfitted(self.seed).fit(inputs[rows], labels[rows]), labels, lengths
        )


def cores() -> int:
    return len(slots("cpu"))


def title(name: str) -> str:
    return TITLES.get(name, name)


def batch_size(rows: int, rarest: float = 0.5) -> int:
    """A power of two near rows / 64: small data get many steps per epoch, large data steady gradients.

    rarest: share of the rarest class; a batch should hold about IN_BATCH of its rows.

    >>> [batch_size(rows) for rows in (500, 6_400, 64_000)]
    [32, 128, 512]
    """
    least, most = BATCHES
    size = max(rows / 64, least, min(IN_BATCH / max(rarest, 1e-9), most))
    return int(min(most, 2 ** round(math.log2(size))))


@dataclass(frozen=True)
class Timetable:
    """Candidates in the order in which they are fitted, cheapest first, with their seconds and shares of the steps."""

    seconds: Mapping[str, float]
    shares: Mapping[str, float]
    notes: tuple[str, ...] = ()

    @classmethod
    def within(cls, contest: Contest, names: Sequence[str], left: float | None) -> "Timetable":
        """The plan for the seconds left: networks are shortened, and what does not fit is left out and noted."""
        seconds: dict[str, float] = {}
        shares: dict[str, float] = {}
        notes: list[str] = []
        with timing.threads(1):  # as in a worker
            whole = {name: contest.seconds(name) for name in names}
        for name in sorted(whole, key=lambda name: whole[name]):
            room = math.inf if left is None else min(cores(), len(names)) * left - sum(seconds.values())
            possible = SHARES if contest.estimator(name) is None else SHARES[:1]
            share = next((share for share in possible if share * whole[name] <= room), None)
            if share is None and seconds:
                notes.append(f"left out: {title(name)}, about {bars.duration(whole[name])}")
                continue
            shares[name] = share or possible[-1]
            seconds[name] = whole[name] * shares[name]
            if shares[name] < 1:
                notes.append(f"shortened: {title(name)}, to {shares[name]:.0%} of the usual steps")
        return cls(seconds, shares, tuple(notes))


def at_once(seconds: Mapping[str, float]) -> float:
    """How long candidates take side by side, at least as long as the longest of them."""
    each = seconds.values()
    return max(sum(each) / min(cores(), len(each)), *each)


def fitted(
    contest: Contest, plan: Timetable, left: float | None, inline: bool = False
) -> Iterator[tuple[str, Component | str]]:
    """Each candidate when it is finished, or the reason why it is not: it failed, or time was up.

    Candidates are fitted side by side, in one process per core, unless there is little to do.
    """
    seconds = {name: max(1, round(seconds)) for name, seconds in plan.seconds.items()}  # of the bar
    inline = inline or (left is None and sum(seconds.values()) < SHORT)
    executor = Executor(name="inline" if inline else "processes", retries=1)  # a process may die for lack of memory
    deadline = math.inf if left is None else time.monotonic() + left
    place = Place(executor, slots=(None,) * min(cores(), len(seconds)), deadline=deadline)
    with bars.bar("fitting the candidates", total=sum(seconds.values()), unit="s") as shown:
        if "constant" in seconds:  # at once, so that there is an answer whatever happens to the processes
            yield "constant", attempted(contest, plan.shares, "constant")
        queue = deque(name for name in seconds if name != "constant")
        for name, result in execute(partial(attempted, contest, plan.shares), queue, place):
            yield name, result.reason if isinstance(result, Lost) else result
            shown.update(seconds[name])


def attempted(contest: Contest, shares: Mapping[str, float], name: str) -> Component | str:
    """The fitted candidate, or what went wrong: the others go on."""
    try:
        with timing.threads(1):
            return contest.fit(name, shares[name])
    except Exception as error:  # anything that a classifier raises
        return f"{type(error).__name__}: {error}"
