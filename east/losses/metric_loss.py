"""MetricLoss: 1 - metric(soft confusion(step(probabilities))), the one idea of EAST, Bridging the Gap and AnyLoss."""

import warnings
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from east import metrics
from east.arrays import as_array, as_tensor
from east.choices import choose
from east.confusion import Confusion
from east.losses import steps
from east.losses.closed_form import Counts, Form, SoftLoss
from east.losses.inputs import IGNORE_INDEX, check_binary, is_tracing
from east.losses.of_metric import LossOfMetric, summed_over_ranks
from east.losses.slopes import refuse_matrix, score_and_slopes
from east.metrics import Sloped, ratio

BTG_THRESHOLDS = tuple(k / 10 for k in range(1, 10))
MAX_TEMPERATURE = 0.4
STEEP_TEMPERATURE = 0.25  # above this, the step's ends are steeper than its middle


class MetricLoss(LossOfMetric):
    """L = 1 - M(C), with M any metric and C the soft confusion matrix of the batch. Section 4, arXiv 2405.20954.

    metric: a name from east.METRICS, a dotted path, or a function of a Confusion. Its parameters (average, beta, costs)
        are keyword arguments; the name may include the average (f1_positive). Without one, it is that of the positive
        class of two, and macro of more. `classes` (names) allows beta and the positive class to be given by name.
    step: linear (`temperature` in (0, 0.4]), sigmoid or cosine (`slope`), none (the probabilities themselves).
    threshold: dynamic (mean of the two largest probabilities), a number, or a list of numbers, whose mean loss is used.
    absent: whether a class without samples in the batch scores 0 in a macro mean (zero) or is left out (ignore).
    multilabel: logits and 0/1 labels [n, L, ...] are L binary problems; `average` is then macro, micro, weighted, or
        samples (the mean over samples of the score over a sample's labels, for metrics with an `average`).
    ignore_index: samples with this label are left out, whatever their logits; if there are no others, the loss and its
        gradient are 0.
    gather: sum the counts over torch.distributed's ranks ("auto": when training with gradients in a process group).

    >>> loss = MetricLoss("f1_positive")
    >>> loss(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1]))
    tensor(0.0954)
    """

    without_positives = 1.0

    def __init__(
        self,
        metric: str | metrics.Metric = "f1",
        *,
        step: str = "linear",
        threshold: str | float | Sequence[float] = "dynamic",
        temperature: float | Tensor = 0.2,
        slope: float | None = None,
        detach_threshold: bool = False,
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
        self.step = choose("step", step, [*steps.STEPS, "none"])
        self.slope = steps.DEFAULT_SLOPE if slope is None else slope
        if slope is not None and (step in ("linear", "none") or not slope > 0):
            with_slope = " or ".join(name for name in steps.STEPS if name != "linear")
            raise ValueError(f"slope: expected a positive number with step {with_slope}, got {slope!r} with {step!r}")
        self.threshold = checked_threshold(threshold, step)
        self.detach_threshold = detach_threshold
        self.temperature = temperature

    @property
    def anneals(self) -> bool:  # type: ignore[override]
        return self.step == "linear"

    @property
    def temperature(self) -> float | Tensor:
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        lowest, highest = (value.min().item(), value.max().item()) if isinstance(value, Tensor) else (value, value)
        is_number = isinstance(value, Real | Tensor)
        if not (is_number and 0 < lowest <= highest <= MAX_TEMPERATURE * (1 + 1e-6)):  # float32's 0.4 is slightly more
            raise ValueError(f"temperature: expected 0 < T <= {MAX_TEMPERATURE}, got {value!r}")
        if highest > STEEP_TEMPERATURE:
            warnings.warn(f"temperature {highest:g}: above {STEEP_TEMPERATURE} the step is no longer steepest at the "
                          "threshold", stacklevel=3)  # fmt: skip
        self._temperature = value if isinstance(value, Tensor) else float(value)  # also NumPy's

    def get_extra_state(self) -> Tensor:
        """The temperature, as part of state_dict(), so that a resumed training continues at the same temperature."""
        return torch.as_tensor(self.temperature, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.temperature = state if state.ndim else state.item()

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        gathers = self.gathers() and self.label_average != "samples"  # a sample's counts are all on one rank
        if self.has_closed_form(labels, weights) and not self.reads_cells(logits.shape[-1]):
            t = self.threshold
            thresholds = t if isinstance(t, tuple) else (t,) if isinstance(t, float) else None
            T = self._temperature if isinstance(self._temperature, float) else self.temperature_for(logits)
            form = Form(T, thresholds, self.detach_threshold)
            score = partial(self.score, gathers)
            return SoftLoss.apply(logits if torch.is_grad_enabled() else logits.detach(), labels, weights, form, score)
        c = here = self.confusion(logits, labels, weights)
        if gathers:
            counts = torch.stack((c.diagonal, c.actual, c.predicted, c.missed, c.false_positives))
            diagonal, actual, predicted, *errors = summed_over_ranks(counts).unbind(0)
            c = Confusion(diagonal, actual, predicted, lambda: summed_over_ranks(here.matrix), *errors)
        score = self.metric(c, **self.metric_parameters)
        if score.shape != c.diagonal.shape[:-1]:
            raise ValueError(
                f"metric: expected one number per leading index, {tuple(c.diagonal.shape[:-1])}, "
                f"got shape {tuple(score.shape)}"
            )
        return 1 - (score.mean(0) if isinstance(self.threshold, tuple) else score)

    def score(self, gathers: bool, counts: Counts) -> Sloped:
        """1 - metric and its slopes at soft counts, of all ranks if `gathers`; all 0 where the counts are empty."""
        ranks = 1.0
        if gathers:
            ranks, whole = dist.get_world_size(), torch.stack([as_tensor(x) for x in counts])
            dist.all_reduce(whole)
            counts = Counts(*as_array(whole))
        diagonal, missed, false_positives = counts
        actual = diagonal + missed
        c = Confusion(diagonal, actual, diagonal + false_positives, refuse_matrix, missed, false_positives)
        score, D, P = score_and_slopes(self.metric, self.metric_parameters, c)
        loss = (1 - score) * (actual.sum(-1) != 0)  # the slopes are 0 already
        if self.threshold != "dynamic":
            ranks, loss = ranks / loss.shape[0], loss.mean(0)
        return Sloped(loss, D * -ranks, P * -ranks)  # DDP divides the sum of the gradients by the number of ranks

    def has_closed_form(self, labels: Tensor, weights: Tensor | None) -> bool:
        """Whether the hand-derived gradient of the counts applies.

        It needs the linear step and class labels, and covers only the logits: neither weights nor temperature may
        require a gradient, and nothing may trace the operations.
        """
        if self.step != "linear" or labels.is_floating_point() or is_tracing():
            return False
        T = self._temperature
        return not ((weights is not None and weights.requires_grad) or (isinstance(T, Tensor) and T.requires_grad))

    def confusion(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Confusion:
        """Soft counts of samples [..., n, d]; with a list of k thresholds they have a first dimension of k."""
        return Confusion.from_memberships(self.memberships(logits), labels, weights)

    def memberships(self, logits: Tensor) -> Tensor:
        """Soft memberships [..., n, d] of logits [..., n, d]; a list of k thresholds gives [k, ..., n, d]."""
        probabilities = logits.softmax(-1)
        if self.step == "none":
            return probabilities
        if self.threshold == "dynamic":
            threshold = steps.dynamic_threshold(probabilities)
            threshold = threshold.detach() if self.detach_threshold else threshold
        else:
            threshold = steps.thresholds_like(self.threshold, logits)
            if logits.shape[-1] == 2:
                # Steps are symmetric; 1 - (the other membership) would round small ones away.
                return self.step_values(probabilities, torch.cat((1 - threshold, threshold), -1))
        if self.step == "linear":
            return steps.normalised(self.step_values(probabilities, threshold))
        normalised = steps.normalised_sigmoid if self.step == "sigmoid" else steps.normalised_cosine
        return normalised(probabilities, threshold, self.slope)

    def step_values(self, probabilities: Tensor, threshold: Tensor) -> Tensor:
        if self.step != "linear":
            return steps.STEPS[self.step](probabilities, threshold, self.slope)
        T = self.temperature_for(probabilities)
        return steps.linear(probabilities, threshold, T[..., None, None] if isinstance(T, Tensor) else T)

    def temperature_for(self, logits: Tensor) -> float | Tensor:
        """The temperature for logits [..., n, d]: a number, or a tensor [] or [...] with their dtype and device."""
        T = self.temperature
        if not isinstance(T, Tensor):
            return T
        if T.ndim and T.shape != logits.shape[:-2]:
            raise ValueError(
                f"temperature: expected a number or one per leading index, {tuple(logits.shape[:-2])}, "
                f"got shape {tuple(T.shape)}"
            )
        return T.to(logits)

    def extra_repr(self) -> str:
        step = f"step={self.step}" + (f" (slope {self.slope:g})" if self.step not in ("linear", "none") else "")
        temperature = f", temperature={self.temperature}" if self.anneals else ""
        return f"{self.metric_in_words()}, {step}, threshold={self.threshold}{temperature}"


def checked_threshold(threshold: str | float | Sequence[float], step: str) -> str | float | tuple[float, ...]:
    """'dynamic', a number or a tuple of numbers; with step="none" always 'dynamic', as a threshold has no effect."""
    if hasattr(threshold, "tolist"):  # a NumPy array or a tensor
        threshold = threshold.tolist()
    if threshold == "dynamic" or step == "none":
        return "dynamic"
    values = [threshold] if isinstance(threshold, int | float) else threshold
    if isinstance(values, str) or not values or not all(isinstance(t, int | float) and 0 < t < 1 for t in values):
        raise ValueError(
            f"threshold: expected 'dynamic', a number between 0 and 1, or a list of them, got {threshold!r}"
        )
    return float(threshold) if isinstance(threshold, int | float) else tuple(float(t) for t in values)


class AUROCLoss(MetricLoss):
    """1 - area under (FPR, TPR) at a list of thresholds, with both end points. Section 4, Bridging the Gap."""

    def __init__(self, threshold: Sequence[float] = BTG_THRESHOLDS, **parameters: Any):
        super().__init__(area_at_each, threshold=threshold, **parameters)
        if not isinstance(self.threshold, tuple):
            raise ValueError(f"AUROC: expected a list of thresholds and a step, got {threshold!r} and {self.step!r}")
        self.threshold, self.classes = tuple(sorted(self.threshold)), None

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        check_binary(self, logits)
        return super().value(logits, labels, weights)


def area_at_each(c: Confusion) -> Tensor:
    """The area under the ROC curve of counts [k, ..., 2] at rising thresholds, repeated for each of them."""
    ones = torch.ones_like(c.actual[:1, ..., 0])  # from everything positive to nothing positive

    def with_ends(hits: Tensor, k: int) -> Tensor:
        return torch.cat((ones, ratio(hits[..., k], c.actual[..., k]), 0 * ones))

    return area(with_ends(c.missed, 0), with_ends(c.diagonal, 1)).expand(c.total.shape)


def area(x: Tensor, y: Tensor) -> Tensor:
    """Area under the points (x, y) [k, ...] with falling x, by the trapezoid rule."""
    return ((x[:-1] - x[1:]) * (y[:-1] + y[1:]) / 2).sum(0)
