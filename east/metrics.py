"""Scores of a Confusion, hard or soft, for training and evaluation alike. METRICS lists them by name.

Each is f(confusion, **parameters) -> Tensor[...], one number per leading index, larger is better. A denominator of at
most MIN_SHARE of the total counts as 0, and x/0 scores 0 with a gradient of 0 (`divisor`). This gives 0/0 the score of
scikit-learn, keeps gradients finite, and makes scores independent of the scale of the counts. Counts that are
differences are computed without cancellation and clamped to their range.
`average`: macro (mean over classes), weighted (by class frequency), positive (one class), micro (counts summed over
classes), none (one number per class).
`absent`: whether a class without samples counts as zero in a macro mean (eq. 2, arXiv 2405.20954) or is ignored.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from east.choices import choose, import_by_path
from east.confusion import Confusion, dtype_of_sums, sum_of_others

MIN_SHARE = 1e-12  # a denominator of at most this share of the total counts as 0
RECALL_FLOOR = 1e-6  # a recall below this has no gradient in the geometric mean

Metric = Callable[..., Tensor]
PerClass = float | Sequence[float] | Tensor
AVERAGES = ("macro", "weighted", "positive", "micro", "none")
ABSENT = ("zero", "ignore")


def divisor(whole: Tensor, total: Tensor | float = 0.0) -> Tensor:
    """A denominator, infinite where it is at most MIN_SHARE of the total: quotients and their gradients are 0 there."""
    return whole.masked_fill(whole <= MIN_SHARE * total, torch.inf)


def ratio(part: Tensor, whole: Tensor, total: Tensor | float = 0.0) -> Tensor:
    """part / whole, and 0 where whole is 0, or at most MIN_SHARE of the total; its gradient is finite everywhere."""
    return part / divisor(whole, total)


def averaged(part: Tensor, whole: Tensor, c: Confusion, average: str, positive: int, absent: str) -> Tensor:
    """The average [...] over classes of part / whole [..., d]; "micro" divides the sums instead."""
    if average == "micro":
        return ratio(part.sum(-1), whole.sum(-1), c.total)
    return average_over_classes(ratio(part, whole, c.total.unsqueeze(-1)), c, average, positive, absent)


def average_over_classes(values: Tensor, c: Confusion, average: str, positive: int, absent: str) -> Tensor:
    """The average [...] of values [..., d]; average="none" returns the values unchanged."""
    if average == "none":
        return values
    if average == "positive":
        return values[..., checked_class(positive, c.classes)]
    shares = class_shares(c, average, absent)
    return values.mean(-1) if isinstance(shares, float) else (values * shares).sum(-1)


def class_shares(c: Confusion, average: str, absent: str) -> float | Tensor:
    """The weight of each class in an average: one number for all classes, or weights [..., d]."""
    if average == "macro" and absent == "zero":
        return 1 / c.classes
    if average == "macro" and choose("absent", absent, ABSENT):
        present = present_classes(c).to(c.actual.dtype)
        return present / present.sum(-1, keepdim=True).clamp_min(1)
    if average == "weighted":
        return ratio(c.actual, c.total.unsqueeze(-1))
    raise ValueError(choose("average", average, AVERAGES))


def checked_class(positive: int, classes: int) -> int:
    if not -classes <= positive < classes:
        raise ValueError(f"positive class {positive} does not exist: expected 0 to {classes - 1}")
    return positive


def present_classes(c: Confusion) -> Tensor:
    """Which classes [..., d] have samples: more than MIN_SHARE of the total."""
    return c.actual > MIN_SHARE * c.total.unsqueeze(-1)


def mean_of_present(values: Tensor, c: Confusion) -> Tensor:
    """Mean of values [..., d] over the classes that have samples."""
    present = present_classes(c).to(values.dtype)
    return (values * present).sum(-1) / present.sum(-1).clamp_min(1)


def recalls_of(c: Confusion) -> Tensor:
    """The recall of each class [..., d], 0 for a class without samples."""
    return ratio(c.diagonal, c.actual, c.total.unsqueeze(-1))


def per_class_values(name: str, value: PerClass, classes: int, like: Tensor) -> float | Tensor:
    """A number for all classes, or one per class as a tensor [d] with the dtype and device of `like`."""
    if isinstance(value, int | float):
        return value
    values = torch.as_tensor(value)
    if values.shape not in ((), (classes,)):
        raise ValueError(f"{name}: expected a number or one per class ({classes}), got shape {tuple(values.shape)}")
    return values.to(like)


def accuracy(c: Confusion) -> Tensor:
    """Share of correct samples (micro accuracy)."""
    return ratio(c.diagonal.sum(-1), c.total)


def balanced_accuracy(c: Confusion) -> Tensor:
    """Mean recall of the classes that have samples (macro accuracy)."""
    return mean_of_present(recalls_of(c), c)


def precision(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Share of a class's predictions that are right."""
    return averaged(c.diagonal, c.predicted, c, average, positive, absent)


def recall(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Share of a class's samples that are predicted as that class."""
    return averaged(c.diagonal, c.actual, c, average, positive, absent)


def fbeta(
    c: Confusion, beta: PerClass = 1.0, average: str = "macro", positive: int = 1, absent: str = "zero"
) -> Tensor:
    """F_beta per class, then averaged; beta < 1 prefers precision, beta > 1 recall. Eq. 2, arXiv 2405.20954.

    Computed from counts, (1+b^2) TP / (b^2 actual + predicted): in terms of precision and recall it would be 0/0 where
    this is 0.
    """
    square = per_class_values("beta", beta, c.classes, c.diagonal) ** 2
    return averaged((1 + square) * c.diagonal, square * c.actual + c.predicted, c, average, positive, absent)


def f1(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Harmonic mean of precision and recall."""
    return averaged(2 * c.diagonal, c.actual + c.predicted, c, average, positive, absent)


def jaccard(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Intersection over union."""
    return averaged(c.diagonal, c.actual + c.predicted - c.diagonal, c, average, positive, absent)


def fowlkes_mallows(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Geometric mean of precision and recall."""
    exact = dtype_of_sums(c.actual)  # in float32, the gradient of a root of a tiny count can overflow
    diagonal, actual, predicted, total = (x.to(exact) for x in (c.diagonal, c.actual, c.predicted, c.total))
    if average == "micro":
        diagonal, actual, predicted = (x.sum(-1) for x in (diagonal, actual, predicted))
    else:
        total = total.unsqueeze(-1)
    values = (diagonal * divisor(actual, total).rsqrt() * divisor(predicted, total).rsqrt()).to(c.actual.dtype)
    return values if average == "micro" else average_over_classes(values, c, average, positive, absent)


def specificity(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Share of the other classes' samples that are not predicted as the class."""
    negatives = sum_of_others(c.actual)
    return averaged_true_negatives(negatives - c.false_positives, negatives, c, average, positive, absent)


def npv(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Negative predictive value: of the samples not predicted as the class, the share that is not of the class."""
    rejected = sum_of_others(c.predicted)
    return averaged_true_negatives(rejected - c.missed, rejected, c, average, positive, absent)


def averaged_true_negatives(
    true_negatives: Tensor, whole: Tensor, c: Confusion, average: str, positive: int, absent: str
) -> Tensor:
    """The average [...] over classes of true_negatives / whole [..., d]; as a difference, they can round below 0."""
    if average == "micro":
        true_negatives = true_negatives.sum(-1, keepdim=True)
    return averaged(true_negatives.clamp_min(0), whole, c, average, positive, absent)


def mcc(c: Confusion) -> Tensor:
    """Matthews correlation; with more than two classes Gorodkin's R_K; 0 when only one class occurs or is predicted.

    With s, t and q the diagonal, actual and predicted counts as shares of the total, the covariance is sum(s - t q).
    Where q >= 1/2, s - t q is computed as t (1 - q) - missed: each form loses precision where the other is accurate.
    """
    n = divisor(c.total).unsqueeze(-1)
    shares = torch.stack((c.actual, c.predicted)) / n
    complement = sum_of_others(shares)
    t, q = shares.unbind(0)
    covariance = torch.where(q < 0.5, c.diagonal / n - t * q, t * complement[1] - c.missed / n).sum(-1)
    variances = (shares * complement).sum(-1)
    actual_scale, predicted_scale = divisor(variances, 1.0).rsqrt().unbind(0)
    return (covariance * actual_scale * predicted_scale).clamp(-1, 1)


def kappa(c: Confusion) -> Tensor:
    """Cohen's kappa: agreement beyond chance; 0 when all samples are in one cell.

    Computed as 1 - missed / (missed by chance): both are sums of non-negative terms, so nothing cancels.
    """
    exact = dtype_of_sums(c.actual)  # the square of a float32 count can overflow
    n = divisor(c.total).to(exact)
    expected = (c.actual.to(exact) * sum_of_others(c.predicted)).sum(-1) / n**2
    missed = c.missed.sum(-1) / n
    return beyond_chance(missed, expected, 1.0).clamp_min(-1).to(c.actual.dtype)


def beyond_chance(observed: Tensor, expected: Tensor, largest: Tensor | float) -> Tensor:
    """1 - observed / expected disagreement, and 0 where at most MIN_SHARE of the largest possible one is expected."""
    return torch.where(expected > MIN_SHARE * largest, 1 - ratio(observed, expected, largest), 0.0)


def quadratic_kappa(c: Confusion, weights: Sequence[Sequence[float]] | Tensor | None = None) -> Tensor:
    """Weighted kappa for ordered classes; `weights` [d, d] are the disagreements, by default (i-j)^2 / (d-1)^2."""
    if weights is None:
        rank = torch.arange(c.classes, dtype=c.diagonal.dtype, device=c.diagonal.device)
        disagreement = (rank.unsqueeze(-1) - rank) ** 2 / (c.classes - 1) ** 2
    else:
        disagreement = square_matrix("weights", weights, c)
    exact = dtype_of_sums(c.actual)
    n = divisor(c.total).to(exact)
    observed = (disagreement * c.matrix).sum((-2, -1)) / n
    expected = (c.actual.to(exact) * (c.predicted @ disagreement.T)).sum(-1) / n**2
    return beyond_chance(observed, expected, disagreement.max()).to(c.actual.dtype)


def cost(c: Confusion, costs: Sequence[Sequence[float]] | Tensor) -> Tensor:
    """Minus the mean cost of a sample; costs [d, d] has true classes in rows, predicted ones in columns."""
    return -ratio((square_matrix("costs", costs, c) * c.matrix).sum((-2, -1)), c.total)


def square_matrix(name: str, values: Sequence[Sequence[float]] | Tensor, c: Confusion) -> Tensor:
    """A d x d parameter as a tensor with the dtype and device of the counts."""
    matrix = torch.as_tensor(values, dtype=c.diagonal.dtype, device=c.diagonal.device)
    if matrix.shape != (c.classes, c.classes):
        raise ValueError(f"{name}: expected a {c.classes} x {c.classes} matrix, got shape {tuple(matrix.shape)}")
    return matrix


def gmean(c: Confusion) -> Tensor:
    """Geometric mean of the recalls of the classes that have samples; 0 if one of these recalls is 0.

    A recall of at most RECALL_FLOOR counts as 0. The gradient is then that of the mean with recalls clamped to the
    floor, so that the other classes keep learning.
    """
    recalls = recalls_of(c)
    mean = mean_of_present(recalls.clamp_min(RECALL_FLOOR).log(), c).exp()
    missed_entirely = ((recalls <= RECALL_FLOOR) & present_classes(c)).any(-1)
    return mean - torch.where(missed_entirely, mean, 0.0).detach()


def youden(c: Confusion) -> Tensor:
    """Youden's J, TPR + TNR - 1; with k classes that have samples, (k balanced accuracy - 1) / (k - 1); 0 for k = 1."""
    present = present_classes(c).sum(-1)
    return torch.where(present > 1, (present * balanced_accuracy(c) - 1) / (present - 1).clamp_min(1), 0.0)


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "cost": cost,
    "f1": f1,
    "fbeta": fbeta,
    "fowlkes_mallows": fowlkes_mallows,
    "gmean": gmean,
    "jaccard": jaccard,
    "kappa": kappa,
    "mcc": mcc,
    "npv": npv,
    "precision": precision,
    "quadratic_kappa": quadratic_kappa,
    "recall": recall,
    "specificity": specificity,
    "youden": youden,
}


def parse(metric: str | Metric, parameters: Mapping[str, Any] | None = None) -> tuple[Metric, dict[str, Any]]:
    """A metric's function and parameters. A name may end in its average: f1_macro, f1_positive (also f1_pos).

    >>> parse("f1_positive")[1]
    {'average': 'positive'}
    """
    parameters = dict(parameters or {})
    stem, _, suffix = metric.rpartition("_") if isinstance(metric, str) else ("", "", "")
    average = {"pos": "positive"}.get(suffix, suffix)
    if average not in AVERAGES or "average" not in inspect.signature(METRICS.get(stem, resolve)).parameters:
        return resolve(metric), parameters
    if parameters.setdefault("average", average) != average:
        raise ValueError(f"average: {metric} is {stem} with average={average!r}, got {parameters['average']!r}")
    return METRICS[stem], parameters


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


def check_leading(metric: Metric, classes: int) -> None:
    """ValueError unless the metric gives one number per leading index, tried on a few uniform counts."""
    leading = 3 if classes == 2 else 2  # unlike the classes, so that one cannot be taken for the other
    counts = torch.ones(leading, classes, dtype=torch.float64)  # as evaluation counts
    uniform = Confusion(
        counts / classes, counts, counts, lambda: (counts / classes).unsqueeze(-1).expand(-1, -1, classes)
    )
    advice = "index classes from the right, as in c.diagonal[..., 1]"
    try:
        shape = tuple(torch.as_tensor(metric(uniform)).shape)
    except IndexError as error:
        raise ValueError(f"metric: {error}; {advice}") from error
    if shape != (leading,):
        raise ValueError(f"metric: expected one number per leading index, {(leading,)}, got shape {shape}; {advice}")
