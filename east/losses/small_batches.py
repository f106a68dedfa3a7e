"""The loss of a small batch and its gradient with NumPy on a CPU, where a torch call costs more than its arithmetic.

The mathematics is that of closed_form.py, in a single pass from logits to gradient, which saves nothing for later.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from east.losses import by_hand
from east.losses.steps import half_width
from east.metrics import Metric

MOST_CLASSES = 32
MOST_ENTRIES = 1 << 15  # above this, torch uses several threads

SIGNS = np.array((-1.0, 1.0))  # derivatives of z1 - z0 with respect to the two logits

Array = NDArray[Any]
LossSlopes = Callable[[Array, Array, Array], by_hand.Slopes]  # of the diagonal, missed and false positives [..., d]


def covers(logits: Tensor) -> bool:
    """Whether a batch is small enough, and in memory that NumPy can read."""
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
    needs_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """1 - metric [...] of the soft counts of logits [..., n, d], and the gradient [..., n, d] if it is needed."""

    def loss_slopes(diagonal: Array, missed: Array, false_positives: Array) -> by_hand.Slopes:
        loss, D, P = by_hand.loss_and_slopes_float64(metric, parameters, diagonal, missed, false_positives)
        zeros = np.zeros(diagonal.shape)
        return by_hand.Slopes(loss[..., 0], D + zeros, P + zeros)

    z, true = logits.detach().numpy(), TrueClasses.from_labels(labels.numpy(), logits.shape[-1])
    w = None if weights is None else weights.detach().numpy()
    step = step_for(temperature, z.dtype)
    gradient: Array | None
    if z.shape[-1] == 2:
        loss, gradient = two_classes(z, true, w, step, loss_slopes)
    else:
        loss, gradient = few_classes(z, true, w, step, loss_slopes, detach_threshold, needs_gradient)
    return torch.as_tensor(loss, dtype=logits.dtype), None if gradient is None else torch.from_numpy(gradient)


class TrueClasses(NamedTuple):
    """Labels [..., n], and the positions of their classes in the flattened counts [..., d]."""

    labels: Array
    positions: Array
    classes: int

    @classmethod
    def from_labels(cls, labels: Array, classes: int) -> "TrueClasses":
        if np.maximum.reduce(labels.view(np.uint64), None) >= classes:  # a negative label becomes a huge number
            raise IndexError("a label is not the index of a class")  # Loss.forward and per_trial report its value
        if labels.ndim == 1:
            return cls(labels, labels, classes)
        offsets = np.arange(0, labels[..., 0].size * classes, classes).reshape(*labels.shape[:-1], 1)
        return cls(labels, (labels + offsets).reshape(-1), classes)

    def sums(self, values: Array) -> Array:
        """Sum of values [..., n] over the samples of each class: [..., d]."""
        lead = self.labels.shape[:-1]
        size = self.classes * int(np.prod(lead))
        return np.bincount(self.positions, values.reshape(-1), size).reshape(*lead, self.classes)

    def pick(self, by_class: Array) -> Array:
        """The value [..., n] of each sample's true class, from values by class [..., d]."""
        return by_class.reshape(-1).take(self.positions).reshape(self.labels.shape)

    def entry_positions(self) -> Array:
        """The positions of the true classes in flattened entries [..., d, n]."""
        n = self.labels.shape[-1]
        samples = np.arange(n)
        if self.labels.ndim > 1:
            samples = np.tile(samples, self.labels[..., 0].size)
        return self.positions * n + samples


class Step(NamedTuple):
    """Corners and slopes of the step, with the names of closed_form.Step: numbers, or arrays [..., 1]."""

    a: Any
    first: Any
    bend_lo: Any
    middle: Any
    hi_per_lo: Any

    @classmethod
    def at(cls, T: float | Tensor, dtype: np.dtype) -> "Step":
        a = (1 - half_width(T)) / 2
        middle = (1 - 2 * T) / (1 - 2 * a) * a / T
        return cls(*(np.asarray(x, dtype)[()] for x in (a, T / a, middle - 1, middle, (1 - a) / a)))


@lru_cache
def step_at(temperature: float, dtype: np.dtype) -> Step:
    return Step.at(temperature, dtype)


def step_for(temperature: float | Tensor, dtype: np.dtype) -> Step:
    if isinstance(temperature, Tensor):
        return Step.at(temperature.detach().double().unsqueeze(-1), dtype)
    return step_at(temperature, dtype)


def two_classes(
    z: Array, true: TrueClasses, w: Array | None, step: Step, loss_slopes: LossSlopes
) -> tuple[Array, Array]:
    """The loss and its gradient for two classes, where everything is a function of z1 - z0."""
    difference = z[..., 1] - z[..., 0]
    p_smaller = np.exp(-np.abs(difference))
    p_smaller /= 1 + p_smaller  # its H is precise however small
    above = p_smaller - step.a
    is_above = above > 0
    H = above * is_above
    H *= step.bend_lo
    H += p_smaller
    H *= step.first
    H_larger = 1 - H
    correct = (difference > 0) == true.labels
    hit, miss = np.where(correct, H_larger, H), np.where(correct, H, H_larger)
    slope = (1 - p_smaller) * p_smaller
    slope *= step.first * (1 + step.bend_lo * is_above)
    if w is not None:
        hit, miss, slope = hit * w, miss * w, slope * w
    diagonal, missed = true.sums(hit), true.sums(miss)
    loss, D, P = loss_slopes(diagonal, missed, missed[..., ::-1])
    by_class = D * SIGNS + np.add.reduce(P * SIGNS, -1, keepdims=True)
    by_difference = true.pick(by_class) * slope
    gradient = np.empty_like(z)
    gradient[..., 1] = by_difference
    np.negative(by_difference, out=gradient[..., 0])
    return loss, gradient


def few_classes(
    z: Array,
    true: TrueClasses,
    w: Array | None,
    step: Step,
    loss_slopes: LossSlopes,
    detach_threshold: bool,
    needs_gradient: bool,
) -> tuple[Array, Array | None]:
    """The loss and its gradient in layout [..., d, n], with the names and formulas of closed_form.ByClass."""
    bend_lo, hi_per_lo = (x[..., None] if np.ndim(x) else x for x in (step.bend_lo, step.hi_per_lo))
    x, E2, lo_Z, lo = in_units_of_lo(z, step)
    gap_hi = 1 - lo * step.hi_per_lo
    bend_hi = lo / gap_hi
    shift_factor = (1 - lo_Z * step.hi_per_lo) * bend_hi / gap_hi
    bend_hi -= step.middle

    above_hi = x > hi_per_lo
    bends_lo, bends_hi = (x > 1) * bend_lo, above_hi * bend_hi[..., None, :]
    H = (x - 1) * bends_lo
    H += x
    H += (x - hi_per_lo) * bends_hi
    positions, flat = true.entry_positions(), H.reshape(-1)
    H_true = flat.take(positions).reshape(true.labels.shape)
    flat[positions] = 0
    rest = np.add.reduce(H, -2)  # summing the other entries is more precise than total - H_true
    total = H_true + rest
    r = 1 / total if w is None else w / total
    diagonal, missed = true.sums(H_true * r), true.sums(rest * r)
    loss, D, P = loss_slopes(diagonal, missed, (H @ r[..., None])[..., 0])

    if not needs_gradient:
        return loss, None

    P, D_true = P.astype(z.dtype), true.pick(D.astype(z.dtype))
    mean = ((P[..., None, :] @ H)[..., 0, :] + (true.pick(P) + D_true) * H_true) / total
    eS = P[..., None] - mean[..., None, :]
    eS.reshape(-1)[positions] += D_true.reshape(-1)
    eS *= x
    eS *= r[..., None, :]
    shift = np.add.reduce(eS * above_hi, -2) * shift_factor
    slopes = bends_lo
    slopes += bends_hi
    slopes += 1
    eS *= slopes
    Q = np.add.reduce(eS, -2)
    if detach_threshold:
        x *= (Q * lo)[..., None, :]
    else:
        # Two entries, which sum to s, unless several are as large as p2.
        top = (x >= (E2 / lo_Z)[..., None, :]) * x
        top *= ((shift - Q) / np.add.reduce(top, -2))[..., None, :]
        eS += top
        x *= (shift * lo)[..., None, :]
    eS -= x
    return loss, np.ascontiguousarray(eS.swapaxes(-1, -2))


def in_units_of_lo(z: Array, step: Step) -> tuple[Array, Array, Array, Array]:
    """x = p / lo [..., d, n] of logits [..., n, d], and E2, lo Z and lo [..., n]; see closed_form.ByClass."""
    E = np.array(z.swapaxes(-1, -2), order="C")  # always a copy: it is overwritten
    E -= np.maximum.reduce(E, -2, keepdims=True)
    torch.from_numpy(E).exp_()  # twice as fast as NumPy's
    Z, below_max = np.add.reduce(E, -2), E < 1
    E2 = np.maximum.reduce(E * below_max, -2)
    if np.count_nonzero(below_max) != E.size - E2.size:  # in some sample several entries tie for the maximum
        E2[np.add.reduce(below_max, -2, dtype=np.intp) < z.shape[-1] - 1] = 1
    lo_Z = (1 + E2) * step.a
    return np.divide(E, lo_Z[..., None, :], out=E), E2, lo_Z, lo_Z / Z
