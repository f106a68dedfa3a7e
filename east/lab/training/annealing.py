"""Temperature schedules, and the two-level early stopping of EAST, as plain arrays over a population of P trials.

Inner level: a trial trains at one temperature until its validation loss has no new minimum for P_in epochs. Outer
level: it returns to that stage's best weights and cools; it ends after P_out coolings in a row without a lower
validation loss. The papers give T0, r and P_in; the other numbers are options. Section 4, arXiv 2405.20954.
Warm-up epochs come first, on cross-entropy; only the weights at their end count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from east.choices import choose
from east.lab.settings.sections import AnnealingSection, Schedule, Science
from east.lab.training.scores import Best

SCHEDULES = get_args(Schedule)
LOSS, METRIC, TIE = 0, 1, 4  # columns of `best` and `stage_best`
NO_BEST = (math.inf, math.inf, 0, 0, math.inf)
STATE = ("stage", "epochs", "stage_epochs", "bad", "stage_best", "best", "bad_stages", "active")


def temperatures(schedule: str, T0: float = 0.2, r: float = 0.9, T_min: float = 1e-3) -> list[float]:
    """The temperatures that a trial may visit, in order.

    geometric: T0 r^k as long as it is at least T_min. linear, cosine: the same number of stages from T0 down to T_min,
    so that schedules compare at equal cost. per_epoch: like geometric, but one step each epoch. none: only T0.

    >>> temperatures("geometric", T0=0.2, r=0.5, T_min=0.05)
    [0.2, 0.1, 0.05]
    """
    choose("schedule", schedule, SCHEDULES)
    if not T0 > 0:
        raise ValueError(f"annealing.T0: expected a positive temperature, got {T0}")
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
    """How many stages of early stopping there are: one per temperature, but per_epoch cools within a single one."""
    return 1 if annealing.schedule == "per_epoch" else len(schedule_of(annealing))


@dataclass
class Verdict:
    """What to do after an epoch, as bool arrays [P]. A trial whose stage is over either cools or is finished."""

    improved: np.ndarray  # new best of its stage: remember these weights
    kept: np.ndarray  # its stage beat all earlier ones: those weights are now the trial's result
    cooled: np.ndarray  # continues at the next temperature from its stage's best weights; or has finished its warm-up
    finished: np.ndarray  # leaves the population; `stopped` says why


class Annealing:
    """The early-stopping state of every trial. `update` takes an epoch's validation numbers and returns what to do.

    configs: resolved configs of the trials; each may have its own schedule and patience.
    anneals: whether the loss has a temperature; if not, there is a single stage without one.
    temperature: the loss's own, for configs without T0. by_metric: whether to stop by 1 - M instead of the loss.
    steps: gradient steps per epoch, for protocols that count in steps.
    """

    def __init__(
        self,
        configs: Sequence[Science],
        anneals: bool = True,
        temperature: float = 0.2,
        by_metric: bool = False,
        steps: int = 1,
    ):
        annealing, protocol = [config.annealing for config in configs], [config.protocol for config in configs]
        self.schedules = [schedule_of(a, temperature) if anneals else [math.nan] for a in annealing]
        self.stages = np.array([len(schedule) for schedule in self.schedules])
        self.per_epoch = np.array([anneals and a.schedule == "per_epoch" for a in annealing])
        self.by_metric = by_metric
        # The surrogate is another function at every temperature; "hard" compares 1 - M of the decisions instead.
        self.hard = np.array([by_metric or a.outer == "hard" for a in annealing])
        self.outer_patience = np.array([a.patience for a in annealing])
        self.delta = np.array([a.delta for a in annealing])
        unit = np.array([steps if p.count == "steps" else 1 for p in protocol])
        self.patience = np.ceil([p.patience for p in protocol] / unit).astype(int)
        self.max_stage_epochs = np.ceil([p.stage_epochs or math.inf for p in protocol] / unit)
        self.max_epochs = np.ceil([p.max_epochs for p in protocol] / unit).astype(int)
        # At least the last of max_epochs is trained on the loss itself, or there would be no weights to keep.
        self.warmup = np.minimum(np.ceil([p.warmup for p in protocol] / unit).astype(int), self.max_epochs - 1)

        trials = len(configs)
        self.stage = np.zeros(trials, dtype=int)
        self.epochs = np.zeros(trials, dtype=int)
        self.stage_epochs = np.zeros(trials, dtype=int)
        self.bad = np.zeros(trials, dtype=int)  # epochs since the stage's best
        self.bad_stages = np.zeros(trials, dtype=int)  # coolings since the trial's best
        self.stage_best = np.tile(NO_BEST, (trials, 1))  # val_loss, val_metric, temperature, epoch, tie
        self.best = self.stage_best.copy()
        self.active = np.ones(trials, dtype=bool)
        self.stopped: list[str | None] = [None] * trials

    @property
    def temperature(self) -> np.ndarray:
        """Temperature [P] of the coming epoch."""
        position = np.where(self.per_epoch, np.maximum(self.epochs - self.warmup, 0), self.stage)
        return np.array([s[min(k, len(s) - 1)] for s, k in zip(self.schedules, position, strict=True)])

    @property
    def epoch(self) -> int:
        """Number of the coming epoch, the same for all trials that are still training."""
        return int(self.epochs[self.active].max()) + 1

    @property
    def warming(self) -> np.ndarray:
        """Whether the coming epoch [P] is a warm-up epoch."""
        return self.active & (self.epochs < self.warmup)

    def update(self, val_loss: np.ndarray, val_metric: np.ndarray, tie: np.ndarray | None = None) -> Verdict:
        """Account for one epoch: `val_loss` at the epoch's temperature, `val_metric` = 1 - M, both [P].

        tie [P]: decides between epochs of a stage that are otherwise equal; lower is better. Numbers of trials that
        are no longer active are ignored.
        """
        warming, active = self.warming, self.active & ~self.warming
        tie = np.zeros(len(val_loss)) if tie is None else tie
        now = np.stack([val_loss, val_metric, self.temperature, self.epochs + 1.0, tie], axis=1)
        # per_epoch is one stage through many temperatures, so the outer rule judges it; other stages go by the loss.
        criterion = np.where(self.by_metric | (self.per_epoch & self.hard), METRIC, LOSS)
        self.epochs += self.active
        self.stage_epochs += active
        new, old = _column(now, criterion), _column(self.stage_best, criterion)
        improved = active & ((new < old) | ((new == old) & (tie < self.stage_best[:, TIE])))
        self.stage_best[improved] = now[improved]
        self.bad = np.where(improved, 0, self.bad + active)

        exhausted = self.epochs >= self.max_epochs
        over = active & (exhausted | (self.bad >= self.patience) | (self.stage_epochs >= self.max_stage_epochs))
        criterion = np.where(self.hard, METRIC, LOSS)
        kept = over & (_column(self.stage_best, criterion) < _column(self.best, criterion) - self.delta)
        self.best[kept] = self.stage_best[kept]
        self.bad_stages = np.where(kept, 0, self.bad_stages + over)

        single = self.per_epoch | (self.stages == 1)
        coldest = single | (self.stage + 1 == self.stages)
        finished = over & (exhausted | coldest | (self.bad_stages >= self.outer_patience))
        for p in np.flatnonzero(finished):
            self.stopped[p] = (
                "max_epochs" if exhausted[p]
                else "patience" if single[p] and self.bad[p] >= self.patience[p]
                else "stage_epochs" if single[p]
                else "coolings" if self.bad_stages[p] >= self.outer_patience[p]
                else "coldest"
            )  # fmt: skip
        cooled = over & ~finished
        self.stage[cooled] += 1
        self.stage_epochs[cooled] = self.bad[cooled] = 0
        self.stage_best[cooled] = NO_BEST
        self.active &= ~finished
        warmed_up = warming & ~self.warming  # continues from these weights, as after a cooling
        return Verdict(improved | warmed_up, kept, cooled | warmed_up, finished)

    def fail(self, p: int) -> None:
        """End trial p, which diverged."""
        self.active[p] = False
        self.epochs[p] += 1
        self.stopped[p] = "diverged"

    def best_of(self, p: int) -> Best:
        """The epoch that trial p has kept."""
        if not np.isfinite(self.best[p, LOSS]):
            return Best()
        val_loss, val_metric, temperature, epoch, tie = self.best[p].tolist()
        best = Best(val_loss, val_metric, None if math.isnan(temperature) else temperature, int(epoch))
        return best._replace(val_loss=val_metric, tie=tie) if self.by_metric else best

    @property
    def lowest_metric(self) -> float:
        """The lowest 1 - M that any trial has seen."""
        return float(min(self.best[:, METRIC].min(), self.stage_best[:, METRIC].min()))

    def state(self) -> dict[str, list]:
        """Everything that changes during training, as plain lists for a checkpoint."""
        return {"stopped": self.stopped, **{name: getattr(self, name).tolist() for name in STATE}}

    def restore(self, state: Mapping[str, list]) -> None:
        self.stopped = list(state["stopped"])
        for name in STATE:
            values = np.array(state[name], dtype=getattr(self, name).dtype)
            if values.shape != getattr(self, name).shape:
                raise ValueError(f"{name}: expected {getattr(self, name).shape} numbers, got {values.shape}")
            setattr(self, name, values)


def _column(table: np.ndarray, column: np.ndarray) -> np.ndarray:
    """table[p, column[p]] for every p."""
    return np.take_along_axis(table, column[:, None], axis=1)[:, 0]
