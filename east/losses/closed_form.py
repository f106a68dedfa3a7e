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

from east.arrays import Array, as_array, as_tensor, at_least, at_most, cast, in_float64, library_of, one_hot, sums_at
from east.losses.steps import half_width, linear
from east.metrics import Sloped

FEW_CLASSES = 32  # rows shorter than this are slow to reduce: samples lie side by side in memory instead


class Counts(NamedTuple):
    """Soft counts [..., d], or [k, ..., d] at k thresholds, summed without differences; see Confusion."""

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
Score = Callable[[Counts], Sloped]  # a loss of the counts and its slopes D and P


class SoftLoss(Function):
    """A loss [...] of the soft counts of logits [..., n, d], labels [..., n] and weights [..., n]: one autograd node.

    Eq. 4-5, arXiv 2405.20954; with a list of thresholds, section 4 of Bridging the Gap. Forward computes the gradient,
    while its inputs are in memory, and backward only scales it.
    """

    @staticmethod
    def forward(ctx, logits, labels, weights, form, score):
        counts, gradient = count(logits.detach(), labels, weights, form)
        loss, D, P = score(counts)
        ctx.save_for_backward(gradient(D, P) if ctx.needs_input_grad[0] else None)
        return torch.as_tensor(loss, dtype=logits.dtype, device=logits.device)

    @staticmethod
    def backward(ctx, upstream):
        if torch.is_grad_enabled():  # create_graph=True: the second derivative would be 0
            raise RuntimeError(
                "MetricLoss's closed form has no second derivative; instead, compute the metric of "
                "Confusion.from_memberships(loss.memberships(logits), labels), which autograd differentiates throughout"
            )
        (gradient,) = ctx.saved_tensors
        if not (upstream.is_cpu and upstream.ndim == 0 and upstream.item() == 1):  # as in loss.backward()
            gradient = gradient * (upstream[..., None, None] if upstream.ndim else upstream)
        return gradient, None, None, None, None


def count(logits: Tensor, labels: Tensor, weights: Tensor | None, form: Form) -> tuple[Counts, Gradient]:
    """Soft counts and their gradient, which may be computed once: it overwrites what counting left."""
    host = logits.is_cpu
    z, y = (logits.numpy(), labels.numpy()) if host else (logits, labels)
    w = None if weights is None else weights.detach().numpy() if host else weights.detach()
    T = form.temperature
    T = in_float64(as_array(T.detach()))[..., None] if isinstance(T, Tensor) else T
    if logits.shape[-1] == 2:
        return count_two_classes(z.mT, y, w, T, form.thresholds)
    side_by_side = logits.shape[-1] < FEW_CLASSES
    p = logits.movedim(-1, 0).softmax(0).movedim(0, -1) if side_by_side else logits.softmax(-1)
    places = Places.of(y, p.shape, side_by_side)
    if form.thresholds is None:
        return count_classes(p, dynamic_steps(p, places, T, form.detach_threshold), places, y, w)
    T = as_tensor(T)[..., None].to(p) if isinstance(form.temperature, Tensor) else T
    each = [count_classes(p, steps_at(p, places, t, T), places, y, w) for t in form.thresholds]
    counts, gradients = zip(*each, strict=True)
    stacked = Counts(*(library_of(y).stack(x) for x in zip(*counts, strict=True)))
    return stacked, lambda D, P: sum(g(D[k], P[k]) for k, g in enumerate(gradients))


@lru_cache
def both_thresholds(thresholds: tuple[float, ...], ndim: int, dtype: Any, device: Any) -> Array:
    """The thresholds of classes 0 and 1, [k, ..., 2, 1] for logits of `ndim` dimensions; uploaded only once."""
    both = np.array([(1 - t, t) for t in thresholds]).reshape(-1, *(1,) * (ndim - 2), 2, 1)
    return both if device == "cpu" else torch.from_numpy(both).to(device, dtype)


def count_two_classes(
    z: Array, labels: Array, weights: Array | None, T: float | Array, thresholds: tuple[float, ...] | None
) -> tuple[Counts, Gradient]:
    """Counts of logits z [..., 2, n] as products of memberships and true classes; small ones keep their precision.

    The step H rises to T at the corner `lower` with the slope `first`, then over `width` to 1 - T with the slope
    `middle`. The steps of both classes sum to 1, so the upper corner of one is 1 - the other's lower corner.
    """
    xp = library_of(z)
    tau: Any = 0.5 if thresholds is None else both_thresholds(thresholds, z.ndim, z.dtype, z.device)
    T = T if isinstance(T, float) else T[..., None]
    half = half_width(T) * (tau if thresholds is None else at_most(tau, 1 - tau))
    lower, width = tau - half, 2 * half
    first, middle = T / lower, (1 - 2 * T) / width
    if not isinstance(lower, float):
        lower, width, first, middle = (cast(x, z) for x in (lower, width, first, middle))
        T = T if isinstance(T, float) else cast(T, z)
    odds = xp.exp(z - xp.maximum(z[..., 0, :], z[..., 1, :])[..., None, :])
    p = odds / (odds[..., 0, :] + odds[..., 1, :])[..., None, :]
    low = at_most(p / lower, 1)
    H = T * (low + (1 - (low[..., ::-1, :] if xp is np else low.flip(-2))))
    H += at_most(at_least(p - lower, 0) / width, 1) * (1 - 2 * T)
    mass = one_hot(labels, 2, p)
    mass = mass if weights is None else mass * weights[..., None, :]
    table = in_float64(H) @ in_float64(mass).mT  # [..., predicted class, true class]
    cells = *table.shape[:-2], 4
    by_class = table.reshape(cells)

    def gradient(D: Array, P: Array) -> Tensor:
        """H of class 0 is 1 - H of class 1: one derivative for each true class is enough."""
        P = P[..., 1] - P[..., 0]
        below = p < lower
        slopes = xp.where(below, first, middle + 0 * p)  # in the dtype of p
        slope = xp.where(below[..., 0, :], slopes[..., 0, :], slopes[..., 1, :])
        of_0, of_1 = cast(P - D[..., 0], p)[..., None], cast(P + D[..., 1], p)[..., None]
        by_p = (mass[..., 0, :] * of_0 + mass[..., 1, :] * of_1) * slope
        by_p = by_p.sum(0) if thresholds else by_p
        by_difference = by_p * p[..., 0, :] * p[..., 1, :]
        return as_tensor(xp.stack((-by_difference, by_difference), -1))

    return Counts(by_class[..., ::3], table.mT.reshape(cells)[..., 1:3], by_class[..., 1:3]), gradient


class Places(NamedTuple):
    """Where things are in flat memory: class c of a sample at entries [..., n] + c stride, and at counts + c.

    `side_by_side`: the memory is that of [d, ..., n], else of [..., n, d]. `tensor` makes a tensor of an array.
    """

    side_by_side: bool
    entries: Array
    stride: int
    counts: Array
    tensor: Callable[[Array], Tensor]

    @classmethod
    def of(cls, labels: Array, shape: tuple[int, ...], side_by_side: bool) -> "Places":
        """Places for entries of this shape and labels [..., n]."""
        *lead, n, d = shape
        host = isinstance(labels, np.ndarray)
        xp: Any = np if host else torch
        entries = xp.arange(prod(lead) * n, device=labels.device).reshape(labels.shape)
        counts = xp.arange(0, prod(lead) * d, d, device=labels.device).reshape(*lead, 1)
        entries, stride = (entries, prod(lead) * n) if side_by_side else (entries * d, 1)
        return cls(side_by_side, entries, stride, counts, torch.from_numpy if host else torch.Tensor.detach)

    def memory(self, x: Tensor) -> tuple[Array, Array]:
        """Entries x [..., n, d] and their flat memory, as NumPy arrays on a CPU."""
        flat = (x.movedim(-1, 0) if self.side_by_side else x).reshape(-1)
        return (x.numpy(), flat.numpy()) if x.is_cpu else (x, flat)


class Peaks(NamedTuple):
    """The two largest entries p1 and p2 of each sample, S at p1, shift / e1, the class of p1, places; all [..., n]."""

    p1: Array
    p2: Array
    S1: Array
    shift: Array
    first: Array
    at_first: Array
    at_second: Array


# Steps H [..., n, d] of probabilities p and their memory; S = p dH/dp; None where the threshold is constant.
Stepped = tuple[Tensor, tuple[Array, Array], Tensor, Peaks | None]


def steps_at(p: Tensor, places: Places, threshold: float, T: float | Tensor) -> Stepped:
    """The steps at a constant threshold."""
    tau = p.new_full((), threshold)
    half = half_width(T) * min(threshold, 1 - threshold)
    slope = torch.where(p < tau - half, T / (tau - half), (1 - 2 * T) / (2 * half))
    slope = torch.where(p > tau + half, T / (1 - tau - half), slope)
    H = linear(p, tau, T)
    return H, places.memory(H), slope.mul_(p), None


def dynamic_steps(p: Tensor, places: Places, T: float | Array, detach: bool) -> Stepped:
    """The steps at the mean of the two largest probabilities, in units of their first slope; S may overwrite p.

    Where p1 > hi, p1 is the only entry above lo, as p2 = s - p1 < s - hi = lo. So p = S at all other entries of samples
    whose shift is not 0. The bits of floats >= 0, read as integers, have the same order, and NumPy compares integers
    faster; its argmax is several times as fast as torch's.
    """
    array, flat_p = places.memory(p)
    order = array.view(f"i{array.itemsize}") if p.is_cpu else array
    width = half_width(T)
    a = (1 - width) / 2  # lo / s
    middle = (1 - 2 * T) / width * a / T
    if not isinstance(T, float):
        a, middle = cast(a, flat_p), cast(middle, flat_p)
    first = order.argmax(-1)
    at_first = places.entries + first * places.stride
    p1 = flat_p[at_first]
    flat_p[at_first] = -1
    at_second = places.entries + order.argmax(-1) * places.stride
    p2 = flat_p[at_second]
    flat_p[at_first] = p1
    s, bend_lo = p1 + p2, middle - 1
    lo, hi = s * a, s * (1 - a)
    is_above, gap_hi = p1 > hi, 1 - hi
    above_hi = (p1 - hi) * is_above
    bend_hi = lo / gap_hi - middle
    lo_column = places.tensor(lo)[..., None]
    H = torch.gt(p, lo_column, out=torch.empty_like(p))
    if isinstance(T, float):
        S = torch.addcmul(p, p, H, value=bend_lo, out=torch.empty_like(p) if detach else p)
        torch.addcmul(S, H, lo_column, value=-bend_lo, out=H)
    else:
        H.mul_(places.tensor(bend_lo)[..., None])
        S = torch.addcmul(p, p, H, out=torch.empty_like(p) if detach else p)
        torch.addcmul(S, H, lo_column, value=-1, out=H)
    S1 = p1 * (middle + is_above * bend_hi)
    memory = places.memory(H)
    memory[1][at_first] = p1 + bend_lo * (p1 - lo) + bend_hi * above_hi
    (places.memory(S)[1] if detach else flat_p)[at_first] = S1
    shift = S1 * (above_hi / gap_hi / p1)
    return H, memory, S, None if detach else Peaks(p1, p2, S1, shift, first, at_first, at_second)


def count_classes(
    p: Tensor, stepped: Stepped, places: Places, labels: Array, weights: Array | None
) -> tuple[Counts, Gradient]:
    """Counts of the steps of p, and the gradient of the logits."""
    H, (array_H, flat_H), S, peaks = stepped
    true = places.counts + labels
    at_true = places.entries + labels * places.stride
    H_true = flat_H[at_true]
    flat_H[at_true] = 0
    others = H.sum(-1)  # summing the other entries is more precise than total - H_true
    rest = others.numpy() if p.is_cpu else others
    total = H_true + rest
    r = 1 / total if weights is None else weights / total
    shape = *p.shape[:-2], p.shape[-1]
    diagonal = sums_at(true, r * H_true, prod(shape)).reshape(shape)
    missed = sums_at(true, r * rest, prod(shape)).reshape(shape)
    false_positives = (r[..., None, :] @ array_H)[..., 0, :]

    def gradient(D: Array, P: Array) -> Tensor:
        D, P = cast(D, r), cast(P, r)
        D_true, P_flat = D.reshape(-1)[true], P.reshape(-1)
        mean = ((array_H @ P[..., None])[..., 0] + (P_flat[true] + D_true) * H_true) / total
        if peaks:
            shift = (P_flat[places.counts + peaks.first] + D_true * (peaks.at_first == at_true) - mean) * peaks.shift
            mean = mean + shift
        eS = torch.sub(places.tensor(P)[..., None, :], places.tensor(mean)[..., None], out=H)
        flat_H[at_true] += D_true
        eS.mul_(S).mul_(places.tensor(r)[..., None])
        Q = eS.sum(-1)
        if not peaks:
            return eS.addcmul_(p, Q[..., None], value=-1)
        shift_1 = shift * r * (peaks.S1 - peaks.p1)
        by_s = ((Q.numpy() if Q.is_cpu else Q) + shift_1) / -(peaks.p1 + peaks.p2)
        flat_H[peaks.at_first] += shift_1 + by_s * peaks.p1
        flat_H[peaks.at_second] += by_s * peaks.p2
        return eS

    return Counts(diagonal, missed, false_positives), gradient
