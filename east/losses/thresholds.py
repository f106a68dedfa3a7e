"""Soft counts at given thresholds, in one pass over the probabilities for all of them, with a hand-derived gradient.

At a threshold t the step is H = c0 p + c1 [p - lo]+ + c2 [p - hi]+, with corners that are the same for all samples.
Below the lowest corner of all thresholds every H is a multiple of p, and p sums to 1: only the m entries above it, at
most 1 / lo of a sample, are looked at for every threshold. What is left for all entries are matrix products with p.

With A, B the gradients of the loss with respect to predicted and diagonal counts, e = (A + B at the own class - their
mean under H) w / sum H, and dL/dp = sum_t e (c0 + c1 [p > lo] + c2 [p > hi]); what a sample's classes have in common in
it is lost in softmax.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from east.losses.closed_form import Counts, without_graph
from east.losses.steps import HALF_WIDTH

LOWEST_CORNER = 1e-3  # below, almost every entry would have to be looked at


class Steps(NamedTuple):
    """The steps at k thresholds, all [k]: corners lo and hi, first slope c0, and its rise at the corners."""

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
        half = HALF_WIDTH * temperature * torch.minimum(tau, 1 - tau)
        lo, hi = tau - half, tau + half
        first, middle, last = temperature / lo, (1 - 2 * temperature) / (hi - lo), temperature / (1 - hi)
        values = lo, hi, first, middle - first, last - middle
        return cls._make((*(x.to(device, dtype) for x in values), float(lo.min())))

    def bends(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """What the corners add to c0 p, and to c0 [..., k], for p [...]."""
        p = p.unsqueeze(-1)
        above, beyond = (p - self.lo).relu_(), (p - self.hi).relu_()
        value = (above * self.c1).addcmul_(beyond, self.c2)
        return value, (above.sign_() * self.c1).addcmul_(beyond.sign_(), self.c2)


def covers(thresholds: Sequence[float], temperature: float | Tensor, classes: int) -> bool:
    """Whether entries above the lowest corner are few; two classes have one H, and another form."""
    if classes == 2 or isinstance(temperature, Tensor):
        return False
    return min(t - HALF_WIDTH * temperature * min(t, 1 - t) for t in thresholds) >= LOWEST_CORNER


def counts_at(
    thresholds: Sequence[float], logits: Tensor, labels: Tensor, weights: Tensor | None, temperature: float
) -> Counts:
    """Soft counts [k, ..., d] at k thresholds, of logits [..., n, d], labels [..., n]. Section 4, Bridging the Gap."""
    steps = Steps.at(tuple(thresholds), float(temperature), logits.dtype, logits.device)
    *lead, n, d = logits.shape
    flat = logits.reshape(-1, n, d), labels.reshape(-1, n), None if weights is None else weights.reshape(-1, n)
    return Counts(*(x.unflatten(0, (*lead, d)).movedim(-1, 0) for x in _CountsAt.apply(*flat, steps)))


class Entries(NamedTuple):
    """The m entries of p [P, n, d] above the lowest corner: of which sample, of which trial's class, where in p."""

    samples: Tensor
    classes: Tensor
    places: Tensor


def entries_above(p: Tensor, least: float) -> Entries:
    _, n, d = p.shape
    flat = p.view(-1)
    if p.device.type == "cpu":  # NumPy's search is seven times as fast
        places = torch.from_numpy(np.flatnonzero(flat.numpy() > least))
    else:
        places = (flat > least).nonzero().squeeze(-1)
    samples = places // d
    return Entries(samples, samples // n * d + places - samples * d, places)


class _CountsAt(Function):
    """Counts [P * d, k] of logits [P, n, d] and labels [P, n]."""

    @staticmethod
    def forward(ctx, logits, labels, weights, steps):
        trials, n, d = logits.shape
        k = len(steps.lo)
        p = logits.softmax(-1)
        entries = entries_above(p, steps.lowest)
        own = (labels + d * torch.arange(trials, device=labels.device).unsqueeze(-1)).view(-1)  # classes of all trials
        p_own = p.gather(-1, labels.unsqueeze(-1)).view(-1)
        value_own, slope_own = steps.bends(p_own)
        value, slope = steps.bends(p.view(-1)[entries.places])
        H_own = torch.addcmul(value_own, p_own.unsqueeze(-1), steps.c0)
        # The others are added up: a difference to the total would lose their digits.
        elsewhere = value * (entries.classes != own[entries.samples]).unsqueeze(-1)
        rest = ((1 - p_own).unsqueeze(-1) * steps.c0).index_add_(0, entries.samples, elsewhere)
        total = H_own + rest
        r = total.reciprocal() if weights is None else weights.reshape(-1, 1) / total
        empty = p.new_zeros(trials * d, k)
        diagonal, missed = (empty.index_add(0, own, r * x) for x in (H_own, rest))
        predicted = (p.mT @ (r * steps.c0).view(trials, n, k)).view(trials * d, k)
        predicted.index_add_(0, entries.classes, r[entries.samples] * value)
        ctx.save_for_backward(p, labels, own, H_own, slope_own, total, r, value, slope, *entries)
        ctx.steps = steps
        return diagonal, missed, predicted

    @staticmethod
    def backward(ctx, B, M, A):
        p, labels, own, H_own, slope_own, total, r, value, slope, *found = ctx.saved_tensors
        samples, classes, places = found
        steps, (trials, n, d), k = ctx.steps, p.shape, r.shape[-1]

        def gradient() -> Tensor:
            B_own, A_entries = (B - M)[own], A[classes]
            by_trial = A.reshape(trials, d, k)
            mean = (p @ by_trial).view(-1, k) * steps.c0
            mean = mean.index_add_(0, samples, A_entries * value).addcmul_(B_own, H_own).div_(total)
            by_p = (r * steps.c0).view(trials, n, k) @ by_trial.mT
            at_own = (r * B_own * (steps.c0 + slope_own)).sum(-1)
            by_p.scatter_add_(-1, labels.unsqueeze(-1), at_own.view(trials, n, 1))
            at_entries = (r[samples] * (A_entries - mean[samples]) * slope).sum(-1)
            by_p.view(-1).index_add_(0, places, at_entries)
            return by_p.sub_((by_p * p).sum(-1, keepdim=True)).mul_(p)  # through the softmax

        return without_graph(gradient, B), None, None, None
