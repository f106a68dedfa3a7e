"""Which candidate is best? It is chosen on validation, reported on test, and a bootstrap estimates the role of luck.

A plug-in rule is tuned on validation, so its validation score would flatter it: it is cross-fitted instead, tuned on
four fifths of the rows and applied to the rest, five times. The expected rule sees no labels and needs none of this. A
network is judged only on validation rows that were not used to stop its training: EAST's loss is nearly the score
itself, so those rows would flatter it most. Intervals are 95 % bootstrap percentiles over rows: the range to expect on
new rows of the same kind.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

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
Arrays: TypeAlias = Mapping[str, np.ndarray]  # a trial's probabilities and labels, as stored beside its record


@dataclass(frozen=True)
class Decided:
    """A model's decisions on labelled rows."""

    probabilities: Tensor  # [n, d]
    labels: Tensor  # int64 [n]
    predicted: Tensor  # int64 [n]
    groups: Tensor | None = None  # int64 [n]: rows of one group are resampled together

    @property
    def classes(self) -> int:
        return self.probabilities.shape[-1]

    @property
    def confusion(self) -> Confusion:
        return Confusion.from_predictions(self.predicted, self.labels, self.classes)

    @property
    def units(self) -> tuple[int, np.ndarray]:
        """How many units a bootstrap draws from, rows or groups of rows, and the unit [n] of each row."""
        if self.groups is None:
            return len(self.labels), np.arange(len(self.labels))
        numbers, unit_of_row = np.unique(self.groups.numpy(), return_inverse=True)
        return len(numbers), unit_of_row

    @property
    def likelihood(self) -> float:
        """Mean log likelihood of the labels, which no decision rule changes."""
        of_label = self.probabilities.double().gather(1, self.labels[:, None])
        return float(of_label.clamp_min(1e-15).log().mean())

    def take(self, rows: Tensor) -> "Decided":
        groups = None if self.groups is None else self.groups[rows]
        return Decided(self.probabilities[rows], self.labels[rows], self.predicted[rows], groups)

    def scores(self, positive: int | None) -> dict[str, float]:
        """The usual scores by the names that users see, without those that are undefined on these rows."""
        stored = evaluation.scores(self.confusion, positive)
        stored |= evaluation.rank_scores(self.probabilities, self.labels, positive)
        values = {name: stored[STORED.get(name, name)] for name in REPORTED}
        return {name: value for name, value in values.items() if isinstance(value, float)}


@dataclass(frozen=True)
class Candidate:
    """A trained model with a decision rule. key: its name in `candidates=[…]`; seed: the trial that would be saved."""

    key: str
    title: str
    decision: DecisionName
    seed: int
    rule: decisions.Rule
    val: Decided  # cross-fitted where training or rule have seen the labels
    test: Decided
    unseen: Tensor  # bool [n]: the validation rows on which it can be judged

    @property
    def name(self) -> str:
        return f"{self.title}{DECIDED[self.decision]}"


def judge(
    key: str,
    title: str,
    trials: Mapping[int, Arrays],
    folds: int | None,
    groups: Mapping[str, Tensor | None],
    measure: Measure,
    positive: int | None,
) -> list[Candidate]:
    """A candidate per decision rule, from the trials (seed -> arrays) of one model.

    folds: `split.folds`; each trial's training ignored one fold of the validation rows, and its probabilities stand for
    that fold. groups: those of the rows of val and test, if they have any.
    """
    val = {seed: torch.from_numpy(arrays["val_probabilities"]) for seed, arrays in trials.items()}
    labels, test_labels = (torch.from_numpy(next(iter(trials.values()))[f"{part}_labels"]) for part in ("val", "test"))
    p = next(iter(val.values())).clone()
    unseen = torch.full_like(labels, folds is None, dtype=torch.bool)
    for seed in reversed(val) if folds else ():
        own = folds_of(labels, folds or 1, groups["val"]) == seed % (folds or 1)
        p[own], unseen = val[seed][own], unseen | own
    tuning = tuning_rows(p, labels)
    rules: dict[DecisionName, decisions.Rule] = {
        "argmax": decisions.Argmax(),
        "plugin": decisions.tuned(*tuning, measure, positive),
        "expected": decisions.expected(tuning[0], measure, positive),
    }
    found = []
    for decision, rule in rules.items():
        tuned = decision == "plugin"
        predicted = cross_fitted(p, labels, measure, positive, groups["val"]) if tuned else rule.decide(p)
        own_decisions = {seed: Decided(of, labels, rule.decide(of)) for seed, of in val.items()}
        seed = max(val, key=lambda seed: float(measure(own_decisions[seed].confusion)))
        of_test = torch.from_numpy(trials[seed]["test_probabilities"])
        on_test = Decided(of_test, test_labels, rule.decide(of_test), groups["test"])
        on_val = Decided(p, labels, predicted, groups["val"])
        found.append(Candidate(key, title, decision, seed, rule, on_val, on_test, unseen))
    return found


def folds_of(labels: Tensor, folds: int, groups: Tensor | None) -> Tensor:
    return torch.from_numpy(folded(labels.numpy(), folds, None if groups is None else groups.numpy()))


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
class Comparison:
    """All candidates, cheapest first, and which one is best.

    scores: a row per candidate, the content of scores.csv. best: the winner's row. uncertain: why the choice is in
    doubt; None if it is not.
    """

    score: str
    candidates: tuple[Candidate, ...]
    classes: tuple[str, ...]
    positive: int | None
    scores: "pd.DataFrame"
    best: int
    uncertain: str | None

    @property
    def winner(self) -> Candidate:
        return self.candidates[self.best]

    @property
    def summary(self) -> str:
        """The winner's test score with its interval, and how many candidates it is clearly ahead of."""
        row, behind, others = (
            self.scores.iloc[self.best],
            int((self.scores["lead_low"] > 0).sum()),
            len(self.scores) - 1,
        )
        count = "any other" if not behind else "all others" if behind == others else f"{behind} of {others} others"
        ahead = f"{'' if behind else 'not '}clearly ahead of {count}"
        return f"{self.winner.name}, test {row.test:.3f} ({row.test_low:.3f} to {row.test_high:.3f}); {ahead}"

    def lines(self) -> list[list[str]]:
        """The candidates as a table of text, header first."""
        header = ["", "validation", "test", "95 % interval", "winner minus this, on test", "95 % interval"]
        rows = [
            [candidate.name, f"{row.validation:.3f}", *with_interval(row.test, row.test_low, row.test_high)]
            + (["winner", ""] if row.winner else with_interval(row.lead, row.lead_low, row.lead_high, "+"))
            for candidate, row in zip(self.candidates, self.scores.itertuples(), strict=True)
        ]
        return [header, *rows]

    def notes(self) -> list[str]:
        """Warnings about individual candidates."""
        constant = [c.name for c in self.candidates if len(c.test.predicted.unique()) == 1]
        return [f"{name} predicts the same class for every test row" for name in constant]


def with_interval(value: Any, low: Any, high: Any, sign: str = "") -> list[str]:
    """Value and interval for a table; the interval is blank if there is none."""
    return [f"{value:{sign}.3f}", "" if np.isnan(low) else f"{low:{sign}.3f} to {high:{sign}.3f}"]


def compared(
    score: str, measure: Measure, candidates: Sequence[Candidate], classes: tuple[str, ...], positive: int | None
) -> Comparison:
    """Choose the winner on the validation rows that no candidate was stopped on, or on all if there are none."""
    import pandas as pd

    common = torch.stack([candidate.unseen for candidate in candidates]).all(0)
    rows = (common if common.any() else torch.ones_like(common)).nonzero().flatten()
    candidates = tuple(replace(candidate, val=candidate.val.take(rows)) for candidate in candidates)
    validation, test = (
        np.array([float(measure(part.confusion)) for part in parts])
        for parts in zip(*((candidate.val, candidate.test) for candidate in candidates), strict=True)
    )
    best, uncertain = chosen(candidates, validation.tolist(), classes, measure)
    samples = resampled([candidate.test for candidate in candidates], measure)
    low, high = np.nanquantile(samples, INTERVAL, axis=1)
    lead_low, lead_high = np.nanquantile(samples[best] - samples, INTERVAL, axis=1)
    about = {
        "candidate": [candidate.key for candidate in candidates],
        "decision": [candidate.decision for candidate in candidates],
        "winner": np.arange(len(candidates)) == best,
        "seed": [candidate.seed for candidate in candidates],
        "validation": validation,
        **{"test": test, "test_low": low, "test_high": high},
        **{"lead": test[best] - test, "lead_low": lead_low, "lead_high": lead_high},
    }
    usual = pd.DataFrame([candidate.test.scores(positive) for candidate in candidates])
    return Comparison(score, candidates, classes, positive, pd.DataFrame(about).join(usual), best, uncertain)


def chosen(
    candidates: Sequence[Candidate], validation: Sequence[float], classes: Sequence[str], measure: Measure
) -> tuple[int, str | None]:
    """Index of the winner, and why the choice is in doubt: the best validation score; ties go to the likelihood.

    With few rows of some class the score is mostly luck. Then the highest likelihood wins among those not clearly
    worse; of a model's rules, the expected one, which needs no labels.
    """
    parts = [candidate.val for candidate in candidates]
    likelihood = [part.likelihood for part in parts]
    labels, groups = parts[0].labels, parts[0].groups
    of_units = labels if groups is None else torch.stack((labels, groups)).unique(dim=1)[0]
    counts = torch.bincount(of_units, minlength=len(classes))
    count, name = int(counts.min()), classes[int(counts.argmin())]
    if count >= FEW:
        return max(range(len(parts)), key=lambda k: (round(validation[k], 9), likelihood[k])), None
    samples, top = resampled(parts, measure), int(np.argmax(validation))
    lows = np.nanquantile(samples[top] - samples, INTERVAL[0], axis=1)
    contenders = [k for k in range(len(parts)) if k == top or not lows[k] > 0]
    by_rule = [candidate.decision == "expected" for candidate in candidates]
    best = max(contenders, key=lambda k: (likelihood[k], by_rule[k], round(validation[k], 9)))
    unit = "validation row" if groups is None else "validation group"
    rows = {0: f"no {unit}s", 1: f"only 1 {unit}"}.get(count, f"only {count} {unit}s")
    return best, (
        f"{rows} of {name!r}; the winner has the highest likelihood among the {len(contenders)} candidates not clearly "
        "worse on validation than the best"
    )


def resampled(parts: Sequence[Decided], measure: Measure) -> np.ndarray:
    """[parts, RESAMPLES]: scores of the parts, which have the same rows, over resampled rows or groups of rows."""
    units, unit_of_row = parts[0].units
    classes, ones = parts[0].classes, np.ones(len(unit_of_row))
    cells = [(unit_of_row, (part.labels * classes + part.predicted).numpy()) for part in parts]
    counts = [csr_array((ones, places), shape=(units, classes**2)) for places in cells]
    scores = []
    for times_drawn in draws(units, max(units, classes**2)):
        matrices = (torch.from_numpy(times_drawn @ of_part).unflatten(-1, (classes, classes)) for of_part in counts)
        scores.append(torch.stack([measure(Confusion.from_matrix(matrix)) for matrix in matrices]))
    return torch.cat(scores, dim=1).numpy()


def draws(units: int, width: int) -> Iterator[np.ndarray]:
    """How often each unit is drawn: RESAMPLES rows [units], as many at a time as fit in memory with `width` counts."""
    random, at_once = np.random.default_rng(0), max(1, AT_ONCE // width)
    for start in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - start)
        drawn = random.integers(units, size=(count, units)) + units * np.arange(count)[:, None]
        yield np.bincount(drawn.ravel(), minlength=count * units).reshape(count, units)


def rank_samples(part: Decided, positive: int | None) -> dict[str, np.ndarray]:
    """auroc and average_precision [RESAMPLES] over resampled rows, computed as in `evaluation.rank_scores`."""
    classes = range(part.classes) if positive is None else [positive]
    ranked = [(part.probabilities[:, k].double().numpy(), (part.labels == k).numpy()) for k in classes]
    ranked = [(values, truth) for values, truth in ranked if truth.any() and not truth.all()]
    units, unit_of_row = part.units
    drawn = []
    for times_drawn in draws(units, len(unit_of_row)):
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
