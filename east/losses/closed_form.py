"""EAST's soft counts in closed form: softmax, dynamic threshold, linear step, and their hand-derived gradient.

Built from elementary operations, the loss costs as much as 9 to 55 cross-entropies on a CPU. Three facts bring it close
to one:

- The threshold is s / 2, with s <= 1 the sum of the two largest probabilities. So the step's corners are lo = a s and
  hi = b s, with a = (1 - 2.5 T) / 2 and b = 1 - a, and only the largest probability p1 can exceed hi. Memberships are
  H divided by its sum, so H may be scaled to a first slope of 1: H = p + bend_lo [p - lo]+, plus bend_hi [p1 - hi]+ at
  the largest entry. Its slopes are 1, then middle = 1 + bend_lo, then lo / (1 - hi) = middle + bend_hi.
- Apart from the 1 in 1 - hi, H is homogeneous in (p, s), and e = dL/dH is orthogonal to H. With S = p dH/dp at fixed s,
  Euler's identity gives dL/ds: sum_j e_j S_j + s dL/ds = shift = e1 lo [p1 - hi]+ / (1 - hi)^2.
- Below lo, H = p, and the probabilities sum to 1, so sums over these entries need no pass over them. With many classes
  few entries exceed lo, and the gradient is p times a matrix of rank two, plus terms at those few (huge_softmax.py).

With D and P the derivatives of the loss with respect to the diagonal and the predicted counts, and g_j = P_j, plus D_j
at the true class, e = (g - mean of g weighted by H) / sum H, times the sample's weight. The gradient with respect to
the logits is e S - p shift, plus p dL/ds at the two largest entries. In the code `total` is sum H, `r` is the weight
divided by it, and Q is sum_j e_j S_j. If the threshold is detached, dL/ds is 0 and Q takes the place of shift.

With two classes s = 1 and H sums to 1, so everything is a function of the difference of the logits (`TwoClasses`).
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from east.confusion import per_class
from east.losses.on_cpu import FEW_CLASSES, argmax
from east.losses.steps import dynamic_shape


class Counts(NamedTuple):
    """Soft counts [..., d] of a batch, summed without differences; see Confusion."""

    diagonal: Tensor
    missed: Tensor
    false_positives: Tensor

    @property
    def predicted(self) -> Tensor:
        return self.diagonal + self.false_positives


class Step(NamedTuple):
    """The step at one temperature [], or at one per leading index [..., 1, 1]; tensors, which are faster than numbers.

    `first` and `second` are the slopes of H with two classes, `second_bend` is their difference; `bend_lo` and `middle`
    are in units of `first`. `hi_per_lo` is b / a. `hi_per_lo_scalar` and `bend_lo_scalar` are plain numbers if there is
    one temperature.
    """

    a: Tensor
    b: Tensor
    first: Tensor
    second: Tensor
    second_bend: Tensor
    bend_lo: Tensor
    middle: Tensor
    one: Tensor
    hi_per_lo: Tensor
    hi_per_lo_scalar: float | Tensor
    bend_lo_scalar: float | Tensor

    @classmethod
    def at(cls, T: Tensor) -> "Step":
        a, first, middle, hi_per_lo = dynamic_shape(T)
        slopes = first, first * middle, first * (middle - 1)
        return cls(a, 1 - a, *slopes, middle - 1, middle, torch.ones_like(T), hi_per_lo, hi_per_lo, middle - 1)


@lru_cache
def step_at(temperature: float, dtype: torch.dtype, device: torch.device) -> Step:
    step = Step.at(torch.tensor(temperature, dtype=torch.float64, device="cpu"))
    tensors = [x.to(device, dtype) for x in step if isinstance(x, Tensor)]
    return Step._make((*tensors[:-2], float(step.hi_per_lo_scalar), float(step.bend_lo_scalar)))


def step_for(temperature: float | Tensor, logits: Tensor) -> Step:
    """The step for logits [..., n, d], at a number or at one temperature per leading index."""
    if isinstance(temperature, Tensor):
        return Step.at(temperature[..., None, None].to(logits))
    return step_at(temperature, logits.dtype, logits.device)


def corners(s: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lo, hi, 1 - hi and bend_hi of samples whose two largest entries sum to s [..., n, 1]."""
    lo, hi = s * step.a, s * step.b
    gap_hi = step.one - hi
    return lo, hi, gap_hi, (lo / gap_hi).sub_(step.middle)


class Upstream(NamedTuple):
    """What the gradient of a batch needs besides the state from counting.

    `D` and `P` [..., d] are the derivatives of the loss with respect to the diagonal and the predicted counts.
    `detach_threshold` treats the threshold as a constant. ByClass writes the gradient to `out`.
    """

    labels: Tensor
    weights: Tensor | None
    D: Tensor
    P: Tensor
    step: Step
    detach_threshold: bool
    out: Tensor | None = None


class TwoClasses(NamedTuple):
    """The state for two classes: s = 1, and H sums to 1. `slope` [..., n] is dH_1/dz_1 times the sample's weight."""

    slope: Tensor

    @classmethod
    def count_batch(
        cls, logits: Tensor, labels: Tensor, weights: Tensor | None, step: Step
    ) -> tuple[Counts, "TwoClasses"]:
        if step.a.ndim:
            step = Step(*(x.squeeze(-1) for x in step if isinstance(x, Tensor)))
        z0, z1 = logits.unbind(-1)
        difference = z1 - z0
        p_smaller = difference.abs().neg_().sigmoid_()  # its H is precise however small
        above = (p_smaller - step.a).relu_()
        H = torch.addcmul(p_smaller * step.first, above, step.second_bend)
        dH_dp = torch.where(above > 0, step.second, step.first)
        slope = torch.ops.aten.sigmoid_backward(dH_dp, p_smaller)
        if weights is None:
            H_larger = step.one - H
        else:
            slope, H = slope * weights, H * weights
            H_larger = weights - H
        correct = (difference > 0) == labels
        diagonal = per_class(torch.where(correct, H_larger, H), labels, 2)
        missed = per_class(torch.where(correct, H, H_larger), labels, 2)
        return Counts(diagonal, missed, missed.flip(-1)), cls(slope)

    def gradient(self, upstream: Upstream) -> Tensor:
        P, signs = upstream.P, signs_of_difference(upstream.P.dtype, upstream.P.device)
        by_class = torch.addcmul((P * signs).sum(-1, keepdim=True), upstream.D, signs)
        by_difference = by_class.gather(-1, upstream.labels).mul_(self.slope)
        return by_difference.unsqueeze(-1) * signs


@lru_cache
def signs_of_difference(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The derivatives of z1 - z0 with respect to the two logits."""
    return torch.tensor([-1.0, 1.0], dtype=dtype).to(device)


def counts_by_class(logits: Tensor) -> bool:
    """Whether ByClass counts logits [..., n, d]: few classes, or pixels, whose samples are adjacent in memory."""
    n, d = logits.shape[-2:]
    return d > 2 and (d < FEW_CLASSES or (logits.stride(-2) == 1 and n > 1))


class ByClass(NamedTuple):
    """The state for few classes, and for pixels: layout [..., d, n], with the samples side by side in memory.

    In units of lo, x = p / lo = E / (a (E1 + E2)) with E = exp(z - max z). The step's corners are then 1 and hi / lo
    for all samples, and at most the largest entry exceeds hi. `others` is H with 0 at the true class; a chunk of a
    batch does without it, as H follows from x in few passes, and keeps x where its gradient will be written. All other
    fields are rows [..., 1, n]; `shift_factor` times e x at the largest entry is the module's `shift`.
    """

    x: Tensor
    others: Tensor | None
    H_true: Tensor
    total: Tensor
    lo: Tensor
    bend_hi: Tensor
    shift_factor: Tensor
    x2: Tensor

    @classmethod
    def count_batch(
        cls, z: Tensor, labels: Tensor, weights: Tensor | None, step: Step, storage: Tensor | None = None
    ) -> tuple[Counts, "ByClass"]:
        if storage is not None and storage.stride(-1) == 1:
            E = storage.copy_(z)
        else:
            E = z.clone(memory_format=torch.contiguous_format)
        E.sub_(E.amax(-2, keepdim=True)).exp_()
        below_max = torch.ops.aten.hardtanh_backward(E, E, 0.0, 1.0)  # E, with 0 in place of the maximum, which is 1
        E2, Z = below_max.amax(-2, keepdim=True), E.sum(-2, keepdim=True)
        E2.masked_fill_(Z - below_max.sum(-2, keepdim=True) > 1.5, 1)  # several entries tie for the maximum
        lo_Z = torch.addcmul(step.a, E2, step.a)
        lo, x = lo_Z / Z, E.div_(lo_Z)
        gap_hi = torch.addcmul(step.one, lo, step.hi_per_lo, value=-1)
        last_slope = lo / gap_hi
        shift_factor = torch.addcmul(step.one, lo_Z, step.hi_per_lo, value=-1).mul_(last_slope).div_(gap_hi)
        bend_hi = last_slope.sub_(step.middle)
        H, true_class = step_values(x, bend_hi, step), labels.unsqueeze(-2)
        H_true = H.gather(-2, true_class)
        # Summing the other entries keeps the precision that a difference from the total would lose.
        parts = torch.cat((H_true, H.scatter_(-2, true_class, 0).sum(-2, keepdim=True)), -2)
        total = parts.sum(-2, keepdim=True)
        r = total.reciprocal() if weights is None else weights.unsqueeze(-2) / total
        zeros = z.new_zeros((*z.shape[:-2], 2, z.shape[-2]))
        diagonal, missed = zeros.scatter_add_(-1, true_class.expand(parts.shape), parts.mul_(r)).unbind(-2)
        false_positives = (H @ r.mT).squeeze(-1)
        others = H if storage is None else None
        state = cls(x, others, H_true, total, lo, bend_hi, shift_factor, E2.div_(lo_Z))
        return Counts(diagonal, missed, false_positives), state

    def gradient(self, upstream: Upstream) -> Tensor:
        labels, weights, D, P, step, detach_threshold, out = upstream
        x, bend_hi, total = self.x, self.bend_hi, self.total
        r = total.reciprocal() if weights is None else weights.unsqueeze(-2) / total
        true_class = labels.unsqueeze(-2)
        D_true = D.unsqueeze(-2).gather(-1, true_class)
        if self.others is None:
            weighted = (P.unsqueeze(-2) @ step_values(x, bend_hi, step)).addcmul_(D_true, self.H_true)
        else:
            g_true = (P + D).unsqueeze(-2).gather(-1, true_class)
            weighted = (P.unsqueeze(-2) @ self.others).addcmul_(g_true, self.H_true)
        mean = weighted.div_(total)
        ex = (P.unsqueeze(-1) - mean).scatter_add_(-2, true_class, D_true).mul_(x).mul_(r)
        ex_above_hi = where_above(ex, x, step.hi_per_lo_scalar)
        eS = ex.addcmul_(where_above(ex, x, 1.0), step.bend_lo).addcmul_(ex_above_hi, bend_hi)
        Q = eS.sum(-2, keepdim=True)
        out = x.new_empty(x.mT.shape) if out is None else out
        if detach_threshold:
            torch.addcmul(eS, x, Q.mul_(self.lo), value=-1, out=out.mT)
            return out
        shift = ex_above_hi.sum(-2, keepdim=True).mul_(self.shift_factor)
        # Two entries, which sum to s, unless several are as large as p2.
        top = torch.ge(x, self.x2, out=ex_above_hi).mul_(x)
        eS.addcmul_(x, shift * self.lo, value=-1)
        torch.addcmul(eS, top, shift.sub_(Q).div_(top.sum(-2, keepdim=True)), out=out.mT)
        return out


def step_values(x: Tensor, bend_hi: Tensor, step: Step) -> Tensor:
    """H / lo of x = p / lo."""
    return torch.addcmul(x, excess(x, 1.0), step.bend_lo).addcmul_(excess(x, step.hi_per_lo_scalar), bend_hi)


def excess(x: Tensor, corner: float | Tensor) -> Tensor:
    """[x - corner]+ of positive x."""
    return (x - corner).relu_() if isinstance(corner, Tensor) else torch.nn.functional.softshrink(x, corner)


def where_above(values: Tensor, x: Tensor, corner: float | Tensor) -> Tensor:
    """The values where x > corner, else 0."""
    if isinstance(corner, Tensor):
        return torch.gt(x, corner, out=torch.empty_like(x)).mul_(values)
    return torch.ops.aten.threshold_backward(values, x, corner)


class TopTwo(NamedTuple):
    """The two largest entries [..., n, 2] of each sample, largest first, and their classes."""

    p: Tensor
    classes: Tensor


class BySample(NamedTuple):
    """The state with every entry of H. Few passes over p, in place where possible: allocating memory costs the most."""

    p: Tensor
    H: Tensor
    S: Tensor
    total: Tensor
    r: Tensor
    s: Tensor
    top_p: Tensor
    top_classes: Tensor
    shift_factor: Tensor
    H_true: Tensor

    @classmethod
    def count_batch(
        cls, p: Tensor, top: TopTwo, labels: Tensor, weights: Tensor | None, step: Step
    ) -> tuple[Counts, "BySample"]:
        s = top.p.sum(-1, keepdim=True)
        lo, hi, gap_hi, bend_hi = corners(s, step)
        p1, first = top.p.narrow(-1, 0, 1), top.classes.narrow(-1, 0, 1)
        excess_hi = (p1 - hi).relu_()
        above_lo, bend_lo = torch.gt(p, lo, out=torch.empty_like(p)), step.bend_lo_scalar
        if isinstance(bend_lo, Tensor):
            above_lo, bend_lo = above_lo.mul_(bend_lo), 1.0
        S = torch.addcmul(p, p, above_lo, value=bend_lo)
        H = torch.addcmul(S, above_lo, lo, value=-bend_lo, out=above_lo)
        H.scatter_add_(-1, first, bend_hi * excess_hi)
        S.scatter_add_(-1, first, excess_hi.sign().mul_(bend_hi).mul_(p1))
        true_class, d = labels.unsqueeze(-1), p.shape[-1]
        H_true = H.gather(-1, true_class)
        rest = H.scatter_(-1, true_class, 0).sum(-1, keepdim=True)  # total - H_true would round it away
        total = H_true + rest
        r = total.reciprocal() if weights is None else weights.unsqueeze(-1) / total
        diagonal, missed = (per_class((r * x).squeeze(-1), labels, d) for x in (H_true, rest))
        counts = Counts(diagonal, missed, (r.mT @ H).squeeze(-2))
        H.scatter_(-1, true_class, H_true)
        shift_factor = excess_hi.div_(gap_hi).div_(p1)
        return counts, cls(p, H, S, total, r, s, top.p, top.classes, shift_factor, H_true)

    def gradient(self, upstream: Upstream) -> Tensor:
        labels, P = upstream.labels, upstream.P
        D_true = upstream.D.gather(-1, labels).unsqueeze(-1)
        mean = (self.H @ P.unsqueeze(-1)).addcmul_(D_true, self.H_true).div_(self.total)
        eS = (P.unsqueeze(-2) - mean).scatter_add_(-1, labels.unsqueeze(-1), D_true).mul_(self.S).mul_(self.r)
        Q = eS.sum(-1, keepdim=True)
        if upstream.detach_threshold:
            return eS.addcmul_(self.p, Q, value=-1)
        shift = eS.gather(-1, self.top_classes.narrow(-1, 0, 1)).mul_(self.shift_factor)
        gradient = eS.addcmul_(self.p, shift, value=-1)
        return gradient.scatter_add_(-1, self.top_classes, shift.sub_(Q).div_(self.s) * self.top_p)


def top_two(p: Tensor) -> TopTwo:
    """The two largest entries of each sample; on a CPU one after the other with NumPy, twenty times as fast as topk."""
    return top_two_in_turn(p) if p.is_cpu else TopTwo(*p.topk(2))


def top_two_in_turn(p: Tensor) -> TopTwo:
    """Find the largest entry of p >= 0, overwrite it to find the second largest, and put it back."""
    first = torch.from_numpy(argmax(p.numpy())).unsqueeze(-1)
    p1 = p.gather(-1, first)
    second = torch.from_numpy(argmax(p.scatter_(-1, first, -1.0).numpy())).unsqueeze(-1)
    classes = torch.cat((first, second), -1)
    return TopTwo(p.scatter_(-1, first, p1).gather(-1, classes), classes)
