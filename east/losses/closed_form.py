"""EAST's soft counts in closed form: softmax, dynamic threshold, linear step, and their hand-derived gradient.

Composed from small operations the surrogate costs 9 to 55 cross-entropies on a CPU. Three facts bring it near one:

- The threshold is half the sum s of the two largest probabilities, at most 1/2, so the step's corners are lo = a s and
  hi = b s, a = (1 - 2.5 T) / 2, b = 1 - a, and only the largest entry p1 can lie above hi. As memberships are H divided
  by its sum, H is taken in units of its first slope: H = p + bend [p - lo]+, at the largest entry + last [p1 - hi]+,
  with the slopes 1, middle = 1 + bend, and lo / (1 - hi) = middle + last.
- But for the 1 in 1 - hi, H is homogeneous in (p, s), and e = dL/dH is orthogonal to H. With S = p dH/dp at fixed s,
  Euler's identity gives dL/ds: sum_j e_j S_j + s dL/ds = shift = e1 lo [p1 - hi]+ / (1 - hi)^2.
- Below lo, H is p, and softmax sums to 1: sums over such entries are known without touching them. With many classes
  few entries lie above, and the gradient is p times a rank-one term plus those few (`Sparse`).

With A, B the gradients of the loss with respect to predicted and diagonal counts, e = (A + B at the own class - their
mean under H) / sum H. The gradient with respect to the logits is e S - p shift, + p dL/ds at the two largest entries.
"""

from contextlib import ExitStack
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from east.confusion import class_counts, per_class
from east.losses.steps import HALF_WIDTH
from east.metrics import f1_loss_and_slopes

MIN_CORNER = 5e-4  # a, and with it 1 - hi, vanishes at T = 0.4
FEW_CLASSES = 32  # rows of fewer entries are slow to reduce and to search: samples are laid side by side in memory
MANY_CLASSES = 2048  # from here on entries above lo are looked up on a CPU,
SPARSE_CORNER = 0.125  # unless a is so small that 1 - (sum of the entries above lo) loses its digits,
SPARSE_SHARE = 32  # or one block in so many holds such an entry, as before any training
BLOCK = 8  # classes, about, whose maximum is taken together when looking for large entries,
LANES = 32  # in a multiple of so many blocks, as the processor likes it


def soft_counts(
    logits: Tensor, labels: Tensor, weights: Tensor | None, temperature: float | Tensor, detach_threshold: bool = False
) -> tuple[Tensor, Tensor]:
    """Diagonal and predicted soft counts [..., d] of logits [..., n, d] and labels [..., n]; eq. 4-5, arXiv 2405.20954.

    `weights` [..., n] count a sample more or less; `temperature` is a number or a tensor over the leading dimensions.
    """
    return _SoftCounts.apply(logits, labels, weights, step_of(temperature, logits), detach_threshold)


def soft_f1_loss(
    logits: Tensor, labels: Tensor, weights: Tensor | None, temperature: float | Tensor, detach_threshold: bool = False
) -> Tensor:
    """1 - macro F1 [...] of the soft counts in a single node of autograd's graph: for few classes, nodes cost most."""
    return _SoftF1Loss.apply(logits, labels, weights, step_of(temperature, logits), detach_threshold)


class _SoftCounts(Function):
    @staticmethod
    def forward(ctx, logits, labels, weights, step, detach_threshold):
        ctx.counted = counted(logits, labels, weights, step, detach_threshold)
        return ctx.counted.counts()

    @staticmethod
    def backward(ctx, B, A):
        return spread(ctx, B, A), None, None, None, None


class _SoftF1Loss(Function):
    @staticmethod
    def forward(ctx, logits, labels, weights, step, detach_threshold):
        ctx.counted = counted(logits, labels, weights, step, detach_threshold)
        diagonal, predicted = ctx.counted.counts()
        loss, ctx.B, ctx.A = f1_loss_and_slopes(diagonal, class_counts(labels, weights, predicted), predicted)
        return loss

    @staticmethod
    def backward(ctx, g):
        g = g.detach().unsqueeze(-1)
        return spread(ctx, ctx.B * g, ctx.A * g), None, None, None, None


def spread(ctx, B: Tensor, A: Tensor) -> Tensor:
    """The gradient with respect to the logits from that with respect to the counts, once."""
    if ctx.counted is None:
        raise RuntimeError("backward a second time through a MetricLoss: expected retain_graph=True the first time")
    with ExitStack() as stack:
        if torch.is_autocast_enabled(B.device.type):  # backward may be called inside of the block that forward left
            stack.enter_context(torch.autocast(B.device.type, enabled=False))
        twice = torch.is_grad_enabled()
        if twice:
            stack.enter_context(torch.no_grad())
        gradient = ctx.counted.gradient(B, A)
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.counted = None  # as autograd drops saved tensors: whoever keeps the loss keeps no batch
    return _OnceOnly.apply(gradient.requires_grad_()) if twice else gradient


class _OnceOnly(Function):
    """Itself; with create_graph=True a second derivative is not taken for zero."""

    @staticmethod
    def forward(ctx, gradient):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError(
            "MetricLoss's closed form has no second derivative; take the metric of "
            "Confusion.from_memberships(loss.memberships(logits), labels), which autograd differentiates throughout"
        )


def counted(
    logits: Tensor, labels: Tensor, weights: Tensor | None, step: "Step", detach_threshold: bool
) -> "Few | Dense | Sparse":
    """A batch ready for counts() and gradient(B, A), in the form that is quickest for so many classes.

    It keeps neither the logits nor the counts: an input or output would hold on to the graph that it is part of.
    """
    classes = logits.shape[-1]
    if classes < FEW_CLASSES:
        return Few(logits, labels, weights, step, detach_threshold or classes == 2)
    p = logits.softmax(-1)
    if classes < MANY_CLASSES or p.device.type != "cpu":
        return Dense(p, top_two(p), labels, weights, step, detach_threshold)
    maxima = block_maxima(p)
    top = top_two_of_blocks(p, maxima)
    entries = Entries.above(p, step.a * top.p.sum(-1, keepdim=True), maxima) if step.a.min() >= SPARSE_CORNER else None
    if entries is None:
        return Dense(p, top, labels, weights, step, detach_threshold)
    return Sparse(p, top, entries, labels, weights, step, detach_threshold)


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
    return Step(*(x.to(device, dtype) for x in Step.at(torch.tensor(temperature, dtype=torch.float64, device="cpu"))))


def step_of(temperature: float | Tensor, logits: Tensor) -> Step:
    """The step beside logits [..., n, d], for a number or one temperature per leading index."""
    if isinstance(temperature, Tensor):
        return Step.at(temperature[..., None, None].to(logits))
    return step_at(temperature, logits.dtype, logits.device)


def corners(s: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lo, hi, 1 - hi and last of samples whose two largest entries sum to s [..., n, 1]."""
    lo, hi = s * step.a, s * step.b
    gap = step.one - hi
    return lo, hi, gap, (lo / gap).sub_(step.middle)


class Few:
    """The largest entries are told by comparison, as numbers 0 or 1: to search them costs more. Of two classes s is 1.

    Any other order of these operations rounds differently, and the committed results could no longer be repeated.
    """

    def __init__(self, logits: Tensor, labels: Tensor, weights: Tensor | None, step: Step, detach_threshold: bool):
        p = logits.mT.softmax(-2).mT
        p1 = p.amax(-1, keepdim=True)
        largest = torch.eq(p, p1, out=torch.empty_like(p))
        s = p2 = step.one
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
        self.p, self.p2, self.largest, self.share = p, p2, largest, beyond.div_(gap).div_(p1)
        self.G, self.S = H.div_(total), S.div_(total)
        self.labels, self.own, self.weights = labels, labels.unsqueeze(-1), weights
        self.G_own = self.G.gather(-1, self.own)
        self.detach_threshold = detach_threshold

    def counts(self) -> tuple[Tensor, Tensor]:
        own = self.G_own.squeeze(-1)
        if self.weights is None:
            return per_class(own, self.labels, self.G.shape[-1]), self.G.sum(-2)
        predicted = (self.weights.unsqueeze(-2) @ self.G).squeeze(-2)
        return per_class(own * self.weights, self.labels, self.G.shape[-1]), predicted

    def gradient(self, B: Tensor, A: Tensor) -> Tensor:
        p, S, own = self.p, self.S, self.own
        B_own = B.gather(-1, self.labels).unsqueeze(-1)
        mean = (self.G @ A.unsqueeze(-1)).addcmul_(B_own, self.G_own)
        eS = (S * A.unsqueeze(-2)).addcmul_(S, mean, value=-1).scatter_add_(-1, own, S.gather(-1, own).mul_(B_own))
        if self.weights is not None:
            eS.mul_(self.weights.unsqueeze(-1))
        Q = eS.sum(-1, keepdim=True)
        if self.detach_threshold:
            return eS.addcmul_(p, Q, value=-1)
        shift = (self.largest * eS).sum(-1, keepdim=True).mul_(self.share)
        two = torch.ge(p, self.p2, out=torch.empty_like(p)).mul_(p)  # their sum is s, unless several are as large as p2
        gradient = eS.addcmul_(p, shift, value=-1)
        return gradient.add_(two.mul_(shift.sub_(Q).div_(two.sum(-1, keepdim=True))))


class Top(NamedTuple):
    """The two largest entries [..., n, 2] of every sample, the largest first, and their classes."""

    p: Tensor
    classes: Tensor


class Dense:
    """Every entry of H: few passes over p, in place where possible, as fresh memory is what costs most."""

    def __init__(self, p: Tensor, top: Top, labels: Tensor, weights: Tensor | None, step: Step, detach_threshold: bool):
        s = top.p.sum(-1, keepdim=True)
        lo, hi, gap, last = corners(s, step)
        p1, first = top.p.narrow(-1, 0, 1), top.classes.narrow(-1, 0, 1)
        beyond = (p1 - hi).relu_()
        bent = torch.gt(p, lo, out=torch.empty_like(p)).mul_(step.bend)  # bend above lo, else 0
        S = torch.addcmul(p, p, bent)
        H = torch.addcmul(S, bent, lo, value=-1, out=bent)
        H.scatter_add_(-1, first, last * beyond)
        S.scatter_add_(-1, first, beyond.sign().mul_(last).mul_(p1))
        total = H.sum(-1, keepdim=True)
        self.p, self.H, self.S, self.total = p, H, S, total
        self.r = total.reciprocal() if weights is None else weights.unsqueeze(-1) / total
        self.s, self.top, self.first, self.share = s, top, first, beyond.div_(gap).div_(p1)
        self.labels, self.own = labels, labels.unsqueeze(-1)
        self.H_own = H.gather(-1, self.own)
        self.detach_threshold = detach_threshold

    def counts(self) -> tuple[Tensor, Tensor]:
        own = (self.r * self.H_own).squeeze(-1)
        return per_class(own, self.labels, self.p.shape[-1]), (self.r.mT @ self.H).squeeze(-2)

    def gradient(self, B: Tensor, A: Tensor) -> Tensor:
        B_own = B.gather(-1, self.labels).unsqueeze(-1)
        mean = (self.H @ A.unsqueeze(-1)).addcmul_(B_own, self.H_own).div_(self.total)
        eS = (A.unsqueeze(-2) - mean).scatter_add_(-1, self.own, B_own).mul_(self.S).mul_(self.r)
        Q = eS.sum(-1, keepdim=True)
        if self.detach_threshold:
            return eS.addcmul_(self.p, Q, value=-1)
        shift = eS.gather(-1, self.first).mul_(self.share)
        gradient = eS.addcmul_(self.p, shift, value=-1)
        return gradient.scatter_add_(-1, self.top.classes, shift.sub_(Q).div_(self.s) * self.top.p)


class Sparse:
    """H = p but at the entries above lo, for which alone `value` = H - p and `slope` = S - p are kept."""

    def __init__(
        self,
        p: Tensor,
        top: Top,
        entries: "Entries",
        labels: Tensor,
        weights: Tensor | None,
        step: Step,
        detach_threshold: bool,
    ):
        s = top.p.sum(-1, keepdim=True)
        lo, hi, gap, last = corners(s, step)
        p1 = top.p.narrow(-1, 0, 1)
        rows = lo, hi, last, step.bend.expand_as(lo)
        self.value, self.slope = bends(entries.p, *(entries.of_rows(x) for x in rows))
        self.labels, self.own = labels, labels.unsqueeze(-1)
        p_own = p.gather(-1, self.own)
        value_own, slope_own = bends(p_own, *rows)
        self.H_own, self.S_own = p_own + value_own, p_own + slope_own
        self.total = 1 + entries.by_row(self.value)
        self.r = self.total.reciprocal() if weights is None else weights.unsqueeze(-1) / self.total
        self.p, self.s, self.top, self.entries = p, s, top, entries
        self.share = (p1 - hi).relu_() * lo / gap**2
        self.detach_threshold = detach_threshold

    def counts(self) -> tuple[Tensor, Tensor]:
        predicted = (self.r.mT @ self.p).squeeze(-2)
        predicted.view(-1).index_add_(0, self.entries.of_counts, self.entries.of_rows(self.r) * self.value)
        return per_class((self.r * self.H_own).squeeze(-1), self.labels, self.p.shape[-1]), predicted

    def gradient(self, B: Tensor, A: Tensor) -> Tensor:
        p, r, entries = self.p, self.r, self.entries
        B_own = B.gather(-1, self.labels).unsqueeze(-1)
        A_entries = A.flatten()[entries.of_counts]
        along = p @ A.unsqueeze(-1)
        mean = (along + entries.by_row(self.value * A_entries) + B_own * self.H_own) / self.total
        at_entries = entries.of_rows(r) * (A_entries - entries.of_rows(mean)) * self.slope
        at_own = r * B_own * self.S_own
        Q = shift = r * (along - mean) + entries.by_row(at_entries) + at_own
        if not self.detach_threshold:
            first = self.top.classes.narrow(-1, 0, 1)
            A_first = A.gather(-1, first.squeeze(-1)).unsqueeze(-1)
            shift = r * (A_first + (first == self.own) * B_own - mean) * self.share
        gradient = torch.cat((r, -r * mean - shift), -1) @ torch.stack((A, torch.ones_like(A)), -2)
        gradient.mul_(p).scatter_add_(-1, self.own, at_own)
        gradient.view(-1).index_add_(0, entries.of_p, at_entries)
        if self.detach_threshold:
            return gradient
        return gradient.scatter_add_(-1, self.top.classes, (shift - Q) / self.s * self.top.p)


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
    numbers = numbers_from(d, p.dtype)
    p1 = p.amax(-1, keepdim=True)
    found = torch.eq(p, p1, out=torch.empty_like(p))
    first = found @ numbers
    rest = torch.addcmul(p, p, found, value=-1, out=found)
    p2 = rest.amax(-1, keepdim=True)
    second = torch.eq(rest, p2, out=found) @ numbers
    both, values = torch.cat((first, second), -1), torch.cat((p1, p2), -1)
    least, most = both.aminmax()
    if d <= least and most < 2 * d:  # NaN is found nowhere, equal entries several times
        classes = both.long().sub_(d)
        if torch.equal(p.gather(-1, classes), values):  # else products are rounded: set_float32_matmul_precision
            return Top(values, classes)
    return top_two_in_turn(p)


@lru_cache
def numbers_from(d: int, dtype: torch.dtype) -> Tensor:
    """d, d + 1, ..., 2d - 1 [d, 1]: two of them add up to more than the last."""
    return torch.arange(d, 2 * d, dtype=dtype, device="cpu").unsqueeze(-1)


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
