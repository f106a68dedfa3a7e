"""Confusion counts, hard or soft. Rows are true classes, columns predicted ones; leading dimensions are a population.

Almost every metric needs only the diagonal and the two margins, which cost O(n d). The d x d matrix is built only on
request, so training on 100,000 classes never allocates it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from east.arrays import Array, at_least, widest_float


class Confusion:
    """Counts over d classes: `diagonal`, `actual`, `predicted` [..., d], `total` [...], `matrix` [..., d, d].

    `missed` [..., d] is actual - diagonal: samples of the class that were given to other classes. `false_positives`
    [..., d] is predicted - diagonal: samples of other classes that were given to the class. Constructors that can sum
    them directly pass them in, because the difference of two nearly equal float32 counts is rounding noise.

    >>> c = Confusion.from_predictions(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), classes=2)
    >>> c.matrix.tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """

    def __init__(
        self,
        diagonal: Array,
        actual: Array,
        predicted: Array,
        matrix: Callable[[], Array],
        missed: Array | None = None,
        false_positives: Array | None = None,
    ):
        self.diagonal, self.actual, self.predicted = diagonal, actual, predicted
        self.missed = at_least(actual - diagonal, 0) if missed is None else missed
        self.false_positives = at_least(predicted - diagonal, 0) if false_positives is None else false_positives
        self.classes = diagonal.shape[-1]
        self._matrix: Array | Callable[[], Array] = matrix

    @property
    def total(self) -> Array:
        return self.actual.sum(-1)

    @property
    def matrix(self) -> Array:
        # functools.cached_property holds a lock in Python 3.11, which torch.compile cannot trace.
        if callable(self._matrix):
            self._matrix = self._matrix()
        return self._matrix

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which cannot store the function that builds the matrix, and so stores the matrix."""
        return self.__dict__ | {"_matrix": self.matrix}

    def to(self, dtype: torch.dtype) -> "Confusion":
        """The counts in another dtype."""
        if self.diagonal.dtype == dtype:
            return self
        counts = (self.diagonal, self.actual, self.predicted, self.missed, self.false_positives)
        diagonal, actual, predicted, *errors = (x.to(dtype) for x in counts)
        return Confusion(diagonal, actual, predicted, lambda: self.matrix.to(dtype), *errors)

    @classmethod
    def from_memberships(cls, memberships: Tensor, labels: Tensor, weights: Tensor | None = None) -> "Confusion":
        """Soft counts of memberships [..., n, d] (rows sum to 1) and labels [..., n]. Def. 5.5, arXiv 2405.20954.

        Floating-point labels [..., n, d] are soft targets: the share of each class in a sample. Labels and `weights`
        [..., n] may omit leading dimensions; they are then broadcast.
        """
        weights = memberships.new_ones(()) if weights is None else weights.to(memberships.dtype)
        weights = weights.expand(memberships.shape[:-1]).unsqueeze(-1)
        weighted = memberships * weights
        if labels.is_floating_point():
            targets = labels.to(memberships.dtype).expand(memberships.shape)
            of_others = sum_of_others(weighted)
        else:
            true_class = labels.expand(memberships.shape[:-1]).unsqueeze(-1)
            targets = torch.zeros_like(memberships).scatter(-1, true_class, 1)
            of_others = weighted.scatter(-1, true_class, 0).sum(-1, keepdim=True)  # without differences
        return cls(
            diagonal=(weighted * targets).sum(-2),
            actual=(weights * targets).sum(-2),
            predicted=weighted.sum(-2),
            matrix=lambda: targets.mT @ weighted,
            missed=(targets * of_others).sum(-2),
            false_positives=(weighted * sum_of_others(targets)).sum(-2),
        )

    @classmethod
    def from_shares(cls, predictions: Tensor, shares: Tensor) -> "Confusion":
        """Counts of predicted classes [..., n] where shares [n, d] tell how much of each sample is of each class."""
        leading = predictions.shape[:-1]
        hits = shares.expand(*leading, *shares.shape).gather(-1, predictions.unsqueeze(-1)).squeeze(-1)
        return cls(
            diagonal=per_class(hits, predictions, shares.shape[-1]),
            actual=shares.sum(0).expand(*leading, -1),
            predicted=per_class(shares.sum(-1).expand(predictions.shape), predictions, shares.shape[-1]),
            matrix=lambda: shares.mT @ one_hot(predictions, shares.shape[-1]).to(shares.dtype),
        )

    @classmethod
    def from_predictions(
        cls, predictions: Tensor, labels: Tensor, classes: int, weights: Tensor | None = None
    ) -> "Confusion":
        """Hard counts of predicted classes [..., n] and labels [..., n], in float64: exact up to 2^53 samples.

        Labels may omit leading dimensions. weights [..., n]: the weight of each sample, 1 by default.
        """
        predictions = check_range("predictions", torch.as_tensor(predictions), classes)
        labels = check_range("labels", torch.as_tensor(labels), classes)
        if labels.shape[-1:] != predictions.shape[-1:]:
            raise ValueError(
                f"labels: expected one per prediction, {list(predictions.shape)}, got shape {list(labels.shape)}"
            )
        labels = labels.expand(predictions.shape)
        counts = torch.ones_like(predictions, dtype=torch.float64)
        counts = counts if weights is None else counts * torch.as_tensor(weights)
        samples = predictions, labels, counts, classes
        return cls(*count_margins(*samples), lambda: count_cells(*samples))

    @classmethod
    def from_matrix(cls, matrix: Any) -> "Confusion":
        """The counts of an existing confusion matrix [..., d, d]: a tensor, an array or a list."""
        matrix = torch.as_tensor(matrix)
        if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
            raise ValueError(f"expected a matrix of shape [..., d, d], got {tuple(matrix.shape)}")
        if not matrix.is_floating_point():
            matrix = matrix.double()
        off_diagonal = matrix.masked_fill(torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device), 0)
        return cls(
            diagonal=matrix.diagonal(dim1=-2, dim2=-1),
            actual=matrix.sum(-1),
            predicted=matrix.sum(-2),
            matrix=lambda: matrix,
            missed=off_diagonal.sum(-1),
            false_positives=off_diagonal.sum(-2),
        )


def check_range(name: str, values: Tensor, classes: int) -> Tensor:
    """Class indices of any integer type as int64, which torch's scatter needs; ValueError if one is out of range."""
    if values.is_floating_point():
        raise ValueError(f"{name}: expected integers from 0 to {classes - 1}, got {values.dtype}")
    indices = values.long()
    if indices.numel() and (indices.min() < 0 or indices.max() >= classes):
        raise ValueError(f"{name}: expected 0 to {classes - 1}, got {int(indices.min())} to {int(indices.max())}")
    return indices


def count_margins(predictions: Array, labels: Array, weights: Array, classes: int) -> tuple[Array, Array, Array]:
    """Diagonal, actual and predicted counts [..., classes] of predictions, labels and weights [..., n], unchecked."""
    hits = per_class((predictions == labels) * weights, labels, classes)
    return hits, per_class(weights, labels, classes), per_class(weights, predictions, classes)


def count_cells(predictions: Array, labels: Array, weights: Array, classes: int) -> Array:
    """The matrix [..., classes, classes] of the same."""
    flat = per_class(weights, labels * classes + predictions, classes * classes)
    return flat.reshape(*labels.shape[:-1], classes, classes)


def per_class(values: Array, labels: Array, classes: int) -> Array:
    """Sum of values [..., n] over the samples of each class: [..., classes]; tensors or NumPy arrays."""
    if isinstance(values, np.ndarray):
        if values.ndim == 1:
            return np.bincount(labels, values, classes)
        rows = values.reshape(-1, values.shape[-1])
        index = labels.reshape(rows.shape) + classes * np.arange(len(rows))[:, None]
        return np.bincount(index.ravel(), rows.ravel(), classes * len(rows)).reshape(*values.shape[:-1], classes)
    zeros = values.new_zeros((*values.shape[:-1], classes), dtype=widest_float(values))
    return zeros.scatter_add(-1, labels, values.to(zeros.dtype)).to(values.dtype)


def sum_of_others(counts: Tensor) -> Tensor:
    """For each class the sum of all other classes' counts [..., d], without rounding small sums away."""
    if counts.shape[-1] == 2:
        return counts.flip(-1)
    return (counts.sum(-1, keepdim=True, dtype=widest_float(counts)) - counts).to(counts.dtype).clamp_min(0)
