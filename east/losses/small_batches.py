"""The loss of a small batch and its gradient on a CPU, by NumPy: there a call of torch costs more than its arithmetic.

The mathematics is that of closed_form.py, in one pass from logits to gradient: nothing has to be kept for later.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from east.losses import by_hand
from east.losses.steps import HALF_WIDTH, MIN_CORNER
from east.metrics import Metric

MOST_CLASSES = 32
MOST_ENTRIES = 1 << 15  # torch works on larger batches with several threads

SIGNS = np.array((-1.0, 1.0))  # how the logits of two classes act on their difference

Array = NDArray[Any]
SlopesAt = Callable[[Array, Array, Array], by_hand.Slopes]  # of diagonal, missed and predicted counts [..., d]


def covers(logits: Tensor) -> bool:
    """Whether a batch is small enough, and where NumPy can see it."""
    small = logits.numel() <= MOST_ENTRIES and logits.shape[-1] < MOST_CLASSES
    return small and logits.device.type == "cpu" and not torch.compiler.is_compiling()


def loss_and_gradient(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    temperature: float | Tensor,
    metric: Metric,
    parameters: Mapping[str, Any],
    detach_threshold: bool = False,
    wanted: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """1 - metric [...] of the soft counts of logits [..., n, d], and where it is wanted the gradient."""

    def slopes(diagonal: Array, missed: Array, predicted: Array) -> by_hand.Slopes:
        loss, B, A = by_hand.slopes_at(metric, parameters, diagonal, missed, predicted)
        zeros = np.zeros(diagonal.shape)
        return by_hand.Slopes(loss[..., 0], B + zeros, A + zeros)

    z, own = logits.detach().numpy(), Own.of(labels.numpy(), logits.shape[-1])
    w = None if weights is None else weights.detach().numpy()
    step = step_of(temperature, z.dtype)
    gradient: Array | None
    if z.shape[-1] == 2:
        loss, gradient = two_classes(z, own, w, step, slopes)
    else:
        loss, gradient = few_classes(z, own, w, step, slopes, detach_threshold, wanted)
    return torch.as_tensor(loss, dtype=logits.dtype), None if gradient is None else torch.from_numpy(gradient)


class Own(NamedTuple):
    """Labels [..., n], and where a sample's own class lies among flattened counts [..., d]."""

    labels: Array
    places: Array
    classes: int

    @classmethod
    def of(cls, labels: Array, classes: int) -> "Own":
        if np.maximum.reduce(labels.view(np.uint64), None) >= classes:  # a negative label is a huge one
            raise IndexError("a label is not the index of a class")
        if labels.ndim == 1:
            return cls(labels, labels, classes)
        firsts = np.arange(0, labels[..., 0].size * classes, classes).reshape(*labels.shape[:-1], 1)
        return cls(labels, (labels + firsts).reshape(-1), classes)

    def sums(self, values: Array) -> Array:
        """Of values [..., n] over the samples of each class: [..., d]."""
        lead = self.labels.shape[:-1]
        size = self.classes * int(np.prod(lead))
        return np.bincount(self.places, values.reshape(-1), size).reshape(*lead, self.classes)

    def at(self, counts: Array) -> Array:
        """Counts [..., d] of the samples' own classes: [..., n]."""
        return counts.reshape(-1).take(self.places).reshape(self.labels.shape)

    def entries(self) -> Array:
        """Where the own classes lie among flattened entries [..., d, n]."""
        n = self.labels.shape[-1]
        samples = np.arange(n)
        if self.labels.ndim > 1:
            samples = np.tile(samples, self.labels[..., 0].size)
        return self.places * n + samples


class Step(NamedTuple):
    """Corners and slopes of the step, as closed_form.Step's: numbers, or arrays [..., 1]."""

    a: Any
    first: Any
    bend: Any
    middle: Any
    corner: Any

    @classmethod
    def at(cls, T: float | Array, dtype: np.dtype) -> "Step":
        a = np.maximum((1 - HALF_WIDTH * T) / 2, MIN_CORNER)
        middle = (1 - 2 * T) / (1 - 2 * a) * a / T
        return cls(*(np.asarray(x, dtype)[()] for x in (a, T / a, middle - 1, middle, (1 - a) / a)))


@lru_cache
def step_at(temperature: float, dtype: np.dtype) -> Step:
    return Step.at(temperature, dtype)


def step_of(temperature: float | Tensor, dtype: np.dtype) -> Step:
    if isinstance(temperature, Tensor):
        return Step.at(temperature.detach().double().numpy()[..., None], dtype)
    return step_at(temperature, dtype)


def two_classes(z: Array, own: Own, w: Array | None, step: Step, slopes: SlopesAt) -> tuple[Array, Array]:
    """Everything is a function of the difference of the two logits."""
    gap = z[..., 1] - z[..., 0]
    less = np.exp(-np.abs(gap))
    less /= 1 + less  # the less probable class, whose H keeps its digits however small
    above = less - step.a
    bent = above > 0
    H = above * bent
    H *= step.bend
    H += less
    H *= step.first
    rest = 1 - H
    right = (gap > 0) == own.labels
    hit, miss = np.where(right, rest, H), np.where(right, H, rest)
    slope = (1 - less) * less
    slope *= step.first * (1 + step.bend * bent)
    if w is not None:
        hit, miss, slope = hit * w, miss * w, slope * w
    diagonal, missed = own.sums(hit), own.sums(miss)
    loss, B, A = slopes(diagonal, missed, diagonal + missed[..., ::-1])
    by_class = B * SIGNS + np.add.reduce(A * SIGNS, -1, keepdims=True)
    along = own.at(by_class) * slope
    gradient = np.empty_like(z)
    gradient[..., 1] = along
    np.negative(along, out=gradient[..., 0])
    return loss, gradient


def few_classes(
    z: Array, own: Own, w: Array | None, step: Step, slopes: SlopesAt, detach_threshold: bool, wanted: bool
) -> tuple[Array, Array | None]:
    """Samples lie side by side, [..., d, n]; see closed_form.ByClass, whose names these are."""
    bend, corner = (x[..., None] if np.ndim(x) else x for x in (step.bend, step.corner))
    e = np.array(z.swapaxes(-1, -2), order="C")  # a copy in any case: it is overwritten
    e -= np.maximum.reduce(e, -2, keepdims=True)
    torch.from_numpy(e).exp_()  # twice as fast as NumPy's
    Z, below = np.add.reduce(e, -2), e < 1
    e2 = np.maximum.reduce(e * below, -2)
    if np.count_nonzero(below) != e.size - e2.size:  # several are the largest of their sample
        e2[np.add.reduce(below, -2, dtype=np.intp) < own.classes - 1] = 1
    lo_e = (1 + e2) * step.a
    lo, x = lo_e / Z, np.divide(e, lo_e[..., None, :], out=e)
    gap = 1 - lo * step.corner
    last = lo / gap
    share = (1 - lo_e * step.corner) * last / gap
    last -= step.middle

    beyond = x > corner
    bends, lasts = (x > 1) * bend, beyond * last[..., None, :]
    H = (x - 1) * bends
    H += x
    H += (x - corner) * lasts
    entries, flat = own.entries(), H.reshape(-1)
    H_own = flat.take(entries).reshape(own.labels.shape)
    flat[entries] = 0
    rest = np.add.reduce(H, -2)  # adding the others up keeps the digits that a difference to the total would lose
    total = H_own + rest
    r = 1 / total if w is None else w / total
    diagonal, missed = own.sums(H_own * r), own.sums(rest * r)
    loss, B, A = slopes(diagonal, missed, (H @ r[..., None])[..., 0] + diagonal)

    if not wanted:
        return loss, None

    A, B_own = A.astype(z.dtype), own.at(B.astype(z.dtype))
    mean = ((A[..., None, :] @ H)[..., 0, :] + (own.at(A) + B_own) * H_own) / total
    eS = A[..., None] - mean[..., None, :]
    eS.reshape(-1)[entries] += B_own.reshape(-1)
    eS *= x
    eS *= r[..., None, :]
    shift = np.add.reduce(eS * beyond, -2) * share
    bends += lasts
    bends += 1
    eS *= bends
    Q = np.add.reduce(eS, -2)
    if detach_threshold:
        x *= (Q * lo)[..., None, :]
    else:
        two = (x >= (e2 / lo_e)[..., None, :]) * x  # their sum is s, unless several are as large as p2
        two *= ((shift - Q) / np.add.reduce(two, -2))[..., None, :]
        eS += two
        x *= (shift * lo)[..., None, :]
    eS -= x
    return loss, np.ascontiguousarray(eS.swapaxes(-1, -2))
