"""Which candidate is best, and what will it score on new rows?

Candidates are ranked by rows out of fold. The best one is judged on test rows, which had no part in the choice.
Intervals are 95 % posterior quantiles: each unit, a row or a group of rows, has a weight drawn from Exp(1), as in the
Bayesian bootstrap, and PRIOR rows are spread over the cells of the confusion matrix. With independent rows and two
classes this is the posterior of the four cells by Jeffreys' prior. A percentile bootstrap would give a model without a
mistake on ten rows the interval [1, 1].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from scipy.sparse import csr_array
from scipy.stats import norm, t
from torch import Tensor

from east import decisions
from east.confusion import Confusion
from east.lab.reporting.papers import SCORES, STORED
from east.lab.training import evaluation

REPORTED = tuple(name for name in SCORES if name not in ("auroc_thresholded", "precision", "recall", "trained_for"))
DRAWS = 2000
AT_ONCE = 1 << 24  # weights that are in memory at once
PRIOR = 2.0  # rows that the prior adds to a confusion matrix: half a row to each of four cells, Jeffreys' prior
MISSED = 0.05  # the share of intervals that may miss the truth

Measure: TypeAlias = Callable[[Confusion], Tensor]


@dataclass(frozen=True)
class DecidedRows:
    """A model's decisions on labelled rows.

    frame: the rows as the user knows them, numbered from 0 by the index.
    """

    probabilities: Tensor  # [n, d]
    labels: Tensor  # int64 [n]
    rule: decisions.Rule
    classes: tuple[str, ...]
    positive: int | None
    groups: Tensor | None = None  # int64 [n]: rows of one group share a weight
    frame: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def predicted(self) -> Tensor:
        return self.rule.decide(self.probabilities)

    @property
    def confusion(self) -> Confusion:
        return Confusion.from_predictions(self.predicted, self.labels, len(self.classes))

    @property
    def units(self) -> tuple[int, np.ndarray]:
        """The number of units, rows or groups of rows, and the unit [n] of each row."""
        if self.groups is None:
            return len(self.labels), np.arange(len(self.labels))
        numbers, unit_of_row = np.unique(self.groups.numpy(), return_inverse=True)
        return len(numbers), unit_of_row

    def scores(self) -> dict[str, float]:
        """The usual scores by the names that users see, without those that are undefined on these rows."""
        stored = evaluation.scores(self.confusion, self.positive)
        stored |= evaluation.rank_scores(self.probabilities, self.labels, self.positive)
        values = {name: stored[STORED.get(name, name)] for name in REPORTED}
        return {name: value for name, value in values.items() if isinstance(value, float)}


@dataclass(frozen=True)
class Candidate:
    """A model's decisions. held_out: rows out of fold that the choice is made on; test: all others."""

    name: str
    held_out: DecidedRows
    test: DecidedRows


@dataclass(frozen=True)
class Comparison:
    """All candidates, best first by their score out of fold. scores: a row for each, the content of scores.csv."""

    score: str
    measure: Measure
    candidates: tuple[Candidate, ...]
    scores: pd.DataFrame

    @property
    def winner(self) -> Candidate:
        return self.candidates[0]

    @property
    def summary(self) -> str:
        """The winner's test score with its interval, and how many candidates it is clearly ahead of."""
        row, others = self.scores.iloc[0], len(self.scores) - 1
        behind = int((self.scores["lead_low"] > 0).sum())
        count = "any other" if not behind else "all others" if behind == others else f"{behind} of {others} others"
        ahead = f"; {'' if behind else 'not '}clearly ahead of {count}" if others else ""
        return f"{self.winner.name}, test {row.test:.3f} ({row.test_low:.3f} to {row.test_high:.3f}){ahead}"

    def lines(self) -> list[list[str]]:
        """The candidates as a table of text, header first."""
        header = ["", "out of fold", "test", "95 % interval", "winner minus this, on test", "interval"]
        rows = [
            [candidate.name, f"{row.held_out:.3f}", *with_interval(row.test, row.test_low, row.test_high)]
            + (["winner", ""] if row.winner else with_interval(row.lead, row.lead_low, row.lead_high, "+"))
            for candidate, row in zip(self.candidates, self.scores.itertuples(), strict=True)
        ]
        return [header, *rows]


def with_interval(value: Any, low: Any, high: Any, sign: str = "") -> list[str]:
    """Value and interval for a table; the interval is blank if there is none."""
    return [f"{value:{sign}.3f}", "" if np.isnan(low) else f"{low:{sign}.3f} to {high:{sign}.3f}"]


def compared(score: str, measure: Measure, candidates: Sequence[Candidate]) -> Comparison:
    """Rank the candidates; of equal scores the first stays first. Intervals of leads hold for all of them together."""
    held_out = [float(measure(candidate.held_out.confusion)) for candidate in candidates]
    order = sorted(range(len(candidates)), key=lambda k: -round(held_out[k], 9))
    ranked = tuple(candidates[k] for k in order)
    tests = [candidate.test for candidate in ranked]
    units, values = tests[0].units[0], np.array([float(measure(test.confusion)) for test in tests])
    samples = drawn_scores(tests, measure)
    low, high = interval(samples, units)
    lead_low, lead_high = interval(samples[:1] - samples, units, questions=len(ranked) - 1)
    columns = {
        "candidate": [candidate.name for candidate in ranked],
        "winner": np.arange(len(ranked)) == 0,
        "held_out": [held_out[k] for k in order],
        **{"test": values, "test_low": low, "test_high": high},
        **{"lead": values[0] - values, "lead_low": lead_low, "lead_high": lead_high},
    }
    usual = pd.DataFrame([test.scores() for test in tests])
    return Comparison(score, measure, ranked, pd.DataFrame(columns).join(usual))


def interval(samples: np.ndarray, units: int, questions: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper ends [k] of intervals from samples [k, DRAWS] that `questions` answers hold together.

    Few units, such as eight patients, vary more than their sample shows: the quantiles are those at which a normal
    distribution is as wide as Student's.
    """
    tail = norm.cdf(t.ppf(MISSED / 2 / max(1, questions), max(1, units - 1)))
    low, high = np.nanquantile(samples, (tail, 1 - tail), axis=-1)
    return low, high


def drawn_scores(parts: Sequence[DecidedRows], measure: Measure) -> np.ndarray:
    """[parts, DRAWS]: scores of the parts, which have the same rows, under the same random weights.

    Independent rows that all parts decide alike share a weight: the sum of c numbers from Exp(1) is one from Gamma(c).
    Each part has a prior of its own: with a common one, a single row would put a model clearly ahead.
    """
    d, groups = len(parts[0].classes), parts[0].groups
    cells = torch.stack([part.labels * d + part.predicted for part in parts]).numpy()
    if groups is None:
        cells, rows = np.unique(cells, axis=1, return_counts=True)
        unit_of_row, shapes = np.arange(len(rows)), rows.astype(float)
    else:
        units, unit_of_row = parts[0].units
        shapes = np.ones(units)
    ones, random = np.ones(len(unit_of_row)), np.random.default_rng(0)
    counts = [csr_array((ones, (unit_of_row, cell)), shape=(len(shapes), d * d)) for cell in cells]
    at_once, scores = max(1, AT_ONCE // max(len(shapes), d * d)), []
    for start in range(0, DRAWS, at_once):
        size = min(at_once, DRAWS - start)
        weights = random.gamma(shapes, size=(size, len(shapes)))
        drawn = (weights @ of_part + random.gamma(PRIOR / d**2, size=(size, d * d)) for of_part in counts)
        square = (torch.from_numpy(matrix).unflatten(-1, (d, -1)) for matrix in drawn)
        scores.append(torch.stack([measure(Confusion.from_matrix(matrix)) for matrix in square]))
    return torch.cat(scores, dim=1).numpy()
