"""What every loss is called with: logits, labels and weights, checked once and brought into one form.

Two doors lead to `Loss.value(logits [..., n, d], labels [..., n], weights [..., n] or None) -> [...]`:

loss(logits, labels, weights=None) follows torch.nn.functional.cross_entropy and returns one number.

| logits                  | labels                                                      |
|-------------------------|-------------------------------------------------------------|
| [n, d, ...], d >= 2     | class indices [n, ...], or soft targets [n, d, ...] (float) |
| [n], [n, 1, ...]        | 0 or 1, or a share in [0, 1] (float), with or without axis 1 |

A single logit z stands for the two logits (0, z). Samples labelled `ignore_index` do not count. Soft targets are shares
that sum to 1 over the classes; a float multilabel batch with exactly one positive per row looks the same and is read as
soft targets, so pass multilabel=True or integer labels where several labels may hold.

loss.per_trial(logits [P, n, d], labels [P, n], weights=None) returns one number per trial, for populations of networks.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from east.choices import ConfigError, choose
from east.confusion import check_range
from east.metrics import ratio

IGNORE_INDEX = -100  # torch's default
SOFT_TARGET_TOLERANCE = 1e-3


class Samples(NamedTuple):
    """A batch in one form: logits [..., n, d]; labels [..., n], or soft targets [..., n, d]; weights [..., n]."""

    logits: Tensor
    labels: Tensor
    weights: Tensor | None

    def flat(self) -> "Samples":
        """All samples in one dimension: logits [n, d]."""
        logits, labels, weights = self
        if logits.ndim == 2:
            return self
        d = logits.shape[-1]
        targets = labels.reshape(-1, d) if labels.is_floating_point() else labels.reshape(-1)
        return Samples(logits.reshape(-1, d), targets, None if weights is None else weights.reshape(-1))


class Loss(nn.Module):
    """Checks the input once for all losses, casts to float32 or better, hands over logits [..., n, d], d >= 2."""

    anneals = False  # whether the loss has a temperature that matters
    stops_by = "loss"  # what early stopping compares on validation: the loss, or 1 - the metric of the decisions
    takes_weights = True
    keeps_labels = False  # whether autograd keeps the labels themselves, and so notices if they are overwritten
    takes_soft_targets = False  # else a sample with soft targets becomes d weighted samples
    gather: str | bool = False  # "auto": sum over ranks when training with gradients in a process group

    def __init__(self, ignore_index: int = IGNORE_INDEX):
        super().__init__()
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise ValueError(f"ignore_index: expected an integer, got {ignore_index!r}")
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """One number, for inputs as torch's cross_entropy takes them (see the module)."""
        check_types(logits, labels, weights)
        if torch.is_autocast_enabled(logits.device.type):
            with torch.autocast(logits.device.type, enabled=False):
                return self.forward(logits, labels, weights)
        samples = self.read(logits, labels, weights)
        try:
            return self.over(samples)
        except (RuntimeError, IndexError):
            self.check_labels(samples)
            raise

    def per_trial(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """One number per trial [P], of logits [P, n, d] or single logits [P, n, 1] and labels [P, n].

        Any number of leading dimensions takes the place of P. No label is ignored.
        """
        check_types(logits, labels, weights)
        if torch.is_autocast_enabled(logits.device.type):
            with torch.autocast(logits.device.type, enabled=False):
                return self.per_trial(logits, labels, weights)
        samples = read_trials(logits, labels, weights)
        try:
            return self.value(*samples)
        except (RuntimeError, IndexError):
            check_range("labels", samples.labels, samples.logits.shape[-1])
            raise

    def gathers(self) -> bool:
        """Whether counts are summed over torch.distributed's ranks."""
        if self.gather is False or not (dist.is_available() and dist.is_initialized()):
            return False
        return self.gather is True or (self.training and torch.is_grad_enabled() and dist.get_world_size() > 1)

    def keep(self, rows: Tensor) -> None:
        """Go on with these trials of a population alone; for losses that carry something from step to step."""

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define value(logits, labels, weights)")

    def read(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Samples:
        """The batch as samples [n, d]."""
        return self.check_targets(read_samples(logits, labels, weights, self.ignore_index).flat())

    def check_targets(self, samples: Samples) -> Samples:
        """Soft targets as this loss takes them."""
        if samples.labels.is_floating_point() and not self.takes_weights:
            raise ValueError(f"{type(self).__name__}: expected class labels, got shares ({samples.labels.dtype})")
        if samples.labels.is_floating_point() and not self.takes_soft_targets:
            samples = as_weighted_samples(samples)
        return samples

    def over(self, samples: Samples) -> Tensor:
        """The loss of the samples that are not ignored, 0 if there are none."""
        if not self.takes_weights:
            return self.value(*samples)
        logits, labels, weights = samples
        used, shares = masked(labels, weights, self.ignore_index, logits.dtype)
        value = self.value(logits, used, shares)
        if self.keeps_labels and used is labels and shares is None:
            return value
        any_left = value.new_ones(()) if shares is None else (shares != 0).any(-1)
        if transformed():
            return torch.where(any_left, value, 0.0)
        return _Watched.apply(value, any_left, labels, weights)

    def check_labels(self, samples: Samples) -> None:
        """Every loss looks its labels up, which fails outside the range: checking first would cost a pass."""
        labels = samples.labels
        if not labels.is_floating_point():
            check_range("labels", labels[labels != self.ignore_index], samples.logits.shape[-1])


class _Watched(Function):
    """The value, 0 where no sample is left; labels and weights may not be overwritten before backward.

    Losses work on masked copies, whose gradient would stay right; torch's cross_entropy refuses, and so do we.
    """

    @staticmethod
    def forward(ctx, value, any_left, labels, weights):
        ctx.save_for_backward(any_left, labels, weights)
        return value * any_left

    @staticmethod
    def backward(ctx, g):
        any_left, _, _ = ctx.saved_tensors  # raises if labels or weights have changed
        return g * any_left, None, None, None


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx, counts: Tensor) -> Tensor:
        counts = counts.clone()
        dist.all_reduce(counts)
        return counts

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        # Every rank holds the same loss; DDP will divide the gradients' sum by the number of ranks.
        return gradient * dist.get_world_size()


def summed_over_ranks(counts: Tensor) -> Tensor:
    """Counts of all ranks; after DDP's averaging the gradient is that of one process on the whole batch."""
    return _SumOverRanks.apply(counts)


def masked(
    labels: Tensor, weights: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Labels with 0 in place of `ignore_index`, and weights that are 0 there. Soft targets have nothing to ignore."""
    if labels.is_floating_point():
        return labels, weights
    looked_at = weights is None and labels.device.type == "cpu" and not transformed()
    if looked_at and ignore_index < 0 <= labels.amin().item():
        return labels, None  # the same for less; elsewhere looking at the data would cost a synchronisation
    valid = labels != ignore_index
    return labels * valid, valid.to(dtype) if weights is None else weights * valid


def check_types(logits: Tensor, labels: Tensor, weights: Tensor | None) -> None:
    if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
        raise ValueError(f"expected tensors, got logits {type(logits)} and labels {type(labels)}")
    if weights is not None and not isinstance(weights, Tensor):
        raise ValueError(f"expected weights as a tensor, got {type(weights)}")
    if not logits.is_floating_point():
        raise ValueError(f"expected floating point logits, got logits {logits.dtype}")
    if labels.is_complex():
        raise ValueError(f"expected labels that are integers, booleans or floats, got {labels.dtype}")


def read_samples(logits: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int) -> Samples:
    """torch's conventions: classes in axis 1, everything else is samples; pixels [N, pixels, d], without a copy."""
    if logits.ndim == 0 or labels.numel() == 0:
        raise ValueError(f"expected at least one sample, got logits of shape {tuple(logits.shape)}")
    if logits.ndim == 1 or logits.shape[1] == 1:
        return read_single_logits(logits, labels, weights, ignore_index)
    shape = without_classes(logits)
    if labels.shape == logits.shape:
        check_soft_targets(labels)
        targets = classes_last(labels).to(single_or_double(logits.dtype))
    elif labels.shape == shape:
        if labels.is_floating_point():
            raise ValueError(f"expected integer labels, the indices of {logits.shape[1]} classes, got {labels.dtype}")
        targets = integers(labels)
    else:
        raise ValueError(wrong_shape(logits, labels))
    rows, weights = classes_last(logits), read_weights(weights, shape, logits.dtype)
    if logits.ndim > 2:
        targets = targets if targets.is_floating_point() else targets.flatten(1)
        weights = None if weights is None else weights.view(rows.shape[:-1])
    return Samples(rows.to(single_or_double(rows.dtype)), targets, weights)


def read_single_logits(logits: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int) -> Samples:
    """Single logits [n] or [n, 1, ...] as two; shares in [0, 1] as soft targets [n, 2]."""
    shape = without_classes(logits)
    if labels.shape not in (logits.shape, shape):
        raise ValueError(wrong_shape(logits, labels))
    z = logits.reshape(-1).to(single_or_double(logits.dtype))
    weights, flat = read_weights(weights, shape, z.dtype), labels.reshape(-1)
    rows = torch.stack((torch.zeros_like(z), z), -1)
    if not labels.is_floating_point():
        return Samples(rows, integers(flat), weights)
    targets, weights = shares_of_two(flat.to(z.dtype), weights, ignore_index)
    return Samples(rows, targets, weights)


def shares_of_two(shares: Tensor, weights: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Soft targets [..., n, 2] of positive shares [..., n] in [0, 1]; `ignore_index` among them gets weight 0."""
    valid = shares != ignore_index
    shares = torch.where(valid, shares, 0)
    if not transformed() and not ((shares >= 0) & (shares <= 1)).all():
        least, most = float(shares.min()), float(shares.max())
        raise ValueError(f"labels: expected shares from 0 to 1 for single logits, got {least:g} to {most:g}")
    return torch.stack((1 - shares, shares), -1), valid.to(shares.dtype) if weights is None else weights * valid


def read_labels(logits: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int, average: str) -> Samples:
    """Multilabel logits and labels [n, L, ...] as L binary problems, logits [L, samples, 2].

    With average="micro" they are one problem [samples * L, 2], with "samples" one per sample, [samples, L, 2].
    """
    if logits.ndim < 2 or labels.shape != logits.shape or labels.numel() == 0:
        raise ValueError(
            f"multilabel=True: expected logits and labels of one shape [n, L, ...], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if weights is not None:
        per_sample = (
            read_weights(weights, without_classes(logits), logits.dtype) if weights.shape != logits.shape else None
        )
        weights = by_sample(weights) if per_sample is None else per_sample.unsqueeze(-1).expand(-1, logits.shape[1])

    def arranged(x: Tensor) -> Tensor:
        return x.reshape(-1) if average == "micro" else x if average == "samples" else x.mT

    z = arranged(by_sample(logits)).to(single_or_double(logits.dtype))
    weights = None if weights is None else arranged(weights).to(z.dtype)
    rows, flat = torch.stack((torch.zeros_like(z), z), -1), arranged(by_sample(labels))
    if not labels.is_floating_point():
        return Samples(rows, integers(flat).contiguous(), weights)
    targets, weights = shares_of_two(flat.to(z.dtype), weights, ignore_index)
    return as_weighted_samples(Samples(rows, targets, weights))


def average_over_labels(
    values: Tensor, samples: Samples, loss: Loss, average: str, absent: str, without_positives: float = 0.0
) -> Tensor:
    """One number of the binary losses [L] of L labels; average="micro" has made one problem of them already.

    Labels without a sample do not count, nor with absent="ignore" those without a positive. without_positives: the
    value of average="weighted" where no label is ever positive.
    """
    if average == "micro":
        return values
    used, shares = masked(samples.labels, samples.weights, loss.ignore_index, values.dtype)
    shares = torch.ones_like(used, dtype=values.dtype) if shares is None else shares
    total, positives = shares.sum(-1), (used * shares).sum(-1)
    if loss.gathers():
        total, positives = summed_over_ranks(torch.stack((total, positives)).detach())
    counted = positives if average == "weighted" else (total != 0).to(values.dtype)
    if absent == "ignore":
        counted = counted * (positives > 0)
    whole = counted.sum(-1)
    value = ratio((values * counted).sum(-1), whole)
    if average == "weighted" and absent == "zero":
        value = torch.where((whole == 0) & (total.sum(-1) != 0), without_positives, value)
    return value


def as_weighted_samples(samples: Samples) -> Samples:
    """Every sample with soft targets [..., n, d] as d samples, each of one class and weighted by its share."""
    logits, targets, weights = samples
    d = targets.shape[-1]
    labels = torch.arange(d, device=logits.device).expand(targets.shape).flatten(-2)
    weights = targets if weights is None else targets * weights.unsqueeze(-1)
    copies = logits.unsqueeze(-2).expand(*targets.shape, d).flatten(-3, -2)
    return Samples(copies, labels, weights.flatten(-2))


def read_trials(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Samples:
    """Logits [P, n, d] or [P, n, 1] and integer labels [P, n]."""
    if labels.is_floating_point():
        raise ValueError(f"expected integer labels, got {labels.dtype}")
    if logits.ndim < 2 or labels.shape != logits.shape[:-1] or labels.numel() == 0:
        raise ValueError(
            f"per_trial: expected logits [P, n, d] and labels [P, n] of at least one sample, got logits "
            f"{tuple(logits.shape)} and labels {tuple(labels.shape)}"
        )
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights: expected the labels' shape {tuple(labels.shape)}, got {tuple(weights.shape)}")
    logits = two_or_more(logits)
    dtype = single_or_double(logits.dtype)
    return Samples(logits.to(dtype), integers(labels), None if weights is None else weights.to(dtype))


def without_classes(logits: Tensor) -> torch.Size:
    """The shape of the logits without axis 1."""
    return logits.shape[:1] + logits.shape[2:]


def classes_last(x: Tensor) -> Tensor:
    """[n, d] as it is, [n, d, ...] as [n, pixels, d]."""
    return x if x.ndim == 2 else x.flatten(2).mT


def by_sample(x: Tensor) -> Tensor:
    """[n, d, ...] as [samples, d]."""
    return x if x.ndim == 2 else x.movedim(1, -1).reshape(-1, x.shape[1])


def single_or_double(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def integers(labels: Tensor) -> Tensor:
    return labels if labels.dtype == torch.int64 else labels.long()


def read_weights(weights: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """Weights of every sample or pixel, flat; one per row of the batch counts for all of its pixels."""
    if weights is None:
        return None
    single = (*shape[:1], 1, *shape[1:])
    if weights.shape not in (shape, single, shape[:1]):
        choices = f"{tuple(shape)}" if len(shape) == 1 else f"{tuple(shape)} or {tuple(shape[:1])}"
        raise ValueError(f"weights: expected the shape {choices}, got {tuple(weights.shape)}")
    if weights.shape == shape[:1]:
        weights = weights.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)
    return weights.reshape(-1).to(single_or_double(dtype))


def wrong_shape(logits: Tensor, labels: Tensor) -> str:
    """What was expected instead, and what to write."""
    got = f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}: "
    shape = tuple(without_classes(logits))
    if logits.ndim > 2 and labels.shape == logits.shape[:-1]:
        move = "logits.transpose(1, 2)" if logits.ndim == 3 else "logits.movedim(-1, 1)"
        return f"{got}move the classes to axis 1: {move}; for populations [P, n, d] call loss.per_trial"
    if labels.ndim == len(shape) + 1 and labels.shape[1] == 1 and without_classes(labels) == shape:
        return f"{got}expected {shape}: labels.squeeze(1)"
    if logits.ndim == 1:
        return f"{got}expected {shape} for single logits, or logits [n, d] for d classes"
    if logits.shape[1] == 1:
        return f"{got}expected {shape} or {tuple(logits.shape)} for single logits"
    return f"{got}expected {shape} for {logits.shape[1]} classes in axis 1"


def check_soft_targets(labels: Tensor) -> None:
    """Labels of the logits' own shape are soft targets if they are floats whose classes sum to 1."""
    if not labels.is_floating_point():
        raise ValueError(
            f"integer labels of the logits' shape {tuple(labels.shape)} have no unique reading: for several labels per "
            "sample write multilabel=True, for single logits logits.unsqueeze(1) and "
            "labels.unsqueeze(1), for one-hot labels labels.argmax(1)"
        )
    if transformed():
        return
    sums = labels.sum(1, dtype=single_or_double(labels.dtype))
    tolerance = max(SOFT_TARGET_TOLERANCE, torch.finfo(labels.dtype).eps / 2)  # bfloat16 rounds by more
    if not ((labels >= 0).all() and ((sums - 1).abs() <= tolerance).all()):  # NaN is neither
        raise ValueError(
            f"float labels of the logits' shape {tuple(labels.shape)} are soft targets if the classes sum to 1 "
            f"(here {float(sums.min()):.4g} to {float(sums.max()):.4g}) and multilabel targets with "
            "multilabel=True"
        )


def two_or_more(logits: Tensor) -> Tensor:
    """Logits [..., d] with d >= 2: a single logit z stands for the two logits (0, z)."""
    return torch.cat((torch.zeros_like(logits), logits), -1) if logits.shape[-1] == 1 else logits


def transformed() -> bool:
    """Whether torch.compile or a torch.func transform is tracing: data-dependent steps must be left out."""
    return torch.compiler.is_compiling() or inside_torch_func()


def inside_torch_func() -> bool:
    """Whether a torch.func transform is at work; torch has no public way to ask."""
    return torch._C._are_functorch_transforms_active()


def refuse_unknown(kind: str, given: Iterable[str], accepted: Sequence[inspect.Parameter]) -> None:
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        for name in given:
            if not accepted:
                raise ConfigError(f"unknown {kind} {name!r}: it has none")
            choose(kind, name, [parameter.name for parameter in accepted])


def binary_only(loss: nn.Module, logits: Tensor, labels: Tensor) -> None:
    """Checks labels as well, since such losses compute with them where others look up."""
    if logits.shape[-1] != 2:
        raise ValueError(f"{type(loss).__name__}: expected two classes or a single logit, got {logits.shape[-1]}")
    if not transformed():
        check_range("labels", labels, 2)


def mean_over_samples(values: Tensor, weights: Tensor | None) -> Tensor:
    """Mean [...] of values [..., n], weighted where weights are given."""
    return values.mean(-1) if weights is None else ratio((values * weights).sum(-1), weights.sum(-1))
