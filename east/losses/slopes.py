"""Slopes dM/dC of a metric M at confusion counts C: hand-derived where the metric has them, else by autograd.

Counts have one of two layouts. Margins are diagonal, missed and false positives, each [..., d]. Their slopes are
dM/dC_kj = A_k + P_j + [j=k] D_k; A is constant within a row and changes no weight and no decision, so only D and P are
returned. Cells [..., d, d] are for metrics that read `Confusion.matrix`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from east.arrays import Array, class_sum
from east.confusion import Confusion
from east.metrics import WITH_SLOPES, Metric, Sloped

Score = Callable[[Confusion], Tensor]


def reads_matrix(score: Score, classes: int) -> bool:
    """True if a metric reads Confusion.matrix, found by calling it on uniform counts."""
    touched, ones = [], torch.ones(classes)

    def matrix() -> Tensor:
        touched.append(True)
        return torch.full((classes, classes), 1 / classes)

    score(Confusion(ones / classes, ones, ones, matrix))
    return bool(touched)


def refuse_matrix() -> Tensor:
    raise ValueError("metric: expected to read Confusion.matrix always or never, but it reads it only for some counts")


def by_hand(
    metric: Metric, parameters: Mapping[str, Any], diagonal: Array, missed: Array, false_positives: Array
) -> Sloped:
    """A metric of WITH_SLOPES and its slopes at counts [..., d], which are arrays or tensors in float64."""
    counts = Confusion(diagonal, diagonal + missed, diagonal + false_positives, refuse_matrix, missed, false_positives)
    return WITH_SLOPES[metric](counts, **parameters)


def loss_and_slopes(
    metric: Metric, parameters: Mapping[str, Any], diagonal: Array, missed: Array, false_positives: Array
) -> Sloped:
    """1 - metric and its slopes, as in `by_hand`; all 0 where the counts are empty."""
    score, D, P = by_hand(metric, parameters, diagonal, missed, false_positives)
    filled = class_sum(diagonal + missed)[..., 0] != 0  # the slopes are 0 already where it is not
    return Sloped((1 - score) * filled, -D, -P)


def of_margins(score: Score, diagonal: Tensor, actual: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes D and P [..., d] at margins [..., d], by autograd."""

    def confusion(margins: Tensor) -> Confusion:
        diagonal, actual, predicted = margins.unbind(-2)
        return Confusion(diagonal, actual, predicted, refuse_matrix)

    by_count = by_autograd(score, torch.stack((diagonal, actual, predicted), -2), confusion)
    return by_count[..., 0, :], by_count[..., 2, :]


def of_cells(score: Score, cells: Tensor) -> Tensor:
    """The slopes G = dM/dC [..., d, d] at cells [..., d, d], by autograd."""
    return by_autograd(score, cells, Confusion.from_matrix)


def by_autograd(score: Score, counts: Tensor, confusion: Callable[[Tensor], Confusion]) -> Tensor:
    """The derivatives of the score with respect to counts [..., k, d], from which `confusion` makes a Confusion."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = counts.detach().clone().requires_grad_()  # cloned: a tensor made in inference mode takes no gradient
        value = score(confusion(leaf))
        if value.shape != leaf.shape[:-2]:
            raise ValueError(
                f"metric: expected one number per leading index, {tuple(leaf.shape[:-2])}, "
                f"got shape {tuple(value.shape)}"
            )
        if not value.requires_grad:
            raise ValueError("metric: expected a differentiable function of the counts, got one without a gradient")
        return torch.autograd.grad(value.sum(), leaf)[0]
