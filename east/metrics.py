"""Scores of a Confusion, hard or soft, for training and evaluation alike. METRICS lists them by name.

Each is f(confusion, **parameters) -> Tensor[...], one number per leading index, larger is better. Those decorated with
`scored` are written as functions that return slopes as well, and accept counts that are NumPy arrays or tensors.

A denominator of at most MIN_SHARE of the total counts as 0, and x/0 scores 0 with a gradient of 0 (`divisor`). This
gives 0/0 the score of scikit-learn, keeps gradients finite, and makes scores independent of the scale of the counts.
Small differences of counts are summed without cancellation, and all scores are computed in float64.
`average`: macro (mean over classes), weighted (by class frequency), positive (one class), micro (counts summed over
classes), none (one number per class). By default, positive (class 1) with two classes and macro with more.
`absent`: a class without samples counts as zero in a macro mean (eq. 2, arXiv 2405.20954), or is left out (ignore).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from east.arrays import Array, at_least, at_most, cast, class_sum, library_of, widest_float
from east.choices import choose, import_by_path

if TYPE_CHECKING:  # scores of recorded confusion matrices need only NumPy
    from torch import Tensor

    from east.confusion import Confusion

MIN_SHARE = 1e-12  # a denominator of at most this share of the total counts as 0
RECALL_FLOOR = 1e-6  # a recall below this has no gradient in the geometric mean

Metric = Callable[..., Any]  # of counts that are tensors or NumPy arrays, to the same
PerClass = float | Sequence[float] | Array
AVERAGES = ("macro", "weighted", "positive", "micro", "none")
ABSENT = ("zero", "ignore")


class Sloped(NamedTuple):
    """A score [...] and its slopes: the derivatives [..., d] (or broadcastable) by diagonal and predicted counts.

    The actual counts are fixed: when the diagonal grows, `missed` falls by as much. A constant added to the slopes by
    predicted counts changes nothing, as the memberships of a sample sum to 1; such constants are dropped.
    """

    value: Array
    by_diagonal: Array = 0.0
    by_predicted: Array = 0.0


def scored(function: Callable[..., Sloped]) -> Metric:
    """The metric of a function that also returns slopes; `WITH_SLOPES` finds that function again."""

    @wraps(function)
    def metric(c: Confusion, *arguments: Any, **parameters: Any) -> Tensor:
        if isinstance(c.diagonal, np.ndarray):
            return function(c, *arguments, **parameters).value
        dtype = c.diagonal.dtype
        return function(c.to(widest_float(c.diagonal)), *arguments, **parameters).value.to(dtype)

    return metric


def divisor(whole: Array, total: Array | float = 0.0) -> Array:
    """A denominator, infinite where it is at most MIN_SHARE of the total: quotients and their gradients are 0 there."""
    return library_of(whole).where(whole <= MIN_SHARE * total, np.inf, whole)


def ratio(part: Tensor, whole: Tensor, total: Tensor | float = 0.0) -> Tensor:
    """part / whole, and 0 where whole is 0, or at most MIN_SHARE of the total; its gradient is finite everywhere."""
    return part / divisor(whole, total)


def present_classes(c: Confusion) -> Array:
    """1 for a class [..., d] that has more than MIN_SHARE of the samples, else 0."""
    return cast(c.actual > MIN_SHARE * class_sum(c.actual), c.actual)


def default_average(classes: int) -> str:
    """The average that is meant where none is given: that of the positive class of two, of more classes macro."""
    return "positive" if classes == 2 else "macro"


def class_shares(c: Confusion, average: str | None, positive: int, absent: str) -> Array:
    """The weight of each class in an average: one number for all, or weights [..., d]."""
    average = average or default_average(c.classes)
    if average == "positive" and -c.classes <= positive < c.classes:
        return library_of(c.actual).arange(c.classes, device=c.actual.device) == positive % c.classes
    if average == "weighted":
        return c.actual / divisor(class_sum(c.actual))
    if average in ("macro", "none") and absent == "zero":
        return 1 / c.classes
    if average in ("macro", "none") and choose("absent", absent, ABSENT):
        present = present_classes(c)
        return present / at_least(class_sum(present), 1)
    choose("average", average, AVERAGES)
    raise ValueError(f"positive class {positive} does not exist: expected 0 to {c.classes - 1}")


def share_of_hits(
    c: Confusion,
    weights: tuple[Array, Array, Array],
    average: str | None,
    positive: int,
    absent: str,
    negatives: bool = False,
) -> Sloped:
    """The average over classes of g hits / (g hits + a missed + b false positives), with weights (g, a, b).

    The hits of a class are the diagonal, or with `negatives` the true negatives.
    """
    gain, of_missed, of_false = weights
    hits, missed, false_positives, total = c.diagonal, c.missed, c.false_positives, c.actual.sum(-1, keepdims=True)
    if negatives:  # a difference of what is in the denominator, so that small ones stay accurate
        counts, errors = (c.actual, false_positives) if of_false else (c.predicted, missed)
        hits = at_least(class_sum(counts) - counts - errors, 0.0)
    part = gain * hits
    whole = part + of_missed * missed + of_false * false_positives
    if average == "micro":
        part, whole, shares = class_sum(part), class_sum(whole), 1.0
    else:
        shares = class_shares(c, average, positive, absent)
    whole = divisor(whole, total)
    values, by_part = part / whole, shares / whole
    by_whole = values * by_part
    by_hits, by_false = gain * (by_part - by_whole), -of_false * by_whole
    value = values if average == "none" else (values * shares).sum(-1)
    by_diagonal = by_hits + (of_missed + of_false) * by_whole
    return Sloped(value, by_diagonal, by_false - by_hits if negatives else by_false)


@scored
def accuracy(c: Confusion) -> Sloped:
    """Share of correct samples (micro accuracy)."""
    return share_of_hits(c, (1, 1, 0), "micro", 1, "zero")


@scored
def balanced_accuracy(c: Confusion) -> Sloped:
    """Mean recall of the classes that have samples (macro accuracy)."""
    return share_of_hits(c, (1, 1, 0), "macro", 1, "ignore")


@scored
def fbeta(
    c: Confusion, beta: PerClass = 1.0, average: str | None = None, positive: int = 1, absent: str = "zero"
) -> Sloped:
    """F_beta per class, then averaged; beta < 1 prefers precision, beta > 1 recall. Eq. 2, arXiv 2405.20954.

    Computed from counts: in terms of precision and recall it would be 0/0 where both are 0.
    """
    square = parameter("beta", beta, [(), (c.classes,)], c.diagonal) ** 2
    return share_of_hits(c, (1 + square, square, 1), average, positive, absent)


def of_ratio(name: str, weights: tuple[float, float, float], negatives: bool = False) -> Metric:
    """The metric of one row of weights, those of `share_of_hits`."""

    def metric(c: Confusion, average: str | None = None, positive: int = 1, absent: str = "zero") -> Sloped:
        return share_of_hits(c, weights, average, positive, absent, negatives)

    metric.__name__ = metric.__qualname__ = name
    metric.__doc__ = share_of_hits.__doc__
    return scored(metric)


precision = of_ratio("precision", (1, 0, 1))
"""Share of a class's predictions that are right."""
recall = of_ratio("recall", (1, 1, 0))
"""Share of a class's samples that are predicted as that class."""
f1 = of_ratio("f1", (2, 1, 1))
"""Harmonic mean of precision and recall."""
jaccard = of_ratio("jaccard", (1, 1, 1))
"""Intersection over union."""
specificity = of_ratio("specificity", (1, 0, 1), negatives=True)
"""Share of the other classes' samples that are not predicted as the class."""
npv = of_ratio("npv", (1, 1, 0), negatives=True)
"""Negative predictive value: of the samples not predicted as the class, the share that is not of the class."""


@scored
def fowlkes_mallows(c: Confusion, average: str | None = None, positive: int = 1, absent: str = "zero") -> Sloped:
    """Geometric mean of precision and recall, s / sqrt(t q); its slope by q is -1/2 s / (q sqrt(t q))."""
    total, diagonal, actual, predicted = class_sum(c.actual), c.diagonal, c.actual, c.predicted
    if average == "micro":
        diagonal, actual, predicted, shares = class_sum(diagonal), total, class_sum(predicted), 1.0
    else:
        shares = class_shares(c, average, positive, absent)
    predicted = divisor(predicted, total)
    factor = divisor(actual, total) ** -0.5 * predicted**-0.5
    values, weight = diagonal * factor, shares * factor
    value = values if average == "none" else (values * shares).sum(-1)
    return Sloped(value, weight, diagonal * weight / predicted * -0.5)


@scored
def mcc(c: Confusion) -> Sloped:
    """Matthews correlation; with more than two classes Gorodkin's R_K; 0 when only one class occurs or is predicted.

    With s, t and q the diagonal, actual and predicted counts as shares of the total, M = cov / sqrt(U V), where
    cov = sum(s - t q), U = sum t (1 - t) and V = sum q (1 - q); dM/dq = (q cov / V - t) / sqrt(U V). Where q >= 1/2,
    s - t q is computed as t (1 - q) - missed: each form loses precision where the other is accurate.
    """
    total = divisor(class_sum(c.actual))
    t, q = c.actual / total, c.predicted / total
    others = class_sum(q) - q
    U, V = (divisor(class_sum(x), 1.0) for x in (t * (class_sum(t) - t), q * others))
    covariance = class_sum(library_of(q).where(q < 0.5, c.diagonal / total - t * q, t * others - c.missed / total))
    scale = U**-0.5 * V**-0.5
    by_diagonal = scale / total
    by_predicted = (q * (covariance / V) - t) * by_diagonal
    return Sloped(at_least(at_most(covariance * scale, 1), -1)[..., 0], by_diagonal, by_predicted)


@scored
def kappa(c: Confusion) -> Sloped:
    """Cohen's kappa: agreement beyond chance; 0 when all samples are in one cell.

    Computed as 1 - missed / (missed by chance): both are sums of non-negative terms, so nothing cancels.
    """
    total = divisor(class_sum(c.actual))
    expected = divisor(class_sum(c.actual / total * (class_sum(c.predicted) - c.predicted) / total), 1.0)
    missed = class_sum(c.missed) / total
    score = 1 - missed / expected
    unclamped = score >= -1
    by_predicted = unclamped * missed / expected**2 * (class_sum(c.actual) - c.actual) / total**2
    value = at_least(score, -1) * (expected < np.inf)
    return Sloped(value[..., 0], unclamped / (total * expected), by_predicted)


@scored
def gmean(c: Confusion) -> Sloped:
    """Geometric mean of the recalls of the classes that have samples; 0 if one of these recalls is 0.

    A recall of at most RECALL_FLOOR counts as 0. The gradient is then that of the mean with recalls clamped to the
    floor, so that the other classes keep learning.
    """
    xp, present = library_of(c.actual), present_classes(c)
    count, actual = at_least(class_sum(present), 1), divisor(c.actual, class_sum(c.actual))
    recalls = c.diagonal / actual
    clamped = at_least(recalls, RECALL_FLOOR)
    mean = xp.exp(class_sum(xp.log(clamped) * present) / count)
    lost = mean * (class_sum((recalls <= RECALL_FLOOR) * present) > 0)
    value = mean - (lost.detach() if hasattr(lost, "detach") else lost)
    return Sloped(value[..., 0], mean / count / clamped / actual * (recalls >= RECALL_FLOOR))


@scored
def youden(c: Confusion) -> Sloped:
    """Youden's J, TPR + TNR - 1; with k classes that have samples, (k balanced accuracy - 1) / (k - 1); 0 for k = 1."""
    score = share_of_hits(c, (1, 1, 0), "macro", 1, "ignore")
    k = class_sum(present_classes(c))
    scale = (k > 1) / at_least(k - 1, 1)
    return Sloped((scale * (k * score.value[..., None] - 1))[..., 0], score.by_diagonal * scale * k)


def quadratic_kappa(c: Confusion, weights: Sequence[Sequence[float]] | Tensor | None = None) -> Tensor:
    """Weighted kappa for ordered classes; `weights` [d, d] are the disagreements, by default (i-j)^2 / (d-1)^2."""
    c, dtype = c.to(widest_float(c.diagonal)), c.diagonal.dtype
    if weights is None:
        rank = library_of(c.diagonal).arange(c.classes, dtype=c.diagonal.dtype, device=c.diagonal.device)
        disagreement = (rank.unsqueeze(-1) - rank) ** 2 / (c.classes - 1) ** 2
    else:
        disagreement = parameter("weights", weights, [(c.classes, c.classes)], c.diagonal)
    total = divisor(c.total)
    observed = (disagreement * c.matrix).sum((-2, -1)) / total
    expected = (c.actual * (c.predicted @ disagreement.T)).sum(-1) / total**2
    largest = disagreement.max()
    score = library_of(expected).where(expected > MIN_SHARE * largest, 1 - ratio(observed, expected, largest), 0.0)
    return score.to(dtype)


def cost(c: Confusion, costs: Sequence[Sequence[float]] | Tensor) -> Tensor:
    """Minus the mean cost of a sample; costs [d, d] has true classes in rows, predicted ones in columns."""
    of_cell = parameter("costs", costs, [(c.classes, c.classes)], c.diagonal)
    return -ratio((of_cell * c.matrix).sum((-2, -1)), c.total)


def parameter(name: str, value: PerClass | Sequence[Sequence[float]], shapes: Sequence[Any], like: Array) -> Array:
    """A parameter of one of these shapes, in the library, dtype and device of `like`; a number is returned as it is."""
    if isinstance(value, int | float):
        return value
    import torch

    values = torch.as_tensor(value)
    if values.shape not in shapes:
        raise ValueError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {tuple(values.shape)}")
    return values.cpu().numpy() if isinstance(like, np.ndarray) else values.to(like)


METRICS: dict[str, Metric] = {
    metric.__name__: metric
    for metric in (
        accuracy, balanced_accuracy, cost, f1, fbeta, fowlkes_mallows, gmean, jaccard, kappa, mcc, npv, precision,
        quadratic_kappa, recall, specificity, youden,
    )
}  # fmt: skip
WITH_SLOPES: dict[Metric, Callable[..., Sloped]] = {
    metric: metric.__wrapped__  # type: ignore[attr-defined]
    for metric in METRICS.values()
    if hasattr(metric, "__wrapped__")
}


def parse(metric: str | Metric, parameters: Mapping[str, Any] | None = None) -> tuple[Metric, dict[str, Any]]:
    """A metric's function and parameters. A name may end in its average: f1_macro, f1_positive (also f1_pos).

    A `positive` class without an average means average="positive".

    >>> parse("f1_positive")[1]
    {'average': 'positive'}
    """
    parameters = dict(parameters or {})
    stem, _, suffix = metric.rpartition("_") if isinstance(metric, str) else ("", "", "")
    average = {"pos": "positive"}.get(suffix, suffix)
    if average in AVERAGES and stem in METRICS and takes_average(METRICS[stem]):
        if parameters.setdefault("average", average) != average:
            raise ValueError(f"average: {metric} is {stem} with average={average!r}, got {parameters['average']!r}")
        return METRICS[stem], parameters
    function = resolve(metric)
    if parameters.get("positive") is not None and takes_average(function):
        parameters.setdefault("average", "positive")
    return function, parameters


def takes_average(metric: Metric) -> bool:
    """True if the metric averages over classes, by default as `default_average` says; a user's has its own default."""
    parameter = inspect.signature(metric).parameters.get("average")
    return parameter is not None and parameter.default is None


def resolve(metric: str | Metric) -> Metric:
    """The function behind a name of METRICS, a dotted path such as `mypackage.mymodule.my_metric`, or a callable."""
    if callable(metric):
        return metric
    module, _, name = str(metric).rpartition(".")
    if not module:
        return METRICS[choose("metric", name, METRICS)]
    try:
        function = import_by_path(str(metric))
    except ValueError as error:
        raise ValueError(f"metric {metric!r} cannot be imported: {error}") from error
    if not callable(function) or isinstance(function, type) or inspect.isbuiltin(function):  # never call os.system
        raise ValueError(
            f"metric {metric!r}: expected a function of a Confusion, got {function!r} ({type(function).__name__})"
        )
    return function
