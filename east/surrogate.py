"""EAST's soft counts in closed form: softmax, dynamic threshold, linear step, and their hand-derived gradient.

Composed from small operations the surrogate costs 9 to 55 cross-entropies on a CPU. Three facts bring it near one:

- The threshold is half the sum s of the two largest probabilities, at most 1/2, so the step's corners are lo = a s and
  hi = b s, a = (1 - 2.5 T) / 2, b = 1 - a, and only the largest entry p1 can lie above hi. As memberships are H divided
  by its sum, H is taken in units of its first slope: H = p + bend [p - lo]+, at the largest entry + last [p1 - hi]+,
  with the slopes 1, middle = 1 + bend, and lo / (1 - hi) = middle + last.
- But for the 1 in 1 - hi, H is homogeneous in (p, s), and e = dL/dH is orthogonal to H. With S = p dH/dp at fixed s,
  Euler's identity gives dL/ds: sum_j e_j S_j + s dL/ds = shift = e1 lo [p1 - hi]+ / (1 - hi)^2.
- Below lo, H is p, and softmax sums to 1: sums over such entries are known without touching them. With many classes
  few entries lie above, and the gradient is p times a rank-one term plus those few (`_SparseCounts`).

With A, B the gradients of the loss with respect to predicted and diagonal counts, e = (A + B at the own class - their
mean under H) / sum H. The gradient with respect to the logits is e S - p shift, + p dL/ds at the two largest entries.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from east.confusion import per_class
from east.steps import HALF_WIDTH

MIN_CORNER = 5e-4  # a, and with it 1 - hi, vanishes at T = 0.4
FEW_CLASSES = 32  # rows of fewer entries are slow to reduce and to search: samples are laid side by side in memory
MANY_CLASSES = 512  # from here on entries above lo are looked up on a CPU,
SPARSE_CORNER = 0.125  # unless a is so small that 1 - (sum of the entries above lo) loses its digits,
SPARSE_SHARE = 4  # or one block in so many holds such an entry, as before any training
BLOCK = 8  # classes, about, whose maximum is taken together when looking for large entries,
LANES = 32  # in a multiple of so many blocks, as the processor likes it


def soft_counts(
    logits: Tensor, labels: Tensor, weights: Tensor | None, temperature: float | Tensor, detach_threshold: bool = False
) -> tuple[Tensor, Tensor]:
    """Diagonal and predicted soft counts [..., d] of logits [..., n, d] and labels [..., n]; eq. 4-5, arXiv 2405.20954.

    `weights` [..., n] count a sample more or less; `temperature` is a number or a tensor over the leading dimensions.
    """
    if isinstance(temperature, Tensor):
        step = Step.at(temperature[..., None, None].to(logits))
    else:
        step = step_at(temperature, logits.dtype, logits.device)
    z, classes = logits.detach(), logits.shape[-1]
    if classes < FEW_CLASSES:
        return _FewCounts.apply(logits, z.mT.softmax(-2).mT, labels, weights, step, detach_threshold or classes == 2)
    p = z.softmax(-1)
    if classes < MANY_CLASSES or p.device.type != "cpu":
        return _DenseCounts.apply(logits, p, top_two(p), labels, weights, step, detach_threshold)
    maxima = block_maxima(p)
    top = top_two_of_blocks(p, maxima)
    entries = Entries.above(p, step.a * top.p.sum(-1, keepdim=True), maxima) if step.a.min() >= SPARSE_CORNER else None
    if entries is None:
        return _DenseCounts.apply(logits, p, top, labels, weights, step, detach_threshold)
    return _SparseCounts.apply(logits, p, top, entries, labels, weights, step, detach_threshold)


class Step(NamedTuple):
    """The step at one temperature [], or at one per leading index [..., 1, 1]; in tensors, quicker than numbers."""

    a: Tensor
    b: Tensor
    bend: Tensor
    middle: Tensor
    one: Tensor

    @classmethod
    def at(cls, T: Tensor) -> "Step":
        a = ((1 - HALF_WIDTH * T) / 2).clamp_min(MIN_CORNER)
        middle = (1 - 2 * T) / (1 - 2 * a) * a / T
        return cls(a, 1 - a, middle - 1, middle, torch.ones_like(T))


@lru_cache
def step_at(temperature: float, dtype: torch.dtype, device: torch.device) -> Step:
    return Step(*(x.to(device, dtype) for x in Step.at(torch.tensor(temperature, dtype=torch.float64))))


def corners(s: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lo, hi, 1 - hi and last of samples whose two largest entries sum to s [..., n, 1]."""
    lo, hi = s * step.a, s * step.b
    gap = step.one - hi
    return lo, hi, gap, (lo / gap).sub_(step.middle)


class _FewCounts(Function):
    """The largest entries are told by comparison, as numbers 0 or 1: to search them costs more. Of two classes s is 1.

    Any other order of these operations rounds differently, and the committed results could no longer be repeated.
    """

    @staticmethod
    def forward(ctx, logits, p, labels, weights, step, detach_threshold):
        p1 = p.amax(-1, keepdim=True)
        largest = torch.eq(p, p1, out=torch.empty_like(p))
        s, p2 = step.one, None
        if p.shape[-1] > 2:
            p2 = torch.addcmul(p, p, largest, value=-1).amax(-1, keepdim=True)
            number = largest.sum(-1, keepdim=True)
            p2.lerp_(p1, torch.gt(number, step.one, out=number))  # where several are largest, p2 is as large
            s = p1 + p2
        lo, hi, gap, last = corners(s, step)
        beyond = (p1 - hi).relu_()
        above = (p - lo).relu_()
        H = torch.addcmul(p, above, step.bend).addcmul_(largest, last * beyond)
        S = above.sign_().mul_(step.bend).add_(step.one).mul_(p)
        S.addcmul_(largest, beyond.sign().mul_(last).mul_(p1))
        total = H.sum(-1, keepdim=True)
        G, S = H.div_(total), S.div_(total)
        own = labels.unsqueeze(-1)
        G_own = G.gather(-1, own)
        # Nothing kept here is an input or an output of this function, so the context may hold it as it is.
        ctx.kept = p, p2, G, S, G_own, beyond.div_(gap).div_(p1), largest, own, weights
        ctx.detach_threshold = detach_threshold
        counted, predicted = (
            G_own.squeeze(-1),
            G.sum(-2) if weights is None else (weights.unsqueeze(-2) @ G).squeeze(-2),
        )
        return per_class(counted if weights is None else counted * weights, labels, p.shape[-1]), predicted

    @staticmethod
    @once_differentiable
    def backward(ctx, B, A):
        p, p2, G, S, G_own, share, largest, own, weights = ctx.kept
        B_own = B.gather(-1, own.squeeze(-1)).unsqueeze(-1)
        mean = (G @ A.unsqueeze(-1)).addcmul_(B_own, G_own)
        eS = (S * A.unsqueeze(-2)).addcmul_(S, mean, value=-1).scatter_add_(-1, own, S.gather(-1, own).mul_(B_own))
        if weights is not None:
            eS.mul_(weights.unsqueeze(-1))
        Q = eS.sum(-1, keepdim=True)
        if ctx.detach_threshold:
            gradient = eS.addcmul_(p, Q, value=-1)
        else:
            shift = (largest * eS).sum(-1, keepdim=True).mul_(share)
            two = torch.ge(p, p2, out=torch.empty_like(p)).mul_(p)  # their sum is s, unless several are as large as p2
            gradient = eS.addcmul_(p, shift, value=-1)
            gradient.add_(two.mul_(shift.sub_(Q).div_(two.sum(-1, keepdim=True))))
        return gradient, None, None, None, None, None


class Top(NamedTuple):
    """The two largest entries [..., n, 2] of every sample, the largest first, and their classes."""

    p: Tensor
    classes: Tensor


class _DenseCounts(Function):
    """Every entry of H: few passes over p, in place where possible, as fresh memory is what costs most."""

    @staticmethod
    def forward(ctx, logits, p, top, labels, weights, step, detach_threshold):
        s = top.p.sum(-1, keepdim=True)
        lo, hi, gap, last = corners(s, step)
        p1, first = top.p.narrow(-1, 0, 1), top.classes.narrow(-1, 0, 1)
        beyond = (p1 - hi).relu_()
        bent = torch.gt(p, lo, out=torch.empty_like(p)).mul_(step.bend)  # bend above lo, else 0
        S = torch.addcmul(p, p, bent)
        H = torch.addcmul(S, bent, lo, value=-1, out=bent)
        H.scatter_add_(-1, first, last * beyond)
        S.scatter_add_(-1, first, beyond.sign().mul_(last).mul_(p1))
        own = labels.unsqueeze(-1)
        H_own = H.gather(-1, own)
        total = H.sum(-1, keepdim=True)
        r = total.reciprocal() if weights is None else weights.unsqueeze(-1) / total
        ctx.kept = p, H, S, H_own, total, r, s, beyond.div_(gap).div_(p1), first, own
        ctx.top, ctx.detach_threshold = top, detach_threshold
        return per_class((r * H_own).squeeze(-1), labels, p.shape[-1]), (r.mT @ H).squeeze(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx, B, A):
        p, H, S, H_own, total, r, s, share, first, own = ctx.kept
        B_own = B.gather(-1, own.squeeze(-1)).unsqueeze(-1)
        mean = (H @ A.unsqueeze(-1)).addcmul_(B_own, H_own).div_(total)
        eS = (A.unsqueeze(-2) - mean).scatter_add_(-1, own, B_own).mul_(S).mul_(r)
        Q = eS.sum(-1, keepdim=True)
        if ctx.detach_threshold:
            gradient = eS.addcmul_(p, Q, value=-1)
        else:
            shift = eS.gather(-1, first).mul_(share)
            gradient = eS.addcmul_(p, shift, value=-1)
            gradient.scatter_add_(-1, ctx.top.classes, shift.sub_(Q).div_(s) * ctx.top.p)
        return gradient, None, None, None, None, None, None


class _SparseCounts(Function):
    """H = p but at the entries above lo, for which alone `value` = H - p and `slope` = S - p are kept."""

    @staticmethod
    def forward(ctx, logits, p, top, entries, labels, weights, step, detach_threshold):
        s = top.p.sum(-1, keepdim=True)
        lo, hi, gap, last = corners(s, step)
        p1 = top.p.narrow(-1, 0, 1)
        rows = lo, hi, last, step.bend.expand_as(lo)
        value, slope = bends(entries.p, *(entries.of_rows(x) for x in rows))
        own = p.gather(-1, labels.unsqueeze(-1))
        own_value, own_slope = bends(own, *rows)
        H_own, S_own = own + own_value, own + own_slope
        total = 1 + entries.by_row(value)
        r = total.reciprocal() if weights is None else weights.unsqueeze(-1) / total
        predicted = (r.mT @ p).squeeze(-2)
        predicted.view(-1).index_add_(0, entries.of_counts, entries.of_rows(r) * value)
        ctx.kept = p, s, (p1 - hi).relu_() * lo / gap**2, total, r, H_own, S_own, value, slope, labels
        ctx.top, ctx.entries, ctx.detach_threshold = top, entries, detach_threshold
        return per_class((r * H_own).squeeze(-1), labels, p.shape[-1]), predicted

    @staticmethod
    @once_differentiable
    def backward(ctx, B, A):
        p, s, share, total, r, H_own, S_own, value, slope, labels = ctx.kept
        top, entries = ctx.top, ctx.entries
        B_own = B.gather(-1, labels).unsqueeze(-1)
        A_entries = A.flatten()[entries.of_counts]
        along = p @ A.unsqueeze(-1)
        mean = (along + entries.by_row(value * A_entries) + B_own * H_own) / total
        at_entries = entries.of_rows(r) * (A_entries - entries.of_rows(mean)) * slope
        at_own = r * B_own * S_own
        Q = shift = r * (along - mean) + entries.by_row(at_entries) + at_own
        if not ctx.detach_threshold:
            first = top.classes.narrow(-1, 0, 1)
            A_first = A.gather(-1, first.squeeze(-1)).unsqueeze(-1)
            shift = r * (A_first + (first == labels.unsqueeze(-1)) * B_own - mean) * share
        gradient = torch.cat((r, -r * mean - shift), -1) @ torch.stack((A, torch.ones_like(A)), -2)
        gradient.mul_(p).scatter_add_(-1, labels.unsqueeze(-1), at_own)
        gradient.view(-1).index_add_(0, entries.of_p, at_entries)
        if not ctx.detach_threshold:
            gradient.scatter_add_(-1, top.classes, (shift - Q) / s * top.p)
        return gradient, None, None, None, None, None, None, None


def bends(p: Tensor, lo: Tensor, hi: Tensor, last: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
    """What the corners add to p: in H, and in S."""
    above, beyond = (p - lo).relu_(), (p - hi).relu_()
    return bend * above + last * beyond, (bend * above.sign_() + last * beyond.sign_()) * p


class Entries:
    """The m entries of p [..., n, d] above lo, by their position in the flattened p."""

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


def top_two(p: Tensor) -> Top:
    """By comparison on a CPU, where that is quicker than any search; equal entries are left to a search."""
    d = p.shape[-1]
    if p.device.type != "cpu":
        return Top(*p.topk(2))
    numbers = torch.arange(d, 2 * d, dtype=p.dtype).unsqueeze(-1)  # two of them add up to more than the last
    p1 = p.amax(-1, keepdim=True)
    found = torch.eq(p, p1, out=torch.empty_like(p))
    first = found @ numbers
    rest = torch.addcmul(p, p, found, value=-1, out=found)
    p2 = rest.amax(-1, keepdim=True)
    second = torch.eq(rest, p2, out=found) @ numbers
    both = torch.cat((first, second), -1)
    least, most = both.aminmax()
    if least < d or most >= 2 * d:  # NaN is found nowhere, equal entries several times
        return top_two_in_turn(p)
    return Top(torch.cat((p1, p2), -1), both.long().sub_(d))


def top_two_in_turn(p: Tensor) -> Top:
    p1, first = p.max(-1, keepdim=True)
    p2, second = p.scatter(-1, first, -1.0).max(-1, keepdim=True)
    return Top(torch.cat((p1, p2), -1), torch.cat((first, second), -1))


def top_two_of_blocks(p: Tensor, maxima: Tensor) -> Top:
    """Both lie in the two blocks that have the largest maxima."""
    d = p.shape[-1]
    members = members_of(top_two_in_turn(maxima).classes, maxima.shape[-1], d).flatten(-2)
    candidates = p.gather(-1, members.clamp_max(d - 1)).masked_fill_(members >= d, -1)
    top, places = top_two_in_turn(candidates)
    return Top(top, members.gather(-1, places))
