"""The inputs of every loss: logits, labels and weights, checked once and converted to one layout.

Two calls lead to `Loss.value(logits [..., n, d], labels [..., n], weights [..., n] or None) -> [...]`:

loss(logits, labels, weights=None) follows torch.nn.functional.cross_entropy and returns one number.

| logits                  | labels                                                      |
|-------------------------|-------------------------------------------------------------|
| [n, d, ...], d >= 2     | class indices [n, ...], or soft targets [n, d, ...] (float) |
| [n], [n, 1, ...]        | 0 or 1, or a probability (float), with or without axis 1    |

A single logit z stands for the two logits (0, z). Samples labelled `ignore_index` or of weight 0 are left out, whatever
their logits: not even NaN or infinity reaches the loss or its gradient. Soft targets are at least 0 and sum to 1 over
the classes. A float multilabel batch with exactly one positive per row looks the same and is read as soft targets: if
samples can have several labels, pass multilabel=True. Integer labels of the logits' shape are refused without it.

loss.per_trial(logits [P, n, d], labels [P, n], weights=None) returns one number per trial, for populations of networks.
"""

import inspect
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from east.choices import ConfigError, choose
from east.confusion import check_range
from east.metrics import ratio

IGNORE_INDEX = -100  # torch's default
SOFT_TARGET_TOLERANCE = 1e-3
HALF = (torch.float16, torch.bfloat16)
INSPECTED = 3  # batches of a loss, the first ones, in which usual mistakes are looked for


class Samples(NamedTuple):
    """A batch in one layout: logits [..., n, d]; labels [..., n] or soft targets [..., n, d]; weights [..., n]."""

    logits: Tensor
    labels: Tensor
    weights: Tensor | None


class Loss(nn.Module):
    """Base class of all losses: checks the inputs, casts to at least float32 and calls `value` with d >= 2 logits."""

    anneals = False  # whether the loss depends on a temperature
    stops_by = "loss"  # what early stopping compares on validation: the loss, or 1 - metric of the decisions
    unused_in_trials: tuple[str, ...] = ("ignore_index",)  # parameters that do not affect `per_trial`

    def __init__(self, ignore_index: int = IGNORE_INDEX):
        super().__init__()
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise ValueError(f"ignore_index: expected an integer, got {ignore_index!r}")
        self.ignore_index, self.to_inspect = ignore_index, INSPECTED

    def forward(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """One number, for inputs in the shapes of torch's cross_entropy; see the module's docstring."""
        check_types(logits, labels, weights)
        if not is_tracing() and self.to_inspect:  # in this order, or a change would be a reason to compile again
            mistake = probable_mistake(logits, labels)
            self.to_inspect = 0 if mistake else self.to_inspect - 1
            if mistake:
                warnings.warn(f"{type(self).__name__}: {mistake}", stacklevel=4)  # in the line that calls the loss
        with no_autocast(logits):
            return self.compute(self.read(logits, labels, weights))

    def per_trial(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """One number per trial [P], for logits [P, n, d] or single logits [P, n, 1] and labels [P, n].

        There may be any number of leading dimensions in place of P. `ignore_index` does not apply.
        """
        check_types(logits, labels, weights)
        with no_autocast(logits):
            return self.value(*read_trials(logits, labels, weights))

    def keep(self, rows: Tensor) -> None:
        """Drop all but these trials of a population; for losses that carry state from step to step."""

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """The loss [...] of logits [..., n, d], labels [..., n] and weights [..., n]; every loss defines it."""
        raise TypeError(f"{type(self).__name__} does not define value(logits, labels, weights)")

    def read(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Samples:
        """The batch as samples [n, d]; a sample with soft targets becomes d weighted samples."""
        samples = read_samples(logits, labels, weights, self.ignore_index)
        return as_weighted_samples(samples) if samples.labels.is_floating_point() else samples

    def compute(self, samples: Samples) -> Tensor:
        """The loss of the samples that have a weight, 0 if there are none."""
        logits, labels, weights = samples
        if weights is None:
            return self.value(logits, labels, None)
        counts = weights != 0
        if not (can_inspect(counts) and counts.all()):  # keep NaN and infinity of samples of weight 0 out of the loss
            logits = logits.masked_fill(~counts.unsqueeze(-1), 0.0)
        return torch.where(counts.any(-1), self.value(logits, labels, weights), 0.0)


def check_types(logits: Tensor, labels: Tensor, weights: Tensor | None) -> None:
    if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
        raise ValueError(f"expected tensors, got logits {type(logits)} and labels {type(labels)}")
    if weights is not None and not isinstance(weights, Tensor):
        raise ValueError(f"expected weights as a tensor, got {type(weights)}")
    if not logits.is_floating_point():
        raise ValueError(f"expected floating-point logits, got {logits.dtype}")
    if labels.is_complex():
        raise ValueError(f"expected labels that are integers, booleans or floats, got {labels.dtype}")


def probable_mistake(logits: Tensor, labels: Tensor) -> str:
    """What is almost surely wrong with inputs of a valid shape, or an empty text; values are read on the CPU alone."""
    if logits.ndim < 2 or logits.shape[1] == 1:
        return ""
    without_classes = logits.shape[:1] + logits.shape[2:]
    if logits.ndim > 2 and labels.shape == logits.shape[:-1] == without_classes and logits.is_contiguous():
        move = "transpose(1, 2)" if logits.ndim == 3 else "movedim(-1, 1)"
        return f"logits of shape {tuple(logits.shape)} have their classes in axis 1; if yours are last: logits.{move}"
    if logits.is_cpu:
        rows, tolerance = logits.detach(), max(1e-5, 2 * torch.finfo(logits.dtype).eps)
        if (rows >= 0).all() and ((rows.sum(1, dtype=torch.float64) - 1).abs() <= tolerance).all():
            return "expected logits, got rows that sum to 1 like probabilities: leave out the softmax, or take the log"
    return ""


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Turn off autocast on the device of x, if it is on."""
    device = "cpu" if x.is_cpu else x.device.type  # faster to read than the device
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def read_samples(logits: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int) -> Samples:
    """Samples [n, d] of inputs in torch's layout, with classes in axis 1; single logits have two classes."""
    if logits.ndim == 0 or labels.numel() == 0:
        got = f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}"
        raise ValueError(f"expected at least one sample, got {got}")
    single = logits.ndim == 1 or logits.shape[1] == 1
    shape = logits.shape[:1] if logits.ndim == 2 else logits.shape[:1] + logits.shape[2:]  # slices of shapes are slow
    rows = logits.float() if logits.dtype in HALF else logits
    rows = rows if rows.ndim == 2 else by_sample(rows)
    rows = two_or_more(rows) if single else rows
    weights = None if weights is None else read_weights(weights, shape, rows.dtype)
    if labels.shape == shape or (single and labels.shape == logits.shape):
        labels = labels.flatten()
        if not labels.is_floating_point():
            labels = labels if labels.dtype == torch.int64 else labels.long()
            return masked(rows, labels, weights, ignore_index)
        if not single:
            raise ValueError(f"expected integer labels, indices of {logits.shape[1]} classes, got {labels.dtype}")
        return Samples(rows, *two_class_targets(labels.to(rows.dtype), weights, ignore_index))
    if labels.shape != logits.shape:
        raise ValueError(wrong_shape(logits, labels))
    check_soft_targets(labels, by_sample(labels))
    return Samples(rows, by_sample(labels).to(rows.dtype), weights)


def masked(logits: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int) -> Samples:
    """Samples with label and weight 0 in place of `ignore_index`; ValueError if another label is out of range."""
    if not 0 <= ignore_index < logits.shape[-1] and are_classes(labels, logits.shape[-1]):
        return Samples(logits, labels, weights)  # nothing to mask
    valid = labels != ignore_index
    labels = labels * valid
    check_labels(labels, logits.shape[-1])
    return Samples(logits, labels, valid.to(logits.dtype) if weights is None else weights * valid)


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise ValueError if a label is out of range; on other devices than the CPU, indexing by it is an error there."""
    if not are_classes(labels, classes) and can_inspect(labels):
        check_range("labels", labels, classes)


def are_classes(labels: Tensor, classes: int) -> bool:
    """Whether all labels are known to be indices of classes."""
    if not labels.is_cpu or is_tracing():
        return False
    unsigned = labels.numpy().view(np.uint64)  # a negative label becomes a huge number
    return np.maximum.reduce(unsigned, None) < classes


def can_inspect(x: Tensor) -> bool:
    """Whether reading the data is free: on other devices it costs a synchronisation, and a tracer does not allow it."""
    return x.is_cpu and not is_tracing()


def two_class_targets(shares: Tensor, weights: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Soft targets [..., n, 2] and weights of positive shares [..., n] in [0, 1]; `ignore_index` gets weight 0."""
    valid = shares != ignore_index
    shares = torch.where(valid, shares, 0)
    if not is_tracing() and not ((shares >= 0) & (shares <= 1)).all():
        least, most = float(shares.min()), float(shares.max())
        raise ValueError(f"labels: expected probabilities from 0 to 1 for single logits, got {least:g} to {most:g}")
    return torch.stack((1 - shares, shares), -1), valid.to(shares.dtype) if weights is None else weights * valid


def read_multilabel(logits: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int, average: str) -> Samples:
    """Multilabel logits and labels [n, L, ...] as L binary problems with logits [L, samples, 2].

    average="micro" makes one problem of them, [samples * L, 2]; "samples" makes one per sample, [samples, L, 2].
    """
    if logits.ndim < 2 or labels.shape != logits.shape or labels.numel() == 0:
        raise ValueError(
            f"multilabel=True: expected logits and labels of the same shape [n, L, ...], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )

    def arranged(x: Tensor) -> Tensor:
        return x.reshape(-1) if average == "micro" else x if average == "samples" else x.mT

    z = arranged(by_sample(logits.float() if logits.dtype in HALF else logits))
    if weights is not None:
        shape = logits.shape[:1] + logits.shape[2:]
        each = by_sample(weights) if weights.shape == logits.shape else read_weights(weights, shape, z.dtype)[:, None]
        weights = checked_weights(arranged(each.expand(-1, logits.shape[1])).to(z.dtype))
    rows, flat = two_or_more(z.unsqueeze(-1)), arranged(by_sample(labels))
    if not labels.is_floating_point():
        return masked(rows, flat.long().contiguous(), weights, ignore_index)
    return as_weighted_samples(Samples(rows, *two_class_targets(flat.to(z.dtype), weights, ignore_index)))


def as_weighted_samples(samples: Samples) -> Samples:
    """Replace each sample with soft targets [..., n, d] by d samples, one per class, weighted by the class's share."""
    logits, targets, weights = samples
    d = targets.shape[-1]
    labels = torch.arange(d, device=logits.device).expand(targets.shape).flatten(-2)
    weights = targets if weights is None else targets * weights.unsqueeze(-1)
    copies = logits.unsqueeze(-2).expand(*targets.shape, d).flatten(-3, -2)
    return Samples(copies, labels, weights.flatten(-2))


def read_trials(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Samples:
    """Samples of a population: logits [P, n, d] or [P, n, 1] and integer labels [P, n]."""
    if labels.is_floating_point():
        raise ValueError(f"expected integer labels, got {labels.dtype}")
    if logits.ndim < 2 or labels.shape != logits.shape[:-1] or labels.numel() == 0:
        raise ValueError(
            f"per_trial: expected logits [P, n, d] and labels [P, n] with at least one sample, got logits "
            f"{tuple(logits.shape)} and labels {tuple(labels.shape)}"
        )
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights: expected the labels' shape {tuple(labels.shape)}, got {tuple(weights.shape)}")
    rows = two_or_more(logits.float() if logits.dtype in HALF else logits)
    check_labels(labels.long(), rows.shape[-1])
    return Samples(rows, labels.long(), None if weights is None else checked_weights(weights.to(rows.dtype)))


def by_sample(x: Tensor) -> Tensor:
    """x [n, d, ...] as [samples, d], and x [n] as [n, 1]; pixels stay side by side in memory."""
    if x.ndim <= 2:
        return x if x.ndim == 2 else x.unsqueeze(1)
    return x.transpose(0, 1).flatten(1).mT


def read_weights(weights: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Weights of all samples or pixels, flat; a weight per row of the batch applies to all of its pixels."""
    with_class_axis = (*shape[:1], 1, *shape[1:])
    if weights.shape not in (shape, with_class_axis, shape[:1]):
        choices = f"{tuple(shape)}" if len(shape) == 1 else f"{tuple(shape)} or {tuple(shape[:1])}"
        raise ValueError(f"weights: expected the shape {choices}, got {tuple(weights.shape)}")
    if weights.shape == shape[:1]:
        weights = weights.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)
    return checked_weights(weights.reshape(-1).to(dtype))


def checked_weights(weights: Tensor) -> Tensor:
    """The weights; ValueError unless they are finite and at least 0."""
    if can_inspect(weights):
        values = weights.detach().numpy()
        least, most = np.minimum.reduce(values, None), np.maximum.reduce(values, None)
        if not (least >= 0 and most < np.inf):  # NaN fails as well
            raise ValueError(f"weights: expected finite numbers of at least 0, got {least:g} to {most:g}")
    return weights


def wrong_shape(logits: Tensor, labels: Tensor) -> str:
    """An error message with the expected shape and how to get it."""
    shape = tuple(logits.shape[:1] + logits.shape[2:])
    choices = f"{shape} or {tuple(logits.shape)} for single logits"
    if logits.ndim == 1:
        choices = f"{shape} for single logits, or logits [n, d] for d classes"
    elif logits.shape[1] > 1:
        choices = f"{shape} for {logits.shape[1]} classes in axis 1"
    advice = f"expected {choices}"
    if logits.ndim > 2 and labels.shape == logits.shape[:-1]:
        move = "logits.transpose(1, 2)" if logits.ndim == 3 else "logits.movedim(-1, 1)"
        advice = f"move the classes to axis 1: {move}; for populations [P, n, d] call loss.per_trial"
    elif labels.shape == (*shape[:1], 1, *shape[1:]):
        advice = f"expected {shape}: labels.squeeze(1)"
    return f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}: {advice}"


def check_soft_targets(labels: Tensor, rows: Tensor) -> None:
    """Raise ValueError unless labels with the logits' shape, as rows [n, d], are floats >= 0 whose rows sum to 1."""
    if not labels.is_floating_point():
        raise ValueError(
            f"integer labels with the logits' shape {tuple(labels.shape)} are ambiguous: for several labels per sample "
            "use multilabel=True, for single logits use logits.unsqueeze(1) and labels.unsqueeze(1), for one-hot "
            "labels use labels.argmax(1)"
        )
    if is_tracing():
        return
    sums = rows.sum(1, dtype=torch.float32 if rows.dtype in HALF else None)
    tolerance = max(SOFT_TARGET_TOLERANCE, torch.finfo(labels.dtype).eps / 2)  # bfloat16 rounds by more
    if not ((labels >= 0).all() and ((sums - 1).abs() <= tolerance).all()):  # NaN fails both
        raise ValueError(
            f"float labels with the logits' shape {tuple(labels.shape)}: expected soft targets, at least 0, that sum "
            f"to 1 over the classes, got sums of {float(sums.min()):.4g} to {float(sums.max()):.4g}; for multilabel "
            "targets use multilabel=True"
        )


def two_or_more(logits: Tensor) -> Tensor:
    """Logits [..., d] with d >= 2: a single logit z stands for the two logits (0, z)."""
    return torch.cat((torch.zeros_like(logits), logits), -1) if logits.shape[-1] == 1 else logits


def is_tracing() -> bool:
    """Whether torch.compile or a torch.func transform is tracing, which does not allow data-dependent control flow."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def inside_torch_func() -> bool:
    """Whether a torch.func transform is active; torch has no public function for this."""
    return torch._C._are_functorch_transforms_active()


def refuse_unknown(kind: str, names: Iterable[str], accepted: Sequence[inspect.Parameter]) -> None:
    """Raise ConfigError if a name is not among the accepted parameters."""
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        for name in names:
            if not accepted:
                raise ConfigError(f"unknown {kind} {name!r}: it takes no parameters")
            choose(kind, name, [parameter.name for parameter in accepted])


def check_binary(loss: nn.Module, logits: Tensor) -> None:
    """Raise ValueError unless there are two classes."""
    if logits.shape[-1] != 2:
        raise ValueError(f"{type(loss).__name__}: expected two classes or a single logit, got {logits.shape[-1]}")


def mean_over_samples(values: Tensor, weights: Tensor | None) -> Tensor:
    """Mean [...] of values [..., n], weighted if there are weights."""
    return values.mean(-1) if weights is None else ratio((values * weights).sum(-1), weights.sum(-1))
