"""Slopes dM/dC of a metric M at confusion counts C: hand-derived where the metric has them, else by autograd.

Counts have one of two layouts. Margins [..., 3, d] are diagonal, actual and predicted counts. Their slopes are
dM/dC_kj = A_k + P_j + [j=k] D_k; A is constant within a row and changes no weight and no decision, so only D and P are
returned. Cells [..., d, d] are for metrics that read `Confusion.matrix`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from east.arrays import Array, as_array, as_tensor, library_of
from east.confusion import Confusion
from east.metrics import WITH_SLOPES, Metric, Sloped

Score = Callable[[Confusion], Tensor]


def reads_matrix(score: Score, classes: int) -> bool:
    """True if a metric reads Confusion.matrix, found on uniform counts.

    ValueError unless it gives one number per leading index.
    """
    leading = 3 if classes == 2 else 2  # unlike the classes, so that one cannot be taken for the other
    touched, counts = [], torch.ones(leading, classes, dtype=torch.float64)  # as evaluation counts

    def matrix() -> Tensor:
        touched.append(True)
        return (counts / classes).unsqueeze(-1).expand(-1, -1, classes)

    advice = "index classes from the right, as in c.diagonal[..., 1]"
    try:
        shape = tuple(torch.as_tensor(score(Confusion(counts / classes, counts, counts, matrix))).shape)
    except IndexError as error:
        raise ValueError(f"metric: {error}; {advice}") from error
    if shape != (leading,):
        raise ValueError(f"metric: expected one number per leading index, {(leading,)}, got shape {shape}; {advice}")
    return bool(touched)


def refuse_matrix() -> Tensor:
    raise ValueError("metric: expected to read Confusion.matrix always or never, but it reads it only for some counts")


def score_and_slopes(metric: Metric, parameters: Mapping[str, Any], c: Confusion) -> Sloped:
    """A metric and its slopes D and P [..., d] at counts in float64, arrays or tensors."""
    if metric in WITH_SLOPES:
        score, D, P = WITH_SLOPES[metric](c, **parameters)
        zero = 0 * c.actual
        return Sloped(score, D + zero, P + zero)  # they may be one number for all classes
    counts = as_tensor(counts_of(c, in_cells=False))
    score, slopes = by_autograd(partial(metric, **parameters), counts, in_cells=False)
    return Sloped(*(as_array(x) for x in (score, *slopes.unbind(-2))))


def counts_of(c: Confusion, in_cells: bool) -> Array:
    """The counts of a Confusion in one of the two layouts."""
    return c.matrix if in_cells else library_of(c.diagonal).stack((c.diagonal, c.actual, c.predicted), -2)


def by_autograd(score: Score, counts: Tensor, in_cells: bool) -> tuple[Tensor, Tensor]:
    """A score, and its slopes: G = dM/dC [..., d, d] at cells, or D and P [..., 2, d] at margins."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = counts.detach().clone().requires_grad_()  # cloned: a tensor made in inference mode takes no gradient
        if in_cells:
            value = score(Confusion.from_matrix(leaf))
        else:
            value = score(Confusion(leaf[..., 0, :], leaf[..., 1, :], leaf[..., 2, :], refuse_matrix))
        if not value.requires_grad:
            raise ValueError("metric: expected a differentiable function of the counts, got one without a gradient")
        slopes = torch.autograd.grad(value.sum(), leaf)[0]
    return value.detach(), slopes if in_cells else slopes[..., ::2, :]
