"""Temperature schedules, and the two-level early stopping of EAST for one trial.

Inner level: a trial trains at one temperature until its validation loss has no new minimum for P_in epochs. Outer
level: it returns to that stage's best weights and cools; it ends after P_out coolings in a row without a lower
validation loss. The papers give T0, r and P_in; the other numbers are options. Section 4, arXiv 2405.20954.
Warm-up epochs come first, on cross-entropy; only the weights at their end count.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from east.choices import choose
from east.lab.settings.settings import AnnealingSection, Schedule, Science
from east.lab.training.scores import Best

SCHEDULES = get_args(Schedule)
NO_BEST = Best()
HISTORY = ("epoch", "temperature", "train_loss", "val_loss", "val_metric")


def temperatures(schedule: str, T0: float = 0.2, r: float = 0.9, T_min: float = 1e-3) -> list[float]:
    """The temperatures that a trial may visit, in order.

    geometric: T0 r^k as long as it is at least T_min. linear, cosine: the same number of stages from T0 down to T_min,
    so that schedules compare at equal cost. per_epoch: like geometric, but one step each epoch. none: only T0.

    >>> temperatures("geometric", T0=0.2, r=0.5, T_min=0.05)
    [0.2, 0.1, 0.05]
    """
    choose("schedule", schedule, SCHEDULES)
    if schedule == "none":
        return [T0]
    if not (0 < r < 1 and 0 < T_min <= T0):
        raise ValueError(f"annealing: expected 0 < r < 1 and 0 < T_min <= T0, got r={r}, T_min={T_min}, T0={T0}")
    coolings = math.floor(math.log(T_min / T0) / math.log(r) + 1e-9)
    steps = range(coolings + 1)
    if schedule == "linear":
        return [T0 + (T_min - T0) * k / max(coolings, 1) for k in steps]
    if schedule == "cosine":
        return [T_min + (T0 - T_min) * (1 + math.cos(math.pi * k / max(coolings, 1))) / 2 for k in steps]
    return [T0 * r**k for k in steps]


def schedule_of(annealing: AnnealingSection, temperature: float = 0.2) -> list[float]:
    """The temperatures of a config; `temperature` is the loss's own, for configs without T0."""
    T0 = temperature if annealing.T0 is None else annealing.T0
    return temperatures(annealing.schedule, T0, 0.9 if annealing.r is None else annealing.r, annealing.T_min)


def stages_of(annealing: AnnealingSection) -> int:
    """The number of stages of early stopping: one per temperature, but per_epoch cools within a single one."""
    return 1 if annealing.schedule == "per_epoch" else len(schedule_of(annealing))


@dataclass
class Course:
    """The training of one trial so far; checkpoints hold it as JSON."""

    stage: int = 0
    epochs: int = 0
    stage_epochs: int = 0
    bad_epochs: int = 0  # since the stage's best
    bad_stages: int = 0  # since the trial's best
    stage_best: Best = NO_BEST
    best: Best = NO_BEST
    stopped: str | None = None  # why the trial ended; None while it trains
    error: str | None = None
    seconds: float = 0.0
    history: dict[str, list] = field(default_factory=lambda: {name: [] for name in HISTORY})


class Verdict(NamedTuple):
    """The consequences of an epoch for a trial's weights."""

    improved: bool = False  # the stage's best so far: remember them
    kept: bool = False  # the stage is over and beat all earlier ones: its best weights are the trial's result so far
    cooled: bool = False  # continue from the stage's best weights, cooler; also at the end of warm-up


class Annealing:
    """Early stopping of one trial: `update` takes the numbers of an epoch and says what happens to the weights.

    anneals: the loss has a temperature; if not, there is a single stage without one. temperature: the loss's own, for
    configs without T0. by_metric: stop by 1 - M instead of the loss. steps: gradient steps per epoch, for protocols
    that count in steps.
    """

    def __init__(
        self,
        config: Science,
        anneals: bool = True,
        temperature: float = 0.2,
        by_metric: bool = False,
        steps: int = 1,
    ):
        outer, inner = config.annealing, config.protocol
        unit = steps if inner.count == "steps" else 1
        self.schedule: list[float | None] = [*schedule_of(outer, temperature)] if anneals else [None]
        self.per_epoch = anneals and outer.schedule == "per_epoch"
        self.by_metric = by_metric
        # The surrogate is another function at every temperature; "hard" compares 1 - M of the decisions instead.
        self.hard = outer.outer == "hard"
        self.outer_patience, self.delta = outer.patience, outer.delta
        self.patience = math.ceil(inner.patience / unit)
        self.max_stage_epochs = math.ceil(inner.stage_epochs / unit) if inner.stage_epochs else math.inf
        self.max_epochs = math.ceil(inner.max_epochs / unit)
        # At least the last of max_epochs is trained on the loss itself, or there would be no weights to keep.
        self.warmup = min(math.ceil(inner.warmup / unit), self.max_epochs - 1)
        self.course = Course()

    @property
    def temperature(self) -> float | None:
        """Temperature of the coming epoch."""
        position = max(self.course.epochs - self.warmup, 0) if self.per_epoch else self.course.stage
        return self.schedule[min(position, len(self.schedule) - 1)]

    @property
    def warming(self) -> bool:
        """True if the coming epoch is a warm-up epoch."""
        return self.course.epochs < self.warmup

    def update(self, val_loss: float, val_metric: float, tie: float = 0.0, train_loss: float = 0.0) -> Verdict:
        """Account for one epoch: `val_loss` at its temperature, `val_metric` = 1 - M.

        tie: decides between equal metrics if they stop training; lower is better. A loss that is not finite ends the
        trial.
        """
        course, T, warming = self.course, self.temperature, self.warming
        course.epochs += 1
        for name, value in zip(HISTORY, (course.epochs, T, train_loss, val_loss, val_metric), strict=True):
            course.history[name].append(value)
        if not (math.isfinite(train_loss) and math.isfinite(val_loss)):
            losses = f"training loss {train_loss:.3g}, validation loss {val_loss:.3g}"
            course.stopped, course.error = "diverged", f"diverged in epoch {course.epochs}: {losses}"
            return Verdict()
        if warming:
            return Verdict(improved=not self.warming, cooled=not self.warming)
        loss, tie_breaker = (val_metric, tie) if self.by_metric else (val_loss, None)
        return self.judge(Best(loss, val_metric, T, course.epochs, tie_breaker))

    def judge(self, epoch: Best) -> Verdict:
        """Both levels of early stopping, for one epoch after the warm-up."""
        course = self.course
        # per_epoch is one stage through many temperatures, so the outer rule judges its epochs too.
        hard = self.per_epoch and self.hard
        improved = rank(epoch, hard) < rank(course.stage_best, hard)
        if improved:
            course.stage_best = epoch
        course.bad_epochs = 0 if improved else course.bad_epochs + 1
        course.stage_epochs += 1
        impatient, exhausted = course.bad_epochs >= self.patience, course.epochs >= self.max_epochs
        if not (impatient or exhausted or course.stage_epochs >= self.max_stage_epochs):
            return Verdict(improved)

        kept = rank(course.stage_best, self.hard)[0] < rank(course.best, self.hard)[0] - self.delta
        if kept:
            course.best = course.stage_best
        course.bad_stages = 0 if kept else course.bad_stages + 1
        ends = {
            "max_epochs": exhausted,
            "patience" if impatient else "stage_epochs": self.per_epoch or len(self.schedule) == 1,
            "coolings": course.bad_stages >= self.outer_patience,
            "coldest": course.stage + 1 == len(self.schedule),
        }
        course.stopped = next((reason for reason, reached in ends.items() if reached), None)
        if course.stopped is None:
            course.stage, course.stage_epochs, course.bad_epochs, course.stage_best = course.stage + 1, 0, 0, NO_BEST
        return Verdict(improved, kept, cooled=course.stopped is None)


def rank(best: Best, hard: bool) -> tuple[float, float]:
    """The numbers that early stopping compares, lower is better: the validation loss or, if `hard`, 1 - M; the tie."""
    value = best.val_metric if hard else best.val_loss
    return math.inf if value is None else value, math.inf if best.tie is None else best.tie
