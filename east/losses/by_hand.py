"""Metrics and their hand-derived slopes, for every metric that needs only the diagonal and the margins.

An autograd graph over a handful of counts costs as much as cross-entropy over the batch. On a CPU the counts become
NumPy arrays, which are four times as fast as tensors this small; on other devices they stay tensors. The functions use
only operations that both libraries have, and work in float64 to keep the precision of differences between counts.

Slopes are the derivatives with respect to the diagonal and the predicted counts [..., d]. The actual counts are fixed:
when the diagonal grows, `missed` falls by as much. The memberships of a sample sum to 1, so adding the same constant to
the predicted slopes of all classes changes nothing; such constants are dropped.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from east import metrics
from east.choices import choose
from east.metrics import MIN_SHARE, RECALL_FLOOR, Metric

Array = Any  # a tensor or a NumPy array


class Margins(NamedTuple):
    """Counts [..., d] of a confusion matrix; `total` [..., 1] is the sum of `actual`."""

    diagonal: Array
    missed: Array
    false_positives: Array
    actual: Array
    predicted: Array
    total: Array

    @classmethod
    def of(cls, diagonal: Array, missed: Array, false_positives: Array) -> "Margins":
        actual = diagonal + missed
        return cls(diagonal, missed, false_positives, actual, diagonal + false_positives, class_sum(actual))

    @property
    def classes(self) -> int:
        return self.diagonal.shape[-1]

    @property
    def negligible(self) -> Array:
        """A count of at most this [..., 1] is 0 as a denominator."""
        return MIN_SHARE * self.total

    @property
    def present(self) -> Array:
        """1 for a class that has samples, else 0."""
        return (self.actual > self.negligible) * 1.0


class Slopes(NamedTuple):
    """A score or loss [..., 1] and its derivatives, each [..., d], or [..., 1] or a number if equal for all classes."""

    value: Array
    by_diagonal: Array
    by_predicted: Array = 0.0


class LossSlopes(NamedTuple):
    """1 - metric [...] and its derivatives [..., d] with respect to the diagonal and the predicted counts."""

    loss: Tensor
    by_diagonal: Tensor
    by_predicted: Tensor


def covers(metric: Metric) -> bool:
    """Whether this metric has hand-derived slopes."""
    return metric in SLOPES


def loss_and_slopes(
    metric: Metric, parameters: Mapping[str, Any], diagonal: Tensor, missed: Tensor, false_positives: Tensor
) -> LossSlopes:
    """1 - metric and its slopes at counts [..., d], with their dtype and device; all 0 where the counts are empty."""
    counts = map(to_float64, (diagonal, missed, false_positives))
    loss, by_diagonal, by_predicted = loss_and_slopes_float64(metric, parameters, *counts)
    *lead, d = diagonal.shape
    packed = diagonal.new_empty((*lead, 2 * d + 1))  # one tensor: a single conversion from NumPy is faster
    target = packed if isinstance(loss, Tensor) else packed.numpy()
    target[..., :d] = by_diagonal
    target[..., d:-1] = by_predicted
    target[..., -1:] = loss
    return LossSlopes(packed.select(-1, 2 * d), packed.narrow(-1, 0, d), packed.narrow(-1, d, d))


def loss_and_slopes_float64(
    metric: Metric, parameters: Mapping[str, Any], diagonal: Array, missed: Array, false_positives: Array
) -> Slopes:
    """1 - metric and its slopes at counts [..., d] from `to_float64`; all 0 where the counts are empty."""
    margins = Margins.of(diagonal, missed, false_positives)
    score, D, P = SLOPES[metric](margins, **parameters)
    loss, total = 1 - score, margins.total
    if isinstance(total, Tensor) or not np.logical_and.reduce(total, None):
        loss = loss * (total != 0)  # the slopes are 0 there already
    return Slopes(loss, -D, -P)


def to_float64(counts: Tensor) -> Array:
    """The counts as a NumPy array on a CPU, else as a tensor; MPS has no float64 and keeps the counts' dtype."""
    if counts.is_cpu and not torch.compiler.is_compiling():
        return counts.numpy().astype(np.float64)
    return counts if counts.device.type == "mps" else counts.double()


def class_sum(x: Array) -> Array:
    """Sum over the classes: [..., 1]."""
    return x.sum(-1, keepdim=True) if isinstance(x, Tensor) else np.add.reduce(x, -1, keepdims=True)


def at_least(x: Array, least: float) -> Array:
    return x.clamp_min(least) if isinstance(x, Tensor) else np.maximum(x, least)


def at_most(x: Array, most: float) -> Array:
    return x.clamp_max(most) if isinstance(x, Tensor) else np.minimum(x, most)


def divisor(whole: Array, negligible: Array | float = 0.0) -> Array:
    """A denominator, infinite where it is negligible: scores and slopes that are divided by it are 0 there."""
    small = whole <= negligible
    if isinstance(whole, Tensor):
        return torch.where(small, np.inf, whole)
    return np.where(small, np.inf, whole) if np.logical_or.reduce(small, None) else whole  # where is slow


def library_of(x: Array) -> Any:
    """The module that works on x: torch or NumPy, whose log, exp and where agree."""
    return torch if isinstance(x, Tensor) else np


def class_shares(c: Margins, average: str, positive: int, absent: str) -> Array:
    """The weight of each class in an average; see metrics.class_shares."""
    if average == "positive":
        one_hot = np.zeros(c.classes)
        one_hot[metrics.checked_class(positive, c.classes)] = 1
        return one_hot if library_of(c.actual) is np else torch.as_tensor(one_hot).to(c.actual)
    if average == "weighted":
        return c.actual / divisor(c.total)
    if average == "macro" and absent == "ignore":
        return c.present / at_least(class_sum(c.present), 1)
    if average != "macro":
        raise ValueError(choose("average", average, metrics.AVERAGES))
    return 1 / c.classes


def sum_of_others(counts: Array) -> Array:
    """For each class the sum of all other classes' counts."""
    return class_sum(counts) - counts


def averaged_fraction(
    c: Margins,
    part: Array,
    whole: Array,
    *,
    part_by_diagonal: Array = 1.0,
    whole_by_diagonal: float = 0.0,
    whole_by_predicted: float = 1.0,
    average: str = "macro",
    positive: int = 1,
    absent: str = "zero",
) -> Slopes:
    """The average over classes of part / whole, both linear in the counts, and its slopes.

    part_by_diagonal, whole_by_diagonal, whole_by_predicted: the derivatives of part and whole; `part` depends on the
    diagonal alone.
    """
    if average == "micro":
        part, whole, share = class_sum(part), class_sum(whole), 1.0
    else:
        share = class_shares(c, average, positive, absent)
    weights = share / (whole := divisor(whole, c.negligible))
    values = part / whole
    score = class_sum(values * share)
    by_diagonal = weights * (part_by_diagonal - whole_by_diagonal * values)
    return Slopes(score, by_diagonal, weights * values * -whole_by_predicted)


def f1(c: Margins, **average: Any) -> Slopes:
    return averaged_fraction(c, 2 * c.diagonal, c.actual + c.predicted, part_by_diagonal=2.0, **average)


def fbeta(c: Margins, beta: metrics.PerClass = 1.0, **average: Any) -> Slopes:
    square: Array = beta**2 if isinstance(beta, int | float) else beta_by_class(beta, c) ** 2
    part, whole = (1 + square) * c.diagonal, square * c.actual + c.predicted
    return averaged_fraction(c, part, whole, part_by_diagonal=1 + square, **average)


def beta_by_class(beta: metrics.PerClass, c: Margins) -> Array:
    """beta for each class [d], in the library of the counts."""
    if isinstance(c.diagonal, Tensor):
        return metrics.per_class_values("beta", beta, c.classes, c.diagonal)
    return np.asarray(metrics.per_class_values("beta", beta, c.classes, torch.empty(0, dtype=torch.float64)))


def jaccard(c: Margins, **average: Any) -> Slopes:
    return averaged_fraction(c, c.diagonal, c.missed + c.predicted, whole_by_diagonal=-1.0, **average)


def precision(c: Margins, **average: Any) -> Slopes:
    return averaged_fraction(c, c.diagonal, c.predicted, **average)


def recall(c: Margins, **average: Any) -> Slopes:
    return averaged_fraction(c, c.diagonal, c.actual, whole_by_predicted=0.0, **average)


def accuracy(c: Margins) -> Slopes:
    share = 1 / divisor(c.total)
    return Slopes(class_sum(c.diagonal) * share, share)


def balanced_accuracy(c: Margins) -> Slopes:
    by_diagonal = 1 / at_least(class_sum(c.present), 1) / divisor(c.actual, c.negligible)
    return Slopes(class_sum(c.diagonal * by_diagonal), by_diagonal)


def youden(c: Margins) -> Slopes:
    score, by_diagonal, _ = balanced_accuracy(c)
    k = class_sum(c.present)
    several, denominator = k > 1, at_least(k - 1, 1)
    return Slopes((k * score - 1) / denominator * several, by_diagonal * k / denominator * several)


def gmean(c: Margins) -> Slopes:
    """M = exp(mean log recall) over k present classes: dM/drecall = M / (k recall), recalls clamped to RECALL_FLOOR.

    A recall at or below the floor makes the score 0, as in metrics.gmean.
    """
    xp, present = library_of(c.actual), c.present
    k, actual = at_least(class_sum(present), 1), divisor(c.actual, c.negligible)
    recalls = c.diagonal / actual
    clamped = at_least(recalls, RECALL_FLOOR)
    mean = xp.exp(class_sum(xp.log(clamped) * present) / k)
    missed_entirely = class_sum((recalls <= RECALL_FLOOR) * present)
    by_diagonal = mean / k / clamped / actual * (recalls >= RECALL_FLOOR)
    return Slopes(mean * (missed_entirely == 0), by_diagonal)


def fowlkes_mallows(c: Margins, average: str = "macro", positive: int = 1, absent: str = "zero") -> Slopes:
    """M = s / sqrt(t q), with s, t, q the diagonal, actual and predicted counts: dM/dq = -M / 2q."""
    diagonal, actual, predicted, share = c.diagonal, c.actual, c.predicted, 1.0
    if average == "micro":
        diagonal, actual, predicted = (class_sum(x) for x in (diagonal, actual, predicted))
    else:
        share = class_shares(c, average, positive, absent)
    predicted = divisor(predicted, c.negligible)
    weights = share * (divisor(actual, c.negligible) * predicted) ** -0.5
    score = class_sum(diagonal * weights)
    return Slopes(score, weights, diagonal * weights / predicted * -0.5)


def specificity(c: Margins, average: str = "macro", positive: int = 1, absent: str = "zero") -> Slopes:
    negatives = sum_of_others(c.actual)
    true_negatives = negatives - c.false_positives
    score, weights, _ = averaged_true_negatives(true_negatives, negatives, c, average, positive, absent)
    return Slopes(score, weights, -weights)


def npv(c: Margins, average: str = "macro", positive: int = 1, absent: str = "zero") -> Slopes:
    rejected = sum_of_others(c.predicted)
    score, weights, values = averaged_true_negatives(rejected - c.missed, rejected, c, average, positive, absent)
    return Slopes(score, weights, sum_of_others(weights * (1 - values)))


def averaged_true_negatives(
    true_negatives: Array, whole: Array, c: Margins, average: str, positive: int, absent: str
) -> tuple[Array, Array, Array]:
    """The average of true_negatives / whole, at least 0, its slopes by true_negatives, and the ratios."""
    if average == "micro":
        true_negatives, whole, share = class_sum(true_negatives), class_sum(whole), 1.0
    else:
        share = class_shares(c, average, positive, absent)
    whole = divisor(whole, c.negligible)
    values = at_least(true_negatives, 0.0) / whole
    return class_sum(values * share), share * (true_negatives >= 0) / whole, values


def mcc(c: Margins) -> Slopes:
    """M = cov / sqrt(U V): dM/dq_k = (q_k cov / V - t_k) / sqrt(U V).

    t and q are the shares of actual and predicted counts, cov = sum(s - t q), U = sum t (1 - t), V = sum q (1 - q). As
    in metrics.mcc, each term of cov is computed in the form that loses no precision.
    """
    n = divisor(c.total)
    t, q = c.actual / n, c.predicted / n
    others = sum_of_others(q)
    U, V = (divisor(class_sum(x), MIN_SHARE) for x in (t * sum_of_others(t), q * others))
    covariance = class_sum(library_of(q).where(q < 0.5, c.diagonal / n - t * q, t * others - c.missed / n))
    scale = (U * V) ** -0.5
    by_diagonal = scale / n
    by_predicted = (q * (covariance / V) - t) * by_diagonal
    return Slopes(at_least(at_most(covariance * scale, 1), -1), by_diagonal, by_predicted)


def kappa(c: Margins) -> Slopes:
    """1 - missed / (missed by chance), clamped to at least -1."""
    n = divisor(c.total)
    expected = divisor(class_sum(c.actual * sum_of_others(c.predicted)) / n**2, MIN_SHARE)
    missed = class_sum(c.missed) / n
    score = 1 - missed / expected
    unclamped = score >= -1
    by_predicted = unclamped * missed / expected**2 * sum_of_others(c.actual) / n**2
    return Slopes(at_least(score, -1) * (expected < np.inf), unclamped / (n * expected), by_predicted)


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
