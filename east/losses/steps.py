"""Heaviside approximations H(p) of a probability at a threshold, and how they become soft memberships.

Four words are never mixed: logits, probabilities, memberships (after the step), labels. These functions use plain
autograd, work under torch.compile and torch.func, and are the reference for closed_form.py.
"""

import math
from typing import Any

import torch
from torch import Tensor

from east.arrays import Array, at_most

EPS = 1e-12  # least width of a segment: as T or a threshold's distance to 0 or 1 vanishes, so does the width
HALF_WIDTH = 2.5  # the step's middle spans tau (1 ± 2.5 T); T = 0.2 is Bridging the Gap's delta = 0.2
WIDEST = 0.999  # upper limit of 2.5 T, which is 1 at T = 0.4: lo and 1 - hi would be 0
DEFAULT_SLOPE = 10.0


def linear(probabilities: Tensor, threshold: Tensor, temperature: Tensor | float) -> Tensor:
    """Piecewise linear through (0,0) (lo,T) (tau,1/2) (hi,1-T) (1,1). Eq. 4, arXiv 2405.20954.

    Written as three clamped ramps: no branches, so no NaN gradient at the ends.
    """
    half = half_width(temperature) * torch.minimum(threshold, 1 - threshold)
    lo, hi = threshold - half, threshold + half
    lower = (probabilities / lo.clamp_min(EPS)).clamp(0, 1)
    middle = ((probabilities - lo) / (hi - lo).clamp_min(EPS)).clamp(0, 1)
    upper = ((probabilities - hi) / (1 - hi).clamp_min(EPS)).clamp(0, 1)
    return temperature * (lower + upper) + (1 - 2 * temperature) * middle


def half_width(temperature: Array) -> Array:
    """Half the width of the step's middle, in units of tau, or of 1 - tau if that is smaller."""
    width = HALF_WIDTH * temperature
    return min(width, WIDEST) if isinstance(width, float) else at_most(width, WIDEST)


def sigmoid(probabilities: Tensor, threshold: Tensor, slope: float) -> Tensor:
    """1 / (1 + exp(-k (p - tau))): Bridging the Gap with k = 10, AnyLoss with k = 73 at tau = 1/2."""
    return torch.sigmoid(slope * (probabilities - threshold))


def cosine(probabilities: Tensor, threshold: Tensor, slope: float) -> Tensor:
    """CDF of a raised cosine of half-width 1/slope around tau: SOL's random threshold."""
    w = (slope * (probabilities - threshold) + 1).clamp(0, 2)
    # w starts at the lower end: computed from p - tau, values near it would be rounding errors, which normalising
    # magnifies.
    return (0.5 * (w - torch.sin(math.pi * w) / math.pi)).clamp_min(0)


STEPS = {"linear": linear, "sigmoid": sigmoid, "cosine": cosine}  # linear takes a temperature, the others a slope


def thresholds_like(thresholds: Any, like: Tensor) -> Tensor:
    """One threshold [1, ...], or k of them [k, 1, ...], for `like` [...].

    They are filled in on its device, as an upload would be waited for.
    """
    if isinstance(thresholds, float):
        return like.new_full((1,) * like.ndim, thresholds)
    return torch.stack([like.new_full((1,) * like.ndim, t) for t in thresholds])


def dynamic_threshold(probabilities: Tensor) -> Tensor:
    """Mean of the two largest probabilities [..., d] of each sample: [..., 1]. Section 4.1, arXiv 2405.20954."""
    return probabilities.topk(2, dim=-1).values.mean(-1, keepdim=True)


def normalised(steps: Tensor) -> Tensor:
    """Memberships: step values [..., d] divided by their sum over the classes. Eq. 5, arXiv 2405.20954."""
    return steps / steps.sum(-1, keepdim=True).clamp_min(EPS)


def normalised_cosine(probabilities: Tensor, threshold: Tensor, slope: float) -> Tensor:
    """Cosine steps [..., d] divided by their sum; the probabilities themselves where all steps are 0."""
    values = cosine(probabilities, threshold, slope)
    total = values.sum(-1, keepdim=True)
    reached = total > EPS
    return torch.where(reached, values / torch.where(reached, total, 1.0), probabilities)


def normalised_sigmoid(probabilities: Tensor, threshold: Tensor, slope: float) -> Tensor:
    """Sigmoid steps [..., d] divided by their sum; uses logarithms, as with many classes all steps can be below EPS."""
    return torch.nn.functional.logsigmoid(slope * (probabilities - threshold)).softmax(-1)
