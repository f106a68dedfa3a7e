"""MetricCrossEntropy: cross-entropy whose class weights are the metric's own slopes.

EAST's gradient is sum_kj G_kj dC_kj/dz with G = dM/dC. The slopes G say what a sample of class k is worth to the
metric; the step's dC/dz vanishes for samples on the wrong side. Here G is kept and the step becomes the logarithm
(Parambath et al. 2014; Narasimhan et al. 2015).

Counts take one of two layouts. Margins [..., 3, d] hold diagonal, actual and predicted; there G_kj = A_k + P_j +
[j=k] D_k, and A, constant within a row, never matters. Cells [..., d, d] are kept only for metrics that read `matrix`.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from east import metrics
from east.choices import choose
from east.confusion import Confusion, per_class
from east.losses import by_hand, slopes
from east.losses.by_hand import Array, at_least, class_sum
from east.losses.inputs import (
    IGNORE_INDEX,
    Loss,
    Samples,
    average_over_labels,
    inside_torch_func,
    read_labels,
    summed_over_ranks,
)
from east.losses.metric_loss import MetricLoss
from east.metrics import EPS, ratio

FORMS = ("class_weights", "soft_targets")
COUNTS = ("training", "validation")
NO_LABEL = torch.iinfo(torch.int64).min  # switches off F.cross_entropy's silent skipping of label -100


@dataclass(frozen=True)
class Targets:
    """What each class is worth: sample i costs -(own_y log p_y + sum_j (across_j - lowest_y) log p_j), or by `cells`.

    own, across, lowest and total (the weight of a sample of the class) are [..., d], cells [..., d, d].
    """

    own: Tensor
    total: Tensor
    across: Tensor | None = None
    lowest: Tensor | None = None
    cells: Tensor | None = None


class MetricCrossEntropy(Loss):
    """L = sum_i w_(y_i) ce_i / sum_i w_(y_i), with w_k the worth of class k to the metric at the counts so far.

    metric: a name of east.METRICS, a dotted path, or a function of a Confusion; its parameters (average, beta, costs)
        follow as keywords. `classes` (names) lets beta, and the positive class, be given by name.
    form: class_weights, w_k = [G_kk - mean_(j != k) G_kj]+ over its mean, at least `floor`; or soft_targets,
        g_kj = G_kj - min_j G_kj, which keeps what the metric thinks of each wrong class. With two classes they agree.
    counts: training, a running mean of hard confusion counts over the batches (`decay`), moved only in training mode
        by logits that require a gradient; or validation, whatever `set_counts` was given last.
    smoothing: share of the counts that a guess by class frequency would give, so that no slope is 0/0.
    ignore_index: samples with this label do not count.
    multilabel: logits and 0/1 labels [n, L, ...] are L binary problems with counts of their own; `average` is then
        macro, weighted, or micro, which counts all labels together.
    gather: sum over torch.distributed's ranks ("auto": when training with gradients in a process group).

    The counts have one row per leading index of the logits and are part of state_dict(). Before any count, and where
    all slopes are zero or not finite, the weights are 1: plain cross-entropy.

    >>> loss = MetricCrossEntropy("f1", average="positive")
    >>> loss(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1]))
    tensor(0.1269)
    """

    anneals = False
    stops_by = "metric"  # its weights move with the counts: values of two epochs do not compare

    def __init__(
        self,
        metric: str | metrics.Metric = "f1",
        *,
        form: str = "class_weights",
        decay: float = 0.95,
        smoothing: float = 0.01,
        floor: float = 0.02,
        counts: str = "training",
        gather: str | bool = "auto",
        classes: Sequence[str] | None = None,
        absent: str = "zero",
        ignore_index: int = IGNORE_INDEX,
        multilabel: bool = False,
        **metric_parameters: Any,
    ):
        super().__init__(ignore_index)
        for name in metric_parameters:
            if name in inspect.signature(MetricLoss).parameters:
                raise ValueError(f"{name}: MetricCrossEntropy does not take it, MetricLoss does")
        checked = MetricLoss(
            metric, gather=gather, classes=classes, absent=absent, multilabel=multilabel, **metric_parameters
        )
        if checked.label_average == "samples":
            raise ValueError("average='samples': expected macro, weighted or micro; a sample has no running counts")
        self.multilabel, self.label_average, self.absent = multilabel, checked.label_average, checked.absent
        self.metric, self.metric_parameters = checked.metric, checked.metric_parameters
        self.classes, self.gather = checked.classes, checked.gather
        self.form = choose("form", form, FORMS)
        self.keeps_labels = form == "class_weights"  # cross_entropy does
        self.source = choose("counts", counts, COUNTS)
        for name, value in (("decay", decay), ("smoothing", smoothing), ("floor", floor)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}: expected a number from 0 to below 1, got {value!r}")
        if floor == 0:
            raise ValueError("floor: expected more than 0, or a batch of classes without worth would weigh nothing")
        self.decay, self.smoothing, self.floor = decay, smoothing, floor
        self.score: Callable[[Confusion], Tensor] = partial(self.metric, **self.metric_parameters)
        self.in_cells: bool | None = False if by_hand.covers(self.metric) else None  # None: not tried yet
        self.counts: Tensor | None = None
        self.targets: Targets | None = None  # of the counts as they are; None: to be taken

    def get_extra_state(self) -> Tensor:
        """The counts are part of state_dict(); an empty tensor before the first."""
        return torch.empty(0) if self.counts is None else self.counts

    def set_extra_state(self, state: Tensor) -> None:
        self.counts, self.targets = (state.clone() if state.numel() else None), None

    def keep(self, rows: Tensor | Sequence[int]) -> None:
        """Keep the counts of some trials of a population, by index or mask over the first dimension."""
        if self.counts is None:
            return
        if self.counts.ndim < 3:
            raise ValueError("keep: expected counts of a population, got those of a single trial")
        self.counts, self.targets = self.counts[torch.as_tensor(rows, device=self.counts.device)], None

    def set_counts(self, confusion: Confusion | Tensor) -> None:
        """Take the slopes at these hard counts, a Confusion or matrices [..., d, d], until the next call."""
        if self.source != "validation":
            raise ValueError("set_counts: expected counts='validation', got a loss that counts its training batches")
        c = confusion if isinstance(confusion, Confusion) else Confusion.from_matrix(confusion)
        margins = torch.stack((c.diagonal, c.actual, c.predicted), -2).detach()
        self.counts = c.matrix.detach().clone() if self.reads_cells(c.classes) else margins
        self.targets = None

    def read(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Samples:
        if self.multilabel:
            return read_labels(logits, labels, weights, self.ignore_index, self.label_average)
        return super().read(logits, labels, weights)

    def over(self, samples: Samples) -> Tensor:
        value = super().over(samples)
        return average_over_labels(value, samples, self, self.label_average, self.absent) if self.multilabel else value

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        gathers = self.gathers()
        batch = None
        if self.source == "training" and self.moves(logits):
            batch = self.batch_counts(logits.detach(), labels, None if weights is None else weights.detach())
            if gathers:
                dist.all_reduce(batch)
            self.move(batch)
        targets = self.targets_for(logits)
        if targets is None:
            ones = logits.new_ones((*logits.shape[:-2], logits.shape[-1]))
            targets = Targets(ones, ones)
        if logits.ndim == 2 and weights is None and self.form == "class_weights" and not gathers:
            return F.cross_entropy(logits, labels, targets.own, ignore_index=NO_LABEL)
        cost, weight = weighted_cost(logits, labels, weights, targets)
        if gathers:
            cost, weight = summed_over_ranks(torch.stack((cost, weight)))
        return ratio(cost, weight)

    def moves(self, logits: Tensor) -> bool:
        """Whether this call is a step of training: counts must not move by validation, nor inside torch.func."""
        if inside_torch_func():
            return False
        return self.training and torch.is_grad_enabled() and logits.requires_grad

    def batch_counts(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Hard counts of a batch: margins [..., 3, d], or cells [..., d, d] for a metric that reads them."""
        if logits.device.type == "cpu" and not torch.compiler.is_compiling():
            return self.batch_counts_by_numpy(logits, labels, weights)
        classes, predicted = logits.shape[-1], logits.argmax(-1)
        lead, n = labels.shape[:-1], labels.shape[-1]
        if self.reads_cells(classes):
            ones = torch.ones_like(labels, dtype=logits.dtype) if weights is None else weights
            return per_class(ones, labels * classes + predicted, classes**2).unflatten(-1, (classes, classes))
        values = logits.new_ones((*lead, 3, n))
        values[..., 0, :] = predicted == labels
        if weights is not None:
            values *= weights.unsqueeze(-2)
        return per_class(values, torch.stack((labels, labels, predicted), -2), classes)

    def batch_counts_by_numpy(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """The same by NumPy, whose argmax is thirty times as fast at d = 1000, and whose counting takes one pass."""
        (*lead, _, d), count = logits.shape, math.prod(logits.shape[:-2])
        y, predicted = labels.numpy(), logits.numpy().argmax(-1)
        if np.maximum.reduce(y.view(np.uint64), None) >= d:  # a negative label is a huge one
            raise IndexError("a label out of range")  # told in words by the caller
        w = None if weights is None else weights.numpy()
        trial = d * np.arange(count).reshape(*lead, 1) if lead else 0

        def by_class(classes: np.ndarray, mass: np.ndarray | None, size: int) -> np.ndarray:
            return np.bincount(classes.ravel(), None if mass is None else mass.ravel(), count * size)

        if self.reads_cells(d):
            cells = by_class((y + trial) * d + predicted, w, d * d).reshape(*lead, d, d)
            return torch.from_numpy(cells).to(logits.dtype)
        hit = (predicted == y) * (1.0 if w is None else w)
        margins = by_class(y + trial, hit, d), by_class(y + trial, w, d), by_class(predicted + trial, w, d)
        return torch.from_numpy(np.stack([x.reshape(*lead, d) for x in margins], -2)).to(logits.dtype)

    def move(self, batch: Tensor) -> None:
        """C <- decay C + (1 - decay) C_batch; the first batch sets it."""
        if self.counts is None:
            self.counts = batch
        else:
            if self.counts.shape != batch.shape:
                raise ValueError(self.misfit(batch.shape))
            self.counts = self.counts.to(batch).lerp(batch, 1 - self.decay)
        self.targets = None

    def targets_for(self, logits: Tensor) -> Targets | None:
        """What the classes are worth at the counts so far; None before the first."""
        if self.counts is None:
            return None
        if (*self.counts.shape[:-2], self.counts.shape[-1]) != (*logits.shape[:-2], logits.shape[-1]):
            raise ValueError(self.misfit(logits.shape))
        if self.targets is None or self.targets.own.dtype != logits.dtype or self.targets.own.device != logits.device:
            self.targets = self.targets_at(self.counts.to(logits))
        return self.targets

    def misfit(self, shape: torch.Size) -> str:
        counts = self.counts
        assert counts is not None
        return (
            f"the counts are of leading shape {tuple(counts.shape[:-2])} and {counts.shape[-1]} classes, the input of "
            f"{tuple(shape[:-2])} and {shape[-1]}: call keep(rows) when trials leave; another task needs a new loss"
        )

    def targets_at(self, counts: Tensor) -> Targets:
        """Slopes at the smoothed counts, turned into targets of the chosen form."""
        soft = self.form == "soft_targets"
        if self.reads_cells(counts.shape[-1]):
            actual = counts.sum(-1)
            by_cell = slopes.of_cells(self.score, smoothed_cells(counts, actual, self.smoothing))
            if soft:
                return soft_cells(by_cell, actual, self.floor)
            worth = worth_by_cells(by_cell)
        else:
            actual = counts[..., 1, :]
            own, across = self.slopes_at(*smoothed_margins(by_hand.to_float64(counts), self.smoothing))
            if soft:
                own, across = (torch.as_tensor(x).to(counts).expand(actual.shape) for x in (own, across))
                return soft_margins(own, across, actual, self.floor)
            worth, actual = worth_by_margins(own, across), by_hand.to_float64(actual)
        weights = torch.as_tensor(class_weights(worth, actual, self.floor)).to(counts)
        return Targets(weights, weights)

    def slopes_at(self, diagonal: Array, actual: Array, predicted: Array) -> tuple[Array, Array]:
        """D and P [..., d] at margins [..., d], up to what is the same for all classes."""
        if by_hand.covers(self.metric):
            slopes_of = by_hand.SLOPES[self.metric]
            margins = by_hand.Margins(diagonal, actual - diagonal, actual, predicted, by_hand.class_sum(actual))
            return slopes_of(margins, **self.metric_parameters)[1:]
        own, across = slopes.of_margins(self.score, *map(torch.as_tensor, (diagonal, actual, predicted)))
        return by_hand.to_float64(own), by_hand.to_float64(across)

    def reads_cells(self, classes: int) -> bool:
        """Whether the metric looks at Confusion.matrix, found out once."""
        if self.in_cells is None:
            self.in_cells = slopes.reads_matrix(self.score, classes)
        return self.in_cells

    def extra_repr(self) -> str:
        name = getattr(self.metric, "__name__", type(self.metric).__name__)
        labels = f"multilabel, average={self.label_average}, " if self.multilabel else ""
        return f"{name}, {labels}form={self.form}, decay={self.decay}, smoothing={self.smoothing}, counts={self.source}"


def smoothed_margins(counts: Array, smoothing: float) -> tuple[Array, Array, Array]:
    """Diagonal, actual and predicted of C + smoothing n t t^T, with t the class shares of C's rows."""
    diagonal, actual, predicted = (counts[..., k, :] for k in range(3))
    mass = smoothing * actual
    return diagonal + mass * (actual / at_least(class_sum(actual), EPS)), actual + mass, predicted + mass


def smoothed_cells(counts: Tensor, actual: Tensor, smoothing: float) -> Tensor:
    """C + smoothing n t t^T, with t the class shares of C's rows."""
    shares = actual / actual.sum(-1, keepdim=True).clamp_min(EPS)
    return counts + smoothing * actual.unsqueeze(-1) * shares.unsqueeze(-2)


def worth_by_margins(own: Array, across: Array) -> Array:
    """G_kk - mean_(j != k) G_kj = D_k + P_k - mean_(j != k) P_j."""
    if isinstance(across, float):  # the same for all classes
        return own
    d = across.shape[-1]
    return own + across * (d / (d - 1)) - class_sum(across) / (d - 1)


def worth_by_cells(slopes: Tensor) -> Tensor:
    """G_kk - mean_(j != k) G_kj."""
    d, own = slopes.shape[-1], slopes.diagonal(dim1=-2, dim2=-1)
    return (d * own - slopes.sum(-1)) / (d - 1)


def class_weights(worth: Array, actual: Array, floor: float) -> Array:
    """Worth [..., d] with its negative part cut off, over its mean, at least `floor`; 1 where the mean is 0 or NaN.

    A class without samples has no say in the mean: its slope is a division by zero, and nothing will be weighed by it.
    """
    present = (actual > 0) * 1.0
    worth = at_least(worth, 0.0) * present
    mean = class_sum(worth) / at_least(class_sum(present), 1)
    usable = (mean > 0) & (mean < float("inf"))
    where = by_hand.library_of(mean).where
    return at_least(where(usable, worth / where(usable, mean, 1.0), 1.0), floor)


def soft_margins(own: Tensor, across: Tensor, actual: Tensor, floor: float) -> Targets:
    """g_kj = G_kj - min_j G_kj without a d x d tensor, scaled to a mean row total of 1; rows hold at least `floor`."""
    d = across.shape[-1]
    across = across - across.amin(-1, keepdim=True)
    # The lowest P_j beside class k's is the second lowest for the class that has the lowest itself.
    values, index = across.topk(2, largest=False)
    beside = torch.zeros_like(across).scatter(-1, index[..., :1], values[..., 1:])
    lowest = torch.minimum(across + own, beside)
    total = across.sum(-1, keepdim=True) - d * lowest + own
    usable, mean = row_mean(total, actual)
    own, across, lowest, total = (x / mean for x in (own, across, lowest, total))
    missing = (floor - total).clamp_min(0)
    plain, zero = torch.ones_like(own), torch.zeros_like(own)
    return Targets(
        torch.where(usable, own + missing, plain),
        torch.where(usable, total + missing, plain),
        torch.where(usable, across, zero),
        torch.where(usable, lowest, zero),
    )


def soft_cells(slopes: Tensor, actual: Tensor, floor: float) -> Targets:
    """g_kj = G_kj - min_j G_kj, scaled to a mean row total of 1; rows hold at least `floor`."""
    cells = slopes - slopes.amin(-1, keepdim=True)
    total = cells.sum(-1)
    usable, mean = row_mean(total, actual)
    missing = (floor - total / mean).clamp_min(0)
    identity = torch.eye(cells.shape[-1], dtype=cells.dtype, device=cells.device)
    cells = cells / mean.unsqueeze(-1) + identity * missing.unsqueeze(-1)
    cells = torch.where(usable.unsqueeze(-1), cells, identity)
    return Targets(cells.diagonal(dim1=-2, dim2=-1), cells.sum(-1), cells=cells)


def row_mean(total: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the slopes of a trial can be used [..., 1], and the mean row total of its classes with samples."""
    present = actual > 0
    mean = torch.where(present, total, 0.0).sum(-1, keepdim=True) / present.sum(-1, keepdim=True).clamp_min(1)
    usable = (mean > 0) & (mean < torch.inf)
    return usable, torch.where(usable, mean, 1.0)


def weighted_cost(logits: Tensor, labels: Tensor, weights: Tensor | None, targets: Targets) -> tuple[Tensor, Tensor]:
    """sum_i of the samples' costs and of their weights, each [...]."""
    total = targets.total.gather(-1, labels)
    if targets.across is None and targets.cells is None:
        classes = logits.shape[-1]
        costs = F.cross_entropy(
            logits.reshape(-1, classes), labels.reshape(-1), reduction="none", ignore_index=NO_LABEL
        ).view(labels.shape)
        costs = total * costs
    else:
        log_p = logits.log_softmax(-1)
        if targets.cells is not None:
            rows = targets.cells.gather(-2, labels.unsqueeze(-1).expand(logits.shape))
            costs = -(rows * log_p).sum(-1)
        else:
            assert targets.across is not None
            assert targets.lowest is not None
            own = targets.own.gather(-1, labels) * log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            all_classes = torch.stack((targets.across, torch.ones_like(targets.across)), -1)
            across, plain = (log_p @ all_classes).unbind(-1)
            costs = targets.lowest.gather(-1, labels) * plain - own - across
    if weights is not None:
        costs, total = costs * weights, total * weights
    return costs.sum(-1), total.sum(-1)
