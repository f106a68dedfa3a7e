"""Scores of a Confusion, hard or soft, for training and evaluation alike. METRICS lists them by name.

Each is f(confusion, **parameters) -> Tensor[...], one number per leading index, larger is better. Denominators are
clamped to at least EPS, so 0/0 scores 0, as in scikit-learn, and gradients stay finite. Counts that are differences are
computed without cancellation and clamped to their range; a denominator below MIN_SHARE of the total scores 0.
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
from east.confusion import Confusion, sum_of_others

EPS = 1e-12
MIN_SHARE = 1e-12  # a denominator below this share of the total counts as 0
RECALL_FLOOR = 1e-6  # a recall below this has no gradient in the geometric mean

Metric = Callable[..., Tensor]
PerClass = float | Sequence[float] | Tensor
AVERAGES = ("macro", "weighted", "positive", "micro", "none")
ABSENT = ("zero", "ignore")


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where both are 0, with a finite gradient everywhere."""
    return part / whole.clamp_min(EPS)


def averaged(part: Tensor, whole: Tensor, c: Confusion, average: str, positive: int, absent: str) -> Tensor:
    """The average [...] over classes of part / whole [..., d]; "micro" divides the sums instead."""
    if average == "micro":
        return ratio(part.sum(-1), whole.sum(-1))
    return average_over_classes(ratio(part, whole), c, average, positive, absent)


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
        present = (c.actual > 0).to(c.actual.dtype)
        return present / present.sum(-1, keepdim=True).clamp_min(1)
    if average == "weighted":
        return c.actual / c.total.unsqueeze(-1).clamp_min(EPS)
    raise ValueError(choose("average", average, AVERAGES))


def checked_class(positive: int, classes: int) -> int:
    if not -classes <= positive < classes:
        raise ValueError(f"positive class {positive} does not exist: expected 0 to {classes - 1}")
    return positive


def clamped_ratio(part: Tensor, whole: Tensor, total: Tensor) -> Tensor:
    """part / whole clamped to [0, 1], and 0 where whole is at most MIN_SHARE of the total."""
    smallest = MIN_SHARE * total
    score = part.clamp_min(0).minimum(whole) / whole.clamp_min(EPS).maximum(smallest)
    return torch.where(whole > smallest, score, 0.0)


def mean_of_present(values: Tensor, c: Confusion) -> Tensor:
    """Mean of values [..., d] over the classes that have samples."""
    present = (c.actual > 0).to(values.dtype)
    return (values * present).sum(-1) / present.sum(-1).clamp_min(1)


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
    return mean_of_present(ratio(c.diagonal, c.actual), c)


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
    diagonal, actual, predicted = c.diagonal, c.actual, c.predicted
    if average == "micro":
        diagonal, actual, predicted = (x.sum(-1) for x in (diagonal, actual, predicted))
    values = diagonal * actual.clamp_min(EPS).rsqrt() * predicted.clamp_min(EPS).rsqrt()
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
    """The average [...] over classes of true_negatives / whole [..., d], clamped to [0, 1]."""
    if average == "micro":
        return clamped_ratio(true_negatives.sum(-1), whole.sum(-1), c.total)
    scores = clamped_ratio(true_negatives, whole, c.total.unsqueeze(-1))
    return average_over_classes(scores, c, average, positive, absent)


def mcc(c: Confusion) -> Tensor:
    """Matthews correlation; with more than two classes Gorodkin's R_K; 0 when only one class occurs or is predicted.

    With s, t and q the diagonal, actual and predicted counts as shares of the total, the covariance is sum(s - t q).
    Where q >= 1/2, s - t q is computed as t (1 - q) - missed: each form loses precision where the other is accurate.
    """
    n = c.total.unsqueeze(-1).clamp_min(EPS)
    shares = torch.stack((c.actual, c.predicted)) / n
    complement = sum_of_others(shares)
    t, q = shares.unbind(0)
    covariance = torch.where(q < 0.5, c.diagonal / n - t * q, t * complement[1] - c.missed / n).sum(-1)
    variances = (shares * complement).sum(-1)
    actual_scale, predicted_scale = variances.clamp_min(EPS).rsqrt().unbind(0)
    correlation = (covariance * actual_scale * predicted_scale).clamp(-1, 1)
    return torch.where(variances.amin(0) > MIN_SHARE, correlation, 0.0)


def kappa(c: Confusion) -> Tensor:
    """Cohen's kappa: agreement beyond chance; 0 when all samples are in one cell.

    Computed as 1 - missed / (missed by chance): both are sums of non-negative terms, so nothing cancels.
    """
    n = c.total.clamp_min(EPS)
    expected = (c.actual * sum_of_others(c.predicted)).sum(-1) / n**2
    missed = c.missed.sum(-1) / n
    return torch.where(expected > MIN_SHARE, (1 - missed / expected.clamp_min(EPS)).clamp_min(-1), 0.0)


def quadratic_kappa(c: Confusion, weights: Sequence[Sequence[float]] | Tensor | None = None) -> Tensor:
    """Weighted kappa for ordered classes; `weights` [d, d] are the disagreements, by default (i-j)^2 / (d-1)^2."""
    if weights is None:
        rank = torch.arange(c.classes, dtype=c.diagonal.dtype, device=c.diagonal.device)
        disagreement = (rank.unsqueeze(-1) - rank) ** 2 / (c.classes - 1) ** 2
    else:
        disagreement = square_matrix("weights", weights, c)
    n = c.total.clamp_min(EPS)
    observed = (disagreement * c.matrix).sum((-2, -1)) / n
    expected = (c.actual * (c.predicted @ disagreement.T)).sum(-1) / n**2
    return torch.where(expected > EPS, 1 - ratio(observed, expected), 0.0)


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
    recalls = ratio(c.diagonal, c.actual)
    mean = mean_of_present(recalls.clamp_min(RECALL_FLOOR).log(), c).exp()
    missed_entirely = ((recalls <= RECALL_FLOOR) & (c.actual > 0)).any(-1)
    return mean - torch.where(missed_entirely, mean, 0.0).detach()


def youden(c: Confusion) -> Tensor:
    """Youden's J, TPR + TNR - 1; with k classes that have samples, (k balanced accuracy - 1) / (k - 1); 0 for k = 1."""
    present = (c.actual > 0).sum(-1)
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
