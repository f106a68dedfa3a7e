"""MetricCrossEntropy: cross-entropy whose class weights are the slopes of a metric.

EAST's gradient is sum_kj G_kj dC_kj/dz with G = dM/dC. The slopes G say what a sample of class k is worth to the
metric, but dC/dz, which comes from the step, vanishes for samples on the wrong side. Here G is kept and the step is
replaced by the logarithm (Parambath et al. 2014; Narasimhan et al. 2015).

Counts and slopes have the layouts of slopes.py: margins, or cells for metrics that read `Confusion.matrix`.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from east import metrics
from east.arrays import Array, as_array, as_tensor, at_least, class_sum, in_float64, library_of, widest_float
from east.choices import choose
from east.confusion import Confusion, count_cells, count_margins
from east.losses import slopes
from east.losses.closed_form import FEW_CLASSES
from east.losses.inputs import IGNORE_INDEX, inside_torch_func
from east.losses.of_metric import LossOfMetric, summed_over_ranks
from east.metrics import divisor, ratio

FORMS = ("class_weights", "soft_targets")
COUNTS = ("training", "validation")
ROUNDING = 16  # machine epsilons by which a difference of slopes may miss 0
SMALL = 4096  # entries: below, it takes longer to turn them than to reduce short rows
NO_LABEL = torch.iinfo(torch.int64).min  # as ignore_index, keeps F.cross_entropy from silently skipping label -100


@dataclass(frozen=True)
class Targets:
    """Soft targets g_kj = [j=k] diagonal_k + base_kj - lowest_k: a sample of class k costs -sum_j g_kj log p_j.

    diagonal, lowest [..., d]; base [..., d] where it is the same for all k, else [..., d, d]. Class weights have only a
    diagonal.
    """

    diagonal: Tensor
    base: Tensor | None = None
    lowest: Tensor | None = None

    def to(self, like: Tensor) -> "Targets":
        """The targets with the dtype and device of `like`."""
        base, lowest = (None if x is None else x.to(like) for x in (self.base, self.lowest))
        return Targets(self.diagonal.to(like), base, lowest)

    def rows(self, shares: Tensor) -> Tensor:
        """The targets [..., n, d] of samples that are of each class by shares [..., n, d]."""
        rows = shares * self.diagonal.unsqueeze(-2)
        if self.base is None or self.lowest is None:
            return rows
        same = self.base.ndim == self.diagonal.ndim
        columns = shares.sum(-1, keepdim=True) * self.base.unsqueeze(-2) if same else shares @ self.base
        return rows + columns - shares @ self.lowest.unsqueeze(-1)

    def costs(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The costs and the weights [..., n] of samples with class labels [..., n] or soft labels [..., n, d]."""
        d, soft = logits.shape[-1], labels.is_floating_point()
        if self.base is None and not soft:
            weights = self.diagonal.gather(-1, labels)
            costs = F.cross_entropy(logits.reshape(-1, d), labels.flatten(), reduction="none", ignore_index=NO_LABEL)
            return weights * costs.view(labels.shape), weights
        rows = self.rows(labels if soft else F.one_hot(labels, d).to(logits.dtype))
        return -(rows * logits.log_softmax(-1)).sum(-1), rows.sum(-1)


class MetricCrossEntropy(LossOfMetric):
    """L = sum_i w_(y_i) ce_i / sum_i w_(y_i), with w_k the worth of class k to the metric at the current counts.

    metric: as in MetricLoss, with the same `classes`, `absent`, `gather`, `ignore_index` and parameters of the metric.
    form: with G = dM/dC at the counts, class_weights, w_k = [G_kk - mean_(j != k) G_kj]+ divided by its mean, at least
        `floor`; or soft_targets, g_kj = G_kj - min_j G_kj, which tells wrong classes apart as the metric does. With two
        classes they are equal.
    counts: training, a running mean of hard confusion counts over the batches (`decay`), updated only in training mode
        and by logits that require a gradient; or validation, the counts last passed to `set_counts`.
    smoothing: weight of the counts that guessing by class frequency would give, added so that no slope is 0/0.
    multilabel: logits and 0/1 labels [n, L, ...] are L binary problems, each with its own counts; `average` is then
        macro, weighted, or micro, which counts all labels together.

    There are separate counts for each leading index of the logits, and they are part of state_dict(). Before the first
    counts, and if the slopes are all zero or not finite, the weights are 1: plain cross-entropy.

    >>> loss = MetricCrossEntropy("f1", average="positive")
    >>> loss(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1]))
    tensor(0.1269)
    """

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
        classes: Sequence[str] | None = None,
        absent: str = "zero",
        gather: str | bool = "auto",
        multilabel: bool = False,
        ignore_index: int = IGNORE_INDEX,
        **metric_parameters: Any,
    ):
        super().__init__(
            metric,
            classes=classes,
            absent=absent,
            gather=gather,
            multilabel=multilabel,
            ignore_index=ignore_index,
            **metric_parameters,
        )
        if self.label_average == "samples":
            raise ValueError("average='samples': expected macro, weighted or micro; a sample has no running counts")
        self.form = choose("form", form, FORMS)
        self.source = choose("counts", counts, COUNTS)
        for name, value in (("decay", decay), ("smoothing", smoothing), ("floor", floor)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}: expected 0 <= {name} < 1, got {value!r}")
        if floor == 0:
            raise ValueError("floor: expected more than 0, got 0: a batch of worthless classes would have no weight")
        self.decay, self.smoothing, self.floor = decay, smoothing, floor
        self.counts: Tensor | None = None
        self.cached: tuple[Tensor, Targets] | None = None  # the last targets, and the counts that they are for

    def get_extra_state(self) -> Tensor:
        """The counts, as part of state_dict(); an empty tensor before the first."""
        return torch.empty(0) if self.counts is None else self.counts

    def set_extra_state(self, state: Tensor) -> None:
        self.counts = state.clone() if state.numel() else None

    def keep(self, rows: Tensor | Sequence[int]) -> None:
        """Drop the counts of all but these trials of a population: indices or a mask over the first dimension."""
        if self.counts is None:
            return
        if self.counts.ndim < 3:
            raise ValueError("keep: expected the counts of a population, got those of a single trial")
        self.counts = self.counts[torch.as_tensor(rows, device=self.counts.device)]

    def set_counts(self, confusion: Confusion | Tensor) -> None:
        """Use the slopes at these hard counts, a Confusion or matrices [..., d, d], until the next call."""
        if self.source != "validation":
            raise ValueError("set_counts: expected counts='validation', got a loss that counts its training batches")
        c = confusion if isinstance(confusion, Confusion) else Confusion.from_matrix(confusion)
        self.counts = slopes.counts_of(c, self.reads_cells(c.classes)).detach().clone()

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        gathers = self.gathers()
        self.check_counts(logits)
        if self.source == "training" and self.is_training_step(logits):
            batch = self.batch_counts(logits.detach(), labels, None if weights is None else weights.detach())
            if gathers:
                dist.all_reduce(batch)
            self.counts = batch if self.counts is None else self.counts.to(batch).lerp(batch, 1 - self.decay)
        targets = self.targets_for(logits)
        plain = logits.ndim == 2 and weights is None and targets.base is None and not gathers
        if plain and not labels.is_floating_point():
            if logits.shape[-1] < FEW_CLASSES and logits.numel() > SMALL:  # short rows are slow to reduce
                logits, labels = logits.mT.unsqueeze(0), labels.unsqueeze(0)
            return F.cross_entropy(logits, labels, targets.diagonal, ignore_index=NO_LABEL)
        sums = torch.stack(targets.costs(logits, labels))
        if weights is not None:
            sums = sums.to(widest_float(sums)) * weights  # in float32 huge weights overflow and tiny ones vanish
        sums = sums.sum(-1)
        return ratio(*(summed_over_ranks(sums) if gathers else sums)).to(logits.dtype)

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

    def check_counts(self, logits: Tensor) -> None:
        """ValueError unless logits [..., n, d] have the leading dimensions and classes of the counts."""
        if self.counts is None:
            return
        lead, d = tuple(self.counts.shape[:-2]), self.counts.shape[-1]
        if (*logits.shape[:-2], logits.shape[-1]) != (*lead, d):
            raise ValueError(
                f"expected leading shape {lead} and {d} classes, as in the counts, got {tuple(logits.shape[:-2])} and "
                f"{logits.shape[-1]}: call keep(rows) when trials leave, and use a new loss for another task"
            )

    def batch_counts(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Hard counts of a batch: margins [..., 3, d], or cells [..., d, d] for a metric that reads them."""
        d, exact, in_cells = logits.shape[-1], widest_float(logits), self.reads_cells(logits.shape[-1])
        if labels.is_floating_point():
            shares = labels.to(exact) if weights is None else labels * weights.to(exact).unsqueeze(-1)
            return slopes.counts_of(Confusion.from_shares(logits.argmax(-1), shares), in_cells)
        weights = torch.ones_like(labels, dtype=exact) if weights is None else weights.to(exact)
        z, y, mass = as_array(logits), as_array(labels), as_array(weights)
        sample = z.argmax(-1), y, mass, d
        return as_tensor(count_cells(*sample) if in_cells else library_of(y).stack(count_margins(*sample), -2))

    def targets_for(self, logits: Tensor) -> Targets:
        """The targets at the current counts, cached, for logits [..., n, d]; weights of 1 before the first counts."""
        if self.counts is None:
            return Targets(logits.new_ones((*logits.shape[:-2], logits.shape[-1])))
        if self.cached is None or self.cached[0] is not self.counts:
            with torch.inference_mode(False):  # a later training step may use what an evaluation computed
                self.cached = self.counts, self.targets_at(self.counts.to(logits.device))
        return self.cached[1].to(logits)

    def targets_at(self, counts: Tensor) -> Targets:
        """Targets of the chosen form, from the slopes G_kj = [j=k] D_k + base_kj at the smoothed counts.

        base is P [..., d] at margins, and G [..., d, d] at cells, where D is 0. A constant in a row has no effect.
        """
        in_cells, exact = self.reads_cells(counts.shape[-1]), in_float64(as_array(counts.detach()))
        actual = exact.sum(-1) if in_cells else exact[..., 1, :]
        mass, shares = self.smoothing * actual, actual / divisor(class_sum(actual))
        if in_cells:
            counted = as_tensor(exact + mass[..., None] * shares[..., None, :])
            score = partial(self.metric, **self.metric_parameters)
            D, base = 0 * actual, as_array(slopes.by_autograd(score, counted, in_cells)[1])
        else:
            diagonal, actual, predicted = exact[..., 0, :] + mass * shares, actual + mass, exact[..., 2, :] + mass
            errors = actual - diagonal, predicted - diagonal
            c = Confusion(diagonal, actual, predicted, slopes.refuse_matrix, *errors)
            _, D, base = slopes.score_and_slopes(self.metric, self.metric_parameters, c)
        if self.form == "class_weights":
            return Targets(as_tensor(class_weights(worth(D, base, in_cells), actual, self.floor)))
        return soft_targets(as_tensor(D), as_tensor(base), as_tensor(actual), self.floor)

    def extra_repr(self) -> str:
        numbers = f"decay={self.decay}, smoothing={self.smoothing}, counts={self.source}"
        return f"{self.metric_in_words()}, form={self.form}, {numbers}"


def worth(D: Array, base: Array, in_cells: bool) -> Array:
    """The worth of each class [..., d]: G_kk - mean_(j != k) G_kj, with G_kj = [j=k] D_k + base_kj."""
    own = base.diagonal(0, -2, -1) if in_cells else base
    row_sum, d = base.sum(-1) if in_cells else class_sum(base), base.shape[-1]
    return D + own - (row_sum - own) / (d - 1)


def class_weights(worth: Array, actual: Array, floor: float) -> Array:
    """Worth [..., d] clamped to at least 0, divided by its mean, at least `floor`; 1 if the mean is 0 or not finite.

    Classes without samples are left out of the mean, because their slope is a division by zero, and get a weight of 1.
    """
    present = actual > 0
    worth = at_least(worth, 0.0) * present
    scale = class_sum(present) / divisor(class_sum(worth))
    return at_least(library_of(worth).where(present & (scale > 0), worth * scale, 1.0), floor)


def soft_targets(D: Tensor, base: Tensor, actual: Tensor, floor: float) -> Targets:
    """g_kj = G_kj - min_j G_kj, scaled to a mean row total of 1; G_kj = [j=k] D_k + base_kj, as in `slopes_at`.

    A total is a difference of slopes, which are of the order of 1 / the number of samples: rounding counts as 0, and
    without a total all targets are the classes themselves. Rows with a total below `floor` are raised to it on the
    diagonal. The slope of a class without samples is a division by zero; its row gets the mean of the others.
    """
    present, d = actual > 0, actual.shape[-1]
    if base.ndim > actual.ndim:
        base = torch.where(present.unsqueeze(-1), base - base.amin(-1, keepdim=True), 0.0)
        lowest, row_sum = torch.zeros_like(actual), base.sum(-1)
        D = torch.where(present, 0.0, mean_over(row_sum, present))
    else:
        D, base = torch.where(present, D, mean_over(D, present)), base - base.amin(-1, keepdim=True)
        # min_(j != k) base_j is now 0, except for the class with the lowest: there it is the second lowest.
        values, index = base.topk(2, largest=False)
        lowest = torch.minimum(base + D, torch.zeros_like(base).scatter(-1, index[..., :1], values[..., 1:]))
        row_sum = base.sum(-1, keepdim=True)
    total = D + row_sum - d * lowest
    mean = mean_over(total, present)
    usable = (mean * actual.sum(-1, keepdim=True) > ROUNDING * torch.finfo(mean.dtype).eps) & (mean < torch.inf)
    mean = torch.where(usable, mean, torch.inf)
    diagonal = torch.where(usable, D / mean + (floor - total / mean).clamp_min(0), 1.0)
    return Targets(diagonal, base / mean.view(*mean.shape, *[1] * (base.ndim - mean.ndim)), lowest / mean)


def mean_over(values: Tensor, present: Tensor) -> Tensor:
    """The mean [..., 1] of values [..., d] over the classes that are present."""
    return torch.where(present, values, 0.0).sum(-1, keepdim=True) / present.sum(-1, keepdim=True).clamp_min(1)
