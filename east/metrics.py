"""Scores of a Confusion, hard or soft: the same functions train and judge. METRICS lists them by name.

Each is f(confusion, **parameters) -> Tensor[...], one number per leading index, larger is better. Denominators are held
above EPS: 0/0 scores 0, as in scikit-learn, and gradients stay finite. Where such a denominator would magnify the
numerator's rounding, the score is set to 0.
`average`: macro (mean over classes), weighted (by class frequency), positive (one class), none (one number per class).
`absent`: whether a class without samples counts as zero in a macro mean (eq. 2, arXiv 2405.20954) or is ignored.
"""

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from east.choices import choose
from east.confusion import Confusion

EPS = 1e-12
RECALL_FLOOR = 1e-6  # below it the geometric mean's gradient is cut off

Metric = Callable[..., Tensor]
PerClass = float | Sequence[float] | Tensor
AVERAGES = ("macro", "weighted", "positive", "none")
ABSENT = ("zero", "ignore")


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where both vanish, with a finite gradient everywhere."""
    return part / whole.clamp_min(EPS)


def averaged(values: Tensor, c: Confusion, average: str, positive: int, absent: str) -> Tensor:
    """One number per leading index from values [..., d] of the classes."""
    if average == "macro" and absent == "zero":
        return values.mean(-1)
    if average == "macro" and choose("absent", absent, ABSENT):
        return mean_of_present(values, c)
    if average == "positive":
        if not -c.classes <= positive < c.classes:
            raise ValueError(f"positive class {positive} does not exist: expected 0 to {c.classes - 1}")
        return values[..., positive]
    if average == "weighted":
        return ratio((values * c.actual).sum(-1), c.total)
    choose("average", average, AVERAGES)
    return values


def mean_of_present(values: Tensor, c: Confusion) -> Tensor:
    """Mean of values [..., d] over the classes that have samples."""
    present = (c.actual > 0).to(values.dtype)
    return (values * present).sum(-1) / present.sum(-1).clamp_min(1)


def per_class_values(name: str, value: PerClass, c: Confusion) -> float | Tensor:
    """A number for all classes, or one per class as a tensor [d]."""
    if isinstance(value, int | float):
        return value
    values = torch.as_tensor(value, dtype=c.diagonal.dtype, device=c.diagonal.device)
    if values.shape not in ((), (c.classes,)):
        raise ValueError(f"{name}: expected a number or one per class ({c.classes}), got shape {tuple(values.shape)}")
    return values


def proportions(c: Confusion) -> tuple[Tensor, Tensor, Tensor]:
    """Diagonal, row and column shares: s, t and q of the formulas."""
    n = c.total.unsqueeze(-1).clamp_min(EPS)
    return c.diagonal / n, c.actual / n, c.predicted / n


def accuracy(c: Confusion) -> Tensor:
    """Share of correct samples (micro accuracy)."""
    return ratio(c.diagonal.sum(-1), c.total)


def balanced_accuracy(c: Confusion) -> Tensor:
    """Mean recall of the classes that have samples (macro accuracy)."""
    return mean_of_present(ratio(c.diagonal, c.actual), c)


def precision(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Share of a class's predictions that are right."""
    return averaged(ratio(c.diagonal, c.predicted), c, average, positive, absent)


def recall(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Share of a class's samples that are found."""
    return averaged(ratio(c.diagonal, c.actual), c, average, positive, absent)


def fbeta(
    c: Confusion, beta: PerClass = 1.0, average: str = "macro", positive: int = 1, absent: str = "zero"
) -> Tensor:
    """F_beta per class, then averaged; beta < 1 prefers precision, beta > 1 recall. Eq. 2, arXiv 2405.20954.

    Written on counts, (1+b^2) TP / (b^2 actual + predicted): the form in precision and recall is 0/0 where this is 0.
    """
    square = per_class_values("beta", beta, c) ** 2
    return averaged(ratio((1 + square) * c.diagonal, square * c.actual + c.predicted), c, average, positive, absent)


def f1(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Harmonic mean of precision and recall."""
    return averaged(ratio(2 * c.diagonal, c.actual + c.predicted), c, average, positive, absent)


def f1_loss_and_slopes(diagonal: Tensor, actual: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """1 - f1's macro mean, and its derivatives with respect to the diagonal and the predicted counts [..., d].

    They are autograd's to the last bit, without its graph, which for a small batch costs as much as cross-entropy.
    """
    whole = (actual + predicted).clamp_min_(EPS)
    values = (diagonal + diagonal).div_(whole)
    loss = 1 - values.mean(-1)
    share = whole.new_full((), 1 / whole.shape[-1])
    by_predicted = values.div_(whole).mul_(share)
    return loss, (share + share).neg_() / whole, by_predicted


def jaccard(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Intersection over union."""
    return averaged(ratio(c.diagonal, c.actual + c.predicted - c.diagonal), c, average, positive, absent)


def fowlkes_mallows(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Geometric mean of precision and recall."""
    values = c.diagonal * c.actual.clamp_min(EPS).rsqrt() * c.predicted.clamp_min(EPS).rsqrt()
    return averaged(values, c, average, positive, absent)


def specificity(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Share of the other classes' samples that are not given to the class."""
    negatives = c.total.unsqueeze(-1) - c.actual
    true_negatives = negatives - c.predicted + c.diagonal
    return averaged(ratio(true_negatives, negatives), c, average, positive, absent)


def npv(c: Confusion, average: str = "macro", positive: int = 1, absent: str = "zero") -> Tensor:
    """Negative predictive value: share of the predictions against a class that are right."""
    rejected = c.total.unsqueeze(-1) - c.predicted
    true_negatives = rejected - c.actual + c.diagonal
    return averaged(ratio(true_negatives, rejected), c, average, positive, absent)


def mcc(c: Confusion) -> Tensor:
    """Matthews correlation; with more than two classes Gorodkin's R_K; 0 when only one class occurs or is predicted.

    sum t(1-t) is kept instead of 1 - sum t^2, which cancels in float32 when one class dominates.
    """
    s, t, q = proportions(c)
    actual, predicted = (t * (1 - t)).sum(-1), (q * (1 - q)).sum(-1)
    correlation = (s - t * q).sum(-1) * actual.clamp_min(EPS).rsqrt() * predicted.clamp_min(EPS).rsqrt()
    return torch.where(torch.minimum(actual, predicted) > EPS, correlation, 0.0)


def kappa(c: Confusion) -> Tensor:
    """Cohen's kappa: agreement beyond chance; 0 when all samples are in one cell."""
    s, t, q = proportions(c)
    expected = (t * (1 - q)).sum(-1)
    return torch.where(expected > EPS, ratio((s - t * q).sum(-1), expected), 0.0)


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
    """A user's d x d parameter as a tensor beside the counts."""
    matrix = torch.as_tensor(values, dtype=c.diagonal.dtype, device=c.diagonal.device)
    if matrix.shape != (c.classes, c.classes):
        raise ValueError(f"{name}: expected a {c.classes} x {c.classes} matrix, got shape {tuple(matrix.shape)}")
    return matrix


def gmean(c: Confusion) -> Tensor:
    """Geometric mean of the recalls of the classes that have samples; 0 when one of them is never found."""
    recalls = ratio(c.diagonal, c.actual)
    mean = mean_of_present(recalls.clamp_min(RECALL_FLOOR).log(), c).exp()
    missed = ((recalls == 0) & (c.actual > 0)).any(-1)
    return torch.where(missed, 0.0, mean)


def youden(c: Confusion) -> Tensor:
    """Youden's J, TPR + TNR - 1; with k classes that have samples (k balanced accuracy - 1) / (k - 1), 0 for k = 1."""
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


def resolve(metric: str | Metric) -> Metric:
    """The function behind a name of METRICS, a dotted path such as `mypackage.mymodule.my_metric`, or a callable."""
    if callable(metric):
        return metric
    module, _, name = str(metric).rpartition(".")
    if not module:
        return METRICS[choose("metric", name, METRICS)]
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"metric {metric!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"metric {metric!r}: expected a function of a Confusion, got {type(function).__name__}")
    return function
