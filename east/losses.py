"""Losses over a batch. MetricLoss is 1 - metric(soft confusion(step(probabilities))); the others are the baselines.

Every loss is called as loss(logits, labels, weights=None) and returns one number per leading index, 0-d in ordinary
use: logits [..., n, d] with labels [..., n] for d classes; a single logit z per sample, logits [..., n, 1] or of the
labels' own shape, stands for the two logits (0, z). `anneals` says whether a loss has a temperature that matters.
"""

import inspect
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from east import metrics, steps
from east.choices import choose
from east.confusion import Confusion, check_range, class_counts, per_class
from east.metrics import ratio
from east.surrogate import soft_counts, soft_f1_loss

BTG_THRESHOLDS = tuple(k / 10 for k in range(1, 10))
MAX_TEMPERATURE = 0.4
STEEP_TEMPERATURE = 0.25  # above, the step's ends become steeper than its middle


class Loss(nn.Module):
    """Checks the input once for all losses, casts to float32 or better, hands over logits [..., n, d], d >= 2."""

    anneals = False

    def forward(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
            raise ValueError(f"expected tensors, got logits {type(logits)} and labels {type(labels)}")
        if torch.is_autocast_enabled(logits.device.type):
            with torch.autocast(logits.device.type, enabled=False):
                return self.forward(logits, labels, weights)
        logits, labels = two_or_more_logits(logits, labels)
        if weights is not None:
            weights = checked_weights(weights, labels, logits.dtype)
        try:
            return self.value(logits, labels, weights)
        except (RuntimeError, IndexError):
            # Every loss looks its labels up, which fails outside the range: checking first would cost a pass.
            check_range("labels", labels, logits.shape[-1])
            raise

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define value(logits, labels, weights)")


def two_or_more_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Checked logits [..., n, d], d >= 2, in float32 or float64, and labels [..., n]."""
    if not logits.is_floating_point() or labels.is_floating_point():
        raise ValueError(
            f"expected floating point logits and integer labels, got logits {logits.dtype} and labels {labels.dtype}"
        )
    single = logits.ndim > 1 and logits.shape[-1] == 1
    if labels.shape == logits.shape or (single and labels.shape == logits.shape[:-1]):
        if single:
            logits, labels = logits.squeeze(-1), labels.reshape(logits.shape[:-1])
        elif logits.ndim > 1:
            refuse_one_hot(labels)
        logits = torch.stack((torch.zeros_like(logits), logits), -1)
    elif labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}: expected "
            f"{tuple(logits.shape[:-1])} for {logits.shape[-1]} classes, or the logits' own shape for single logits"
        )
    if labels.ndim == 0 or labels.numel() == 0:
        raise ValueError(f"expected at least one sample, got logits of shape {tuple(logits.shape)}")
    if labels.dtype != torch.int64:
        labels = labels.long()
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return logits, labels


def refuse_one_hot(labels: Tensor) -> None:
    """Labels of the logits' own shape are those of single logits, and rarely meant so if every row has a single 1."""
    if not transformed() and (labels >= 0).all() and (labels.sum(-1) == 1).all():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} look one-hot: expected class indices, labels.argmax(-1); "
            "for populations of single logits give logits as [..., n, 1]"
        )


def checked_weights(weights: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights [..., n] of the samples; with single logits [..., n, 1] also of that shape."""
    if weights.shape not in (labels.shape, (*labels.shape, 1)):
        raise ValueError(f"weights: expected the labels' shape {tuple(labels.shape)}, got {tuple(weights.shape)}")
    return weights.reshape(labels.shape).to(dtype)


def transformed() -> bool:
    """Whether torch.compile or a torch.func transform is tracing: data-dependent steps must be left out."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


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


def refuse_unknown(kind: str, given: Iterable[str], accepted: Sequence[inspect.Parameter]) -> None:
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        for name in given:
            choose(kind, name, [parameter.name for parameter in accepted])


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


def binary_only(loss: nn.Module, logits: Tensor, labels: Tensor) -> None:
    """Checks labels as well, since such losses compute with them where others look up."""
    if logits.shape[-1] != 2:
        raise ValueError(f"{type(loss).__name__}: expected two classes or a single logit, got {logits.shape[-1]}")
    if not transformed():
        check_range("labels", labels, 2)


class ReleasedBtG(Loss):
    """Bridging the Gap as its released code computes it: the threshold is mirrored on one side of p = tau, so that a
    sample's memberships do not sum to 1 (equal to the paper only at tau = 1/2), and the AUROC area lacks its ends.
    """

    EPS = 1e-7

    def __init__(self, metric: str = "f1", beta: float = 1.0, threshold: Sequence[float] = BTG_THRESHOLDS,
                 step: str = "linear", slope: float = 10.0):  # fmt: skip
        super().__init__()
        self.metric = choose("metric", metric, ("f1", "fbeta", "accuracy", "auroc"))
        self.step = choose("step", step, ("linear", "sigmoid"))
        self.beta, self.slope = beta, slope
        self.threshold = checked_threshold(threshold, step)

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        binary_only(self, logits, labels)
        tp, fn, fp, tn = self.counts(logits.softmax(-1)[..., 1], labels, weights)
        if self.metric == "accuracy":
            return 1 - ((tp + tn) / (tp + tn + fp + fn)).mean(0)
        recall = tp / (tp + fn + self.EPS)
        if self.metric == "auroc":
            fall_out, order = (fp / (fp + tn + self.EPS)).sort(0, descending=True)
            return 1 - area(fall_out, recall.gather(0, order))
        precision, square = tp / (tp + fp + self.EPS), self.beta**2
        return 1 - ((1 + square) * precision * recall / (square * precision + recall + self.EPS)).mean(0)

    def counts(self, p: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        t = torch.as_tensor(self.threshold, dtype=p.dtype, device=p.device).reshape(-1, *(1,) * p.ndim)
        y = labels.to(p.dtype)

        def summed(inputs: Tensor, threshold: Tensor) -> Tensor:
            values = self.stepped(inputs.expand(threshold.shape), threshold)
            return (values if weights is None else values * weights).sum(-1)

        mirrored = 1 - t
        return (
            summed(p * y, torch.where(p > t, t, mirrored)),
            summed((1 - p) * y, torch.where(p < t, mirrored, t)),
            summed(p * (1 - y), torch.where(p < t, t, mirrored)),
            summed((1 - p) * (1 - y), torch.where(p < t, mirrored, t)),
        )

    def stepped(self, inputs: Tensor, threshold: Tensor) -> Tensor:
        if self.step == "sigmoid":
            return steps.sigmoid(inputs, threshold, self.slope)
        return steps.linear(inputs, threshold, 0.2)


def mean_over_samples(values: Tensor, weights: Tensor | None) -> Tensor:
    """Mean [...] of values [..., n], weighted where weights are given."""
    return values.mean(-1) if weights is None else ratio((values * weights).sum(-1), weights.sum(-1))


class ClassWeighted(Loss):
    """A loss with one weight per class, or None; build() turns "balanced" into n / (d n_k) of the training labels."""

    def __init__(self, class_weights: Sequence[float] | str | None = None):
        super().__init__()
        if isinstance(class_weights, str):
            raise ValueError(
                f"class_weights: expected numbers, got {class_weights!r}; 'balanced' needs training labels"
            )
        self.class_weights = None if class_weights is None else [float(w) for w in class_weights]

    def of(self, labels: Tensor, logits: Tensor) -> Tensor:
        """The weight [..., n] of every sample's class."""
        if len(self.class_weights or ()) != logits.shape[-1]:
            raise ValueError(f"class_weights: expected {logits.shape[-1]}, got {len(self.class_weights or ())}")
        return logits.new_tensor(self.class_weights)[labels]


class CrossEntropy(ClassWeighted):
    """Softmax cross-entropy; with class weights their weighted mean, as torch's."""

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        values = -log_likelihood(logits, labels)
        if self.class_weights is not None:
            by_class = self.of(labels, logits)
            weights = by_class if weights is None else by_class * weights
        return mean_over_samples(values, weights)


class Focal(ClassWeighted):
    """-(1 - p_y)^gamma log p_y: well classified samples count less. Lin et al. 2017."""

    def __init__(self, gamma: float = 2.0, class_weights: Sequence[float] | None = None):
        super().__init__(class_weights)
        self.gamma = gamma

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        log_p = log_likelihood(logits, labels)
        values = -((-torch.expm1(log_p)).clamp_min(1e-7) ** self.gamma) * log_p
        if self.class_weights is not None:
            alpha = self.of(labels, logits) / sum(self.class_weights)
            values = values * alpha
        return mean_over_samples(values, weights)


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """log p_y [..., n]."""
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


class Dice(Loss):
    """1 - mean over present classes of 2 sum p y / (sum p^2 + sum y^2), sums over the batch. Milletari et al. 2016."""

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        p = logits.softmax(-1)
        w = torch.ones_like(p[..., 0]) if weights is None else weights
        classes = p.shape[-1]
        overlap = per_class(w * p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), labels, classes)
        actual = per_class(w, labels, classes)
        dice = 2 * overlap / ((w.unsqueeze(-1) * p * p).sum(-2) + actual + 1e-7)
        present = (actual > 0).to(p.dtype)
        return 1 - (dice * present).sum(-1) / present.sum(-1).clamp_min(1)


class ReleasedDice(Loss):
    """Dice on raw outputs with the class index broadcast against all of them, as if integer labels were passed to a
    loss that expects one-hot ones: its optimum is "every output equals the class index". The suspected origin of EAST's
    Dice rows; their code was never seen.
    """

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if not transformed():
            check_range("labels", labels, logits.shape[-1])
        y = labels.to(logits.dtype).unsqueeze(-1)
        dice = (logits * y).sum(-1) / ((logits**2).sum(-1) + logits.shape[-1] * y.squeeze(-1) ** 2 + 1e-7)
        return 1 - mean_over_samples(dice, weights)


class WMW(Loss):
    """Mean over pairs of max(0, gamma - (p_positive - p_negative))^power: a smooth AUROC. Yan et al. 2003.

    Divided by the number of pairs, so that its scale does not depend on the batch; 0 when one class is absent.
    """

    def __init__(self, gamma: float = 0.2, power: float = 3.0):
        super().__init__()
        self.gamma, self.power = gamma, power

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        binary_only(self, logits, labels)
        return self.over_pairs(logits.softmax(-1)[..., 1], labels == 1, labels == 0, weights)

    def over_pairs(self, scores: Tensor, first: Tensor, second: Tensor, weights: Tensor | None) -> Tensor:
        """Weighted mean over the pairs of a sample that is in `first` and one in `second`, both bool [..., n]."""
        weights = torch.ones_like(scores) if weights is None else weights
        if transformed():
            return self.mean_margin(scores, weights * first, scores, weights * second)
        # A whole split has few positives among many samples: all n^2 pairs would not fit into memory.
        trials = zip(*(x.reshape(-1, x.shape[-1]) for x in (scores, weights, first, second)), strict=True)
        means = [self.mean_margin(x[f], w[f], x[s], w[s]) for x, w, f, s in trials]
        return torch.stack(means).reshape(scores.shape[:-1])

    def mean_margin(self, x: Tensor, x_weights: Tensor, y: Tensor, y_weights: Tensor) -> Tensor:
        """Over all pairs of x [..., n] and y [..., m]."""
        margins = (self.gamma - (x.unsqueeze(-1) - y.unsqueeze(-2))).clamp_min(0) ** self.power
        pairs = x_weights.unsqueeze(-1) * y_weights.unsqueeze(-2)
        return ratio((margins * pairs).sum((-2, -1)), pairs.sum((-2, -1)))


class ReleasedWMW(WMW):
    """WMW as the released code computes it: positives against positives, on raw logits, so that its optimum is "all
    positives equal". Explains the WMW row of Bridging the Gap's Table 1.
    """

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        binary_only(self, logits, labels)
        return self.over_pairs(logits[..., 1] - logits[..., 0], labels == 1, labels == 1, weights)


class APPerf(Loss):
    """Adversarial F_beta of the positive class, per sample. Fathony and Kolter 2020; the package `ap_perf` solves it.

    L = (1 - M(Q) + (q - y) z) / n, with Q the distribution over label vectors, of marginals q, that maximises L, and
    M(Q) the expected F_beta of the best answer to Q. ADMM finds Q in `max_iter` steps, at a cost cubic in n: more than
    `block` samples are solved in blocks, whose sums are added. The package's own layer has the gradient of n L.
    """

    def __init__(self, beta: float = 1.0, max_iter: int = 50, block: int = 20):
        super().__init__()
        try:
            from ap_perf.common_metrics import FBeta
        except ImportError as error:
            raise ValueError("ap_perf is not installed: pip install 'east[apperf]'") from error
        self.beta, self.max_iter, self.block = beta, max_iter, block
        self.metric = FBeta(beta)
        self.metric.initialize()
        self.metric.enforce_special_case_positive()  # no positives, none predicted: F_beta is 1

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        binary_only(self, logits, labels)
        if weights is not None:
            raise ValueError("APPerf: expected no weights, it has no weighted form")
        z = logits[..., 1] - logits[..., 0]
        y = labels.to(z.dtype)
        n = z.shape[-1]
        trials = zip(z.reshape(-1, n), y.reshape(-1, n), strict=True)
        return torch.stack([self.in_blocks(*trial) for trial in trials]).reshape(z.shape[:-1]) / n

    def in_blocks(self, z: Tensor, y: Tensor) -> Tensor:
        count = -(-len(z) // self.block)
        blocks = zip(z.tensor_split(count), y.tensor_split(count), strict=True)
        return torch.stack([self.against_adversary(*block) for block in blocks]).sum()

    def against_adversary(self, z: Tensor, y: Tensor) -> Tensor:
        """1 - M(Q) + (q - y) z of one block. Q is at its maximum, so its own dependence on z adds no gradient."""
        if not z.isfinite().all():
            return z.sum() * torch.nan  # the solver would not return
        scores, truth = (t.detach().cpu().double() for t in (z, y))
        # Not `objective`, which values Q by sums that lack a label each (max_sumlargest); Q itself is right.
        solve = self.metric._PerformanceMetric__solve_admm_q
        Q, _ = solve(scores[:, None].repeat(1, len(z)).numpy(), truth.numpy(), max_iter=self.max_iter)
        Q = z.new_tensor(Q)  # [i, k - 1]: that sample i is positive, one of k
        return 1 - self.best_answer(Q) + ((Q.sum(1) - y) * z).sum()

    def best_answer(self, Q: Tensor) -> Tensor:
        """M(Q): of calling l samples positive, those that add most to the expected F_beta, the best l, or none."""
        k, square = torch.arange(1, len(Q) + 1, device=Q.device), self.beta**2
        added = Q @ ((1 + square) / (square * k[:, None] + k)).to(Q.dtype)
        of_size = added.sort(0, descending=True).values.cumsum(0).diagonal()
        return torch.maximum(of_size.max(), 1 - (Q / k).sum())


class SigmoidF1(Loss):
    """1 - macro F1 of S = sigmoid(slope (z + offset)), each class against the rest. Benedict et al. 2021."""

    def __init__(self, slope: float = 1.0, offset: float = 0.0):
        super().__init__()
        self.slope, self.offset = slope, offset

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        S = torch.sigmoid(self.slope * (logits + self.offset))
        w = torch.ones_like(S[..., 0]) if weights is None else weights
        found = per_class(w * S.gather(-1, labels.unsqueeze(-1)).squeeze(-1), labels, S.shape[-1])
        actual = per_class(w, labels, S.shape[-1])
        predicted = (w.unsqueeze(-1) * S).sum(-2)
        return 1 - ratio(2 * found, actual + predicted).mean(-1)


def build(
    config: Mapping[str, Any], classes: Sequence[str], labels: Tensor | None = None, positive: int | None = None
) -> nn.Module:
    """The loss of a config's `loss` section.

    `labels` of the training set serve class_weights=balanced, the index `positive` of a class average=positive.
    What `parameters` holds is passed like the rest: room for a metric's own, which the config cannot know beforehand.
    """
    parameters = {key: value for key, value in config.items() if key not in ("name", "_target_", "parameters")}
    parameters |= config.get("parameters") or {}
    module, _, name = config["_target_"].rpartition(".")
    target = getattr(import_module(module), name)
    if parameters.get("class_weights") == "balanced":
        if labels is None:
            raise ValueError("class_weights=balanced: expected the training labels, got none")
        counts = torch.bincount(labels.flatten(), minlength=len(classes)).clamp_min(1)
        parameters["class_weights"] = (labels.numel() / (len(classes) * counts)).tolist()
    if parameters.get("average") == "positive" and "positive" not in parameters:
        if positive is None and len(classes) > 2:
            raise ValueError(f"average=positive: none of the {len(classes)} classes is the positive one; "
                             "say dataset.positive=… or loss.average=macro")  # fmt: skip
        parameters["positive"] = 1 if positive is None else positive
    if issubclass(target, MetricLoss):
        parameters["classes"] = classes
    else:
        refuse_unknown(f"parameter of {name}", parameters, list(inspect.signature(target).parameters.values()))
    return target(**parameters)
