"""How sure are we: intervals, paired comparisons, ranks. Pure functions of lists of numbers.

± is the sample standard deviation over trials (ddof 1) everywhere; an interval is about the mean. The papers' trials
differ in weight initialisation on one split, so their ± says nothing about other splits: `spread` tells the two apart.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtrc, ndtr, stdtr, stdtrit

EXACT_FLIPS = 14  # up to 2^14 sign patterns are enumerated, beyond that they are drawn
PUBLISHED_STD_FLOOR = 0.005  # a printed 0.00 is anything below it


@dataclass(frozen=True)
class Summary:
    """Mean of n trials, their sample standard deviation, and an interval for the mean; None where n is too small."""

    n: int
    mean: float | None
    std: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """Paired difference a - b: its mean with interval, how often a is ahead, and a two-sided p-value."""

    n: int
    difference: float | None
    low: float | None
    high: float | None
    wins: int
    p: float | None


def summarize(values: Sequence[float], level: float = 0.95) -> Summary:
    """
    >>> summarize([0.7, 0.8, 0.9]).std.__round__(3)
    0.1
    """
    n = len(values)
    mean = math.fsum(values) / n if n else None
    std = float(np.std(values, ddof=1)) if n > 1 else None
    low, high = t_interval(values, level) if n > 1 else (None, None)
    return Summary(n, mean, std, low, high)


def t_interval(values: Sequence[float], level: float = 0.95, overlap: float = 0.0) -> tuple[float, float]:
    """Student's interval for the mean of at least two values.

    `overlap` = test size / training size, where the trials are random re-splits of the same data: their values are
    correlated, and the variance of the mean is s² (1/n + overlap) instead of s²/n (Nadeau and Bengio, 2003).
    """
    n = _at_least(2, values)
    half = stdtrit(n - 1, (1 + level) / 2) * np.std(values, ddof=1) * math.sqrt(1 / n + overlap)
    return float(np.mean(values) - half), float(np.mean(values) + half)


def inside(ours: float, s_ours: float, published: float, s_published: float) -> bool:
    """Does our mean agree with the published one? |difference| <= 2 sqrt(s_published² + s_ours²)."""
    return abs(ours - published) <= 2 * math.hypot(max(s_published, PUBLISHED_STD_FLOOR), s_ours) + 1e-12


def paired(a: Mapping, b: Mapping, level: float = 0.95, overlap: float = 0.0) -> Comparison:
    """Compare two losses over the trials (seeds, or splits) that both have: label -> score.

    The p-value is that of the sign-flip test: if neither is better, every difference could as well have the other sign.
    It is exact and needs no normality; its smallest value is 2^(1-n), so few trials can never look convincing. With
    `overlap` (see `t_interval`) the trials are not exchangeable, and it is that of the corrected t-test instead.
    Where all differences are the same number there is no interval.
    """
    differences = [a[label] - b[label] for label in a if label in b]
    n = len(differences)
    mean = math.fsum(differences) / n if n else None
    spread = n > 1 and max(differences) - min(differences) > 1e-12  # else nothing says how sure the mean is
    low, high = t_interval(differences, level, overlap) if spread else (None, None)
    p = None if n < 2 else corrected_t(differences, overlap) if overlap and spread else sign_flip(differences)
    return Comparison(n, mean, low, high, sum(d > 0 for d in differences), p)


def corrected_t(differences: Sequence[float], overlap: float) -> float:
    """Two-sided p-value by the t-test for overlapping re-splits (Nadeau and Bengio, 2003), of unequal differences."""
    n = _at_least(2, differences)
    error = np.std(differences, ddof=1) * math.sqrt(1 / n + overlap)
    mean = abs(float(np.mean(differences)))
    return float(2 * stdtr(n - 1, -mean / error))


def sign_flip(differences: Sequence[float], draws: int = 20_000, seed: int = 0) -> float:
    """Two-sided p-value: the share of sign patterns whose mean is at least as far from 0 as the one seen."""
    n = _at_least(1, differences)
    if n <= EXACT_FLIPS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=n)))
    else:
        signs = np.random.default_rng(seed).choice((1.0, -1.0), (draws, n))
        signs[0] = 1.0  # the pattern seen is one of them, which keeps p above 0
    sums = np.abs(signs @ np.asarray(differences, dtype=float))
    return float(np.mean(sums >= sums[0] - 1e-12))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p-values that may all be read at once at the same level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def by_split(values: Mapping[tuple, float]) -> dict:
    """(split, seed) -> score becomes split -> mean over its seeds: the unit of a comparison over splits."""
    splits: dict = {}
    for (split, _), value in values.items():
        splits.setdefault(split, []).append(value)
    return {split: math.fsum(found) / len(found) for split, found in splits.items()}


def spread(values: Mapping[tuple, float]) -> tuple[float | None, float | None]:
    """(split, seed) -> score: standard deviation over seeds within a split, and between the splits' means.

    The first pools the splits' variances; either is None where there is nothing to take it from.
    """
    means = by_split(values)
    freedom = len(values) - len(means)
    within = (
        math.sqrt(math.fsum((v - means[split]) ** 2 for (split, _), v in values.items()) / freedom) if freedom else None
    )
    between = float(np.std(list(means.values()), ddof=1)) if len(means) > 1 else None
    return within, between


def mean_ranks(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Average rank of each method over the columns they all share; 1 is best, ties share their mean rank.

    >>> mean_ranks({"f1": [0.9, 0.8], "ce": [0.7, 0.8]})
    {'f1': 1.25, 'ce': 1.75}
    """
    return dict(zip(scores, ranks(scores).mean(1).tolist(), strict=True))


def ranks(scores: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Rank of every method within every column: [methods, columns]."""
    table = np.array(list(scores.values()), dtype=float)
    ahead = (table[None] > table[:, None]).sum(1)
    equal = (table[None] == table[:, None]).sum(1)
    return ahead + (equal + 1) / 2


def friedman(scores: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Chi-square and p-value of "all methods rank alike", ties accounted for (Friedman, 1937).

    N (k - 1) times the share of the ranks' variation that lies between k methods over N columns.
    """
    table = ranks(scores)
    methods, columns = table.shape
    around = table - (methods + 1) / 2
    total = (around**2).sum()
    if total == 0:  # every column is one tie
        return 0.0, 1.0
    statistic = float(columns**2 * (methods - 1) * (around.mean(1) ** 2).sum() / total)
    return statistic, float(chdtrc(methods - 1, statistic))


def critical_difference(methods: int, columns: int, level: float = 0.95) -> float:
    """Mean ranks that differ by less are not told apart (Nemenyi, 1963; Demšar, 2006): q sqrt(k (k + 1) / (6 N)).

    >>> round(critical_difference(5, 30), 3)
    1.114
    """
    return studentized_range(methods, level) / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * columns))


def studentized_range(count: int, level: float) -> float:
    """Quantile of the range of `count` standard normal values: k ∫ φ(z) (Φ(z) - Φ(z - q))^(k-1) dz = level."""
    z = np.linspace(-10, 10, 4001)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    low, high = 0.0, 20.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        below = count * float(density @ (ndtr(z) - ndtr(z - middle)) ** (count - 1))
        low, high = (middle, high) if below < level else (low, middle)
    return low


@dataclass(frozen=True)
class SignTest:
    """How probable it is that a loss is behind, practically equal, or ahead on the largest share of data sets."""

    behind: float
    equal: float
    ahead: float


def sign_test(
    differences: Sequence[float], rope: float = 0.01, prior: float = 1.0, draws: int = 50_000, seed: int = 0
) -> SignTest:
    """Bayesian sign test of differences over data sets (Benavoli et al., 2017).

    `rope`: differences up to here are practically none. The shares of the three outcomes have a Dirichlet posterior
    whose prior weighs as much as `prior` equal data sets; each number is the probability that its share is the largest.
    """
    values = np.asarray(differences, dtype=float)
    counts = [(values < -rope).sum(), (np.abs(values) <= rope).sum() + prior, (values > rope).sum()]
    # Dirichlet shares are gamma draws up to their sum, which does not change which is the largest.
    shares = np.random.default_rng(seed).standard_gamma(np.array(counts, dtype=float), (draws, 3))
    return SignTest(*(np.bincount(shares.argmax(1), minlength=3) / draws).tolist())


def _at_least(count: int, values: Sequence[float]) -> int:
    if len(values) < count:
        raise ValueError(f"expected at least {count} values, got {len(values)}")
    return len(values)
