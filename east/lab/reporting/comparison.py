"""Which candidate is best? It is chosen on validation, reported on test, and a bootstrap estimates the role of luck.

A plug-in rule is tuned on validation, so its validation score would flatter it: it is cross-fitted instead, tuned on
four fifths of the rows and applied to the rest, five times. The expected rule sees no labels and needs none of this. A
network is judged only on validation rows that were not used to stop its training: EAST's loss is nearly the score
itself, so those rows would flatter it most. Intervals are 95 % bootstrap percentiles over rows and seeds: the range to
expect on new rows of the same kind.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn.functional import one_hot

from east import decisions
from east.confusion import Confusion
from east.lab.data.common import folded, stratified
from east.lab.reporting.papers import SCORES, STORED
from east.lab.reporting.specs import DECIDED, DecisionName
from east.lab.training import evaluation

if TYPE_CHECKING:
    import pandas as pd

REPORTED = tuple(name for name in SCORES if name not in ("auroc_thresholded", "precision", "recall", "trained_for"))
FOLDS = 5
RESAMPLES = 1000
AT_ONCE = 1 << 24  # counts of a bootstrap that are in memory at once
TUNED_ON = 5000  # validation rows that a rule for many classes is tuned on; with two classes all are used
FEW = 30  # validation rows of the rarest class; with fewer, a choice is uncertain
INTERVAL = (0.025, 0.975)

Measure: TypeAlias = Callable[[Confusion], Tensor]


@dataclass(frozen=True)
class JudgedPart:
    """What a trial decided on one part of the data."""

    probabilities: Tensor  # [n, d]
    labels: Tensor  # int64 [n]
    predicted: Tensor  # int64 [n]
    score: float
    groups: Tensor | None = None  # int64 [n]: rows of one group are resampled and folded together

    @property
    def confusion(self) -> Confusion:
        return Confusion.from_predictions(self.predicted, self.labels, self.probabilities.shape[-1])

    @property
    def cross_entropy(self) -> float:
        of_label = self.probabilities.double().gather(1, self.labels[:, None])
        return float(-of_label.clamp_min(1e-15).log().mean())


@dataclass(frozen=True)
class JudgedTrial:
    """One trial under a decision rule. Validation decisions are cross-fitted if the rule is tuned."""

    seed: int
    rule: decisions.Rule
    val: JudgedPart
    test: JudgedPart
    unseen: Tensor | None = None  # bool [n]: validation rows not used to stop its training; None: no row was


@dataclass(frozen=True)
class Candidate:
    """A model with a decision rule, and its finished trials. key: its name in `candidates=[…]`.

    judged: its decisions on validation rows that its training did not see; by default on all rows, trial by trial.
    """

    key: str
    title: str
    decision: DecisionName
    trials: tuple[JudgedTrial, ...]
    judged: tuple[JudgedPart, ...] = ()

    @property
    def val(self) -> tuple[JudgedPart, ...]:
        return self.judged or tuple(trial.val for trial in self.trials)

    @property
    def name(self) -> str:
        return f"{self.title}{DECIDED[self.decision]}"

    @property
    def validation(self) -> float:
        return float(np.mean([part.score for part in self.val]))

    @property
    def likelihood(self) -> float:
        """Log likelihood of the validation labels, per row: minus the cross-entropy, which no decision rule changes."""
        return -float(np.mean([part.cross_entropy for part in self.val]))

    @property
    def test(self) -> float:
        return float(np.mean([trial.test.score for trial in self.trials]))

    @property
    def chosen(self) -> JudgedTrial:
        """The trial that is saved: the best on validation."""
        return max(self.trials, key=lambda trial: trial.val.score)

    @property
    def one_class(self) -> int:
        """How many trials predict a single class for all test rows."""
        return sum(len(trial.test.predicted.unique()) == 1 for trial in self.trials)

    def scores(self, positive: int | None) -> dict[str, float | None]:
        """Means over trials of the usual scores on test."""
        each = [scores_of(trial.test, positive) for trial in self.trials]
        return {name: None if each[0][name] is None else float(np.mean([s[name] for s in each])) for name in each[0]}


def scores_of(part: JudgedPart, positive: int | None) -> dict[str, float | None]:
    """The usual scores by the names that users see; None where they are undefined on these rows."""
    stored = evaluation.scores(part.confusion, positive)
    stored |= evaluation.rank_scores(part.probabilities, part.labels, positive)
    values = {name: stored[STORED.get(name, name)] for name in REPORTED}
    return {name: value if isinstance(value, float) else None for name, value in values.items()}


def judge(
    arrays: Mapping[str, np.ndarray],
    seed: int,
    decision: str,
    measure: Measure,
    positive: int | None,
    folds: int | None = None,
    groups: Mapping[str, Tensor | None] | None = None,
) -> JudgedTrial:
    """Apply a decision rule to a trial's probabilities.

    folds: `split.folds` of the trial. groups: the groups [n] of the rows of val and test, if they have any.
    """
    groups = groups or {}
    val, test, val_labels, test_labels = (
        torch.from_numpy(arrays[f"{part}_{kind}"]) for kind in ("probabilities", "labels") for part in ("val", "test")
    )
    rule: decisions.Rule = decisions.Argmax()
    if decision == "expected":
        rule = decisions.expected(tuning_rows(val, val_labels)[0], measure, positive)
    if decision == "plugin":
        rule = decisions.tuned(*tuning_rows(val, val_labels), measure, positive)
        on_val = cross_fitted(val, val_labels, measure, positive, groups.get("val"))
    else:
        on_val = rule.decide(val)

    def part(name: str, probabilities: Tensor, labels: Tensor, predicted: Tensor) -> JudgedPart:
        score = measure(Confusion.from_predictions(predicted, labels, probabilities.shape[-1]))
        return JudgedPart(probabilities, labels, predicted, float(score), groups.get(name))

    unseen = None if folds is None else folds_of(val_labels, folds, groups.get("val")) == seed % folds
    on_test = part("test", test, test_labels, rule.decide(test))
    return JudgedTrial(seed, rule, part("val", val, val_labels, on_val), on_test, unseen)


def folds_of(labels: Tensor, folds: int, groups: Tensor | None) -> Tensor:
    return torch.from_numpy(folded(labels.numpy(), folds, None if groups is None else groups.numpy()))


def on_unseen_rows(candidates: Sequence[Candidate], measure: Measure) -> list[Candidate]:
    """The candidates, all judged on the same validation rows, none of which was used for early stopping.

    If a network's trials leave out different folds, each row is decided by the trial that left it out.
    """
    covered = [
        torch.stack([trial.unseen for trial in c.trials if trial.unseen is not None]).any(0)
        for c in candidates
        if any(trial.unseen is not None for trial in c.trials)
    ]
    if not covered or not torch.stack(covered).all(0).any():
        return list(candidates)
    rows = torch.stack(covered).all(0).nonzero().flatten()
    return [replace(c, judged=tuple(unseen_parts(c.trials, rows, measure))) for c in candidates]


def unseen_parts(trials: Sequence[JudgedTrial], rows: Tensor, measure: Measure) -> Iterator[JudgedPart]:
    """Decisions of the trials on these validation rows [m]: one part if each left out a fold, else one per trial."""
    left_out = [(trial, trial.unseen) for trial in trials if trial.unseen is not None]
    owner = (
        torch.stack([unseen.int() for _, unseen in left_out]).argmax(0)[rows] if left_out else torch.zeros_like(rows)
    )
    for parts in [[trial.val for trial, _ in left_out]] if left_out else [[trial.val] for trial in trials]:
        probabilities = torch.stack([part.probabilities for part in parts])[owner, rows]
        predicted = torch.stack([part.predicted for part in parts])[owner, rows]
        labels = parts[0].labels[rows]
        score = measure(Confusion.from_predictions(predicted, labels, probabilities.shape[-1]))
        groups = None if parts[0].groups is None else parts[0].groups[rows]
        yield JudgedPart(probabilities, labels, predicted, float(score), groups)


def tuning_rows(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that a rule is tuned on: with many classes, a sample: tuning is slow, and more rows change nothing."""
    if probabilities.shape[-1] == 2 or len(labels) <= TUNED_ON:
        return probabilities, labels
    rows = torch.from_numpy(stratified(labels.numpy(), TUNED_ON, np.random.RandomState(0)))
    return probabilities[rows], labels[rows]


def cross_fitted(
    probabilities: Tensor, labels: Tensor, measure: Measure, positive: int | None, groups: Tensor | None = None
) -> Tensor:
    """Plug-in decisions [n], each by a rule tuned without that row and its group."""
    fold = folds_of(labels, FOLDS, groups)
    predicted = torch.empty_like(labels)
    for k in range(FOLDS):
        inside = fold == k
        rule = decisions.tuned(*tuning_rows(probabilities[~inside], labels[~inside]), measure, positive)
        predicted[inside] = rule.decide(probabilities[inside])
    return predicted


@dataclass(frozen=True)
class Estimate:
    """A score, or a difference of scores, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    @property
    def cells(self) -> list[str]:
        """Value and interval for a table; the interval is blank if there is none."""
        return [f"{self.value:.3f}", "" if np.isnan(self.low) else f"{self.low:.3f} to {self.high:.3f}"]


@dataclass(frozen=True)
class Comparison:
    """All candidates, cheapest first; the winner is chosen on validation."""

    score: str
    measure: Measure
    candidates: tuple[Candidate, ...]
    classes: tuple[str, ...]
    positive: int | None

    @cached_property
    def best(self) -> int:
        """Index of the winner: the best validation score; ties go to the highest likelihood.

        With few rows of some class the score is mostly luck. Then the highest likelihood wins among those not clearly
        worse; of a model's rules, the expected one, which needs no labels.
        """
        score = lambda k: round(self.candidates[k].validation, 9)  # noqa: E731
        likelihood = lambda k: self.candidates[k].likelihood  # noqa: E731
        if self.rarest[1] < FEW:
            return max(
                self.contenders, key=lambda k: (likelihood(k), self.candidates[k].decision == "expected", score(k))
            )
        return max(range(len(self.candidates)), key=lambda k: (score(k), likelihood(k)))

    @cached_property
    def rarest(self) -> tuple[str, int]:
        """The class with the fewest validation rows, or groups of rows, and how many it has."""
        part = self.candidates[0].val[0]
        labels = part.labels if part.groups is None else torch.stack((part.labels, part.groups)).unique(dim=1)[0]
        counts = torch.bincount(labels, minlength=len(self.classes))
        return self.classes[int(counts.argmin())], int(counts.min())

    @cached_property
    def contenders(self) -> list[int]:
        """Indices of the candidates not clearly worse on validation than the best one there."""
        top = max(range(len(self.candidates)), key=lambda k: self.candidates[k].validation)
        leads = self.val_samples[top] - self.val_samples
        return [k for k in range(len(self.candidates)) if k == top or not np.nanquantile(leads[k], INTERVAL[0]) > 0]

    @property
    def winner(self) -> Candidate:
        return self.candidates[self.best]

    @cached_property
    def samples(self) -> np.ndarray:
        """[candidates, RESAMPLES]: mean test scores, over resampled test rows and seeds."""
        return resampled([[trial.test for trial in c.trials] for c in self.candidates], self.measure)

    @cached_property
    def val_samples(self) -> np.ndarray:
        """As `samples`, but of validation rows."""
        return resampled([c.val for c in self.candidates], self.measure)

    @property
    def certainty(self) -> float:
        """How often the winner has the best validation score in resamples of the rows."""
        drawn = np.nan_to_num(self.val_samples, nan=-np.inf)  # a metric may need rows of each class
        ahead = np.isclose(drawn, drawn.max(0))
        return float((ahead[self.best] / ahead.sum(0)).mean())  # ties share a win

    def interval(self, k: int) -> Estimate:
        return Estimate(self.candidates[k].test, *np.nanquantile(self.samples[k], INTERVAL).tolist())

    def lead(self, k: int) -> Estimate:
        """The winner's test score minus candidate k's."""
        low, high = np.nanquantile(self.samples[self.best] - self.samples[k], INTERVAL).tolist()
        return Estimate(self.winner.test - self.candidates[k].test, low, high)

    @property
    def behind(self) -> list[str]:
        """Names of the candidates that are clearly behind the winner."""
        return [c.name for k, c in enumerate(self.candidates) if k != self.best and self.lead(k).low > 0]

    @property
    def uncertain(self) -> str | None:
        """Why the choice of winner is in doubt; None if it is not."""
        name, count = self.rarest
        if count < FEW:
            unit = "validation row" if self.candidates[0].val[0].groups is None else "validation group"
            rows = {0: f"no {unit}s", 1: f"only 1 {unit}"}.get(count, f"only {count} {unit}s")
            return (
                f"{rows} of {name!r}; the winner has the highest likelihood among the {len(self.contenders)} "
                "candidates not clearly worse on validation than the best"
            )
        if self.certainty >= 0.5:
            return None
        return f"with other validation rows it would win {self.certainty:.0%} of the time"

    @property
    def standing(self) -> str:
        """How many candidates the winner is clearly ahead of, in words."""
        behind, others = len(self.behind), len(self.candidates) - 1
        if not behind:
            return "not clearly ahead of any other"
        return "clearly ahead of all others" if behind == others else f"clearly ahead of {behind} of {others} others"

    def frame(self) -> "pd.DataFrame":
        """The content of scores.csv: a row per candidate."""
        import pandas as pd

        rows = []
        for k, candidate in enumerate(self.candidates):
            test, lead = self.interval(k), self.lead(k)
            rows.append(
                {
                    "candidate": candidate.key,
                    "decision": candidate.decision,
                    "winner": k == self.best,
                    "seeds": len(candidate.trials),
                    "validation": candidate.validation,
                    "test": test.value,
                    "test_low": test.low,
                    "test_high": test.high,
                    "lead": lead.value,
                    "lead_low": lead.low,
                    "lead_high": lead.high,
                    **candidate.scores(self.positive),
                }
            )
        return pd.DataFrame(rows)

    def notes(self) -> list[str]:
        """Warnings about individual candidates."""
        return [
            f"{c.name} predicts the same class for every test row"
            + (f" in {c.one_class} of {len(c.trials)} trials" if len(c.trials) > 1 else "")
            for c in self.candidates
            if c.one_class
        ]


def resampled(candidates: Sequence[Sequence[JudgedPart]], measure: Measure) -> np.ndarray:
    """[candidates, RESAMPLES]: mean scores over resampled rows, or whole groups of rows, and seeds.

    Rows are the same for all candidates, seeds for all with equally many: the rules of one network share its trials.
    Rows with the same label and the same decisions of all trials form one pattern, so that patterns are counted instead
    of rows.
    """
    parts = [part for candidate in candidates for part in candidate]
    random, classes = np.random.default_rng(0), parts[0].probabilities.shape[-1]
    decisions_by_row = torch.stack([parts[0].labels, *(part.predicted for part in parts)], dim=1).numpy()
    patterns, pattern_of_row = np.unique(decisions_by_row, axis=0, return_inverse=True)
    labels, *predicted = torch.from_numpy(patterns).unbind(1)
    units, unit_of_row = units_of(parts[0])
    places = unit_of_row, pattern_of_row.ravel()
    contents = csr_array((np.ones(len(unit_of_row)), places), shape=(units, len(patterns))).T  # [patterns, units]
    scores = []
    for times_drawn in draws(units, random):
        weights = torch.from_numpy((contents @ times_drawn.T).T)
        scores.append(torch.stack([measure(weighted(of_trial, labels, weights, classes)) for of_trial in predicted]))
    values, means, first = torch.cat(scores, dim=1).numpy(), [], 0
    seeds = {count: random.integers(count, size=(count, RESAMPLES)) for count in sorted(set(map(len, candidates)))}
    for candidate in candidates:
        trials = values[first : first + len(candidate)]
        means.append(np.take_along_axis(trials, seeds[len(trials)], axis=0).mean(0))
        first += len(candidate)
    return np.array(means)


def units_of(part: JudgedPart) -> tuple[int, np.ndarray]:
    """How many units a bootstrap draws from, rows or groups of rows, and the unit [n] of each row."""
    if part.groups is None:
        return len(part.labels), np.arange(len(part.labels))
    numbers, unit_of_row = np.unique(part.groups.numpy(), return_inverse=True)
    return len(numbers), unit_of_row


def draws(units: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """How often each unit is drawn: RESAMPLES rows [units], some at a time to save memory."""
    at_once = max(1, AT_ONCE // units)
    for start in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - start)
        drawn = random.integers(units, size=(count, units)) + units * np.arange(count)[:, None]
        yield np.bincount(drawn.ravel(), minlength=count * units).reshape(count, units)


def rank_samples(part: JudgedPart, positive: int | None) -> dict[str, np.ndarray]:
    """auroc and average_precision [RESAMPLES] over resampled rows, computed as in `evaluation.rank_scores`."""
    classes = range(part.probabilities.shape[-1]) if positive is None else [positive]
    ranked = [(part.probabilities[:, k].double().numpy(), (part.labels == k).numpy()) for k in classes]
    ranked = [(values, truth) for values, truth in ranked if truth.any() and not truth.all()]
    units, unit_of_row = units_of(part)
    drawn = []
    for times_drawn in draws(units, np.random.default_rng(0)):
        weights = times_drawn[:, unit_of_row]
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a draw may lack positives
            drawn.append(np.nanmean([ranking(values, truth, weights) for values, truth in ranked], axis=0))
    return dict(zip(("auroc", "average_precision"), np.concatenate(drawn, axis=1), strict=True))


def ranking(values: np.ndarray, truth: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """auroc and average precision [2, b] of values [n] and truth [n], row i counted weights [b, n] times."""
    order = np.argsort(-values, kind="stable")
    ties = np.flatnonzero(np.diff(values[order], prepend=np.inf))  # where each value begins
    positives, negatives = (
        np.add.reduceat((weights * chosen)[:, order], ties, axis=1).astype(float) for chosen in (truth, ~truth)
    )
    tp, fp = positives.cumsum(1), negatives.cumsum(1)
    with np.errstate(invalid="ignore"):  # NaN if a draw lacks positives or negatives
        auroc = 1 - (positives * (fp - negatives / 2)).sum(1) / (tp[:, -1] * fp[:, -1])
        precision = (positives * tp / np.maximum(tp + fp, 1)).sum(1) / tp[:, -1]
    return np.stack([auroc, precision])


def weighted(predicted: Tensor, labels: Tensor, weights: Tensor, classes: int) -> Confusion:
    """The confusion [b] of predicted [n] and labels [n], row i counted weights [b, n] times."""
    decided, actual = (one_hot(index, classes).double() for index in (predicted, labels))
    cells = labels * classes + predicted

    def matrix() -> Tensor:
        counts = weights.new_zeros(len(weights), classes**2).index_add_(1, cells, weights)
        return counts.unflatten(-1, (classes, classes))

    return Confusion(weights @ (decided * actual), weights @ actual, weights @ decided, matrix)
