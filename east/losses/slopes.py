"""Slopes dM/dC of a metric at confusion counts, by autograd; `by_hand.py` has hand-derived ones.

Counts have one of two layouts. Margins [..., 3, d] hold diagonal, actual and predicted counts. Their slopes are
dM/dC_kj = A_k + P_j + [j=k] D_k; A is constant within a row and changes no weight and no decision, so only D and P are
returned. Cells [..., d, d] are for metrics that read `Confusion.matrix`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from east.confusion import Confusion

Score = Callable[[Confusion], Tensor]


def reads_matrix(score: Score, classes: int) -> bool:
    """Whether a metric reads Confusion.matrix, found by calling it on uniform counts."""
    touched, ones = [], torch.ones(classes)

    def matrix() -> Tensor:
        touched.append(True)
        return torch.full((classes, classes), 1 / classes)

    score(Confusion(ones / classes, ones, ones, matrix))
    return bool(touched)


def from_margins(margins: Tensor) -> Confusion:
    """The Confusion of margins [..., 3, d]; its matrix raises an error."""
    diagonal, actual, predicted = margins.unbind(-2)
    return Confusion(diagonal, actual, predicted, refuse_matrix)


def refuse_matrix() -> Tensor:
    raise ValueError("metric: expected to read Confusion.matrix always or never, but it reads it only for some counts")


def of_margins(score: Score, diagonal: Tensor, actual: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes D and P [..., d] at margins [..., d]."""
    by_count = by_autograd(score, torch.stack((diagonal, actual, predicted), -2), from_margins)
    return by_count[..., 0, :], by_count[..., 2, :]


def of_cells(score: Score, cells: Tensor) -> Tensor:
    """The slopes G = dM/dC [..., d, d] at cells [..., d, d]."""
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
