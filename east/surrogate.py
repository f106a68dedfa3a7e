"""EAST's soft counts in closed form: softmax, dynamic threshold, linear step, and their hand-derived gradient.

Composed from small operations the surrogate costs 9 to 55 cross-entropies on a CPU. Three facts bring it near one:

- The threshold is half the sum s of the two largest probabilities, at most 1/2, so the step's corners lie where
  q = p / s is a, b = (1 ∓ 2.5 T) / 2, and only the largest entry can lie above b:
  H = c1 q + (c2 - c1) [q - a]+ + (c3 - c2) [q - b]+,  where c3 alone depends on s.
- Below b the step depends on q alone and is unchanged when p is scaled, so its gradient along p vanishes.
- Below a it is linear in p, and softmax sums to 1: sums over such entries are known without touching them. With many
  classes few entries lie above, and the gradient is p times a rank-one term plus those few (`_SparseCounts`).

Symbols: A, B are the gradients of the loss with respect to predicted and diagonal counts, e = dL/dH, D = e p dH/dp at
fixed s, Q = sum_j D_j, x = dL/ds. Softmax's backward is then D - p (Q + x s), plus x p at the two largest entries.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from east.confusion import per_class
from east.steps import HALF_WIDTH

MIN_CORNER = 5e-4  # a vanishes at T = 0.4,
MIN_GAP = 1e-6  # and so does 1 / s - b
FEW_CLASSES = 64
SPARSE_CORNER = 0.125  # below, 1 - (sum of the entries above a) loses its digits
SPARSE_SHARE = 4  # and where one block in so many holds such an entry, as before any training, all are computed
BLOCK = 8  # classes, about, whose maximum is taken together when looking for large entries,
LANES = 32  # in a multiple of so many blocks, as the processor likes it


def soft_counts(
    logits: Tensor, labels: Tensor, weights: Tensor | None, temperature: float | Tensor, detach_threshold: bool = False
) -> tuple[Tensor, Tensor]:
    """Diagonal and predicted soft counts [..., d] of logits [..., n, d] and labels [..., n]; eq. 4-5, arXiv 2405.20954.

    `weights` [..., n] count a sample more or less; `temperature` is a number or a tensor over the leading dimensions.
    """
    step = Corners.at(temperature)
    classes = logits.shape[-1]
    if classes < FEW_CLASSES:
        # Rows of so few entries are slow to reduce: samples go last.
        p = logits.detach().mT.contiguous().softmax(-2)
        fixed = detach_threshold or classes == 2  # their sum is 1
        return _DenseCounts.apply(logits, p, top_two(p, -2), -2, labels, weights, step, fixed)
    p = logits.detach().softmax(-1)
    if p.device.type == "cpu" and (step.a.min() if isinstance(step.a, Tensor) else step.a) >= SPARSE_CORNER:
        maxima = block_maxima(p)
        top = top_two_of_blocks(p, maxima)
        entries = Entries.above(p, step.a * (top.p1 + top.p2), maxima)
        if entries is not None:
            return _SparseCounts.apply(logits, p, top, entries, labels, weights, step, detach_threshold)
    else:
        top = top_two(p, -1)
    return _DenseCounts.apply(logits, p, top, -1, labels, weights, step, detach_threshold)


class Top(NamedTuple):
    """The two largest entries of every sample, values and classes, with a dimension of size 1 for the classes."""

    p1: float | Tensor
    p2: float | Tensor
    i1: Tensor | None
    i2: Tensor | None


def top_two(p: Tensor, dim: int) -> Top:
    """Along the dimension of the classes; of two classes both, without a look, as only their sum matters."""
    if p.shape[dim] == 2:
        return Top(0.5, 0.5, None, None)
    p1, i1 = p.max(dim, keepdim=True)
    p2, i2 = p.scatter(dim, i1, -1.0).max(dim, keepdim=True)
    return Top(p1, p2, i1, i2)


class Corners(NamedTuple):
    """The step at one temperature, or at one per leading index [..., 1, 1]: corners a, b of q and slopes below them."""

    T: float | Tensor
    a: float | Tensor
    b: float | Tensor
    c1: float | Tensor
    c2: float | Tensor

    @classmethod
    def at(cls, temperature: float | Tensor) -> "Corners":
        T = temperature[..., None, None] if isinstance(temperature, Tensor) else temperature
        a, b = (1 - HALF_WIDTH * T) / 2, (1 + HALF_WIDTH * T) / 2
        a = at_least(MIN_CORNER, a)
        return cls(T, a, b, T / a, (1 - 2 * T) / (b - a))


def at_least(least: float, x: float | Tensor) -> float | Tensor:
    return x.clamp_min(least) if isinstance(x, Tensor) else max(x, least)


def plus(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """x + factor y, in place."""
    return x.addcmul_(y, factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)


def above(q: Tensor, corner: float | Tensor) -> Tensor:
    """q where it lies above the corner, else 0."""
    return torch.where(q > corner, q, 0) if isinstance(corner, Tensor) else torch.threshold(q, corner, 0)


class _DenseCounts(Function):
    """Every entry of H: for few classes, accelerators, and flat probabilities. `dim` is the one of the classes."""

    @staticmethod
    def forward(ctx, logits, p, top, dim, labels, weights, step, detach_threshold):
        v = 1 / (top.p1 + top.p2)
        gap = at_least(MIN_GAP, v - step.b)
        c3 = step.T / gap
        bend = c3 - step.c2
        q = p * v
        beyond = (q - step.b).clamp_min_(0)
        H = plus((q - step.a).clamp_min_(0).mul_(step.c2 - step.c1), q, step.c1)
        H = plus(H, beyond, bend)
        scale = H.sum(dim, keepdim=True).reciprocal_()
        G = H.mul_(scale)
        own = labels.unsqueeze(dim)
        # Nothing kept here is an input or an output of this function, so the context may hold it as it is.
        ctx.kept = p, q, beyond, G, scale, v, gap, c3, bend, own, weights
        ctx.top, ctx.dim, ctx.step, ctx.detach_threshold = top, dim, step, detach_threshold
        if weights is not None:
            G = G * weights.unsqueeze(dim)
        return per_class(G.gather(dim, own).squeeze(dim), labels, p.shape[dim]), G.sum(-3 - dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, B, A):
        p, q, beyond, G, scale, v, gap, c3, bend, own, weights = ctx.kept
        dim, (_, a, b, c1, c2) = ctx.dim, ctx.step
        V = A.unsqueeze(-3 - dim).expand(p.shape)
        V = V.scatter_add(dim, own, B.gather(-1, own.squeeze(dim)).unsqueeze(dim))
        if weights is not None:
            scale = scale * weights.unsqueeze(dim)
        e = V.sub_((V * G).sum(dim, keepdim=True)).mul_(scale)
        D = plus(plus(above(q, a).mul_(c2 - c1), q, c1), above(q, b), bend).mul_(e)
        Q = D.sum(dim, keepdim=True)
        if ctx.detach_threshold:
            gradient = D.addcmul_(p, Q, value=-1)
        else:
            p1, p2, i1, i2 = ctx.top
            rest = (e * beyond).sum(dim, keepdim=True).mul_(c3).mul_(v).div_(gap)  # Q + x s: from above b alone
            x = (rest - Q).mul_(v)
            gradient = D.addcmul_(p, rest, value=-1)
            gradient.scatter_add_(dim, i1, x * p1).scatter_add_(dim, i2, x * p2)
        return gradient.mT if dim == -2 else gradient, None, None, None, None, None, None, None


class _SparseCounts(Function):
    """H = c1 q but at the entries above a, for which alone `value` = H - c1 q and `slope` = q (dH/dq - c1) are kept."""

    @staticmethod
    def forward(ctx, logits, p, top, entries, labels, weights, step, detach_threshold):
        v = 1 / (top.p1 + top.p2)
        gap = (v - step.b).clamp_min_(MIN_GAP)
        corners = step.a, step.b, step.c1, step.c2, step.T / gap
        q = entries.p * entries.of_rows(v)
        value, slope = bends(q, *(entries.of_rows(c.expand_as(v)) if isinstance(c, Tensor) else c for c in corners))
        own = p.gather(-1, labels.unsqueeze(-1)) * v
        own_value, own_slope = bends(own, *corners)
        low = step.c1 * v
        total = low + entries.by_row(value)
        H_own = step.c1 * own + own_value
        r = total.reciprocal() if weights is None else weights.unsqueeze(-1) / total
        predicted = ((r * low).mT @ p).squeeze(-2)
        predicted.view(-1).index_add_(0, entries.of_counts, entries.of_rows(r) * value)
        ctx.kept = p, v, gap, corners[-1], low, total, r, H_own, step.c1 * own + own_slope, value, slope, labels
        ctx.top, ctx.entries, ctx.b, ctx.detach_threshold = top, entries, step.b, detach_threshold
        return per_class((r * H_own).squeeze(-1), labels, p.shape[-1]), predicted

    @staticmethod
    @once_differentiable
    def backward(ctx, B, A):
        p, v, gap, c3, low, total, r, H_own, slope_own, value, slope, labels = ctx.kept
        (p1, p2, i1, i2), entries = ctx.top, ctx.entries
        B_own = B.gather(-1, labels).unsqueeze(-1)
        A_entries = A.flatten()[entries.of_counts]
        along = p @ A.unsqueeze(-1)
        mean = (low * along + entries.by_row(value * A_entries) + B_own * H_own) / total
        at_entries = entries.of_rows(r) * (A_entries - entries.of_rows(mean)) * slope
        at_own = r * B_own * slope_own
        scale = r * low
        Q = scale * (along - mean) + entries.by_row(at_entries) + at_own
        rest = Q
        if not ctx.detach_threshold:
            e1 = r * (A.gather(-1, i1.squeeze(-1)).unsqueeze(-1) + (i1 == labels.unsqueeze(-1)) * B_own - mean)
            rest = e1 * (p1 * v - ctx.b).clamp_min(0) * c3 * v / gap  # Q + x s: from above b alone
        gradient = torch.cat((scale, -scale * mean - rest), -1) @ torch.stack((A, torch.ones_like(A)), -2)
        gradient.mul_(p).scatter_add_(-1, labels.unsqueeze(-1), at_own)
        gradient.view(-1).index_add_(0, entries.of_p, at_entries)
        if not ctx.detach_threshold:
            x = (rest - Q) * v
            gradient.scatter_add_(-1, i1, x * p1).scatter_add_(-1, i2, x * p2)
        return gradient, None, None, None, None, None, None, None


def bends(q: Tensor, a, b, c1, c2, c3) -> tuple[Tensor, Tensor]:
    """What the corners add to c1 q: to H, and to q dH/dq."""
    value = (c2 - c1) * (q - a).clamp_min_(0) + (c3 - c2) * (q - b).clamp_min_(0)
    return value, (c2 - c1) * above(q, a) + (c3 - c2) * above(q, b)


class Entries:
    """The m entries of p [..., n, d] above a, by their position in the flattened p."""

    def __init__(self, p: Tensor, rows: Tensor, classes: Tensor):
        n, d = p.shape[-2:]
        self.shape = (*p.shape[:-1], 1)
        self.rows = rows
        self.of_p = rows * d + classes
        self.of_counts = rows // n * d + classes
        self.p = p.view(-1)[self.of_p]

    def of_rows(self, x: Tensor) -> Tensor:
        """x [..., n, 1] of the entries' samples: [m]."""
        return x.flatten()[self.rows]

    def by_row(self, values: Tensor) -> Tensor:
        """Sums [..., n, 1] of values [m]."""
        return values.new_zeros(self.shape).view(-1).index_add_(0, self.rows, values).view(self.shape)

    @classmethod
    def above(cls, p: Tensor, least: Tensor, maxima: Tensor) -> "Entries | None":
        """Looks into the blocks whose maximum lies above least [..., n, 1]; None where they are too many."""
        d, blocks = p.shape[-1], maxima.shape[-1]
        found = (maxima > least).view(-1).nonzero().squeeze(-1)
        if len(found) * SPARSE_SHARE > maxima.numel():
            return None
        rows = found // blocks
        members = members_of(found - rows * blocks, blocks, d)
        places = (members + (rows * d).unsqueeze(-1)).clamp_max_(p.numel() - 1)
        inside = (p.view(-1).take(places) > least.view(-1)[rows].unsqueeze(-1)) & (members < d)
        places = places[inside]
        rows = places // d
        return cls(p, rows, places - rows * d)


def block_maxima(p: Tensor) -> Tensor:
    """Maxima [..., k] of k interleaved blocks of p [..., d]: block j holds the classes j, j+k, j+2k, …"""
    blocks = max(LANES, p.shape[-1] // BLOCK // LANES * LANES)
    whole = p.shape[-1] // blocks * blocks
    maxima = p[..., :whole].unflatten(-1, (-1, blocks)).amax(-2)
    left = p.shape[-1] - whole
    maxima[..., :left] = torch.maximum(maxima[..., :left], p[..., whole:])
    return maxima


def members_of(block: Tensor, blocks: int, classes: int) -> Tensor:
    """Classes [..., size] of blocks [...]; a number beyond the last class is no member."""
    size = -(-classes // blocks)
    return block.unsqueeze(-1) + torch.arange(0, size * blocks, blocks, device=block.device)


def top_two_of_blocks(p: Tensor, maxima: Tensor) -> Top:
    """As top_two: both lie in the two blocks that have the largest maxima."""
    d = p.shape[-1]
    best = top_two(maxima, -1)
    members = members_of(torch.cat((best.i1, best.i2), -1), maxima.shape[-1], d).flatten(-2)
    candidates = p.gather(-1, members.clamp_max(d - 1)).masked_fill_(members >= d, -1)
    top = top_two(candidates, -1)
    return Top(top.p1, top.p2, members.gather(-1, top.i1), members.gather(-1, top.i2))
