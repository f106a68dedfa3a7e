"""Scores and their slopes by hand, for every metric that needs no more than the diagonal and the margins.

Autograd's graph over a handful of counts costs as much as cross-entropy over the batch. On a CPU the counts become
NumPy arrays, four times as quick as tensors of so few numbers; elsewhere they stay tensors. The functions are written
in what both understand, and in float64, where differences of counts keep their digits.

Slopes are with respect to the diagonal (what is hit is not missed) and to the predicted counts [..., d]. As memberships
of a sample sum to 1, what is added to all predicted slopes alike changes nothing, and may be left out.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from east import metrics
from east.metrics import EPS, RECALL_FLOOR, SHARE, Metric

Array = Any  # a Tensor or a NumPy array


class Margins(NamedTuple):
    """Counts [..., d]; actual is diagonal + missed, total [..., 1] their sum."""

    diagonal: Array
    missed: Array
    actual: Array
    predicted: Array
    total: Array

    @property
    def classes(self) -> int:
        return self.diagonal.shape[-1]

    @property
    def present(self) -> Array:
        """1 for a class that has samples, else 0."""
        return (self.actual > 0) * 1.0


class Slopes(NamedTuple):
    """A score or loss [..., 1] and its derivatives, [..., d] or [..., 1]."""

    value: Array
    by_diagonal: Array
    by_predicted: Array = 0.0


class LossSlopes(NamedTuple):
    """1 - score [...], and its derivatives with respect to diagonal and predicted counts [..., d]."""

    loss: Tensor
    by_diagonal: Tensor
    by_predicted: Tensor


def covers(metric: Metric) -> bool:
    """Whether the slopes of this metric are known by hand."""
    return metric in SLOPES


def slopes_of_loss(
    metric: Metric, parameters: Mapping[str, Any], diagonal: Tensor, missed: Tensor, predicted: Tensor
) -> LossSlopes:
    """Of 1 - metric at counts [..., d]; both 0 where nothing is counted."""
    counts = map(exact, (diagonal, missed, predicted))
    packed = joined(*slopes_at(metric, parameters, *counts), diagonal)
    d = diagonal.shape[-1]
    return LossSlopes(packed.select(-1, 2 * d), packed.narrow(-1, 0, d), packed.narrow(-1, d, d))


def slopes_at(
    metric: Metric, parameters: Mapping[str, Any], diagonal: Array, missed: Array, predicted: Array
) -> Slopes:
    """Of 1 - metric at counts in float64, tensors or arrays."""
    total = summed(actual := diagonal + missed)
    score, B, A = SLOPES[metric](Margins(diagonal, missed, actual, predicted, total), **parameters)
    counted = total != 0
    if isinstance(total, Tensor) or not counted.all():
        return Slopes((1 - score) * counted, -B * counted, -A * counted)
    return Slopes(1 - score, -B, -A)


def exact(counts: Tensor) -> Array:
    if counts.device.type == "cpu" and not torch.compiler.is_compiling():
        return counts.numpy().astype(np.float64)
    return counts if counts.device.type == "mps" else counts.double()


def joined(loss: Array, by_diagonal: Array, by_predicted: Array, like: Tensor) -> Tensor:
    """Slopes, slopes and loss in one tensor [..., 2d + 1] beside the counts: changing libraries once is quicker."""
    *lead, d = like.shape
    packed = like.new_empty((*lead, 2 * d + 1))
    into = packed if isinstance(loss, Tensor) else packed.numpy()
    into[..., :d] = by_diagonal
    into[..., d:-1] = by_predicted
    into[..., -1:] = loss
    return packed


def summed(x: Array) -> Array:
    """Over the classes, [..., 1]."""
    return x.sum(-1, keepdim=True) if isinstance(x, Tensor) else np.add.reduce(x, -1, keepdims=True)


def at_least(x: Array, least: float) -> Array:
    return x.clamp_min(least) if isinstance(x, Tensor) else np.maximum(x, least)


def numerics(x: Array) -> Any:
    """The library of an array: torch or NumPy, which agree on log, exp and where."""
    return torch if isinstance(x, Tensor) else np


def shares(c: Margins, average: str, positive: int, absent: str) -> Array:
    """What every class contributes to an average."""
    if average == "positive":
        one = np.zeros(c.classes)
        one[metrics.checked_class(positive, c.classes)] = 1
        return one if numerics(c.actual) is np else torch.as_tensor(one).to(c.actual)
    if average == "weighted":
        return c.actual / at_least(c.total, EPS)
    if average == "macro" and absent == "ignore":
        return c.present / at_least(summed(c.present), 1)
    metrics.choose("average", average, ("macro",))
    return 1 / c.classes


def others(counts: Array) -> Array:
    """Sum of the other classes' counts."""
    return summed(counts) - counts


def of_fraction(
    c: Margins,
    part: Array,
    whole: Array,
    hit: Array,
    by_diagonal: float,
    by_predicted: float,
    average: str = "macro",
    positive: int = 1,
    absent: str = "zero",
) -> Slopes:
    """The average of part / whole, both linear in the counts.

    `part` is `hit` times the diagonal; `whole` changes by `by_diagonal` and `by_predicted`.
    """
    if average == "micro":
        part, whole, share = summed(part), summed(whole), 1.0
    else:
        share = shares(c, average, positive, absent)
    weights = share / (whole := at_least(whole, EPS))
    values = part / whole
    score = summed(values * share)
    return Slopes(score, weights * (hit - by_diagonal * values), weights * values * -by_predicted)


def f1(c: Margins, **average: Any) -> Slopes:
    return of_fraction(c, 2 * c.diagonal, c.actual + c.predicted, 2.0, 0.0, 1.0, **average)


def fbeta(c: Margins, beta: metrics.PerClass = 1.0, **average: Any) -> Slopes:
    arrays = numerics(c.diagonal) is np
    like = torch.empty(0, dtype=torch.float64) if arrays else c.diagonal
    beta = metrics.per_class_values("beta", beta, c.classes, like)
    square = (beta.numpy() if arrays and isinstance(beta, Tensor) else beta) ** 2
    return of_fraction(c, (1 + square) * c.diagonal, square * c.actual + c.predicted, 1 + square, 0.0, 1.0, **average)


def jaccard(c: Margins, **average: Any) -> Slopes:
    return of_fraction(c, c.diagonal, c.missed + c.predicted, 1.0, -1.0, 1.0, **average)


def precision(c: Margins, **average: Any) -> Slopes:
    return of_fraction(c, c.diagonal, c.predicted, 1.0, 0.0, 1.0, **average)


def recall(c: Margins, **average: Any) -> Slopes:
    return of_fraction(c, c.diagonal, c.actual, 1.0, 0.0, 0.0, **average)


def accuracy(c: Margins) -> Slopes:
    share = 1 / at_least(c.total, EPS)
    return Slopes(summed(c.diagonal) * share, share)


def balanced_accuracy(c: Margins) -> Slopes:
    present = c.present
    by_diagonal = present / at_least(summed(present), 1) / at_least(c.actual, EPS)
    return Slopes(summed(c.diagonal * by_diagonal), by_diagonal)


def youden(c: Margins) -> Slopes:
    score, by_diagonal, _ = balanced_accuracy(c)
    k = summed(c.present)
    several, rest = k > 1, at_least(k - 1, 1)
    return Slopes((k * score - 1) / rest * several, by_diagonal * k / rest * several)


def gmean(c: Margins) -> Slopes:
    """exp(mean log recall): dM/drecall_k = M / (K recall_k), with recalls held at the floor; see metrics.gmean."""
    xp, present = numerics(c.actual), c.present
    k, actual = at_least(summed(present), 1), at_least(c.actual, EPS)
    recalls = c.diagonal / actual
    held = at_least(recalls, RECALL_FLOOR)
    mean = xp.exp(summed(xp.log(held) * present) / k)
    missing = summed((recalls <= RECALL_FLOOR) * present)
    return Slopes(mean * (missing == 0), mean / k / held / actual * present * (recalls >= RECALL_FLOOR))


def fowlkes_mallows(c: Margins, average: str = "macro", positive: int = 1, absent: str = "zero") -> Slopes:
    """s / sqrt(t q): dM/dq = -M / 2q."""
    diagonal, actual, predicted, share = c.diagonal, c.actual, c.predicted, 1.0
    if average == "micro":
        diagonal, actual, predicted = (summed(x) for x in (diagonal, actual, predicted))
    else:
        share = shares(c, average, positive, absent)
    weights = share * (at_least(actual, EPS) * at_least(predicted, EPS)) ** -0.5
    score = summed(diagonal * weights)
    return Slopes(score, weights, diagonal * weights / at_least(predicted, EPS) * (predicted > EPS) * -0.5)


def specificity(c: Margins, average: str = "macro", positive: int = 1, absent: str = "zero") -> Slopes:
    negatives = others(c.actual)
    score, weights, _ = of_negatives(negatives - (c.predicted - c.diagonal), negatives, c, average, positive, absent)
    return Slopes(score, weights, -weights)


def npv(c: Margins, average: str = "macro", positive: int = 1, absent: str = "zero") -> Slopes:
    rejected = others(c.predicted)
    score, weights, left = of_negatives(rejected - c.missed, rejected, c, average, positive, absent)
    return Slopes(score, weights, others(weights * left))


def of_negatives(
    part: Array, whole: Array, c: Margins, average: str, positive: int, absent: str
) -> tuple[Array, Array, Array]:
    """The average of part / whole within [0, 1], its slopes by the parts, and 1 - part / whole."""
    if average == "micro":
        part, whole, share = summed(part), summed(whole), 1.0
    else:
        share = shares(c, average, positive, absent)
    usable = whole > SHARE * c.total
    inside = usable * (part >= 0) * (part <= whole)
    whole = numerics(whole).where(usable, whole, 1.0)
    values = (part / whole).clip(min=0, max=1) * usable
    return summed(values * share), share * inside / whole, 1 - values


def mcc(c: Margins) -> Slopes:
    """M = cov / sqrt(U V) with V = 1 - sum q^2: dM/dq_k = (q_k cov / V - t_k) / sqrt(U V)."""
    n = at_least(c.total, EPS)
    t, q = c.actual / n, c.predicted / at_least(summed(c.predicted), EPS)
    U, V = 1 - summed(t * t), 1 - summed(q * q)
    usable = (U > SHARE) * (V > SHARE)
    covariance = summed(c.diagonal) / n - summed(t * q)
    scale = usable * (at_least(U, SHARE) * at_least(V, SHARE)) ** -0.5
    by_diagonal = scale / n
    by_predicted = (q * (covariance / at_least(V, SHARE)) - t) * by_diagonal
    return Slopes((covariance * scale).clip(min=-1, max=1), by_diagonal, by_predicted)


def kappa(c: Margins) -> Slopes:
    """1 - missed / expected to be missed."""
    n = at_least(c.total, EPS)
    expected = summed(c.actual * others(c.predicted)) / n**2
    usable = expected > SHARE
    expected = at_least(expected, SHARE)
    missed = summed(c.missed) / n
    score = 1 - missed / expected
    inside = usable * (score >= -1)
    by_predicted = inside * missed / expected**2 * others(c.actual) / n**2
    return Slopes(at_least(score, -1) * usable, inside / (n * expected), by_predicted)


SLOPES: dict[Metric, Callable[..., Slopes]] = {
    metrics.accuracy: accuracy,
    metrics.balanced_accuracy: balanced_accuracy,
    metrics.f1: f1,
    metrics.fbeta: fbeta,
    metrics.fowlkes_mallows: fowlkes_mallows,
    metrics.gmean: gmean,
    metrics.jaccard: jaccard,
    metrics.kappa: kappa,
    metrics.mcc: mcc,
    metrics.npv: npv,
    metrics.precision: precision,
    metrics.recall: recall,
    metrics.specificity: specificity,
    metrics.youden: youden,
}
