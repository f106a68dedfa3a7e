"""What MetricLoss and MetricCrossEntropy share: a metric and its parameters, multilabel inputs, several ranks."""

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
from torch.autograd import Function

from east import metrics
from east.choices import choose
from east.losses import slopes
from east.losses.inputs import (
    Loss,
    Samples,
    as_weighted_samples,
    is_tracing,
    read_multilabel,
    read_samples,
    refuse_unknown,
)
from east.metrics import ratio

LABEL_AVERAGES = ("macro", "micro", "weighted", "samples")


class LossOfMetric(Loss):
    """Base class of the losses that are made for a metric; the parameters are those of MetricLoss."""

    unused_in_trials = ("ignore_index", "gather", "multilabel", "classes")  # `build_loss` sets the classes
    without_positives = 0.0  # the loss of a batch in which no label has a positive, with average="weighted"

    def __init__(
        self,
        metric: str | metrics.Metric,
        *,
        classes: Sequence[str] | None,
        absent: str,
        gather: str | bool,
        multilabel: bool,
        ignore_index: int,
        **metric_parameters: Any,
    ):
        super().__init__(ignore_index)
        self.metric, parameters = metrics.parse(metric, metric_parameters)
        self.classes = None if classes is None else [str(name) for name in classes]
        self.absent = choose("absent", absent, metrics.ABSENT)
        if gather not in ("auto", True, False):
            raise ValueError(f"gather: expected 'auto', true or false, got {gather!r}")
        self.gather, self.multilabel = gather, multilabel
        self.to_inspect = 0 if multilabel else self.to_inspect  # labels have probabilities that may sum to anything
        accepted = dict(list(inspect.signature(self.metric).parameters.items())[1:])
        self.label_average = ""
        if multilabel:
            if "positive" in parameters:
                raise ValueError("positive: expected none with multilabel=True: every label has its own positives")
            averages = LABEL_AVERAGES if "average" in accepted else LABEL_AVERAGES[:-1]
            self.label_average = choose("average", parameters.pop("average", "macro"), averages)
        self.average_is_default = metrics.takes_average(self.metric) and not multilabel and "average" not in parameters
        self.metric_parameters = self.checked(parameters, accepted)
        if self.classes and metrics.takes_average(self.metric):
            self.metric_parameters.setdefault("average", metrics.default_average(len(self.classes)))
        self.in_cells: bool | None = None  # whether the metric reads Confusion.matrix; None: not known yet

    def checked(self, given: dict[str, Any], accepted: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
        """The metric's keyword arguments, checked, with class names replaced by indices."""
        refuse_unknown(f"parameter of {name_of(self.metric)}", given, list(accepted.values()))
        for name, parameter in accepted.items():
            required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if required and name not in given:
                raise ValueError(f"{name_of(self.metric)} needs {name}: expected {name}=…")
        if "beta" in given:
            given["beta"] = self.checked_beta(given["beta"])
        if self.multilabel:
            # The score of a label is that of its positives.
            return given | ({"average": "positive", "positive": 1} if "average" in accepted else {})
        if "absent" in accepted:
            given["absent"] = self.absent
        elif self.absent != "zero":
            raise ValueError(
                f"absent={self.absent!r} does not apply to this metric, which has no macro mean over classes"
            )
        average, positive = given.get("average"), given.get("positive")
        if average is not None:
            # "none" gives one number per class; a loss needs a single number.
            choose("average", average, [a for a in metrics.AVERAGES if a != "none"])
        if not torch.as_tensor(given.get("costs", 0.0)).isfinite().all():
            raise ValueError(f"costs: expected finite numbers, got {given['costs']!r}")
        if positive is not None and "average" in accepted and average != "positive":
            raise ValueError(f"positive={positive!r}: expected average='positive' with it, else it has no effect")
        if isinstance(positive, bool) or not isinstance(positive, Integral | str | None):
            raise ValueError(f"positive: expected the index or name of a class, got {positive!r}")
        return given | ({"positive": self.class_index(positive)} if isinstance(positive, str) else {})

    def checked_beta(self, beta: metrics.PerClass | Mapping[str, float] | str) -> metrics.PerClass:
        """beta, or if it is given by class name that of every class, 1 where none is named."""
        if self.multilabel and not isinstance(beta, Real):
            raise ValueError(f"beta: expected one number for all labels with multilabel=True, got {beta!r}")
        values = list(beta.values()) if isinstance(beta, Mapping) else beta
        numbers = None if isinstance(values, str) else torch.as_tensor(values, dtype=torch.float64)
        if numbers is None or not ((numbers >= 0) & (numbers < math.inf)).all():
            expected = "a number" if isinstance(beta, str | Real) else "finite numbers"
            raise ValueError(f"beta: expected {expected} of at least 0, got {beta!r}")
        if not isinstance(beta, Mapping):
            return beta
        each = [1.0] * len(self.classes or ())
        for name, value in beta.items():
            each[self.class_index(name)] = float(value)
        return each

    def class_index(self, name: str) -> int:
        if self.classes is None:
            raise ValueError(f"class {name!r} is given by name: expected `classes` too, the list of all class names")
        return self.classes.index(choose("class", str(name), self.classes))

    def reads_cells(self, classes: int) -> bool:
        """Whether the metric reads Confusion.matrix; tested once and remembered."""
        if self.metric in metrics.WITH_SLOPES:
            return False
        if self.in_cells is None:
            self.in_cells = slopes.reads_matrix(partial(self.metric, **self.metric_parameters), classes)
        return self.in_cells

    def gathers(self) -> bool:
        """Whether counts are summed over torch.distributed's ranks."""
        if self.gather is False or not (dist.is_available() and dist.is_initialized()):
            return False
        return self.gather is True or (self.training and torch.is_grad_enabled() and dist.get_world_size() > 1)

    def read(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Samples:
        if self.multilabel:
            return read_multilabel(logits, labels, weights, self.ignore_index, self.label_average)
        samples = read_samples(logits, labels, weights, self.ignore_index)
        classes = samples.logits.shape[-1]
        if self.classes is not None and len(self.classes) != classes:
            raise ValueError(f"classes: expected {classes} names, one per class of the logits, got {len(self.classes)}")
        if classes == 2 and self.average_is_default and not is_tracing():
            warn_of_default(name_of(self.metric))
        # With two classes, two weighted samples in closed form are faster than soft targets through autograd.
        return as_weighted_samples(samples) if classes == 2 and samples.labels.is_floating_point() else samples

    def compute(self, samples: Samples) -> Tensor:
        values = super().compute(samples)
        return self.average_over_labels(values, samples) if self.multilabel else values

    def average_over_labels(self, values: Tensor, samples: Samples) -> Tensor:
        """The average of the binary losses [L] of L labels; for average="micro" they are one problem already.

        Labels without samples are left out, and with absent="ignore" also those without positives.
        """
        _, labels, weights = samples
        if self.label_average == "micro":
            return values
        if self.label_average == "samples":
            weights = torch.ones_like(values) if weights is None else weights.mean(-1)
            sums = torch.stack(((values * weights).sum(-1), weights.sum(-1)))
            return ratio(*(summed_over_ranks(sums) if self.gathers() else sums))
        weights = torch.ones_like(labels, dtype=values.dtype) if weights is None else weights
        total, positives = weights.sum(-1), (labels * weights).sum(-1)
        if self.gathers():
            total, positives = summed_over_ranks(torch.stack((total, positives)).detach())
        label_weights = positives if self.label_average == "weighted" else (total != 0).to(values.dtype)
        if self.absent == "ignore":
            label_weights = label_weights * (positives > 0)
        whole = label_weights.sum(-1)
        value = ratio((values * label_weights).sum(-1), whole)
        if self.label_average == "weighted" and self.absent == "zero":
            value = torch.where((whole == 0) & (total.sum(-1) != 0), self.without_positives, value)
        return value

    def metric_in_words(self) -> str:
        """The metric and its average, for `repr`."""
        unstated = "positive with two classes, else macro" if metrics.takes_average(self.metric) else None
        average = self.label_average or self.metric_parameters.get("average", unstated)
        parts = name_of(self.metric), f"average={average}" if average else "", "multilabel" if self.multilabel else ""
        return ", ".join(filter(None, parts))


@cache
def warn_of_default(metric: str) -> None:
    """Warn once that the average of two classes has changed; goes with the next release."""
    warnings.warn(
        f"{metric} with two classes is now that of class 1, no longer the mean over both: average='macro' gives the "
        "mean, average='positive' silences this warning",
        FutureWarning,
        stacklevel=6,  # the line that calls the loss
    )


def name_of(metric: metrics.Metric) -> str:
    return getattr(metric, "__name__", type(metric).__name__)


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx, counts: Tensor) -> Tensor:
        counts = counts.clone()
        dist.all_reduce(counts)
        return counts

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        # Every rank has the same loss, and DDP divides the sum of the gradients by the number of ranks.
        return gradient * dist.get_world_size()


def summed_over_ranks(counts: Tensor) -> Tensor:
    """Counts summed over all ranks; after DDP's averaging, the gradient is that of one process on the whole batch."""
    return _SumOverRanks.apply(counts)
