"""Soft counts at fixed thresholds, all in one pass over the probabilities, with a hand-derived gradient.

At a threshold t the step is H = c0 p + c1 [p - lo]+ + c2 [p - hi]+, with the same corners for all samples. Below the
lowest corner of all thresholds, every H is a multiple of p, and p sums to 1. So only the m entries above that corner,
at most 1 / lo per sample, are visited for each threshold; the rest is matrix products with p.

With D and P the derivatives of the loss with respect to the diagonal and the predicted counts, and g_j = P_j, plus D_j
at the true class, e = (g - mean of g weighted by H) w / sum H and dL/dp = sum_t e (c0 + c1 [p > lo] + c2 [p > hi]).
The mean cancels in the softmax, but without it the rounding of large slopes would not.

With two classes the memberships are H of class 1 at t and of class 0 at 1 - t, which sum to 1 (`BinarySteps`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from east.confusion import dtype_of_sums
from east.losses.closed_form import Counts
from east.losses.nodes import slopes_by_margins, without_graph
from east.losses.steps import half_width

LOWEST_CORNER = 1e-3  # with a lower corner, almost every entry would have to be visited


class Steps(NamedTuple):
    """The steps at k thresholds, all [k]: corners lo and hi, first slope c0, slope changes c1 and c2 at the corners.

    `lowest` is the smallest lo.
    """

    lo: Tensor
    hi: Tensor
    c0: Tensor
    c1: Tensor
    c2: Tensor
    lowest: float

    @classmethod
    @lru_cache
    def at(cls, thresholds: tuple[float, ...], temperature: float, dtype: torch.dtype, device: torch.device) -> "Steps":
        tau = torch.tensor(thresholds, dtype=torch.float64, device="cpu")
        half = half_width(temperature) * torch.minimum(tau, 1 - tau)
        lo, hi = tau - half, tau + half
        first, middle, last = temperature / lo, (1 - 2 * temperature) / (hi - lo), temperature / (1 - hi)
        values = lo, hi, first, middle - first, last - middle
        return cls._make((*(x.to(device, dtype) for x in values), float(lo.min())))

    def corner_terms(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """What the corners add to H = c0 p and to its slope c0, at p [...]: each [..., k]."""
        p = p.unsqueeze(-1)
        excess_lo, excess_hi = (p - self.lo).relu_(), (p - self.hi).relu_()
        H_extra = (excess_lo * self.c1).addcmul_(excess_hi, self.c2)
        return H_extra, (excess_lo.sign_() * self.c1).addcmul_(excess_hi.sign_(), self.c2)


def covers(thresholds: Sequence[float], temperature: float | Tensor, classes: int) -> bool:
    """Whether the counts can be computed here: with two classes, or if few entries exceed the lowest corner."""
    if classes == 2:
        return True
    if isinstance(temperature, Tensor):
        return False
    return min(t - half_width(temperature) * min(t, 1 - t) for t in thresholds) >= LOWEST_CORNER


def counts_at(
    thresholds: Sequence[float], logits: Tensor, labels: Tensor, weights: Tensor | None, temperature: float | Tensor
) -> Counts:
    """Soft counts [k, ..., d] at k thresholds, of logits [..., n, d], labels [..., n]. Section 4, Bridging the Gap.

    temperature: a number, or with two classes also one per leading index.
    """
    if logits.shape[-1] == 2:
        return Counts(*_BinaryCountsAt.apply(logits, labels, weights, BinarySteps.at(thresholds, temperature, logits)))
    steps = Steps.at(tuple(thresholds), float(temperature), logits.dtype, logits.device)
    *lead, n, d = logits.shape
    flat = logits.reshape(-1, n, d), labels.reshape(-1, n), None if weights is None else weights.reshape(-1, n)
    return Counts(*(x.unflatten(0, (*lead, d)).movedim(-1, 0) for x in _CountsAt.apply(*flat, steps)))


class Entries(NamedTuple):
    """The m entries of p [trials, n, d] above the lowest corner, as positions [m] in flattened tensors.

    samples: in [trials, n]; classes: in the counts [trials, d]; positions: in p.
    """

    samples: Tensor
    classes: Tensor
    positions: Tensor


def entries_above(p: Tensor, lowest: float) -> Entries:
    _, n, d = p.shape
    flat = p.view(-1)
    if p.is_cpu:  # NumPy's search is seven times as fast
        positions = torch.from_numpy(np.flatnonzero(flat.numpy() > lowest))
    else:
        positions = (flat > lowest).nonzero().squeeze(-1)
    samples = positions // d
    return Entries(samples, samples // n * d + positions - samples * d, positions)


class _CountsAt(Function):
    """Diagonal, missed and false positives [trials * d, k] of logits [trials, n, d] and labels [trials, n]."""

    @staticmethod
    def forward(ctx, logits, labels, weights, steps):
        trials, n, d = logits.shape
        k = len(steps.lo)
        p = logits.softmax(-1)
        entries = entries_above(p, steps.lowest)
        # The true class of each sample, as a position in the counts of all trials.
        true = (labels + d * torch.arange(trials, device=labels.device).unsqueeze(-1)).view(-1)
        true_class = labels.unsqueeze(-1)
        p_true = p.gather(-1, true_class).view(-1)
        H_extra_true, slope_extra_true = steps.corner_terms(p_true)
        H_extra, slope_extra = steps.corner_terms(p.view(-1)[entries.positions])
        H_true = torch.addcmul(H_extra_true, p_true.unsqueeze(-1), steps.c0)
        # Summing the other classes is more precise than 1 - p_true and total - H_true.
        p.scatter_(-1, true_class, 0)
        of_others = H_extra * (entries.classes != true[entries.samples]).unsqueeze(-1)
        rest = (p.sum(-1).view(-1, 1) * steps.c0).index_add_(0, entries.samples, of_others)
        total = H_true + rest
        r = total.reciprocal() if weights is None else weights.reshape(-1, 1) / total
        zeros = p.new_zeros(trials * d, k)
        diagonal, missed = (zeros.index_add(0, true, r * x) for x in (H_true, rest))
        false_positives = (p.mT @ (r * steps.c0).view(trials, n, k)).view(trials * d, k)
        false_positives.index_add_(0, entries.classes, r[entries.samples] * of_others)
        p.scatter_(-1, true_class, p_true.view(true_class.shape))
        ctx.save_for_backward(p, labels, true, H_true, slope_extra_true, total, r, H_extra, slope_extra, *entries)
        ctx.steps, ctx.logits = steps, logits
        return diagonal, missed, false_positives

    @staticmethod
    def backward(ctx, by_diagonal, by_missed, by_false_positives):
        p, labels, true, H_true, slope_extra_true, total, r, H_extra, slope_extra, *entries = ctx.saved_tensors
        samples, classes, positions = entries
        steps, (trials, n, d), k = ctx.steps, p.shape, r.shape[-1]

        def gradient() -> Tensor:
            D, P = slopes_by_margins(by_diagonal, by_missed, by_false_positives)
            D_true, P_entries, P = D[true], P[classes], P.reshape(trials, d, k)
            mean = (p @ P).view(-1, k) * steps.c0
            mean = mean.index_add_(0, samples, P_entries * H_extra).addcmul_(D_true, H_true).div_(total)
            first_slopes = r * steps.c0
            by_p = first_slopes.view(trials, n, k) @ P.mT
            by_p.sub_((first_slopes * mean).sum(-1).view(trials, n, 1))
            at_true = (r * D_true * (steps.c0 + slope_extra_true)).sum(-1)
            by_p.scatter_add_(-1, labels.unsqueeze(-1), at_true.view(trials, n, 1))
            at_entries = (r[samples] * (P_entries - mean[samples]) * slope_extra).sum(-1)
            by_p.view(-1).index_add_(0, positions, at_entries)
            return by_p.sub_((by_p * p).sum(-1, keepdim=True)).mul_(p)  # through the softmax

        return without_graph(gradient, ctx, by_diagonal), None, None, None


class BinarySteps(NamedTuple):
    """The steps of both classes at k thresholds, each [k, ..., 1]; a class's lower corner is 1 - the other's upper one.

    `lower` are the lower corners of classes 1 and 0, `outer` the slopes below them, `middle` is the slope between the
    corners, which are `width` apart.
    """

    lower: tuple[Tensor, Tensor]
    outer: tuple[Tensor, Tensor]
    middle: Tensor
    width: Tensor

    @classmethod
    def at(cls, thresholds: Sequence[float], temperature: float | Tensor, logits: Tensor) -> "BinarySteps":
        exact, device = dtype_of_sums(logits), logits.device
        T = torch.as_tensor(temperature, dtype=exact, device=device).unsqueeze(-1)
        tau = torch.tensor(thresholds, dtype=exact, device=device).view(-1, *(1,) * (logits.ndim - 1))
        half = half_width(T) * torch.minimum(tau, 1 - tau)
        lower, lower_of_0 = tau - half, 1 - tau - half
        values = lower, lower_of_0, T / lower, T / lower_of_0, (1 - 2 * T) / (2 * half), 2 * half
        lower, lower_of_0, outer, outer_of_0, middle, width = (x.to(logits.dtype) for x in values)
        return cls((lower, lower_of_0), (outer, outer_of_0), middle, width)

    def memberships(self, p: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """H [k, ..., n] of classes 1 and 0 with probabilities p, each [..., n]; small ones keep their precision."""

        def step(k: int) -> Tensor:
            lower, upper = self.lower[k], 1 - self.lower[1 - k]
            low = p[k].minimum(lower) * self.outer[k]
            middle = (p[k] - lower).clamp_min_(0).minimum(self.width).mul_(self.middle)
            return low.add_(middle).addcmul_((p[k] - upper).clamp_min_(0), self.outer[1 - k])

        return step(0), step(1)

    def slopes(self, p: tuple[Tensor, Tensor]) -> Tensor:
        """The slope [k, ..., n] of H of class 1."""
        ends = (torch.where(p[k] < self.lower[k], self.outer[k] - self.middle, 0.0) for k in (0, 1))
        return sum(ends, self.middle)


class _BinaryCountsAt(Function):
    """Diagonal, missed and false positives [k, ..., 2] of logits [..., n, 2] and labels [..., n]."""

    @staticmethod
    def forward(ctx, logits, labels, weights, steps):
        difference = logits[..., 1] - logits[..., 0]
        p = difference.sigmoid(), (-difference).sigmoid()
        is_one = labels.to(logits.dtype)
        of_class = torch.stack((1 - is_one, is_one), -1)  # [..., n, 2]
        if weights is not None:
            of_class = of_class * weights.unsqueeze(-1)
        of_class = of_class.to(dtype_of_sums(of_class))
        # As class 1 and as class 0, the mass of the samples of classes 0 and 1: false and true positives and so on.
        fp_tp, tn_fn = ((H.to(of_class).unsqueeze(-2) @ of_class).squeeze(-2) for H in steps.memberships(p))
        diagonal = torch.stack((tn_fn[..., 0], fp_tp[..., 1]), -1).to(logits.dtype)
        missed = torch.stack((fp_tp[..., 0], tn_fn[..., 1]), -1).to(logits.dtype)
        ctx.save_for_backward(labels, weights, *p)
        ctx.steps, ctx.logits = steps, logits
        return diagonal, missed, missed.flip(-1)

    @staticmethod
    def backward(ctx, by_diagonal, by_missed, by_false_positives):
        labels, weights, *p = ctx.saved_tensors

        def gradient() -> Tensor:
            wrong = by_missed + by_false_positives.flip(-1)
            by_H = wrong[..., 0] - by_diagonal[..., 0], by_diagonal[..., 1] - wrong[..., 1]  # of class 1, by true class
            at_true = torch.where(labels == 1, by_H[1].unsqueeze(-1), by_H[0].unsqueeze(-1))
            by_difference = (ctx.steps.slopes(tuple(p)) * at_true).sum(0) * p[0] * p[1]
            if weights is not None:
                by_difference = by_difference * weights
            return torch.stack((-by_difference, by_difference), -1)

        return without_graph(gradient, ctx, by_diagonal), None, None, None
