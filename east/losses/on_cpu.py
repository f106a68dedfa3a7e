"""The loss of a batch and its gradient on a CPU, with NumPy wherever a torch call costs more than its arithmetic.

That is everything in small batches. With more classes, torch computes what has an entry per class, on all its threads,
and NumPy what has one number per sample. The mathematics is that of closed_form.py, from logits to gradient in one go,
which keeps nothing else in memory.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from east.losses.slopes import loss_and_slopes
from east.losses.steps import dynamic_shape
from east.metrics import Metric, Sloped

FEW_CLASSES = 32  # rows shorter than this are slow to reduce and to search: samples lie side by side instead
MANY_CLASSES = 2048  # from here on, huge_softmax.py saves passes over the entries
MOST_ENTRIES = 1 << 15  # with few classes; above this, torch uses several threads

SIGNS = np.array((-1.0, 1.0))  # derivatives of z1 - z0 with respect to the two logits

Array = NDArray[Any]
SlopesAt = Callable[[Array, Array, Array], Sloped]  # of the diagonal, missed and false positives [..., d]


def covers(logits: Tensor) -> bool:
    """Whether this is the fastest way for logits [..., n, d], and their memory is one that NumPy can read."""
    if not logits.is_cpu or torch.compiler.is_compiling():
        return False
    if logits.shape[-1] < FEW_CLASSES:
        return logits.numel() <= MOST_ENTRIES
    return logits.shape[-1] < MANY_CLASSES and logits.stride(-1) == 1  # in images, adjacent entries are pixels


def are_classes(labels: Tensor, classes: int) -> bool:
    """Whether all labels are indices of classes."""
    least, most = torch.aminmax(labels)
    return least.item() >= 0 and most.item() < classes


def loss_and_gradient(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    temperature: float | Tensor,
    detach_threshold: bool,
    metric: Metric,
    parameters: Mapping[str, Any],
    needs_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """1 - metric [...] of the soft counts of logits [..., n, d], and the gradient [..., n, d] if it is needed.

    All labels [..., n] must be indices of classes.
    """

    def loss_slopes(diagonal: Array, missed: Array, false_positives: Array) -> Sloped:
        loss, D, P = loss_and_slopes(metric, parameters, diagonal, missed, false_positives)
        return Sloped(loss, per_class(D, diagonal.shape), per_class(P, diagonal.shape))

    classes, z = logits.shape[-1], logits.detach().numpy()
    true = TrueClasses.from_labels(labels.numpy(), classes)
    batch = Batch(z, true, None if weights is None else weights.detach().numpy(), step_for(temperature, z.dtype))
    gradient: Array | None
    if classes == 2:
        loss, gradient = two_classes(batch, loss_slopes)
    else:
        compute = few_classes if classes < FEW_CLASSES else many_classes
        loss, gradient = compute(batch, loss_slopes, detach_threshold, needs_gradient)
    return torch.from_numpy(np.asarray(loss, z.dtype)), None if gradient is None else torch.from_numpy(gradient)


def per_class(slopes: Any, shape: tuple[int, ...]) -> Array:
    """Slopes [..., d] of a metric whose slopes may be equal for all classes, and then are [..., 1] or a number."""
    return slopes if getattr(slopes, "shape", ()) == shape else slopes + np.zeros(shape)


class TrueClasses(NamedTuple):
    """Labels [..., n], and the positions of their classes in the flattened counts [..., d]."""

    labels: Array
    positions: Array
    classes: int

    @classmethod
    def from_labels(cls, labels: Array, classes: int) -> "TrueClasses":
        if labels.ndim == 1:
            return cls(labels, labels, classes)
        offsets = np.arange(0, labels[..., 0].size * classes, classes).reshape(*labels.shape[:-1], 1)
        return cls(labels, (labels + offsets).reshape(-1), classes)

    def sums(self, values: Array) -> Array:
        """Sum of values [..., n] over the samples of each class: [..., d]."""
        shape = *self.labels.shape[:-1], self.classes
        return np.bincount(self.positions, values.reshape(-1), prod(shape)).reshape(shape)

    def pick(self, by_class: Array, offsets: Array | None = None) -> Array:
        """The value [..., n] of each sample's true class, or of true class + offset, from values by class [..., d]."""
        positions = self.positions.reshape(self.labels.shape)
        return by_class.reshape(-1).take(positions if offsets is None else positions + offsets)

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
        a, first, middle, hi_per_lo = dynamic_shape(T)
        return cls(*(np.asarray(x, dtype)[()] for x in (a, first, middle - 1, middle, hi_per_lo)))


@lru_cache
def step_at(temperature: float, dtype: np.dtype) -> Step:
    return Step.at(temperature, dtype)


def step_for(temperature: float | Tensor, dtype: np.dtype) -> Step:
    if isinstance(temperature, Tensor):
        return Step.at(temperature.detach().double().unsqueeze(-1), dtype)
    return step_at(temperature, dtype)


class Batch(NamedTuple):
    """Logits z [..., n, d], their true classes, sample weights w [..., n], and the step."""

    z: Array
    true: TrueClasses
    w: Array | None
    step: Step


def two_classes(batch: Batch, loss_slopes: SlopesAt) -> tuple[Array, Array]:
    """The loss and its gradient for two classes, where everything is a function of z1 - z0."""
    z, true, w, step = batch
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
    batch: Batch, loss_slopes: SlopesAt, detach_threshold: bool, needs_gradient: bool
) -> tuple[Array, Array | None]:
    """The loss and its gradient in layout [..., d, n], with the names and formulas of closed_form.ByClass."""
    z, true, w, step = batch
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


def many_classes(
    batch: Batch, loss_slopes: SlopesAt, detach_threshold: bool, needs_gradient: bool
) -> tuple[Array, Array | None]:
    """The loss and its gradient in layout [..., n, d], with the names and formulas of closed_form.BySample.

    p, S, H and eS are tensors; what has one number per sample is an array, also of positions in their flat memory.

    Subtracting p shift needs no pass of its own: shift is not 0 only if p1 > hi, and then p1 is the only entry above
    lo, as p2 = s - p1 < s - hi = lo. In all others p = S, so e S - p shift = (e - shift) S.
    """
    z, true, w, step = batch
    p = torch.from_numpy(z).softmax(-1).contiguous()
    p_flat, starts = p.numpy().reshape(-1), first_positions(true.labels.shape, true.classes)
    at_true = starts + true.labels
    at_first, at_second, p1, p2 = pop_top_two(p.numpy(), starts)
    s = p1 + p2
    lo, hi = s * step.a, s * (1 - step.a)
    gap_hi, excess_hi = 1 - hi, np.maximum(p1 - hi, 0)
    bend_hi = lo / gap_hi - step.middle
    above_lo, bend_lo = torch.gt(p, column(lo), out=torch.empty_like(p)), step.bend_lo
    if isinstance(bend_lo, np.ndarray):
        above_lo, bend_lo = above_lo.mul_(column(bend_lo)), 1.0
    S = torch.addcmul(p, p, above_lo, value=float(bend_lo), out=torch.empty_like(p) if detach_threshold else p)
    H = torch.addcmul(S, above_lo, column(lo), value=-float(bend_lo), out=above_lo)
    H_array = H.numpy()
    H_flat = H_array.reshape(-1)
    H_flat[at_first] = p1 + step.bend_lo * (p1 - lo) + bend_hi * excess_hi
    S1 = p1 * (step.middle + (excess_hi > 0) * bend_hi)
    S.numpy().reshape(-1)[at_first] = S1
    H_true = H_flat.take(at_true)
    H_flat[at_true] = 0
    rest = H.sum(-1).numpy()  # summing the other entries is more precise than total - H_true
    total = H_true + rest
    r = 1 / total if w is None else w / total
    diagonal, missed = true.sums(H_true * r), true.sums(rest * r)
    loss, D, P = loss_slopes(diagonal, missed, (r[..., None, :] @ H_array)[..., 0, :])
    if not needs_gradient:
        return loss, None

    P, D_true = P.astype(z.dtype), true.pick(D.astype(z.dtype))
    mean = (np.vecdot(H_array, P[..., None, :]) + (true.pick(P) + D_true) * H_true) / total
    shift = 0
    if not detach_threshold:
        g1 = true.pick(P, at_first - at_true) + D_true * (at_first == at_true)
        shift = (g1 - mean) * S1 * (excess_hi / gap_hi / p1)
    eS, eS_flat = torch.sub(torch.from_numpy(P[..., None, :]), column(mean + shift), out=H), H_flat
    eS_flat[at_true] += D_true
    eS.mul_(S).mul_(column(r))
    Q = eS.sum(-1).numpy()
    if detach_threshold:
        p_flat[at_first] = p1
        eS.addcmul_(p, column(Q), value=-1)
    else:
        shift_1 = shift * r * (S1 - p1)
        by_s = (Q + shift_1) / -s
        eS_flat[at_first] += shift_1 + by_s * p1
        eS_flat[at_second] += by_s * p2
    return loss, H_array  # the memory of eS


@lru_cache(maxsize=4)
def first_positions(shape: tuple[int, ...], classes: int) -> Array:
    """Flat positions [..., n] of the first entries of samples [..., n, d]."""
    return np.arange(0, prod(shape) * classes, classes).reshape(shape)


def pop_top_two(p: Array, starts: Array) -> tuple[Array, Array, Array, Array]:
    """Flat positions [..., n] of the largest and the second largest entries of p [..., n, d] >= 0, and both entries.

    The largest entries become -1. `starts` [..., n] are the positions of the first entries.
    """
    entries = p.reshape(-1)
    at_first = starts + argmax(p)
    p1 = entries.take(at_first)
    entries[at_first] = -1
    at_second = starts + argmax(p)
    return at_first, at_second, p1, entries.take(at_second)


def argmax(p: Array) -> Array:
    """argmax [..., n] of p [..., n, d] whose negative entries are not the largest.

    The bits of floats >= 0, read as integers, have the same order, and NumPy compares integers faster. Its argmax of
    floats is twenty times as fast as torch's topk.
    """
    return p.view(f"i{p.itemsize}").argmax(-1)


def column(values: Array) -> Tensor:
    """Numbers per sample [..., n] as a column [..., n, 1]."""
    return torch.from_numpy(values[..., None])
