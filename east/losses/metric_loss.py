"""MetricLoss: 1 - metric(soft confusion(step(probabilities))), the one idea of EAST, Bridging the Gap and AnyLoss."""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from east import metrics
from east.choices import choose
from east.confusion import Confusion, class_counts
from east.losses import steps
from east.losses.closed_form import soft_counts, soft_f1_loss
from east.losses.inputs import Loss, binary_only, refuse_unknown, transformed
from east.metrics import ratio

BTG_THRESHOLDS = tuple(k / 10 for k in range(1, 10))
MAX_TEMPERATURE = 0.4
STEEP_TEMPERATURE = 0.25  # above, the step's ends become steeper than its middle


class MetricLoss(Loss):
    """L = 1 - M(C), with M any metric and C the soft confusion matrix of the batch. Section 4, arXiv 2405.20954.

    metric: a name of east.METRICS, a dotted path, or a function of a Confusion; its parameters (average, beta, costs)
        follow as keywords. `classes` (names) lets beta, and the positive class, be given by name.
    step: linear (`temperature` in (0, 0.4]), sigmoid or cosine (`slope`), none (probabilities themselves).
    threshold: dynamic (mean of the two largest probabilities), a number, or a list of numbers: the mean loss over them.
    absent: whether a class without samples in the batch scores zero in a macro mean, or is ignored.
    gather: sum the counts over torch.distributed's ranks ("auto": when training with gradients in a process group).

    >>> loss = MetricLoss("f1")
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
        **metric_parameters: Any,
    ):
        super().__init__()
        self.metric = metrics.resolve(metric)
        self.step = choose("step", step, [*steps.STEPS, "none"])
        self.slope = steps.DEFAULT_SLOPE if slope is None else slope
        if slope is not None and (step in ("linear", "none") or not slope > 0):
            sloped = ", ".join(name for name in steps.STEPS if name != "linear")
            raise ValueError(f"slope: expected a positive number, for the steps {sloped}, got {slope!r} for {step!r}")
        self.threshold = checked_threshold(threshold, step)
        self.classes = None if classes is None else [str(name) for name in classes]
        self.detach_threshold = detach_threshold
        if gather not in ("auto", True, False):
            raise ValueError(f"gather: expected 'auto', true or false, got {gather!r}")
        self.gather = gather
        self.temperature = temperature
        self.metric_parameters = self.checked_parameters(metric_parameters, choose("absent", absent, metrics.ABSENT))

    @property
    def anneals(self) -> bool:  # type: ignore[override]
        return self.step == "linear"

    @property
    def temperature(self) -> float | Tensor:
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        least, most = (value.min().item(), value.max().item()) if isinstance(value, Tensor) else (value, value)
        a_number = isinstance(value, Real | Tensor)
        if not (a_number and 0 < least <= most <= MAX_TEMPERATURE * (1 + 1e-6)):  # float32's 0.4 is a little more
            raise ValueError(f"temperature: expected 0 < T <= {MAX_TEMPERATURE}, got {value!r}")
        if most > STEEP_TEMPERATURE:
            warnings.warn(f"temperature {most:g}: above {STEEP_TEMPERATURE} the step is no longer steepest at the "
                          "threshold", stacklevel=3)  # fmt: skip
        self._temperature = value

    def get_extra_state(self) -> Tensor:
        """The temperature is part of state_dict(): a training that is resumed goes on as cold as it was."""
        return torch.as_tensor(self.temperature, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.temperature = state if state.ndim else state.item()

    def checked_parameters(self, given: Mapping[str, Any], absent: str) -> dict[str, Any]:
        """The metric's keyword arguments, class names turned into indices."""
        accepted = dict(list(inspect.signature(self.metric).parameters.items())[1:])
        refuse_unknown("parameter of the metric", given, list(accepted.values()))
        for name, parameter in accepted.items():
            needed = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if needed and name not in given:
                raise ValueError(f"this metric needs {name}: expected MetricLoss(…, {name}=…)")
        parameters = dict(given)
        if "absent" in accepted:
            parameters["absent"] = absent
        elif absent != "zero":
            raise ValueError(f"absent={absent!r} does not apply to this metric: it takes no macro mean over classes")
        if "average" in parameters:
            # "none" gives one number per class, which cannot be minimised.
            choose("average", parameters["average"], [a for a in metrics.AVERAGES if a != "none"])
        beta, positive = parameters.get("beta"), parameters.get("positive")
        if isinstance(beta, Real) and not 0 <= float(beta) < math.inf:
            raise ValueError(f"beta: expected a number of at least 0, got {beta!r}")
        if isinstance(beta, Mapping):
            parameters["beta"] = self.by_class(beta)
        if positive is not None and "average" in accepted and parameters.get("average") != "positive":
            raise ValueError(f"positive={positive!r}: expected average='positive' beside it, else it has no meaning")
        if isinstance(positive, bool):
            raise ValueError(f"positive: expected the index or the name of a class, got {positive!r}")
        if isinstance(positive, str):
            parameters["positive"] = self.class_index(positive)
        return parameters

    def by_class(self, beta: Mapping[str, float]) -> list[float]:
        """beta for every class, 1 where it is not named."""
        values = [1.0] * len(self.classes or ())
        for name, value in beta.items():
            values[self.class_index(name)] = float(value)
        return values

    def class_index(self, name: str) -> int:
        if self.classes is None:
            raise ValueError(f"class {name!r} is given by name: expected `classes`, the list of all names, as well")
        return self.classes.index(choose("class", str(name), self.classes))

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if self.is_macro_f1() and self.closed(weights) and not self.gathers():
            return soft_f1_loss(logits, labels, weights, self.temperature_for(logits), self.detach_threshold)
        confusion = self.confusion(logits, labels, weights)
        score = self.metric(confusion, **self.metric_parameters)
        if score.shape != confusion.diagonal.shape[:-1]:
            raise ValueError(
                f"metric: expected one number per leading index, {tuple(confusion.diagonal.shape[:-1])}, "
                f"got shape {tuple(score.shape)}"
            )
        return 1 - (score.mean(0) if isinstance(self.threshold, tuple) else score)

    def is_macro_f1(self) -> bool:
        """Of which the closed form knows the derivatives; a subclass may count otherwise."""
        parameters, own = self.metric_parameters, type(self).confusion is MetricLoss.confusion
        macro = parameters.get("average", "macro") == "macro" and parameters.get("absent") == "zero"
        return self.metric is metrics.f1 and macro and own

    def closed(self, weights: Tensor | None) -> bool:
        """Whether the closed form applies: the linear step at the dynamic threshold, derived by the logits alone."""
        if self.step != "linear" or self.threshold != "dynamic" or transformed():
            return False
        return not any(isinstance(x, Tensor) and x.requires_grad for x in (weights, self.temperature))

    def confusion(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Confusion:
        """Soft counts of a batch; with a list of k thresholds they have a first dimension of k."""
        if self.closed(weights):
            T = self.temperature_for(logits)
            diagonal, predicted = soft_counts(logits, labels, weights, T, self.detach_threshold)
            confusion = Confusion(
                diagonal,
                class_counts(labels, weights, predicted),
                predicted,
                lambda: Confusion.from_memberships(self.memberships(logits), labels, weights).matrix,
            )
        else:
            confusion = Confusion.from_memberships(self.memberships(logits), labels, weights)
        return summed_over_ranks(confusion) if self.gathers() else confusion

    def memberships(self, logits: Tensor) -> Tensor:
        """Soft membership [..., n, d] of every sample in every class; a list of k thresholds gives [k, ..., n, d]."""
        probabilities = logits.softmax(-1)
        if self.step == "none":
            return probabilities
        if self.threshold == "dynamic":
            threshold = steps.dynamic_threshold(probabilities)
            threshold = threshold.detach() if self.detach_threshold else threshold
            return steps.normalised(self.stepped(probabilities, threshold))
        threshold = torch.as_tensor(self.threshold, dtype=logits.dtype, device=logits.device)
        threshold = threshold.reshape(threshold.shape + (1,) * logits.ndim)
        if logits.shape[-1] == 2:
            positive = self.stepped(probabilities[..., 1:], threshold)
            return torch.cat((1 - positive, positive), -1)
        return steps.normalised(self.stepped(probabilities, threshold))

    def stepped(self, probabilities: Tensor, threshold: Tensor) -> Tensor:
        if self.step != "linear":
            return steps.STEPS[self.step](probabilities, threshold, self.slope)
        T = self.temperature_for(probabilities)
        return steps.linear(probabilities, threshold, T[..., None, None] if isinstance(T, Tensor) else T)

    def temperature_for(self, logits: Tensor) -> float | Tensor:
        """The number, or a tensor [...] beside the logits [..., n, d]."""
        T = self.temperature
        if not isinstance(T, Tensor):
            return T
        if T.ndim and T.shape != logits.shape[:-2]:
            raise ValueError(
                f"temperature: expected a number or one per leading index, {tuple(logits.shape[:-2])}, "
                f"got shape {tuple(T.shape)}"
            )
        return T.to(logits)

    def gathers(self) -> bool:
        if not (dist.is_available() and dist.is_initialized()) or self.gather is False:
            return False
        return self.gather is True or (self.training and torch.is_grad_enabled() and dist.get_world_size() > 1)

    def extra_repr(self) -> str:
        name = getattr(self.metric, "__name__", type(self.metric).__name__)
        return f"{name}, step={self.step}, threshold={self.threshold}, temperature={self.temperature}"


def checked_threshold(threshold: str | float | Sequence[float], step: str) -> str | float | tuple[float, ...]:
    """'dynamic', a number, or a tuple of them; without a step there is nothing that a threshold could change."""
    if hasattr(threshold, "tolist"):  # an array or a tensor
        threshold = threshold.tolist()
    if threshold == "dynamic" or step == "none":
        return "dynamic"
    values = [threshold] if isinstance(threshold, int | float) else threshold
    if isinstance(values, str) or not values or not all(isinstance(t, int | float) and 0 < t < 1 for t in values):
        raise ValueError(
            f"threshold: expected 'dynamic', a number between 0 and 1, or a list of them, got {threshold!r}"
        )
    return float(threshold) if isinstance(threshold, int | float) else tuple(float(t) for t in values)


def summed_over_ranks(confusion: Confusion) -> Confusion:
    """Counts of all ranks; after DDP's averaging the gradient is that of one process on the whole batch."""
    counts = torch.stack((confusion.diagonal, confusion.actual, confusion.predicted))
    diagonal, actual, predicted = _SumOverRanks.apply(counts)
    return Confusion(diagonal, actual, predicted, lambda: _SumOverRanks.apply(confusion.matrix))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, counts: Tensor) -> Tensor:
        counts = counts.clone()
        dist.all_reduce(counts)
        return counts

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        # Every rank holds the same loss; DDP will divide the gradients' sum by the number of ranks.
        return gradient * dist.get_world_size()


class AUROCLoss(MetricLoss):
    """1 - area under (FPR, TPR) over a list of thresholds, with both end points. Section 4, Bridging the Gap."""

    def __init__(self, threshold: Sequence[float] = BTG_THRESHOLDS, **parameters: Any):
        super().__init__("accuracy", threshold=threshold, **parameters)
        if not isinstance(self.threshold, tuple):
            raise ValueError(f"an area needs a list of thresholds and a step, got {threshold!r} and {self.step!r}")
        self.threshold = tuple(sorted(self.threshold))

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        binary_only(self, logits, labels)
        c = self.confusion(logits, labels, weights)
        true_rate = ratio(c.diagonal[..., 1], c.actual[..., 1])
        false_rate = ratio(c.actual[..., 0] - c.diagonal[..., 0], c.actual[..., 0])
        return 1 - area(with_ends(false_rate), with_ends(true_rate))


def with_ends(rates: Tensor) -> Tensor:
    """Rates [k, ...] at rising thresholds, from (1, 1) where everything is positive to (0, 0)."""
    return torch.cat((torch.ones_like(rates[:1]), rates, torch.zeros_like(rates[:1])))


def area(x: Tensor, y: Tensor) -> Tensor:
    """Trapezoid area under points whose x [k, ...] falls."""
    return ((x[:-1] - x[1:]) * (y[:-1] + y[1:]) / 2).sum(0)
