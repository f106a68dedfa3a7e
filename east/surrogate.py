"""EAST's soft counts in closed form: linear step, dynamic threshold, softmax, and their hand-derived gradient.

Composed from small operations the surrogate costs 9 to 55 cross-entropies on a CPU. Three facts bring it near one:

- With tau the mean of the two largest probabilities, tau <= 1/2, so lo, hi = (1 ∓ 2.5 T) tau, and only the largest
  entry can lie above hi. All others are a function of p / tau.
- They are then unchanged when p is scaled, so their gradient along p vanishes.
- Below lo = a tau the step is linear in p and softmax sums to 1: sums over all such entries are known without touching
  them. With many classes few entries lie above, and the gradient is p times a rank-one term plus those few (`Sparse`).

Symbols: r = weight / sum_j H_j;  A, B the gradients with respect to predicted and diagonal counts;  e = dL/dH;
D_j = e_j H'_j p_j, the gradient that softmax's backward needs;  x = dL/dtau;  rows are samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from east.confusion import per_class
from east.steps import EPS, HALF_WIDTH

SPARSE_CLASSES = 64  # with so many classes, on a CPU, entries above lo are looked up instead of computing all
SPARSE_SHARE = 4  # unless one block in so many holds such an entry, as before any training
SPARSE_TEMPERATURE = 0.3  # beyond, lo is so small that 1 - (sum of the entries above) loses its digits
BLOCK = 16  # classes whose maximum is taken together when looking for large entries


def soft_counts(
    logits: Tensor, labels: Tensor, weights: Tensor | None, temperature: float | Tensor, detach_threshold: bool = False
) -> tuple[Tensor, Tensor]:
    """Diagonal and predicted soft counts [..., d] of logits [..., n, d] and labels [..., n]; eq. 4-5, arXiv 2405.20954.

    `weights` [..., n] count a sample more or less; `temperature` is a number or a tensor over the leading dimensions.
    """
    return _SoftCounts.apply(logits, labels, weights, temperature, detach_threshold)


class _SoftCounts(Function):
    @staticmethod
    def forward(ctx, logits, labels, weights, T, detach_threshold):
        p = logits.softmax(-1)
        per_trial = isinstance(T, Tensor)
        maxima = None
        many = p.shape[-1] >= SPARSE_CLASSES and p.device.type == "cpu"
        if many and (T.max() if per_trial else T) <= SPARSE_TEMPERATURE:
            maxima = block_maxima(p)
        (p1, p2), (i1, i2) = top_two(p, maxima)
        tau = (p1 + p2) / 2

        T = T.unsqueeze(-1) if per_trial else T
        a, b = 1 - HALF_WIDTH * T, 1 + HALF_WIDTH * T
        a = a.clamp_min(EPS) if per_trial else max(a, EPS)  # a = 0 at T = 0.4
        lo, hi, low, middle = tau * a, tau * b, T / a / tau, (1 - 2 * T) / (b - a) / tau  # low, middle: slopes
        room = (1 - hi).clamp_min(EPS)
        high = p1 > hi
        H1 = torch.where(high, 1 - T + T * (p1 - hi) / room, T + middle * (p1 - lo))
        slope1 = torch.where(high, T / room, middle)

        step = Step(p, lo, low, middle, i1, H1, slope1)
        entries = (Sparse.of(step, maxima) if maxima is not None else None) or Dense(step)
        own = step.at(labels)
        r = entries.total.reciprocal() if weights is None else weights / entries.total
        ctx.save_for_backward(labels, i1, i2, p1, p2, tau, high, room, slope1, own, r)
        ctx.entries, ctx.b, ctx.detach_threshold = entries, b, detach_threshold
        return per_class(own * r, labels, p.shape[-1]), entries.predicted(r)

    @staticmethod
    @once_differentiable
    def backward(ctx, B, A):
        labels, i1, i2, p1, p2, tau, high, room, slope1, own, r = ctx.saved_tensors
        B_own = B.gather(-1, labels)
        mean = (ctx.entries.along(A) + B_own * own) / ctx.entries.total
        rest = None
        if not ctx.detach_threshold:
            # All of H but the largest entry beyond hi is a function of p / tau: there x = -Q / tau, and Q + x tau = 0.
            e1 = r * (A.gather(-1, i1) + torch.where(i1 == labels, B_own, 0) - mean)
            rest = torch.where(high, e1 * slope1 * (p1 - tau * ctx.b * (1 - p1) / room), 0)
        gradient, Q = ctx.entries.gradient(A, B_own, mean, r, labels, rest)
        if rest is not None:
            x = (rest - Q) / (2 * tau)
            gradient.scatter_add_(-1, torch.stack((i1, i2), -1), torch.stack((x * p1, x * p2), -1))
        return gradient, None, None, None, None


@dataclass
class Step:
    """The linear step of every sample: p [..., n, d], and one number per sample [..., n] for the rest.

    `lo` is where the slope changes from `low` to `middle`; the largest entry, at `top`, has value and slope of its own.
    """

    p: Tensor
    lo: Tensor
    low: Tensor
    middle: Tensor
    top: Tensor
    top_value: Tensor
    top_slope: Tensor

    def at(self, labels: Tensor) -> Tensor:
        """H of the label's entry."""
        own = self.p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        value = self.low * torch.minimum(own, self.lo) + self.middle * (own - self.lo).clamp_min(0)
        return torch.where(labels == self.top, self.top_value, value)


class Dense:
    """Every entry of H, for few classes, accelerators, and flat probabilities."""

    def __init__(self, step: Step):
        self.step = step
        lo = step.lo.unsqueeze(-1)
        H = torch.minimum(step.p, lo).mul_(step.low.unsqueeze(-1))
        H.addcmul_((step.p - lo).clamp_min_(0), step.middle.unsqueeze(-1))
        self.H = H.scatter_(-1, step.top.unsqueeze(-1), step.top_value.unsqueeze(-1))
        self.total = H.sum(-1)

    def predicted(self, r: Tensor) -> Tensor:
        """Sum over samples of r H."""
        return (r.unsqueeze(-2) @ self.H).squeeze(-2)

    def along(self, A: Tensor) -> Tensor:
        """Sum over classes of A H."""
        return (self.H @ A.unsqueeze(-1)).squeeze(-1)

    def gradient(
        self, A: Tensor, B_own: Tensor, mean: Tensor, r: Tensor, labels: Tensor, rest: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """D - p rest, and Q = sum_j D_j, with D = r (A + B at the label - mean) slope p; `rest` is Q if not given."""
        step = self.step
        slope = torch.where(step.p > step.lo.unsqueeze(-1), step.middle.unsqueeze(-1), step.low.unsqueeze(-1))
        slope.scatter_(-1, step.top.unsqueeze(-1), step.top_slope.unsqueeze(-1))
        D = (A.unsqueeze(-2) - mean.unsqueeze(-1)).scatter_add_(-1, labels.unsqueeze(-1), B_own.unsqueeze(-1))
        D.mul_(slope).mul_(r.unsqueeze(-1)).mul_(step.p)
        Q = D.sum(-1)
        return D.addcmul_(step.p, (Q if rest is None else rest).unsqueeze(-1), value=-1), Q


class Sparse:
    """The entries above lo, m of them by row [m] and class [m]; all others are `low` times p."""

    def __init__(self, step: Step, rows: Tensor, classes: Tensor, values: Tensor):
        self.step, self.rows, self.classes = step, rows, classes
        lo, low, middle = (x.flatten()[rows] for x in (step.lo, step.low, step.middle))
        top = classes == step.top.flatten()[rows]
        value = torch.where(top, step.top_value.flatten()[rows], middle * (values - lo) + low * lo)
        slope = torch.where(top, step.top_slope.flatten()[rows], middle)
        self.excess = value - low * values
        self.steepness = (slope - low) * values
        self.total = step.low + self.by_row(self.excess)

    @classmethod
    def of(cls, step: Step, maxima: Tensor) -> "Sparse | None":
        """Looks into the blocks whose maximum lies above lo; None where there are too many of them."""
        classes, blocks = step.p.shape[-1], maxima.shape[-1]
        rows, block = (maxima > step.lo.unsqueeze(-1)).flatten(0, -2).nonzero(as_tuple=True)
        if len(rows) * SPARSE_SHARE > maxima.numel():
            return None
        members = block_members(block, blocks, classes)
        values = step.p.flatten(0, -2)[rows.unsqueeze(-1), members.clamp_max(classes - 1)]
        inside = (values > step.lo.flatten()[rows].unsqueeze(-1)) & (members < classes)
        return cls(step, rows.unsqueeze(-1).expand_as(members)[inside], members[inside], values[inside])

    def by_row(self, values: Tensor) -> Tensor:
        """Sums [..., n] of values [m] of the entries."""
        shape = self.step.lo.shape
        return values.new_zeros(shape.numel()).index_add_(0, self.rows, values).view(shape)

    def trial(self) -> Tensor:
        """Index [m] of the entries' leading dimensions."""
        return self.rows // self.step.p.shape[-2]

    def predicted(self, r: Tensor) -> Tensor:
        p, classes = self.step.p, self.step.p.shape[-1]
        counts = ((r * self.step.low).unsqueeze(-2) @ p).squeeze(-2)
        counts.view(-1).index_add_(0, self.trial() * classes + self.classes, r.flatten()[self.rows] * self.excess)
        return counts

    def along(self, A: Tensor) -> Tensor:
        return self.step.low * self.dot(A) + self.by_row(self.excess * self.of_entries(A))

    def dot(self, A: Tensor) -> Tensor:
        return (self.step.p @ A.unsqueeze(-1)).squeeze(-1)

    def of_entries(self, A: Tensor) -> Tensor:
        return A.reshape(-1, A.shape[-1])[self.trial(), self.classes]

    def gradient(
        self, A: Tensor, B_own: Tensor, mean: Tensor, r: Tensor, labels: Tensor, rest: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As Dense.gradient: a rank-one term times p, then the entries above lo, then the labels' own."""
        step, p = self.step, self.step.p
        scale = r * step.low
        own = p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        slope = torch.where(labels == step.top, step.top_slope, torch.where(own > step.lo, step.middle, step.low))
        at_label = r * B_own * slope * own
        at_entries = r.flatten()[self.rows] * (self.of_entries(A) - mean.flatten()[self.rows]) * self.steepness
        Q = scale * (self.dot(A) - mean) + self.by_row(at_entries) + at_label
        offset = -scale * mean - (Q if rest is None else rest)
        gradient = torch.stack((scale, offset), -1) @ torch.stack((A, torch.ones_like(A)), -2)
        gradient.mul_(p).scatter_add_(-1, labels.unsqueeze(-1), at_label.unsqueeze(-1))
        gradient.view(-1).index_add_(0, self.rows * p.shape[-1] + self.classes, at_entries)
        return gradient, Q


def block_maxima(p: Tensor) -> Tensor:
    """Maxima [..., k] of k interleaved blocks of p [..., d]: block j holds the classes j, j+k, j+2k, …"""
    blocks = p.shape[-1] // BLOCK
    whole = blocks * BLOCK
    maxima = p[..., :whole].unflatten(-1, (BLOCK, blocks)).amax(-2)
    left = p.shape[-1] - whole
    if left:
        torch.maximum(maxima[..., :left], p[..., whole:], out=maxima[..., :left])
    return maxima


def block_members(block: Tensor, blocks: int, classes: int) -> Tensor:
    """Classes [..., s] of blocks [...]; what lies beyond the last class is no member."""
    size = -(-classes // blocks)
    return block.unsqueeze(-1) + blocks * torch.arange(size, device=block.device)


def top_two(p: Tensor, maxima: Tensor | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Values and classes of the two largest entries of p [..., d].

    With many classes both lie in the two blocks that have the largest maxima.
    """
    if maxima is None:
        values, classes = p.topk(2, dim=-1)
    else:
        blocks = maxima.topk(2, dim=-1).indices
        members = block_members(blocks, maxima.shape[-1], p.shape[-1]).flatten(-2)
        inside = members < p.shape[-1]
        candidates = p.gather(-1, members.clamp_max(p.shape[-1] - 1)).masked_fill_(~inside, -1)
        values, order = candidates.topk(2, dim=-1)
        classes = members.gather(-1, order)
    return values.unbind(-1), classes.unbind(-1)
