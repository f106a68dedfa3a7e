"""MetricCrossEntropy: cross-entropy whose class weights are the slopes of a metric.

EAST's gradient is sum_kj G_kj dC_kj/dz with G = dM/dC. The slopes G say what a sample of class k is worth to the
metric, but dC/dz, which comes from the step, vanishes for samples on the wrong side. Here G is kept and the step is
replaced by the logarithm (Parambath et al. 2014; Narasimhan et al. 2015).

Counts have one of two layouts. Margins [..., 3, d] hold diagonal, actual and predicted counts. Their slopes are
G_kj = A_k + P_j + [j=k] D_k; A is constant within a row and has no effect. Cells [..., d, d] are kept only for metrics
that read `Confusion.matrix`.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from east import metrics
from east.arrays import Array, at_least, class_sum, fastest, indicator, library_of
from east.choices import choose
from east.confusion import Confusion, per_class
from east.losses import slopes
from east.losses.inputs import (
    IGNORE_INDEX,
    Loss,
    Samples,
    average_over_labels,
    inside_torch_func,
    read_multilabel,
    summed_over_ranks,
)
from east.losses.metric_loss import UNUSED_IN_TRIALS, MetricLoss, average_of, check_classes, warn_of_default
from east.metrics import divisor, ratio

FORMS = ("class_weights", "soft_targets")
COUNTS = ("training", "validation")
ROUNDING = 16  # machine epsilons by which a difference of slopes may miss 0
NO_LABEL = torch.iinfo(torch.int64).min  # as ignore_index, keeps F.cross_entropy from silently skipping label -100


@dataclass(frozen=True)
class Targets:
    """Soft targets g_kj: a sample of class y costs -sum_j g_yj log p_j.

    g_kj = [j=k] diagonal_k + columns_j - row_minimum_k; class weights have only the diagonal. row_total_k = sum_j g_kj
    is the weight of a sample of class k. All are [..., d]. For metrics that read cells, `cells` [..., d, d] is g.
    """

    diagonal: Tensor
    row_total: Tensor
    columns: Tensor | None = None
    row_minimum: Tensor | None = None
    cells: Tensor | None = None

    def to(self, like: Tensor) -> "Targets":
        """The targets with the dtype and device of `like`."""
        return replace(self, **{name: value.to(like) for name, value in vars(self).items() if value is not None})


class MetricCrossEntropy(Loss):
    """L = sum_i w_(y_i) ce_i / sum_i w_(y_i), with w_k the worth of class k to the metric at the current counts.

    metric: a name from east.METRICS, a dotted path, or a function of a Confusion. Its parameters (average, beta, costs)
        are keyword arguments, as in MetricLoss. `classes` (names) allows beta and the positive class to be given by
        name.
    form: with G = dM/dC at the counts, class_weights, w_k = [G_kk - mean_(j != k) G_kj]+ divided by its mean, at least
        `floor`; or soft_targets, g_kj = G_kj - min_j G_kj, which tells wrong classes apart as the metric does. With two
        classes they are equal.
    counts: training, a running mean of hard confusion counts over the batches (`decay`), updated only in training mode
        and by logits that require a gradient; or validation, the counts last passed to `set_counts`.
    smoothing: weight of the counts that guessing by class frequency would give, added so that no slope is 0/0.
    ignore_index: samples with this label are left out.
    multilabel: logits and 0/1 labels [n, L, ...] are L binary problems, each with its own counts; `average` is then
        macro, weighted, or micro, which counts all labels together.
    gather: sum over torch.distributed's ranks ("auto": when training with gradients in a process group).

    There are separate counts for each leading index of the logits, and they are part of state_dict(). Before the first
    counts, and if the slopes are all zero or not finite, the weights are 1: plain cross-entropy.

    >>> loss = MetricCrossEntropy("f1", average="positive")
    >>> loss(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1]))
    tensor(0.1269)
    """

    anneals = False
    takes_soft_targets = True
    unused_in_trials = UNUSED_IN_TRIALS
    stops_by = "metric"  # the weights change with the counts, so losses of two epochs cannot be compared

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
        self.unstated = checked.unstated
        self.classes, self.gather = checked.classes, checked.gather
        self.form = choose("form", form, FORMS)
        self.keeps_labels = form == "class_weights"  # F.cross_entropy saves them
        self.source = choose("counts", counts, COUNTS)
        for name, value in (("decay", decay), ("smoothing", smoothing), ("floor", floor)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}: expected 0 <= {name} < 1, got {value!r}")
        if floor == 0:
            raise ValueError("floor: expected more than 0, got 0: a batch of worthless classes would have no weight")
        self.decay, self.smoothing, self.floor = decay, smoothing, floor
        self.score: Callable[[Confusion], Tensor] = partial(self.metric, **self.metric_parameters)
        self.in_cells: bool | None = False if self.metric in metrics.WITH_SLOPES else None  # None: not known yet
        self.counts: Tensor | None = None
        self.targets: Targets | None = None  # at the current counts; None: not computed yet

    def get_extra_state(self) -> Tensor:
        """The counts, as part of state_dict(); an empty tensor before the first."""
        return torch.empty(0) if self.counts is None else self.counts

    def set_extra_state(self, state: Tensor) -> None:
        self.counts, self.targets = (state.clone() if state.numel() else None), None

    def keep(self, rows: Tensor | Sequence[int]) -> None:
        """Drop the counts of all but these trials of a population: indices or a mask over the first dimension."""
        if self.counts is None:
            return
        if self.counts.ndim < 3:
            raise ValueError("keep: expected the counts of a population, got those of a single trial")
        self.counts, self.targets = self.counts[torch.as_tensor(rows, device=self.counts.device)], None

    def set_counts(self, confusion: Confusion | Tensor) -> None:
        """Use the slopes at these hard counts, a Confusion or matrices [..., d, d], until the next call."""
        if self.source != "validation":
            raise ValueError("set_counts: expected counts='validation', got a loss that counts its training batches")
        c = confusion if isinstance(confusion, Confusion) else Confusion.from_matrix(confusion)
        margins = torch.stack((c.diagonal, c.actual, c.predicted), -2).detach()
        self.counts = c.matrix.detach().clone() if self.reads_cells(c.classes) else margins
        self.targets = None

    def read(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Samples:
        if self.multilabel:
            return read_multilabel(logits, labels, weights, self.ignore_index, self.label_average)
        samples = super().read(logits, labels, weights)
        check_classes(self.classes, samples.logits.shape[-1])
        warn_of_default(self, samples.logits.shape[-1])
        return samples

    def compute(self, samples: Samples) -> Tensor:
        value = super().compute(samples)
        return average_over_labels(value, samples, self, self.label_average, self.absent) if self.multilabel else value

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        gathers = self.gathers()
        if self.source == "training" and self.is_training_step(logits):
            batch = self.batch_counts(logits.detach(), labels, None if weights is None else weights.detach())
            if gathers:
                dist.all_reduce(batch)
            self.update_counts(batch)
        targets = self.targets_for(logits)
        if targets is None:
            ones = logits.new_ones((*logits.shape[:-2], logits.shape[-1]))
            targets = Targets(ones, ones)
        soft = labels.is_floating_point()
        if logits.ndim == 2 and weights is None and self.form == "class_weights" and not (gathers or soft):
            return F.cross_entropy(logits, labels, targets.diagonal, ignore_index=NO_LABEL)
        cost, weight = (soft_label_cost if soft else weighted_cost)(logits, labels, weights, targets)
        if gathers:
            cost, weight = summed_over_ranks(torch.stack((cost, weight)))
        return ratio(cost, weight)

    def is_training_step(self, logits: Tensor) -> bool:
        """Whether this call updates the counts: not in validation, and not inside torch.func."""
        if inside_torch_func():
            if self.training and self.counts is None:
                warnings.warn(
                    "inside torch.func MetricCrossEntropy does not update its counts: it is plain cross-entropy until "
                    "it is called outside, or has counts='validation' and set_counts(...)",
                    stacklevel=2,
                )
            return False
        return self.training and torch.is_grad_enabled() and logits.requires_grad

    def batch_counts(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Hard counts of a batch: margins [..., 3, d], or cells [..., d, d] for a metric that reads them."""
        if labels.is_floating_point():
            return self.soft_label_counts(logits, labels, weights)
        if logits.is_cpu and not torch.compiler.is_compiling():
            return self.batch_counts_numpy(logits, labels, weights)
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

    def batch_counts_numpy(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """The same with NumPy, whose argmax is thirty times as fast at d = 1000 and which counts in one pass."""
        (*lead, _, d), count = logits.shape, math.prod(logits.shape[:-2])
        y, predicted = labels.numpy(), logits.numpy().argmax(-1)
        if np.maximum.reduce(y.view(np.uint64), None) >= d:  # a negative label becomes a huge number
            raise IndexError("a label is not the index of a class")  # Loss.forward and per_trial report its value
        w = None if weights is None else weights.numpy()
        offset = d * np.arange(count).reshape(*lead, 1) if lead else 0  # of each trial's classes

        def by_class(classes: np.ndarray, mass: np.ndarray | None, size: int) -> np.ndarray:
            return np.bincount(classes.ravel(), None if mass is None else mass.ravel(), count * size)

        if self.reads_cells(d):
            cells = by_class((y + offset) * d + predicted, w, d * d).reshape(*lead, d, d)
            return torch.from_numpy(cells).to(logits.dtype)
        hit = (predicted == y) * (1.0 if w is None else w)
        margins = by_class(y + offset, hit, d), by_class(y + offset, w, d), by_class(predicted + offset, w, d)
        return torch.from_numpy(np.stack([x.reshape(*lead, d) for x in margins], -2)).to(logits.dtype)

    def soft_label_counts(self, logits: Tensor, shares: Tensor, weights: Tensor | None) -> Tensor:
        """The same for soft labels [n, d]: a sample counts for every class by its share."""
        classes, predicted = logits.shape[-1], logits.argmax(-1)
        mass = shares if weights is None else shares * weights.unsqueeze(-1)
        if self.reads_cells(classes):
            return mass.new_zeros(classes, classes).index_add_(1, predicted, mass.mT)
        hit = mass.gather(-1, predicted.unsqueeze(-1)).squeeze(-1)
        diagonal, of_prediction = (per_class(x, predicted, classes) for x in (hit, mass.sum(-1)))
        return torch.stack((diagonal, mass.sum(-2), of_prediction))

    def update_counts(self, batch: Tensor) -> None:
        """C <- decay C + (1 - decay) C_batch; the first batch sets C."""
        if self.counts is None:
            self.counts = batch
        else:
            if self.counts.shape != batch.shape:
                raise ValueError(self.wrong_shape(batch.shape))
            self.counts = self.counts.to(batch).lerp(batch, 1 - self.decay)
        self.targets = None

    def targets_for(self, logits: Tensor) -> Targets | None:
        """The targets at the current counts, cached, for logits [..., n, d]; None before the first counts."""
        if self.counts is None:
            return None
        if (*self.counts.shape[:-2], self.counts.shape[-1]) != (*logits.shape[:-2], logits.shape[-1]):
            raise ValueError(self.wrong_shape(logits.shape))
        cached = self.targets
        if cached is None or cached.diagonal.dtype != logits.dtype or cached.diagonal.device != logits.device:
            with torch.inference_mode(False):  # a later training step may use what an evaluation computed
                cached = self.targets = self.targets_at(self.counts.to(logits, copy=True))
        return cached

    def wrong_shape(self, shape: torch.Size) -> str:
        """The error message for an input whose leading dimensions or classes are not those of the counts."""
        counts = self.counts
        assert counts is not None
        return (
            f"expected leading shape {tuple(counts.shape[:-2])} and {counts.shape[-1]} classes, as in the counts, got "
            f"{tuple(shape[:-2])} and {shape[-1]}: call keep(rows) when trials leave, and use a new loss for "
            "another task"
        )

    def targets_at(self, counts: Tensor) -> Targets:
        """Targets of the chosen form, from the slopes at the smoothed counts."""
        soft = self.form == "soft_targets"
        if self.reads_cells(counts.shape[-1]):
            exact = counts if counts.device.type == "mps" else counts.double()  # MPS has no float64
            actual = exact.sum(-1)
            G = slopes.by_autograd(self.score, smoothed_cells(exact, actual, self.smoothing), in_cells=True)
            if soft:
                return soft_targets_by_cells(G, actual, self.floor).to(counts)
            worth = worth_by_cells(G)
        else:
            actual = counts[..., 1, :]
            D, P = self.slopes_at(*smoothed_margins(fastest(counts), self.smoothing))
            if soft:
                D, P = (torch.as_tensor(x).expand(actual.shape) for x in (D, P))
                return soft_targets_by_margins(D, P, actual, self.floor).to(counts)
            worth, actual = worth_by_margins(D, P), fastest(actual)
        weights = torch.as_tensor(class_weights(worth, actual, self.floor)).to(counts)
        return Targets(weights, weights)

    def slopes_at(self, diagonal: Array, actual: Array, predicted: Array) -> tuple[Array, Array]:
        """The slopes D and P [..., d] at margins [..., d]; P up to a constant that is the same for all classes."""
        if self.metric in metrics.WITH_SLOPES:
            errors = actual - diagonal, predicted - diagonal
            return slopes.by_hand(self.metric, self.metric_parameters, diagonal, *errors)[1:]
        D, P = slopes.by_autograd(
            self.score, torch.stack([*map(torch.as_tensor, (diagonal, actual, predicted))], -2), in_cells=False
        ).unbind(-2)
        return fastest(D), fastest(P)

    def reads_cells(self, classes: int) -> bool:
        """Whether the metric reads Confusion.matrix; tested once and remembered."""
        if self.in_cells is None:
            self.in_cells = slopes.reads_matrix(self.score, classes)
        return self.in_cells

    def extra_repr(self) -> str:
        name = getattr(self.metric, "__name__", type(self.metric).__name__)
        parts = [name, average_of(self), "multilabel" if self.multilabel else "", f"form={self.form}"]
        parts += [f"decay={self.decay}", f"smoothing={self.smoothing}", f"counts={self.source}"]
        return ", ".join(filter(None, parts))


def smoothed_margins(counts: Array, smoothing: float) -> tuple[Array, Array, Array]:
    """Diagonal, actual and predicted counts of C + smoothing n t t^T; n is the total, t the actual class shares."""
    diagonal, actual, predicted = (counts[..., k, :] for k in range(3))
    mass = smoothing * actual
    return diagonal + mass * (actual / divisor(class_sum(actual))), actual + mass, predicted + mass


def smoothed_cells(counts: Tensor, actual: Tensor, smoothing: float) -> Tensor:
    """C + smoothing n t t^T; n is the total, t the actual class shares."""
    shares = ratio(actual, actual.sum(-1, keepdim=True))
    return counts + smoothing * actual.unsqueeze(-1) * shares.unsqueeze(-2)


def worth_by_margins(D: Array, P: Array) -> Array:
    """The worth of each class [..., d]: G_kk - mean_(j != k) G_kj = D_k + P_k - mean_(j != k) P_j."""
    if isinstance(P, float) or P.shape[-1] == 1:  # the same for all classes
        return D
    d = P.shape[-1]
    return D + P * (d / (d - 1)) - class_sum(P) / (d - 1)


def worth_by_cells(G: Tensor) -> Tensor:
    """The worth of each class [..., d]: G_kk - mean_(j != k) G_kj."""
    d = G.shape[-1]
    return (d * G.diagonal(dim1=-2, dim2=-1) - G.sum(-1)) / (d - 1)


def class_weights(worth: Array, actual: Array, floor: float) -> Array:
    """Worth [..., d] clamped to at least 0, divided by its mean, at least `floor`; 1 if the mean is 0 or not finite.

    Classes without samples are left out of the mean, because their slope is a division by zero, and get a weight of 1.
    """
    present = actual > 0
    worth = at_least(worth, 0.0) * present
    mean = class_sum(worth) / at_least(class_sum(indicator(present, worth)), 1)
    usable = (mean > 0) & (mean < float("inf"))
    where = library_of(mean).where
    return at_least(where(usable & present, worth / where(usable, mean, 1.0), 1.0), floor)


def soft_targets_by_margins(D: Tensor, P: Tensor, actual: Tensor, floor: float) -> Targets:
    """g_kj = G_kj - min_j G_kj, scaled to a mean row total of 1, without a d x d tensor.

    Rows with a total below `floor` are raised to it on the diagonal.
    """
    d, present = P.shape[-1], actual > 0
    # The slope of a class without samples is a division by zero.
    D = torch.where(present, D, mean_over(D, present))
    P = P - P.amin(-1, keepdim=True)
    # min_(j != k) P_j is now 0, except for the class with the lowest P: there it is the second lowest.
    lowest_two, index = P.topk(2, largest=False)
    lowest_other = torch.zeros_like(P).scatter(-1, index[..., :1], lowest_two[..., 1:])
    row_minimum = torch.minimum(P + D, lowest_other)
    row_total = P.sum(-1, keepdim=True) - d * row_minimum + D
    usable, mean = mean_row_total(row_total, actual)
    D, P, row_minimum, row_total = (x / mean for x in (D, P, row_minimum, row_total))
    missing = (floor - row_total).clamp_min(0)
    ones, zeros = torch.ones_like(D), torch.zeros_like(D)
    return Targets(
        torch.where(usable, D + missing, ones),
        torch.where(usable, row_total + missing, ones),
        torch.where(usable, P, zeros),
        torch.where(usable, row_minimum, zeros),
    )


def soft_targets_by_cells(G: Tensor, actual: Tensor, floor: float) -> Targets:
    """The same as `soft_targets_by_margins`, from slopes G [..., d, d]."""
    cells, present = G - G.amin(-1, keepdim=True), actual > 0
    row_total = cells.sum(-1)
    usable, mean = mean_row_total(row_total, actual)
    missing = (floor - row_total / mean).clamp_min(0)
    identity = torch.eye(cells.shape[-1], dtype=cells.dtype, device=cells.device)
    cells = cells / mean.unsqueeze(-1) + identity * missing.unsqueeze(-1)
    cells = torch.where((usable & present).unsqueeze(-1), cells, identity)
    return Targets(cells.diagonal(dim1=-2, dim2=-1), cells.sum(-1), cells=cells)


def mean_row_total(row_total: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the mean row total [..., 1] of the classes with samples is usable, and the mean, 1 if it is not.

    A total is a difference of slopes, which are of the order of 1 / the number of samples; rounding counts as 0.
    """
    mean = mean_over(row_total, actual > 0)
    usable = (mean * actual.sum(-1, keepdim=True) > ROUNDING * torch.finfo(mean.dtype).eps) & (mean < torch.inf)
    return usable, torch.where(usable, mean, 1.0)


def mean_over(values: Tensor, present: Tensor) -> Tensor:
    """The mean [..., 1] of values [..., d] over the classes that are present."""
    return torch.where(present, values, 0.0).sum(-1, keepdim=True) / present.sum(-1, keepdim=True).clamp_min(1)


def weighted_cost(logits: Tensor, labels: Tensor, weights: Tensor | None, targets: Targets) -> tuple[Tensor, Tensor]:
    """The sums [...] over the samples of their costs and of their weights."""
    sample_weights = targets.row_total.gather(-1, labels)
    if targets.columns is None and targets.cells is None:
        classes = logits.shape[-1]
        costs = F.cross_entropy(
            logits.reshape(-1, classes), labels.reshape(-1), reduction="none", ignore_index=NO_LABEL
        ).view(labels.shape)
        costs = sample_weights * costs
    else:
        log_p = logits.log_softmax(-1)
        if targets.cells is not None:
            rows = targets.cells.gather(-2, labels.unsqueeze(-1).expand(logits.shape))
            costs = -(rows * log_p).sum(-1)
        else:
            assert targets.columns is not None
            assert targets.row_minimum is not None
            diagonal = targets.diagonal.gather(-1, labels) * log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            factors = torch.stack((targets.columns, torch.ones_like(targets.columns)), -1)
            columns, log_p_sum = (log_p @ factors).unbind(-1)
            costs = targets.row_minimum.gather(-1, labels) * log_p_sum - diagonal - columns
    if weights is not None:
        costs, sample_weights = costs * weights, sample_weights * weights
    return costs.sum(-1), sample_weights.sum(-1)


def soft_label_cost(logits: Tensor, shares: Tensor, weights: Tensor | None, targets: Targets) -> tuple[Tensor, Tensor]:
    """`weighted_cost` for soft labels [n, d]: the costs of all classes, weighted by the sample's shares."""
    log_p, sample_weights = logits.log_softmax(-1), shares @ targets.row_total
    if targets.cells is not None:
        costs = -((shares @ targets.cells) * log_p).sum(-1)
    else:
        # In this order, because autograd then saves the shares and notices if they are overwritten.
        costs = -((log_p * targets.diagonal) * shares).sum(-1)
    if targets.columns is not None and targets.row_minimum is not None:
        costs = costs + (shares @ targets.row_minimum) * log_p.sum(-1) - shares.sum(-1) * (log_p @ targets.columns)
    if weights is not None:
        costs, sample_weights = costs * weights, sample_weights * weights
    return costs.sum(-1), sample_weights.sum(-1)
