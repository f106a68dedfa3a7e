"""95 % intervals, paired comparisons and ranks, as pure functions of lists of numbers. Distributions are SciPy's.

± is the sample standard deviation over trials (ddof 1) everywhere; an interval is always that of a mean. The papers'
trials differ only in their initial weights, on one split, so their ± says nothing about other splits.
"""

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import stats

Split = TypeVar("Split", bound=Hashable)
LEVEL = 0.95
EXACT_FLIPS = 14  # differences up to which all 2^n sign patterns are enumerated
DRAWN_FLIPS = 20_000  # sign patterns drawn for more differences
POSTERIOR_DRAWS = 50_000
PUBLISHED_STD_FLOOR = 0.005  # a printed 0.00 can be anything below this
PUBLISHED_TRIALS = 10  # behind every published mean
MARGIN = 0.02  # differences up to this do not matter
MEANING = (  # of the words of `verdict`
    f"Reproduced: the interval is inside ±{MARGIN} and contains 0; close: inside ±{MARGIN}; differs: excludes 0 and "
    f"reaches beyond ±{MARGIN}; imprecise: anything else. ✓: reproduced or close, unless always predicting one class "
    "earns that word too."
)
WORDS = ("reproduced", "close", "differs", "imprecise")


class Interval(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """Mean of n trials, their sample standard deviation, and an interval for the mean; None where n is too small."""

    n: int
    mean: float | None
    std: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Paired:
    """Paired difference a - b: its mean with interval, how often a is ahead and behind, and a two-sided p-value."""

    n: int
    difference: float
    low: float | None
    high: float | None
    wins: int
    losses: int
    p: float | None


@dataclass(frozen=True)
class SignTest:
    """Probabilities that a loss is behind, practically equal, or ahead on the largest share of datasets."""

    behind: float
    equal: float
    ahead: float


def summarize(values: Sequence[float]) -> Summary:
    """Mean, spread and interval of trials.

    >>> round(summarize([0.7, 0.8, 0.9]).std, 3)
    0.1
    """
    n = len(values)
    if n < 2:
        return Summary(n, values[0] if n else None, None, None, None)
    return Summary(n, math.fsum(values) / n, float(np.std(values, ddof=1)), *t_interval(values))


def t_interval(values: Sequence[float], overlap: float = 0.0) -> Interval:
    """Student's interval for the mean of at least two values; `overlap`: see `standard_error`."""
    return student(float(np.mean(values)), standard_error(values, overlap), len(values) - 1)


def standard_error(values: Sequence[float], overlap: float) -> float:
    """Of the mean. `overlap` is test size / training size if the trials are random re-splits of the same data.

    Their values are then correlated, and the variance of the mean is s² (1/n + overlap) instead of s²/n (Nadeau and
    Bengio, 2003).
    """
    return float(np.std(values, ddof=1)) * math.sqrt(1 / len(values) + overlap)


def published_interval(mean: float, std: float) -> Interval:
    """The interval of a published mean of ten trials, computed as for our own means."""
    error = max(std, PUBLISHED_STD_FLOOR) / math.sqrt(PUBLISHED_TRIALS)
    return student(mean, error, PUBLISHED_TRIALS - 1)


def welch(ours: Sequence[float], mean: float, std: float) -> Interval:
    """Welch's interval for the mean of `ours` minus a published mean of ten trials, whose std is at least 0.005."""
    n = len(ours)
    a = float(np.var(ours, ddof=1)) / n
    b = max(std, PUBLISHED_STD_FLOOR) ** 2 / PUBLISHED_TRIALS
    freedom = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (PUBLISHED_TRIALS - 1))
    return student(math.fsum(ours) / n - mean, math.sqrt(a + b), freedom)


def student(mean: float, error: float, freedom: float) -> Interval:
    half = _t_quantile(freedom) * error
    return Interval(mean - half, mean + half)


@cache
def _t_quantile(freedom: float) -> float:
    """Of two-sided intervals; cached, because a table needs the same few thousands of times and SciPy is slow."""
    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))


def verdict(difference: Interval) -> str:
    """One word for an interval of ours minus published: see MEANING.

    >>> [verdict(Interval(*ends)) for ends in [(-0.01, 0.01), (0.005, 0.015), (0.01, 0.03), (-0.03, 0.01)]]
    ['reproduced', 'close', 'differs', 'imprecise']
    """
    inside = difference.low >= -MARGIN and difference.high <= MARGIN
    if difference.low <= 0 <= difference.high:
        return "reproduced" if inside else "imprecise"
    return "close" if inside else "differs"


def paired(a: Mapping[Split, float], b: Mapping[Split, float], overlap: float | None = None) -> Paired | None:
    """Compare two losses over the seeds, splits or datasets that both have: label -> score. None if they share none.

    The p-value is that of the sign-flip test: if neither is better, every difference could as well have the other sign.
    It is exact and needs no normality; its smallest value is 2^(1-n), so few trials can never look convincing. With
    `overlap` (see `standard_error`) the t-test is used instead: corrected for splits that share rows, plain (0) for
    datasets. There is no interval if all differences are equal.
    """
    differences = [a[label] - b[label] for label in a if label in b]
    n, low, high = len(differences), None, None
    if not n:
        return None
    mean, p = math.fsum(differences) / n, sign_flip(differences) if n > 1 else None
    if max(differences) - min(differences) > 1e-12:  # otherwise the error of the mean is unknown
        low, high = t_interval(differences, overlap or 0.0)
        if overlap is not None:
            p = float(2 * stats.t.sf(abs(mean) / standard_error(differences, overlap), n - 1))
    return Paired(n, mean, low, high, sum(d > 0 for d in differences), sum(d < 0 for d in differences), p)


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p-value: the share of sign patterns whose mean is at least as far from 0 as the observed one."""
    n = len(differences)
    if n <= EXACT_FLIPS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=n)))
    else:
        signs = np.random.default_rng(0).choice((1.0, -1.0), (DRAWN_FLIPS, n))
        signs[0] = 1.0  # include the observed pattern, which keeps p above 0
    sums = np.abs(signs @ np.asarray(differences, dtype=float))
    return float(np.mean(sums >= sums[0] - 1e-12))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p-values that can all be judged at the same level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    weights = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, weights * np.asarray(p_values, dtype=float)[order]))
    return adjusted.tolist()


def rank_columns(scores: Mapping[str, Sequence[float]]) -> np.ndarray:
    """The rank of each method [methods, columns] in each column that they share; 1 is best, ties share their mean rank.

    >>> rank_columns({"f1": [0.9, 0.8], "ce": [0.7, 0.8]}).tolist()
    [[1.0, 1.5], [2.0, 1.5]]
    """
    return stats.rankdata(-np.array(list(scores.values()), dtype=float), axis=0)


def friedman(ranks: np.ndarray) -> tuple[float, float]:
    """Chi-square and p-value of "all methods rank alike" for ranks [k, n], ties accounted for (Friedman, 1937).

    (k - 1) sum_j (sum_i d_ji)² / sum_ji d_ji², where d_ji is the distance of a rank from the mean rank (k + 1) / 2.
    """
    distances = ranks - (len(ranks) + 1) / 2
    spread = (distances**2).sum()
    chi_square = (len(ranks) - 1) * float((distances.sum(1) ** 2).sum() / spread) if spread else 0.0
    return chi_square, float(stats.chi2.sf(chi_square, len(ranks) - 1))


def critical_difference(methods: int, columns: int) -> float:
    """Mean ranks closer than this do not differ significantly (Nemenyi, 1963; Demšar, 2006): q sqrt(k (k + 1) / (6 N)).

    >>> round(critical_difference(5, 30), 3)
    1.114
    """
    quantile = stats.studentized_range.ppf(LEVEL, methods, math.inf) / math.sqrt(2)
    return float(quantile * math.sqrt(methods * (methods + 1) / (6 * columns)))


def sign_test(differences: Sequence[float], rope: float) -> SignTest:
    """Bayesian sign test of differences over datasets (Benavoli et al., 2017).

    `rope`: differences up to this count as equal. The shares of the three outcomes have a Dirichlet posterior, whose
    prior weighs as much as one dataset with equal scores. Each number is the probability that its share is the largest.
    """
    values = np.asarray(differences, dtype=float)
    counts = [(values < -rope).sum(), (np.abs(values) <= rope).sum() + 1, (values > rope).sum()]
    # Dirichlet shares are gamma draws divided by their sum, which does not change which one is largest.
    shares = np.random.default_rng(0).standard_gamma(np.array(counts, dtype=float), (POSTERIOR_DRAWS, 3))
    return SignTest(*(np.bincount(shares.argmax(1), minlength=3) / POSTERIOR_DRAWS).tolist())
