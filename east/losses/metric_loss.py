"""MetricLoss: 1 - metric(soft confusion(step(probabilities))), the one idea of EAST, Bridging the Gap and AnyLoss."""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from east import metrics
from east.arrays import Array, as_array, as_tensor
from east.choices import choose
from east.confusion import Confusion
from east.losses import steps
from east.losses.closed_form import Counts, Form, soft_counts, soft_loss
from east.losses.inputs import (
    IGNORE_INDEX,
    Loss,
    Samples,
    as_weighted_samples,
    average_over_labels,
    check_binary,
    is_tracing,
    masked,
    read_multilabel,
    refuse_unknown,
    summed_over_ranks,
)
from east.losses.slopes import loss_and_slopes
from east.metrics import Sloped, ratio

BTG_THRESHOLDS = tuple(k / 10 for k in range(1, 10))
MAX_TEMPERATURE = 0.4
LABEL_AVERAGES = ("macro", "micro", "weighted", "samples")
UNUSED_IN_TRIALS = ("ignore_index", "gather", "multilabel", "classes")  # `build` sets the classes
STEEP_TEMPERATURE = 0.25  # above this, the step's ends are steeper than its middle


class MetricLoss(Loss):
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

    def __init__(
        self,
        metric: str | metrics.Metric = "f1",
        *,
        step: str = "linear",
        threshold: str | float | Sequence[float] = "dynamic",
        temperature: float | Tensor = 0.2,
        slope: float | None = None,
        classes: Sequence[str] | None = None,
        absent: str = "zero",
        detach_threshold: bool = False,
        gather: str | bool = "auto",
        multilabel: bool = False,
        ignore_index: int = IGNORE_INDEX,
        **metric_parameters: Any,
    ):
        super().__init__(ignore_index)
        self.metric, metric_parameters = metrics.parse(metric, metric_parameters)
        self.multilabel = multilabel
        self.step = choose("step", step, [*steps.STEPS, "none"])
        self.slope = steps.DEFAULT_SLOPE if slope is None else slope
        if slope is not None and (step in ("linear", "none") or not slope > 0):
            with_slope = " or ".join(name for name in steps.STEPS if name != "linear")
            raise ValueError(f"slope: expected a positive number with step {with_slope}, got {slope!r} with {step!r}")
        self.threshold = checked_threshold(threshold, step)
        self.classes = None if classes is None else [str(name) for name in classes]
        self.detach_threshold = detach_threshold
        if gather not in ("auto", True, False):
            raise ValueError(f"gather: expected 'auto', true or false, got {gather!r}")
        self.gather = gather
        self.temperature = temperature
        self.absent = choose("absent", absent, metrics.ABSENT)
        self.label_average = self.pop_label_average(metric_parameters) if multilabel else ""
        self.metric_parameters = self.checked_parameters(metric_parameters, absent)
        self.unstated = metrics.takes_average(self.metric) and "average" not in self.metric_parameters
        if self.unstated and self.classes:
            warn_of_default(self, len(self.classes))
            self.metric_parameters["average"] = metrics.default_average(len(self.classes))

    takes_soft_targets = True
    unused_in_trials = UNUSED_IN_TRIALS

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

    def checked_parameters(self, keywords: Mapping[str, Any], absent: str) -> dict[str, Any]:
        """The metric's keyword arguments, checked, with class names replaced by indices."""
        accepted = dict(list(inspect.signature(self.metric).parameters.items())[1:])
        refuse_unknown(f"parameter of {name_of(self.metric)}", keywords, list(accepted.values()))
        for name, parameter in accepted.items():
            required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if required and name not in keywords:
                raise ValueError(f"{name_of(self.metric)} needs {name}: expected {name}=…")
        parameters = dict(keywords)
        self.check_beta(parameters.get("beta", 1.0))
        if self.multilabel:
            # The score of a label is that of its positives.
            return parameters | ({"average": "positive", "positive": 1} if "average" in accepted else {})
        if "absent" in accepted:
            parameters["absent"] = absent
        elif absent != "zero":
            raise ValueError(f"absent={absent!r} does not apply to this metric, which has no macro mean over classes")
        if "average" in parameters:
            # "none" gives one number per class; a loss needs a single number.
            choose("average", parameters["average"], [a for a in metrics.AVERAGES if a != "none"])
        if isinstance(parameters.get("beta"), Mapping):
            parameters["beta"] = self.beta_per_class(parameters["beta"])
        positive = parameters.get("positive")
        if not torch.as_tensor(parameters.get("costs", 0.0)).isfinite().all():
            raise ValueError(f"costs: expected finite numbers, got {parameters['costs']!r}")
        if positive is not None and "average" in accepted and parameters.get("average") != "positive":
            raise ValueError(f"positive={positive!r}: expected average='positive' with it, else it has no effect")
        if isinstance(positive, bool) or not isinstance(positive, Integral | str | None):
            raise ValueError(f"positive: expected the index or name of a class, got {positive!r}")
        if isinstance(positive, str):
            parameters["positive"] = self.class_index(positive)
        return parameters

    def pop_label_average(self, parameters: dict[str, Any]) -> str:
        """Remove `average` from a multilabel metric's parameters and return it: it is the average over labels."""
        if "positive" in parameters:
            raise ValueError("positive: expected none with multilabel=True, where every label has its own positives")
        averages = LABEL_AVERAGES if "average" in inspect.signature(self.metric).parameters else LABEL_AVERAGES[:-1]
        return choose("average", parameters.pop("average", "macro"), averages)

    def check_beta(self, beta: metrics.PerClass | Mapping[str, float] | str) -> None:
        """Raise ValueError unless beta is a finite number of at least 0, or several, if classes can have their own."""
        if self.multilabel and not isinstance(beta, Real):
            raise ValueError(f"beta: expected one number for all labels with multilabel=True, got {beta!r}")
        values = list(beta.values()) if isinstance(beta, Mapping) else beta
        numbers = None if isinstance(values, str) else torch.as_tensor(values, dtype=torch.float64)
        if numbers is None or not ((numbers >= 0) & (numbers < math.inf)).all():
            expected = "a number" if isinstance(beta, str | Real) else "finite numbers"
            raise ValueError(f"beta: expected {expected} of at least 0, got {beta!r}")

    def beta_per_class(self, beta: Mapping[str, float]) -> list[float]:
        """beta for every class, 1 for classes that are not named."""
        values = [1.0] * len(self.classes or ())
        for name, value in beta.items():
            values[self.class_index(name)] = float(value)
        return values

    def check_classes(self, classes: int) -> None:
        check_classes(self.classes, classes)

    def class_index(self, name: str) -> int:
        if self.classes is None:
            raise ValueError(f"class {name!r} is given by name: expected `classes` too, the list of all class names")
        return self.classes.index(choose("class", str(name), self.classes))

    def read(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Samples:
        if self.multilabel:
            return read_multilabel(logits, labels, weights, self.ignore_index, self.label_average)
        samples = super().read(logits, labels, weights)
        classes = samples.logits.shape[-1]
        self.check_classes(classes)
        warn_of_default(self, classes)
        # With two classes, two weighted samples in closed form are faster than soft targets through autograd.
        return as_weighted_samples(samples) if classes == 2 and samples.labels.is_floating_point() else samples

    def compute(self, samples: Samples) -> Tensor:
        return self.compute_multilabel(samples) if self.multilabel else super().compute(samples)

    def compute_multilabel(self, samples: Samples) -> Tensor:
        """The average of one binary loss per label, or per sample, as `read_multilabel` arranges them."""
        if self.label_average != "samples":
            values = Loss.compute(self, samples)
            return average_over_labels(values, samples, self, self.label_average, self.absent, without_positives=1.0)
        values = self.loss_per_sample(samples)
        _, weights = masked(*samples[1:], self.ignore_index, samples.logits)
        sample_weights = torch.ones_like(values) if weights is None else weights.mean(-1)
        sums = torch.stack(((values * sample_weights).sum(-1), sample_weights.sum(-1)))
        return ratio(*(summed_over_ranks(sums) if self.gathers() else sums))

    def loss_per_sample(self, samples: Samples) -> Tensor:
        """One loss per sample. The counts of a sample are all on one rank: only the mean over samples is gathered."""
        gather, self.gather = self.gather, False
        try:
            return Loss.compute(self, samples)
        finally:
            self.gather = gather

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        is_ours = type(self).confusion is MetricLoss.confusion  # not a subclass's
        if is_ours and self.metric in metrics.WITH_SLOPES and self.has_closed_form(labels, weights):
            return soft_loss(logits, labels, weights, self.form(logits), partial(self.score, self.gathers()))
        confusion = self.confusion(logits, labels, weights)
        score = self.metric(confusion, **self.metric_parameters)
        if score.shape != confusion.diagonal.shape[:-1]:
            raise ValueError(
                f"metric: expected one number per leading index, {tuple(confusion.diagonal.shape[:-1])}, "
                f"got shape {tuple(score.shape)}"
            )
        return 1 - (score.mean(0) if isinstance(self.threshold, tuple) else score)

    def score(self, gathers: bool, *counts: Array) -> Sloped:
        """1 - metric and its slopes at the diagonal, missed and false positive counts, of all ranks if `gathers`."""
        ranks = 1
        if gathers:
            ranks, whole = dist.get_world_size(), torch.stack([as_tensor(x) for x in counts])
            dist.all_reduce(whole)
            counts = tuple(as_array(whole))
        loss, D, P = loss_and_slopes(self.metric, self.metric_parameters, *counts)
        if self.threshold != "dynamic":
            ranks, loss = ranks / loss.shape[0], loss.mean(0)
        return Sloped(loss, D * ranks, P * ranks)  # DDP divides the sum of the gradients by the number of ranks

    def has_closed_form(self, labels: Tensor, weights: Tensor | None) -> bool:
        """Whether the hand-derived gradient of the counts applies.

        It needs the linear step and class labels, and covers only the logits: neither weights nor temperature may
        require a gradient, and nothing may trace the operations.
        """
        if self.step != "linear" or labels.is_floating_point() or is_tracing():
            return False
        T = self._temperature
        return not ((weights is not None and weights.requires_grad) or (isinstance(T, Tensor) and T.requires_grad))

    def form(self, logits: Tensor) -> Form:
        t = self.threshold
        thresholds = t if isinstance(t, tuple) else (t,) if isinstance(t, float) else None
        return Form(self.temperature_for(logits), thresholds, self.detach_threshold)

    def confusion(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Confusion:
        """Soft counts of samples [..., n, d]; with a list of k thresholds they have a first dimension of k."""
        if self.has_closed_form(labels, weights):
            counts = soft_counts(logits, labels, weights, self.form(logits))
            counts = Counts(*(x.squeeze(0) for x in counts)) if isinstance(self.threshold, float) else counts
            confusion = Confusion(
                counts.diagonal,
                counts.diagonal + counts.missed,
                counts.diagonal + counts.false_positives,
                lambda: Confusion.from_memberships(self.memberships(logits), labels, weights).matrix,
                counts.missed,
                counts.false_positives,
            )
        else:
            confusion = Confusion.from_memberships(self.memberships(logits), labels, weights)
        return gathered(confusion) if self.gathers() else confusion

    def memberships(self, logits: Tensor) -> Tensor:
        """Soft memberships [..., n, d] of logits [..., n, d]; a list of k thresholds gives [k, ..., n, d]."""
        probabilities = logits.softmax(-1)
        if self.step == "none":
            return probabilities
        if self.threshold == "dynamic":
            threshold = steps.dynamic_threshold(probabilities)
            return self.normalised_steps(probabilities, threshold.detach() if self.detach_threshold else threshold)
        threshold = steps.thresholds_like(self.threshold, logits)
        if logits.shape[-1] == 2:
            # Steps are symmetric; 1 - (the other membership) would round small ones away.
            return self.step_values(probabilities, torch.cat((1 - threshold, threshold), -1))
        return self.normalised_steps(probabilities, threshold)

    def normalised_steps(self, probabilities: Tensor, threshold: Tensor) -> Tensor:
        if self.step == "sigmoid":
            return steps.normalised_sigmoid(probabilities, threshold, self.slope)
        if self.step == "cosine":
            return steps.normalised_cosine(probabilities, threshold, self.slope)
        return steps.normalised(self.step_values(probabilities, threshold))

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
        parts = [name_of(self.metric), average_of(self), "multilabel" if self.multilabel else ""]
        step = f"step={self.step}" + (f" (slope {self.slope:g})" if self.step not in ("linear", "none") else "")
        parts += [step, f"threshold={self.threshold}"]
        parts += [f"temperature={self.temperature}"] if self.anneals else []
        return ", ".join(part for part in parts if part)


def check_classes(names: Sequence[str] | None, classes: int) -> None:
    """Refuse logits with another number of classes than were named."""
    if names is not None and len(names) != classes:
        raise ValueError(f"classes: expected {classes} names, one per class of the logits, got {len(names)}")


def average_of(loss: Any) -> str:
    """The average of a metric's loss, as its repr shows it."""
    average = loss.label_average or loss.metric_parameters.get("average")
    unstated = "positive with two classes, else macro" if loss.unstated else ""
    return f"average={average or unstated}" if average or unstated else ""


def warn_of_default(loss: Any, classes: int) -> None:
    """Warn once that the default average for two classes has changed, if none was given."""
    if loss.unstated and classes == 2 and not is_tracing():
        say_new_default(name_of(loss.metric))


@cache
def say_new_default(metric: str) -> None:
    warnings.warn(
        f"{metric} with two classes is now that of class 1, no longer the mean over both: average='macro' gives the "
        "mean, average='positive' silences this warning",
        FutureWarning,
        stacklevel=7,
    )


def name_of(metric: metrics.Metric) -> str:
    return getattr(metric, "__name__", type(metric).__name__)


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


def gathered(confusion: Confusion) -> Confusion:
    """The counts summed over all ranks."""
    c = confusion
    counts = summed_over_ranks(torch.stack((c.diagonal, c.actual, c.predicted, c.missed, c.false_positives)))
    diagonal, actual, predicted, *errors = counts.unbind(0)
    return Confusion(diagonal, actual, predicted, lambda: summed_over_ranks(c.matrix), *errors)


class AUROCLoss(MetricLoss):
    """1 - area under (FPR, TPR) at a list of thresholds, with both end points. Section 4, Bridging the Gap."""

    def __init__(self, threshold: Sequence[float] = BTG_THRESHOLDS, **parameters: Any):
        super().__init__("accuracy", threshold=threshold, **parameters)
        if not isinstance(self.threshold, tuple):
            raise ValueError(f"AUROC: expected a list of thresholds and a step, got {threshold!r} and {self.step!r}")
        self.threshold = tuple(sorted(self.threshold))

    def check_classes(self, classes: int) -> None:
        """`value` checks that there are two."""

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        check_binary(self, logits)
        c = self.confusion(logits, labels, weights)
        true_positive_rate = ratio(c.diagonal[..., 1], c.actual[..., 1])
        false_positive_rate = ratio(c.missed[..., 0], c.actual[..., 0])
        return 1 - area(with_ends(false_positive_rate), with_ends(true_positive_rate))


def with_ends(rates: Tensor) -> Tensor:
    """Rates [k, ...] at rising thresholds, between 1 (everything positive) and 0 (nothing positive): [k + 2, ...]."""
    return torch.cat((torch.ones_like(rates[:1]), rates, torch.zeros_like(rates[:1])))


def area(x: Tensor, y: Tensor) -> Tensor:
    """Area under the points (x, y) [k, ...] with falling x, by the trapezoid rule."""
    return ((x[:-1] - x[1:]) * (y[:-1] + y[1:]) / 2).sum(0)
