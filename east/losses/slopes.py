"""Slopes dM/dC of a metric at confusion counts, by autograd or by hand.

Counts take one of two layouts. Margins [..., 3, d] hold diagonal, actual and predicted; there dM/dC_kj = A_k + P_j +
[j=k] D_k, and A, constant within a row, changes no weight and no decision: D and P are what is asked for. Cells
[..., d, d] serve the metrics that read `Confusion.matrix`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from east import metrics
from east.confusion import Confusion
from east.metrics import EPS

Score = Callable[[Confusion], Tensor]
Slopes = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def reads_matrix(score: Score, classes: int) -> bool:
    """Whether a metric looks at Confusion.matrix: tried on counts without structure."""
    touched, ones = [], torch.ones(classes)

    def matrix() -> Tensor:
        touched.append(True)
        return torch.full((classes, classes), 1 / classes)

    score(Confusion(ones / classes, ones, ones, matrix))
    return bool(touched)


def from_margins(margins: Tensor) -> Confusion:
    """The Confusion of margins [..., 3, d], without a matrix."""
    diagonal, actual, predicted = margins.unbind(-2)
    return Confusion(diagonal, actual, predicted, refuse_matrix)


def refuse_matrix() -> Tensor:
    raise ValueError("metric: it reads Confusion.matrix for some counts but not for all; expected always or never")


def of_margins(score: Score, diagonal: Tensor, actual: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """D and P [..., d] at margins [..., d]."""
    by_count = by_autograd(score, torch.stack((diagonal, actual, predicted), -2), from_margins)
    return by_count[..., 0, :], by_count[..., 2, :]


def of_cells(score: Score, cells: Tensor) -> Tensor:
    """G [..., d, d] at cells [..., d, d]."""
    return by_autograd(score, cells, Confusion.from_matrix)


def by_autograd(score: Score, counts: Tensor, confusion: Callable[[Tensor], Confusion]) -> Tensor:
    with torch.enable_grad():
        leaf = counts.detach().requires_grad_()
        value = score(confusion(leaf))
        if value.shape != leaf.shape[:-2]:
            raise ValueError(
                f"metric: expected one number per leading index, {tuple(leaf.shape[:-2])}, "
                f"got shape {tuple(value.shape)}"
            )
        if not value.requires_grad:
            raise ValueError("metric: expected a differentiable function of the counts, got one without gradient")
        return torch.autograd.grad(value.sum(), leaf)[0]


def closed_form(metric: metrics.Metric, parameters: Mapping[str, Any]) -> Slopes | None:
    """D and P of the commonest metrics by hand, up to a factor and to what is constant in a row; None for others."""
    if metric is metrics.mcc:
        return mcc_slopes
    if metric in (metrics.f1, metrics.fbeta):
        return partial(fbeta_slopes, **parameters)
    return None


def fbeta_slopes(
    diagonal: Tensor,
    actual: Tensor,
    predicted: Tensor,
    beta: metrics.PerClass = 1.0,
    average: str = "macro",
    positive: int = 1,
    absent: str = "zero",
) -> tuple[Tensor, Tensor]:
    """F_k = (1+b^2) s / (b^2 t + q): D_k = (1+b^2) / (b^2 t + q), P_k = -F_k / (b^2 t + q), times k's share."""
    c = Confusion(diagonal, actual, predicted, refuse_matrix)
    square = metrics.per_class_values("beta", beta, c) ** 2
    whole = (
        torch.addcmul(predicted, actual, square) if isinstance(square, Tensor) else predicted.add(actual, alpha=square)
    )
    whole = whole.clamp_min_(EPS)
    own = (1 + square) / whole
    if average == "weighted":
        own = own * actual
    elif average == "positive":
        if not -c.classes <= positive < c.classes:
            raise ValueError(f"positive class {positive} does not exist: expected 0 to {c.classes - 1}")
        share = torch.zeros_like(own)
        share[..., positive] = 1
        own = own * share
    elif absent == "ignore":
        own = torch.where(actual > 0, own, 0.0)
    return own, (own * diagonal).div_(whole).neg_()


def mcc_slopes(diagonal: Tensor, actual: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """M = N / sqrt(U V), N = sum s - t q, V = sum q (1 - q): times sqrt(U V), D_k = 1 and P_k = q_k N / V - t_k."""
    s, t, q = metrics.proportions(Confusion(diagonal, actual, predicted, refuse_matrix))
    spread, predicted_spread = (t * (1 - t)).sum(-1, keepdim=True), (q * (1 - q)).sum(-1, keepdim=True)
    usable = torch.minimum(spread, predicted_spread) > EPS
    covariance = (s - t * q).sum(-1, keepdim=True)
    across = q * (covariance / predicted_spread.clamp_min(EPS)) - t
    return usable.to(s.dtype).expand(s.shape), torch.where(usable, across, 0.0)
