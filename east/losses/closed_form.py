"""EAST's soft counts in closed form: softmax, dynamic threshold, linear step, and their hand-derived gradient.

Composed from small operations the loss costs 9 to 55 cross-entropies on a CPU. Three facts bring it near one:

- The threshold is half the sum s of the two largest probabilities, at most 1/2, so the step's corners are lo = a s and
  hi = b s, a = (1 - 2.5 T) / 2, b = 1 - a, and only the largest entry p1 can lie above hi. As memberships are H divided
  by its sum, H is taken in units of its first slope: H = p + bend [p - lo]+, at the largest entry + last [p1 - hi]+,
  with the slopes 1, middle = 1 + bend, and lo / (1 - hi) = middle + last.
- But for the 1 in 1 - hi, H is homogeneous in (p, s), and e = dL/dH is orthogonal to H. With S = p dH/dp at fixed s,
  Euler's identity gives dL/ds: sum_j e_j S_j + s dL/ds = shift = e1 lo [p1 - hi]+ / (1 - hi)^2.
- Below lo, H is p, and softmax sums to 1: sums over such entries are known without touching them. With many classes
  few entries lie above, and the gradient is p times a rank-one term plus those few (`HugeSoftmax`).

With A, B the gradients of the loss with respect to predicted and diagonal counts, e = (A + B at the own class - their
mean under H) / sum H. The gradient with respect to the logits is e S - p shift, + p dL/ds at the two largest entries.

With two classes s = 1 and H sums to 1: everything is a function of the difference of the two logits (`TwoClasses`).
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from east.confusion import Confusion, class_counts, per_class
from east.losses.inputs import masked
from east.losses.steps import HALF_WIDTH
from east.metrics import SLOPES, Metric, score_and_slopes

MIN_CORNER = 5e-4  # a, and with it 1 - hi, vanishes at T = 0.4
FEW_CLASSES = 32  # rows of fewer entries are slow to reduce and to search: samples are laid side by side in memory
MANY_CLASSES = 2048  # from here on entries above lo are looked up on a CPU,
SPARSE_CORNER = 0.125  # unless a is so small that 1 - (sum of the entries above lo) loses its digits,
SPARSE_SHARE = 32  # or one block in so many holds such an entry, as before any training
BLOCK = 8  # classes, about, whose maximum is taken together when looking for large entries,
LANES = 32  # in a multiple of so many blocks, as the processor likes it
CHUNK = 1 << 16  # entries: larger batches are counted in chunks that stay in the cache, and again in backward


class Counts(NamedTuple):
    """Soft counts [..., d] of a batch; `missed` is actual - diagonal without its rounding."""

    diagonal: Tensor
    missed: Tensor | None
    predicted: Tensor


def soft_counts(
    logits: Tensor, labels: Tensor, weights: Tensor | None, temperature: float | Tensor, detach_threshold: bool = False
) -> Counts:
    """Soft counts [..., d] of logits [..., n, d] and labels [..., n]; eq. 4-5, arXiv 2405.20954.

    `weights` [..., n] count a sample more or less; `temperature` is a number or a tensor over the leading dimensions.
    """
    step = step_of(temperature, logits)
    return Counts(*_SoftCounts.apply(logits, labels, weights, step, detach_threshold))


def soft_metric_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    metric: Metric,
    parameters: Mapping[str, Any],
    temperature: float | Tensor,
    detach_threshold: bool = False,
    ignore_index: int | None = None,
) -> Tensor:
    """1 - metric [...] of the soft counts in a single node of autograd's graph: for few classes, nodes cost most.

    Samples labelled `ignore_index` do not count; the loss of a batch that has no others is 0.
    """
    step = step_of(temperature, logits)
    return _SoftMetricLoss.apply(logits, labels, weights, step, detach_threshold, metric, parameters, ignore_index)


class _SoftCounts(Function):
    @staticmethod
    def forward(ctx, logits, labels, weights, step, detach_threshold):
        counts, state = counted(logits, labels, weights, step)
        ctx.save_for_backward(labels, weights, *state)
        ctx.kind, ctx.detach_threshold = type(state), detach_threshold
        return tuple(counts)

    @staticmethod
    def backward(ctx, B, M, A):
        labels, weights, *state = ctx.saved_tensors
        with Backward(B) as scope:
            gradient = ctx.kind(*state).gradient(labels, weights, B - M, A, ctx.detach_threshold)
        return scope.once(gradient), None, None, None, None


class _SoftMetricLoss(Function):
    @staticmethod
    def forward(ctx, logits, labels, weights, step, detach_threshold, metric, parameters, ignore_index):
        ctx.ignore_index, ctx.step, ctx.detach_threshold = ignore_index, step, detach_threshold
        used, shares = labels, weights
        if ignore_index is not None:
            used, shares = masked(labels, weights, ignore_index, logits.dtype)
        ctx.chunked = logits.ndim == 2 and 2 < logits.shape[-1] < FEW_CLASSES and logits.numel() > CHUNK
        if ctx.chunked:
            parts = [counted(*part, step, missed=metric in SLOPES)[0] for part in chunks(logits, used, shares)]
            state, counts = (), Counts(*(None if x[0] is None else sum(x) for x in zip(*parts, strict=True)))
        else:
            counts, state = counted(logits, used, shares, step, missed=metric in SLOPES)
        ctx.kind = type(state)
        if logits.shape[-1] == 2:
            actual = counts.diagonal + counts.missed
        else:
            actual = class_counts(used, shares, counts.predicted)
        confusion = Confusion(counts.diagonal, actual, counts.predicted, no_matrix, counts.missed)
        score, B, A = score_and_slopes(metric, confusion, parameters)
        loss = 1 - score
        if ignore_index is not None and shares is not None:
            left = confusion.total != 0
            loss, B, A = loss * left, B * left.unsqueeze(-1), A * left.unsqueeze(-1)
        # The labels and weights are kept as they came, so that autograd notices if they are overwritten.
        kept = (logits, used, shares) if ctx.chunked else (None, used, shares)
        ctx.save_for_backward(labels, weights, B, A, *kept, *state)
        return loss

    @staticmethod
    def backward(ctx, g):
        _, _, B, A, logits, labels, shares, *state = ctx.saved_tensors
        with Backward(g) as scope:
            scale = g.detach().unsqueeze(-1).neg()
            B, A = B * scale, A * scale
            if ctx.chunked:
                gradient = torch.empty_like(logits)
                for out, *part in chunks(gradient, logits, labels, shares):
                    _, state = counted(*part, ctx.step, missed=False)
                    out.copy_(state.gradient(*part[1:], B, A, ctx.detach_threshold))
            else:
                gradient = ctx.kind(*state).gradient(labels, shares, B, A, ctx.detach_threshold)
        return scope.once(gradient), None, None, None, None, None, None, None


def no_matrix() -> Tensor:
    raise TypeError("a metric with slopes in closed form does without the matrix")


def chunks(logits: Tensor, *rest: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """Parts of about CHUNK entries of tensors that have samples in their first dimension; None stays None."""
    rows = max(1, CHUNK // logits.shape[-1])
    for start in range(0, len(logits), rows):
        yield tuple(None if x is None else x[start : start + rows] for x in (logits, *rest))


class Backward(ExitStack):
    """Computes a gradient by hand: without a graph, and in full precision."""

    def __init__(self, gradient: Tensor):
        super().__init__()
        if torch.is_autocast_enabled(gradient.device.type):  # backward may be called inside of the block forward left
            self.enter_context(torch.autocast(gradient.device.type, enabled=False))
        self.twice = torch.is_grad_enabled()
        if self.twice:
            self.enter_context(torch.no_grad())

    def once(self, gradient: Tensor) -> Tensor:
        return _OnceOnly.apply(gradient.requires_grad_()) if self.twice else gradient


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
    logits: Tensor, labels: Tensor, weights: Tensor | None, step: "Step", missed: bool = True
) -> tuple[Counts, "TwoClasses | FewClasses | ManyClasses | HugeSoftmax"]:
    """The counts of a batch, and what their gradient needs, in the form that is quickest for so many classes.

    Few classes are spared the count of what was missed where `missed` is false.
    """
    classes = logits.shape[-1]
    if classes == 2:
        return TwoClasses.counted(logits, labels, weights, step)
    if classes < FEW_CLASSES:
        return FewClasses.counted(logits, labels, weights, step, missed)
    p = logits.softmax(-1)
    if classes < MANY_CLASSES or p.device.type != "cpu":
        return ManyClasses.counted(p, top_two(p), labels, weights, step)
    maxima = block_maxima(p)
    top = top_two_of_blocks(p, maxima)
    entries = Entries.above(p, step.a * top.p.sum(-1, keepdim=True), maxima) if step.a.min() >= SPARSE_CORNER else None
    if entries is None:
        return ManyClasses.counted(p, top, labels, weights, step)
    return HugeSoftmax.counted(p, top, entries, labels, weights, step)


class Step(NamedTuple):
    """The step at one temperature [], or at one per leading index [..., 1, 1]; in tensors, quicker than numbers.

    `first` and `second` are the slopes for two classes, `second_bend` their difference; the others are in units of it.
    """

    a: Tensor
    b: Tensor
    first: Tensor
    second: Tensor
    second_bend: Tensor
    bend: Tensor
    middle: Tensor
    one: Tensor

    @classmethod
    def at(cls, T: Tensor) -> "Step":
        a = ((1 - HALF_WIDTH * T) / 2).clamp_min(MIN_CORNER)
        middle = (1 - 2 * T) / (1 - 2 * a) * a / T
        first = T / a
        return cls(a, 1 - a, first, first * middle, first * (middle - 1), middle - 1, middle, torch.ones_like(T))


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


class TwoClasses(NamedTuple):
    """s is 1, H of both classes sums to 1, and `slope` [..., n] is the weighted dH_1/dz_1."""

    slope: Tensor

    @classmethod
    def counted(cls, logits: Tensor, labels: Tensor, weights: Tensor | None, step: Step) -> tuple[Counts, "TwoClasses"]:
        if step.a.ndim:
            step = Step(*(x.squeeze(-1) for x in step))
        other, z = logits.unbind(-1)
        gap = z - other
        less = gap.abs().neg_().sigmoid_()  # the less probable class, whose H keeps its digits however small
        above = (less - step.a).relu_()
        H = torch.addcmul(less * step.first, above, step.second_bend)
        steep = torch.where(above > 0, step.second, step.first)
        slope = torch.ops.aten.sigmoid_backward(steep, less)
        if weights is None:
            rest = step.one - H
        else:
            slope, H = slope * weights, H * weights
            rest = weights - H
        right = (gap > 0) == labels
        diagonal = per_class(torch.where(right, rest, H), labels, 2)
        missed = per_class(torch.where(right, H, rest), labels, 2)
        return Counts(diagonal, missed, diagonal + missed.flip(-1)), cls(slope)

    def gradient(self, labels: Tensor, weights: Tensor | None, B: Tensor, A: Tensor, detach: bool) -> Tensor:
        signs = signs_of_two(A.dtype, A.device)
        by_class = torch.addcmul((A * signs).sum(-1, keepdim=True), B, signs)
        along = by_class.gather(-1, labels).mul_(self.slope)
        return along.unsqueeze(-1) * signs


@lru_cache
def signs_of_two(dtype: torch.dtype, device: torch.device) -> Tensor:
    """How the logits of two classes act on their difference."""
    return torch.tensor([-1.0, 1.0], dtype=dtype).to(device)


class FewClasses(NamedTuple):
    """The largest entries are found by comparison and kept as numbers 0 or 1, which is quicker than an index."""

    p: Tensor
    p2: Tensor
    largest: Tensor
    share: Tensor
    G: Tensor
    S: Tensor
    G_own: Tensor

    @classmethod
    def counted(
        cls, logits: Tensor, labels: Tensor, weights: Tensor | None, step: Step, missed: bool
    ) -> tuple[Counts, "FewClasses"]:
        p = logits.mT.softmax(-2).mT
        p1 = p.amax(-1, keepdim=True)
        largest = torch.eq(p, p1, out=torch.empty_like(p))
        p2 = torch.addcmul(p, p, largest, value=-1).amax(-1, keepdim=True)
        number = largest.sum(-1, keepdim=True)
        p2.lerp_(p1, torch.gt(number, step.one, out=number))  # where several are largest, p2 is as large
        lo, hi, gap, last = corners(p1 + p2, step)
        beyond = (p1 - hi).relu_()
        above = (p - lo).relu_()
        H = torch.addcmul(p, above, step.bend).addcmul_(largest, last * beyond)
        S = above.sign_().mul_(step.bend).add_(step.one).mul_(p)
        S.addcmul_(largest, beyond.sign().mul_(last).mul_(p1))
        rest = None
        if missed:
            H_own, rest = without_own(H, labels.unsqueeze(-1))
        total = H.sum(-1, keepdim=True) if rest is None else H_own + rest
        G = H.div_(total)
        G_own = G.gather(-1, labels.unsqueeze(-1))
        state = cls(p, p2, largest, beyond.div_(gap).div_(p1), G, S.div_(total), G_own)
        predicted = G.sum(-2) if weights is None else (weights.unsqueeze(-2) @ G).squeeze(-2)

        def summed(shares: Tensor) -> Tensor:
            shares = shares.squeeze(-1)
            return per_class(shares if weights is None else shares * weights, labels, p.shape[-1])

        elsewhere = None if rest is None else summed(rest.div_(total))
        return Counts(summed(G_own), elsewhere, predicted), state

    def gradient(self, labels: Tensor, weights: Tensor | None, B: Tensor, A: Tensor, detach: bool) -> Tensor:
        p, S, own = self.p, self.S, labels.unsqueeze(-1)
        B_own = B.gather(-1, labels).unsqueeze(-1)
        mean = (self.G @ A.unsqueeze(-1)).addcmul_(B_own, self.G_own)
        eS = (S * A.unsqueeze(-2)).addcmul_(S, mean, value=-1).scatter_add_(-1, own, S.gather(-1, own).mul_(B_own))
        if weights is not None:
            eS.mul_(weights.unsqueeze(-1))
        Q = eS.sum(-1, keepdim=True)
        if detach:
            return eS.addcmul_(p, Q, value=-1)
        shift = (self.largest * eS).sum(-1, keepdim=True).mul_(self.share)
        two = torch.ge(p, self.p2, out=torch.empty_like(p)).mul_(p)  # their sum is s, unless several are as large as p2
        gradient = eS.addcmul_(p, shift, value=-1)
        return gradient.add_(two.mul_(shift.sub_(Q).div_(two.sum(-1, keepdim=True))))


def without_own(H: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """H [..., n, d] at the own class, and its sum over all others, which a difference would lose to rounding."""
    H_own = H.gather(-1, own)
    rest = H.scatter_(-1, own, 0).sum(-1, keepdim=True)
    H.scatter_(-1, own, H_own)
    return H_own, rest


class Top(NamedTuple):
    """The two largest entries [..., n, 2] of every sample, the largest first, and their classes."""

    p: Tensor
    classes: Tensor


class ManyClasses(NamedTuple):
    """Every entry of H: few passes over p, in place where possible, as fresh memory is what costs most."""

    p: Tensor
    H: Tensor
    S: Tensor
    total: Tensor
    r: Tensor
    s: Tensor
    top_p: Tensor
    top_classes: Tensor
    share: Tensor
    H_own: Tensor

    @classmethod
    def counted(
        cls, p: Tensor, top: Top, labels: Tensor, weights: Tensor | None, step: Step
    ) -> tuple[Counts, "ManyClasses"]:
        s = top.p.sum(-1, keepdim=True)
        lo, hi, gap, last = corners(s, step)
        p1, first = top.p.narrow(-1, 0, 1), top.classes.narrow(-1, 0, 1)
        beyond = (p1 - hi).relu_()
        bent = torch.gt(p, lo, out=torch.empty_like(p)).mul_(step.bend)  # bend above lo, else 0
        S = torch.addcmul(p, p, bent)
        H = torch.addcmul(S, bent, lo, value=-1, out=bent)
        H.scatter_add_(-1, first, last * beyond)
        S.scatter_add_(-1, first, beyond.sign().mul_(last).mul_(p1))
        H_own, rest = without_own(H, labels.unsqueeze(-1))
        total = H_own + rest
        r = total.reciprocal() if weights is None else weights.unsqueeze(-1) / total
        hits, missed = ((r * x).squeeze(-1) for x in (H_own, rest))
        d = p.shape[-1]
        counts = Counts(per_class(hits, labels, d), per_class(missed, labels, d), (r.mT @ H).squeeze(-2))
        return counts, cls(p, H, S, total, r, s, top.p, top.classes, beyond.div_(gap).div_(p1), H_own)

    def gradient(self, labels: Tensor, weights: Tensor | None, B: Tensor, A: Tensor, detach: bool) -> Tensor:
        B_own = B.gather(-1, labels).unsqueeze(-1)
        mean = (self.H @ A.unsqueeze(-1)).addcmul_(B_own, self.H_own).div_(self.total)
        eS = (A.unsqueeze(-2) - mean).scatter_add_(-1, labels.unsqueeze(-1), B_own).mul_(self.S).mul_(self.r)
        Q = eS.sum(-1, keepdim=True)
        if detach:
            return eS.addcmul_(self.p, Q, value=-1)
        shift = eS.gather(-1, self.top_classes.narrow(-1, 0, 1)).mul_(self.share)
        gradient = eS.addcmul_(self.p, shift, value=-1)
        return gradient.scatter_add_(-1, self.top_classes, shift.sub_(Q).div_(self.s) * self.top_p)


class HugeSoftmax(NamedTuple):
    """H = p but at the m entries above lo, for which alone `value` = H - p and `slope` = S - p [m] are kept."""

    p: Tensor
    value: Tensor
    slope: Tensor
    rows: Tensor
    of_p: Tensor
    of_counts: Tensor
    H_own: Tensor
    S_own: Tensor
    total: Tensor
    r: Tensor
    s: Tensor
    top_p: Tensor
    top_classes: Tensor
    share: Tensor

    @classmethod
    def counted(
        cls, p: Tensor, top: Top, entries: "Entries", labels: Tensor, weights: Tensor | None, step: Step
    ) -> tuple[Counts, "HugeSoftmax"]:
        s = top.p.sum(-1, keepdim=True)
        lo, hi, gap, last = corners(s, step)
        p1 = top.p.narrow(-1, 0, 1)
        rows = lo, hi, last, step.bend.expand_as(lo)
        value, slope = bends(entries.p, *(entries.of_rows(x) for x in rows))
        p_own = p.gather(-1, labels.unsqueeze(-1))
        value_own, slope_own = bends(p_own, *rows)
        H_own, S_own = p_own + value_own, p_own + slope_own
        total = 1 + entries.by_row(value)
        r = total.reciprocal() if weights is None else weights.unsqueeze(-1) / total
        share = (p1 - hi).relu_() * lo / gap**2
        predicted = (r.mT @ p).squeeze(-2)
        predicted.view(-1).index_add_(0, entries.of_counts, entries.of_rows(r) * value)
        hits, missed = ((r * x).squeeze(-1) for x in (H_own, (total - H_own).relu_()))
        counts = Counts(per_class(hits, labels, p.shape[-1]), per_class(missed, labels, p.shape[-1]), predicted)
        found = entries.rows, entries.of_p, entries.of_counts
        return counts, cls(p, value, slope, *found, H_own, S_own, total, r, s, top.p, top.classes, share)

    def of_rows(self, x: Tensor) -> Tensor:
        return x.flatten()[self.rows]

    def by_row(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.total).view(-1).index_add_(0, self.rows, values).view(self.total.shape)

    def gradient(self, labels: Tensor, weights: Tensor | None, B: Tensor, A: Tensor, detach: bool) -> Tensor:
        p, r, own = self.p, self.r, labels.unsqueeze(-1)
        B_own = B.gather(-1, labels).unsqueeze(-1)
        A_entries = A.flatten()[self.of_counts]
        along = p @ A.unsqueeze(-1)
        mean = (along + self.by_row(self.value * A_entries) + B_own * self.H_own) / self.total
        at_entries = self.of_rows(r) * (A_entries - self.of_rows(mean)) * self.slope
        at_own = r * B_own * self.S_own
        Q = shift = r * (along - mean) + self.by_row(at_entries) + at_own
        if not detach:
            first = self.top_classes.narrow(-1, 0, 1)
            A_first = A.gather(-1, first.squeeze(-1)).unsqueeze(-1)
            shift = r * (A_first + (first == own) * B_own - mean) * self.share
        gradient = torch.cat((r, -r * mean - shift), -1) @ torch.stack((A, torch.ones_like(A)), -2)
        gradient.mul_(p).scatter_add_(-1, own, at_own)
        gradient.view(-1).index_add_(0, self.of_p, at_entries)
        if detach:
            return gradient
        return gradient.scatter_add_(-1, self.top_classes, (shift - Q) / self.s * self.top_p)


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
