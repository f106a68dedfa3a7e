"""The linear step's soft counts in closed form: softmax, threshold, step, counts, and their hand-derived gradient.

Composed from elementary operations and differentiated by autograd, the loss costs several times a soft Dice. This form
makes few passes over the entries [..., n, d], which are tensors. What has one number per sample or per class is a NumPy
array on a CPU, and a tensor elsewhere (east.arrays).

With D and P the derivatives of the loss with respect to the diagonal and the predicted counts, H the steps of a sample,
and g_j = P_j, plus D_j at the true class: memberships are H / sum H, so dL/dH_j = e_j = r (g_j - mean of g weighted by
H), with r the sample's weight divided by sum H. With S = p dH/dp, the softmax gives dL/dz = e S - p sum_j e_j S_j.

At the dynamic threshold s / 2, with s the sum of the two largest probabilities, the corners are lo = a s and hi = b s,
with a = (1 - 2.5 T) / 2 and b = 1 - a, and only the largest probability p1 can exceed hi. H may be scaled to a first
slope of 1: H = p + bend_lo [p - lo]+, plus bend_hi [p1 - hi]+ at the largest entry. Its slopes are 1, then middle =
1 + bend_lo, then lo / (1 - hi) = middle + bend_hi. Apart from the 1 in 1 - hi, H is homogeneous in (p, s), and e is
orthogonal to H, so Euler's identity gives dL/ds: sum_j e_j S_j + s dL/ds = shift = e1 S1 [p1 - hi]+ / (1 - hi) / p1.
Then dL/dz = e S - p shift, plus p dL/ds at the two largest entries.

With two classes the dynamic threshold is 1/2, and the steps of both classes sum to 1.
"""

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from east.arrays import (
    Array,
    as_array,
    as_tensor,
    at_least,
    at_most,
    expanded,
    in_float64,
    indicator,
    library_of,
    one_hot,
    reverse,
    sums_at,
    taken,
)
from east.losses.steps import dynamic_shape, half_width, linear
from east.metrics import Sloped

FEW_CLASSES = 32  # rows shorter than this are slow to reduce: samples lie side by side in memory instead


class Counts(NamedTuple):
    """Soft counts [..., d], summed without differences; see Confusion."""

    diagonal: Array
    missed: Array
    false_positives: Array


class Form(NamedTuple):
    """The step's temperature, a number or [...], and its k thresholds; None is the dynamic threshold.

    `detach_threshold` treats the dynamic threshold as a constant.
    """

    temperature: float | Tensor
    thresholds: tuple[float, ...] | None = None
    detach_threshold: bool = False


Gradient = Callable[[Array, Array], Tensor]  # of the slopes D and P, shaped as the counts, to that of the logits
Score = Callable[[Array, Array, Array], Sloped]  # a loss of the counts and its slopes D and P


def soft_counts(logits: Tensor, labels: Tensor, weights: Tensor | None, form: Form) -> Counts:
    """Soft counts of logits [..., n, d], labels [..., n] and weights [..., n]: [..., d], or [k, ..., d].

    Eq. 4-5, arXiv 2405.20954; with a list of thresholds, section 4 of Bridging the Gap.
    """
    return Counts(*_Counts.apply(logits, labels, weights, form))


def soft_loss(logits: Tensor, labels: Tensor, weights: Tensor | None, form: Form, score: Score) -> Tensor:
    """A loss [...] of the soft counts whose slopes are known, as a single autograd node."""
    return _Loss.apply(logits if torch.is_grad_enabled() else logits.detach(), labels, weights, form, score)


class _Loss(Function):
    """Forward computes the gradient, while its inputs are in memory, and backward only scales it."""

    @staticmethod
    def forward(ctx, logits, labels, weights, form, score):
        logits = logits.detach()
        counts, gradient = count(logits, labels, weights, form)
        loss, D, P = score(*counts)
        D, P = expanded(D, counts.diagonal), expanded(P, counts.diagonal)  # they may be equal for all classes
        ctx.save_for_backward(gradient(D, P) if ctx.needs_input_grad[0] else None)
        return as_tensor(indicator(loss, as_array(logits)))

    @staticmethod
    def backward(ctx, upstream):
        refuse_second_derivative()
        (gradient,) = ctx.saved_tensors
        if not (upstream.is_cpu and upstream.ndim == 0 and upstream.item() == 1):  # as in loss.backward()
            gradient = gradient * (upstream[..., None, None] if upstream.ndim else upstream)
        return gradient, None, None, None, None


class _Counts(Function):
    """For losses whose slopes only autograd knows. Backward counts once more, so that nothing is kept until then."""

    @staticmethod
    def forward(ctx, logits, labels, weights, form):
        ctx.save_for_backward(logits, labels, weights)
        ctx.form = form
        return tuple(as_tensor(x).to(logits.dtype) for x in count(logits.detach(), labels, weights, form)[0])

    @staticmethod
    def backward(ctx, by_diagonal, by_missed, by_false_positives):
        refuse_second_derivative()
        D = by_diagonal - by_missed - by_false_positives  # if only the diagonal grows, both kinds of errors fall
        logits = ctx.saved_tensors[0]
        with torch.autocast(logits.device.type, enabled=False):
            gradient = count(*ctx.saved_tensors, ctx.form)[1]
            return gradient(as_array(D), as_array(by_false_positives)), None, None, None


def refuse_second_derivative() -> None:
    """Raise RuntimeError in a backward with create_graph=True: the second derivative would be 0."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "MetricLoss's closed form has no second derivative; instead, compute the metric of "
            "Confusion.from_memberships(loss.memberships(logits), labels), which autograd differentiates throughout"
        )


def count(logits: Tensor, labels: Tensor, weights: Tensor | None, form: Form) -> tuple[Counts, Gradient]:
    """Soft counts and their gradient, which may be computed once: it overwrites what counting left."""
    weights = None if weights is None else as_array(weights.detach())
    if logits.shape[-1] == 2:
        return count_two_classes(as_array(logits).mT, as_array(labels), weights, form)
    p = logits.mT.softmax(-2).mT if logits.shape[-1] < FEW_CLASSES else logits.softmax(-1)
    places = Places.of(p.shape, None if isinstance(as_array(p), np.ndarray) else p.device)
    batch = places, as_array(labels), weights
    if form.thresholds is None:
        return count_classes(dynamic_steps(p, places, form), *batch)
    each = [count_classes(steps_at(p, t, form.temperature), *batch) for t in form.thresholds]
    counts, gradients = zip(*each, strict=True)
    stacked = (library_of(x[0]).stack(x) for x in zip(*counts, strict=True))
    return Counts(*stacked), lambda D, P: sum(g(D[k], P[k]) for k, g in enumerate(gradients))


class TwoSteps(NamedTuple):
    """The steps of classes 0 and 1, [2, 1] or [k, ..., 2, 1]; the upper corner of one is 1 - the other's lower corner.

    H rises to T at the corner `lower` with the slope `first`, then over `width` to 1 - T with the slope `middle`.
    """

    T: float | Array
    lower: Array
    width: Array
    first: Array
    middle: Array

    @classmethod
    def of(cls, form: Form, z: Array) -> "TwoSteps":
        """The steps for logits z [..., 2, n], in their library, dtype and device."""
        T, device = form.temperature, None if isinstance(z, np.ndarray) else z.device
        if not isinstance(T, Tensor):
            return cls.at(form.thresholds, z.ndim, T, z.dtype, device)
        tau = both_thresholds(form.thresholds, z.ndim, z.dtype, device)
        return cls.between(tau, in_float64(as_array(T.detach()))[..., None, None], z)

    @classmethod
    @lru_cache
    def at(
        cls, thresholds: tuple[float, ...] | None, ndim: int, T: float, dtype: Any, device: torch.device | None
    ) -> "TwoSteps":
        tau = both_thresholds(thresholds, ndim, dtype, device)
        like = np.empty(0, dtype) if device is None else torch.empty(0, dtype=dtype, device=device)
        return cls.between(tau, T, like)

    @classmethod
    def between(cls, tau: Array, T: float | Array, like: Array) -> "TwoSteps":
        half = half_width(T) * at_most(tau, 1 - tau)
        lower = tau - half
        steps = lower, 2 * half, T / lower, (1 - 2 * T) / (2 * half)
        return cls(T if isinstance(T, float) else indicator(T, like), *(indicator(x, like) for x in steps))


@lru_cache
def both_thresholds(thresholds: tuple[float, ...] | None, ndim: int, dtype: Any, device: torch.device | None) -> Array:
    """The thresholds of classes 0 and 1 for logits of `ndim` dimensions: [2, 1] or [k, ..., 2, 1]."""
    of_one = np.array(thresholds or 0.5).reshape(-1, *(1,) * (ndim if thresholds else 1))
    both = np.concatenate((1 - of_one, of_one), -2 if thresholds else 0)
    return both if device is None else torch.from_numpy(both).to(device, dtype)


def count_two_classes(z: Array, labels: Array, weights: Array | None, form: Form) -> tuple[Counts, Gradient]:
    """Counts of logits z [..., 2, n] as products of memberships and true classes; small ones keep their precision."""
    xp, steps = library_of(z), TwoSteps.of(form, z)
    odds = xp.exp(z - xp.maximum(z[..., 0, :], z[..., 1, :])[..., None, :])
    p = odds / (odds[..., 0, :] + odds[..., 1, :])[..., None, :]
    low = at_most(p / steps.lower, 1)
    H = steps.T * (low + (1 - reverse(low.mT).mT))
    H += at_most(at_least(p - steps.lower, 0) / steps.width, 1) * (1 - 2 * steps.T)
    mass = one_hot(labels, 2, p)
    mass = mass if weights is None else mass * weights[..., None, :]
    table = in_float64(H) @ in_float64(mass).mT  # [..., predicted class, true class]
    table = table.reshape(*table.shape[:-2], 4)
    false_positives = table[..., 1:3]

    def gradient(D: Array, P: Array) -> Tensor:
        """H of class 0 is 1 - H of class 1: one derivative for each true class is enough."""
        P = P[..., 1] - P[..., 0]
        below = p < steps.lower
        slope = xp.where(below[..., 0, :], steps.first[..., 0, :], steps.middle[..., 0, :])
        slope = xp.where(below[..., 1, :], steps.first[..., 1, :], slope)
        of_0, of_1 = (indicator(x, p)[..., None] for x in (P - D[..., 0], P + D[..., 1]))
        by_H = mass[..., 0, :] * of_0 + mass[..., 1, :] * of_1
        by_p = (by_H * slope).sum(0) if form.thresholds else by_H * slope
        by_difference = (by_p * p[..., 0, :] * p[..., 1, :])[..., None]
        return as_tensor(xp.concatenate((-by_difference, by_difference), -1))

    return Counts(table[..., ::3], reverse(false_positives), false_positives), gradient


class Places(NamedTuple):
    """Where things are in flat memory: class c of a sample in entries [..., n, d], and in counts [..., d].

    `side_by_side`: adjacent entries are of adjacent samples. Class c is at entries + c stride, and at counts + c.
    """

    side_by_side: bool
    entries: Array
    stride: int
    counts: Array

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, shape: tuple[int, ...], device: torch.device | None) -> "Places":
        """Places for entries of this shape, as NumPy arrays without a device."""
        *lead, n, d = shape
        xp: Any = np if device is None else torch
        where = {} if device is None else {"device": device}
        trials, samples = xp.arange(prod(lead), **where).reshape(*lead, 1), xp.arange(n, **where)
        if d < FEW_CLASSES:
            return cls(True, trials * (n * d) + samples, n, trials * d)
        return cls(False, trials * (n * d) + samples * d, 1, trials * d)

    def flat(self, x: Tensor) -> Array:
        """The memory of entries x [..., n, d]."""
        return as_array((x.mT if self.side_by_side else x).view(-1))


class Stepped(NamedTuple):
    """Steps H [..., n, d] of probabilities p, and S = p dH/dp, which may share memory with p.

    `peaks` is what the gradient by the dynamic threshold needs, None where the threshold is constant.
    """

    p: Tensor
    H: Tensor
    S: Tensor
    peaks: "Peaks | None" = None


class Peaks(NamedTuple):
    """The two largest entries p1 and p2 of each sample, S at p1, shift / e1, the class of p1, places; all [..., n]."""

    p1: Array
    p2: Array
    S1: Array
    shift: Array
    first: Array
    at_first: Array
    at_second: Array


def steps_at(p: Tensor, threshold: float, temperature: float | Tensor) -> Stepped:
    """The steps at a constant threshold."""
    T = temperature[..., None, None] if isinstance(temperature, Tensor) else temperature
    tau = p.new_full((), threshold)
    half = half_width(T) * min(threshold, 1 - threshold)
    slope = torch.where(p < tau - half, T / (tau - half), (1 - 2 * T) / (2 * half))
    slope = torch.where(p > tau + half, T / (1 - tau - half), slope)
    return Stepped(p, linear(p, tau, T), slope.mul_(p))


def dynamic_steps(p: Tensor, places: Places, form: Form) -> Stepped:
    """The steps at the mean of the two largest probabilities, in units of their first slope; overwrites p.

    Where p1 > hi, p1 is the only entry above lo, as p2 = s - p1 < s - hi = lo. So p = S at all other entries of samples
    whose shift is not 0.
    """
    flat_p, T, detach = places.flat(p), form.temperature, form.detach_threshold
    if isinstance(T, Tensor):
        a, middle = (indicator(x, flat_p) for x in dynamic_shape(in_float64(as_array(T.detach()))[..., None]))
    else:
        a, middle = dynamic_shape(T)
    array = as_array(p)
    first = argmax(array)
    at_first = places.entries + first * places.stride
    p1 = taken(flat_p, at_first)
    flat_p[at_first] = -1
    at_second = places.entries + argmax(array) * places.stride
    p2 = taken(flat_p, at_second)
    flat_p[at_first] = p1
    s, bend_lo = p1 + p2, middle - 1
    lo, hi = s * a, s * (1 - a)
    above_hi, gap_hi = at_least(p1 - hi, 0), 1 - hi
    bend_hi = lo / gap_hi - middle
    lo_column = column(lo)
    above_lo, bend = torch.gt(p, lo_column, out=torch.empty_like(p)), bend_lo
    if isinstance(T, Tensor):
        above_lo, bend = above_lo.mul_(column(bend_lo)), 1.0
    S = torch.addcmul(p, p, above_lo, value=bend, out=torch.empty_like(p) if detach else p)
    H = torch.addcmul(S, above_lo, lo_column, value=-bend, out=above_lo)
    S1 = p1 * (middle + (above_hi > 0) * bend_hi)
    places.flat(H)[at_first] = p1 + bend_lo * (p1 - lo) + bend_hi * above_hi
    places.flat(S)[at_first] = S1
    shift = S1 * (above_hi / gap_hi / p1)
    return Stepped(p, H, S, None if detach else Peaks(p1, p2, S1, shift, first, at_first, at_second))


def count_classes(stepped: Stepped, places: Places, labels: Array, weights: Array | None) -> tuple[Counts, Gradient]:
    """Counts of steps, and the gradient of the logits."""
    p, H, S, peaks = stepped
    flat_H, at_true, true = places.flat(H), places.entries + labels * places.stride, places.counts + labels
    H_true = taken(flat_H, at_true)
    flat_H[at_true] = 0
    rest = as_array(H.sum(-1))  # summing the other entries is more precise than total - H_true
    total = H_true + rest
    r = 1 / total if weights is None else weights / total
    shape = *p.shape[:-2], p.shape[-1]
    diagonal = sums_at(true, r * H_true, prod(shape)).reshape(shape)
    missed = sums_at(true, r * rest, prod(shape)).reshape(shape)
    false_positives = in_float64((r[..., None, :] @ as_array(H))[..., 0, :])

    def gradient(D: Array, P: Array) -> Tensor:
        D, P = indicator(D, r), indicator(P, r)
        D_true = taken(D, true)
        mean = ((as_array(H) @ P[..., None])[..., 0] + (taken(P, true) + D_true) * H_true) / total
        shift = 0.0
        if peaks:
            shift = (taken(P, places.counts + peaks.first) + D_true * (peaks.at_first == at_true) - mean) * peaks.shift
        eS = torch.sub(as_tensor(P)[..., None, :], column(mean + shift), out=H)
        flat_H[at_true] += D_true
        eS.mul_(S).mul_(column(r))
        Q = as_array(eS.sum(-1))
        if not peaks:
            return eS.addcmul_(p, column(Q), value=-1)
        shift_1 = shift * r * (peaks.S1 - peaks.p1)
        by_s = (Q + shift_1) / -(peaks.p1 + peaks.p2)
        flat_H[peaks.at_first] += shift_1 + by_s * peaks.p1
        flat_H[peaks.at_second] += by_s * peaks.p2
        return eS

    return Counts(diagonal, missed, false_positives), gradient


def argmax(p: Array) -> Array:
    """argmax [..., n] of p [..., n, d] whose negative entries are not the largest.

    The bits of floats >= 0, read as integers, have the same order, and NumPy compares integers faster; its argmax is
    several times as fast as torch's.
    """
    return p.view(f"i{p.itemsize}").argmax(-1) if isinstance(p, np.ndarray) else p.argmax(-1)


def column(values: Array) -> Tensor:
    """Numbers per sample [..., n] as a column [..., n, 1]."""
    return as_tensor(values)[..., None]
