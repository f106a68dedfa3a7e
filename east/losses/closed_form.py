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

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from east.confusion import per_class
from east.losses import by_hand, small_batches
from east.losses.inputs import masked
from east.losses.steps import HALF_WIDTH, MIN_CORNER
from east.metrics import Metric

FEW_CLASSES = 32  # rows of fewer entries are slow to reduce and to search: samples are laid side by side in memory
MANY_CLASSES = 2048  # from here on entries above lo are looked up on a CPU,
SPARSE_CORNER = 0.125  # unless a is so small that 1 - (sum of the entries above lo) loses its digits,
SPARSE_SHARE = 32  # or one block in so many holds such an entry, as before any training
BLOCK = 8  # classes, about, whose maximum is taken together when looking for large entries,
LANES = 32  # in a multiple of so many blocks, as the processor likes it
CHUNK = 1 << 18  # entries: larger batches are counted in parts, whose passing tensors are few and near


class Counts(NamedTuple):
    """Soft counts [..., d] of a batch; `missed` is actual - diagonal without its rounding."""

    diagonal: Tensor
    missed: Tensor
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
    """1 - metric of the soft counts in a single node of autograd's graph, for metrics with slopes by hand.

    With `ignore_index` all samples of logits [n, d], or [k, n, d] with k > 1, are counted together, but those of that
    label; the loss of a batch that has no others is 0. Without it there is one loss per leading index.
    """
    if logits.requires_grad and not torch.is_grad_enabled():
        logits = logits.detach()  # else the node would take the gradient all the same
    return _SoftMetricLoss.apply(
        logits, labels, weights, temperature, detach_threshold, metric, parameters, ignore_index
    )


class _SoftCounts(Function):
    @staticmethod
    def forward(ctx, logits, labels, weights, step, detach_threshold):
        counts, state = counted(logits, labels, weights, step)
        ctx.save_for_backward(labels, weights, *state)
        ctx.kind, ctx.step, ctx.detach_threshold = type(state), step, detach_threshold
        return tuple(counts)

    @staticmethod
    def backward(ctx, B, M, A):
        labels, weights, *state = ctx.saved_tensors

        def gradient() -> Tensor:
            return ctx.kind(*state).gradient(Slopes(labels, weights, B - M, A, ctx.step, ctx.detach_threshold))

        return without_graph(gradient, B), None, None, None, None


class _SoftMetricLoss(Function):
    """The gradient of few classes is taken in forward, where all that it needs is at hand, and backward only scales it.

    With many classes a pass over the gradient costs more than keeping what it is made of: there it waits for backward.
    """

    @staticmethod
    def forward(ctx, logits, labels, weights, temperature, detach_threshold, metric, parameters, ignore_index):
        used, shares = labels, weights
        if ignore_index is not None:
            used, shares = masked(labels, weights, ignore_index, logits.dtype)
        gradient, waiting = None, ()
        together = ignore_index is None or logits.ndim == 2
        if together and small_batches.covers(logits):
            batch, wanted = (logits, used, shares, temperature), ctx.needs_input_grad[0]
            loss, gradient = small_batches.loss_and_gradient(*batch, metric, parameters, detach_threshold, wanted)
            ctx.save_for_backward(labels, weights, gradient)
            return loss
        step = step_of(temperature, logits)
        if together and (ignore_index is None or logits.numel() <= CHUNK or not laid_by_class(logits)):
            counts, state = counted(logits, used, shares, step)
            loss, B, A = by_hand.slopes_of_loss(metric, parameters, *counts)
            if isinstance(state, BySample | HugeSoftmax):
                ctx.kind, ctx.step, ctx.detach_threshold = type(state), step, detach_threshold
                waiting = used, shares, B, A, *state
            elif ctx.needs_input_grad[0]:
                gradient = state.gradient(Slopes(used, shares, B, A, step, detach_threshold))
        else:
            gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
            parts, states = list(chunks(logits, used, shares, gradient)), []
            sums = Counts(*(torch.stack(x).sum(0) for x in zip(*counted_parts(parts, step, states), strict=True)))
            loss, B, A = by_hand.slopes_of_loss(metric, parameters, *sums)
            for (_, own, share, out), state in zip(parts, states, strict=False):  # no states without a gradient
                result = state.gradient(Slopes(own, share, B, A, step, detach_threshold, out))
                out.copy_(result) if result is not out else None
        # Labels and weights are kept so that autograd notices if they are overwritten.
        ctx.save_for_backward(labels, weights, gradient, *waiting)
        return loss

    @staticmethod
    def backward(ctx, g):
        _, _, gradient, *waiting = ctx.saved_tensors

        def scaled() -> Tensor:
            if gradient is not None:
                return gradient * (g[..., None, None] if g.ndim else g)
            labels, weights, B, A, *state = waiting
            B, A = B * g.unsqueeze(-1), A * g.unsqueeze(-1)
            return ctx.kind(*state).gradient(Slopes(labels, weights, B, A, ctx.step, ctx.detach_threshold))

        return without_graph(scaled, g), None, None, None, None, None, None, None


def counted_parts(parts: list[tuple[Any, ...]], step: "Step", states: list["State"]) -> Iterator[Counts]:
    """The counts of parts (logits, labels, weights, gradient); where a gradient is wanted, states are added."""
    for logits, labels, weights, gradient in parts:
        counts, state = counted(logits, labels, weights, step, gradient)
        if gradient is not None:
            states.append(state)
        yield counts


def chunks(logits: Tensor, *rest: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Parts [k, d] of logits [n, d] or [..., n, d], with what belongs to their samples; None stays None.

    Where samples lie side by side in memory, parts have about CHUNK entries.
    """
    if logits.ndim > 2:
        for group in zip(logits, *(repeat(None) if x is None else x for x in rest)):  # noqa: B905 (repeat has no end)
            yield from chunks(*group)
        return
    n, d = logits.shape
    parts = -(-n * d // CHUNK) if laid_by_class(logits) else 1
    rows = -(-n // parts)
    for start in range(0, n, rows):
        yield tuple(None if x is None else x[start : start + rows] for x in (logits, *rest))


def laid_by_class(logits: Tensor) -> bool:
    """Whether logits [..., n, d] are counted class by class: few classes, or pixels, whose samples are neighbours."""
    n, d = logits.shape[-2:]
    return d > 2 and (d < FEW_CLASSES or (logits.stride(-2) == 1 and n > 1))


def without_graph(gradient: Callable[[], Tensor], g: Tensor) -> Tensor:
    """Computes a gradient without a graph and in full precision; g is what came from above."""
    if torch.is_autocast_enabled(g.device.type):  # backward may be called inside of the block forward left
        with torch.autocast(g.device.type, enabled=False):
            return without_graph(gradient, g)
    if not torch.is_grad_enabled():
        return gradient()
    with torch.no_grad():
        result = gradient()
    return _OnceOnly.apply(result.requires_grad_())


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
    logits: Tensor, labels: Tensor, weights: Tensor | None, step: "Step", gradient: Tensor | None = None
) -> tuple[Counts, "State"]:
    """The counts of a batch, and what their gradient needs, in the form that is quickest for it.

    Where the `gradient` [n, d] will go, less may be kept meanwhile.
    """
    classes = logits.shape[-1]
    if classes == 2:
        return TwoClasses.counted(logits, labels, weights, step)
    if laid_by_class(logits):
        return ByClass.counted(logits.mT, labels, weights, step, None if gradient is None else gradient.mT)
    p = logits.softmax(-1)
    if classes < MANY_CLASSES or p.device.type != "cpu":
        return BySample.counted(p, top_two(p), labels, weights, step)
    maxima = block_maxima(p)
    top = top_two_of_blocks(p, maxima)
    entries = Entries.above(p, step.a * top.p.sum(-1, keepdim=True), maxima) if step.a.min() >= SPARSE_CORNER else None
    if entries is None:
        return BySample.counted(p, top, labels, weights, step)
    return HugeSoftmax.counted(p, top, entries, labels, weights, step)


class Step(NamedTuple):
    """The step at one temperature [], or at one per leading index [..., 1, 1]; in tensors, quicker than numbers.

    `first` and `second` are the slopes for two classes, `second_bend` their difference; the others are in units of it.
    `hi_per_lo` is b / a. `corner` and `bending` are `hi_per_lo` and `bend` as numbers, if they are.
    """

    a: Tensor
    b: Tensor
    first: Tensor
    second: Tensor
    second_bend: Tensor
    bend: Tensor
    middle: Tensor
    one: Tensor
    hi_per_lo: Tensor
    corner: float | Tensor
    bending: float | Tensor

    @classmethod
    def at(cls, T: Tensor) -> "Step":
        a = ((1 - HALF_WIDTH * T) / 2).clamp_min(MIN_CORNER)
        middle = (1 - 2 * T) / (1 - 2 * a) * a / T
        first, upper = T / a, (1 - a) / a
        slopes = first, first * middle, first * (middle - 1)
        return cls(a, 1 - a, *slopes, middle - 1, middle, torch.ones_like(T), upper, upper, middle - 1)


@lru_cache
def step_at(temperature: float, dtype: torch.dtype, device: torch.device) -> Step:
    step = Step.at(torch.tensor(temperature, dtype=torch.float64, device="cpu"))
    tensors = [x.to(device, dtype) for x in step if isinstance(x, Tensor)]
    return Step._make((*tensors[:-2], float(step.corner), float(step.bending)))


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


class Slopes(NamedTuple):
    """What the gradient of a batch needs besides the state that counting left behind.

    `B` and `A` [..., d] are the slopes of the loss with respect to the diagonal and the predicted counts. `detach`
    treats the threshold as a constant; `out` is where ByClass puts the gradient.
    """

    labels: Tensor
    weights: Tensor | None
    B: Tensor
    A: Tensor
    step: Step
    detach: bool
    out: Tensor | None = None


class TwoClasses(NamedTuple):
    """s is 1, H of both classes sums to 1, and `slope` [..., n] is the weighted dH_1/dz_1."""

    slope: Tensor

    @classmethod
    def counted(cls, logits: Tensor, labels: Tensor, weights: Tensor | None, step: Step) -> tuple[Counts, "TwoClasses"]:
        if step.a.ndim:
            step = Step(*(x.squeeze(-1) for x in step if isinstance(x, Tensor)))
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

    def gradient(self, slopes: Slopes) -> Tensor:
        A, signs = slopes.A, signs_of_two(slopes.A.dtype, slopes.A.device)
        by_class = torch.addcmul((A * signs).sum(-1, keepdim=True), slopes.B, signs)
        along = by_class.gather(-1, slopes.labels).mul_(self.slope)
        return along.unsqueeze(-1) * signs


@lru_cache
def signs_of_two(dtype: torch.dtype, device: torch.device) -> Tensor:
    """How the logits of two classes act on their difference."""
    return torch.tensor([-1.0, 1.0], dtype=dtype).to(device)


class ByClass(NamedTuple):
    """Samples side by side in memory, [..., d, n]: for few classes, and for pixels, which come so.

    In units of lo, x = p / lo = e / (a (e1 + e2)) with e = exp(z - max z), the step's corners are the same for all
    samples, 1 and hi / lo, and above hi lies at most the largest entry, alone. `others` is H but at the own class,
    where it is 0; a part of a batch keeps x alone, where its gradient will go, as H follows from it in few passes. All
    else are rows [..., 1, n].
    """

    x: Tensor
    others: Tensor | None
    H_own: Tensor
    total: Tensor
    lo: Tensor
    last: Tensor
    share: Tensor
    x2: Tensor

    @classmethod
    def counted(
        cls, z: Tensor, labels: Tensor, weights: Tensor | None, step: Step, into: Tensor | None = None
    ) -> tuple[Counts, "ByClass"]:
        if into is not None and into.stride(-1) == 1:
            e = into.copy_(z)
        else:
            e = z.clone(memory_format=torch.contiguous_format)
        e.sub_(e.amax(-2, keepdim=True)).exp_()
        lower = torch.ops.aten.hardtanh_backward(e, e, 0.0, 1.0)  # all but the largest, which is 1
        e2, Z = lower.amax(-2, keepdim=True), e.sum(-2, keepdim=True)
        e2.masked_fill_(Z - lower.sum(-2, keepdim=True) > 1.5, 1)  # several are the largest
        lo_e = torch.addcmul(step.a, e2, step.a)
        lo, x = lo_e / Z, e.div_(lo_e)
        gap = torch.addcmul(step.one, lo, step.hi_per_lo, value=-1)
        per_gap = lo / gap
        share = torch.addcmul(step.one, lo_e, step.hi_per_lo, value=-1).mul_(per_gap).div_(gap)
        last = per_gap.sub_(step.middle)
        H, own = stepped(x, last, step), labels.unsqueeze(-2)
        H_own = H.gather(-2, own)
        # Adding the others up keeps the digits that a difference to the total would lose.
        parts = torch.cat((H_own, H.scatter_(-2, own, 0).sum(-2, keepdim=True)), -2)
        total = parts.sum(-2, keepdim=True)
        r = total.reciprocal() if weights is None else weights.unsqueeze(-2) / total
        empty = z.new_zeros((*z.shape[:-2], 2, z.shape[-2]))
        diagonal, missed = empty.scatter_add_(-1, own.expand(parts.shape), parts.mul_(r)).unbind(-2)
        predicted = (H @ r.mT).squeeze(-1).add_(diagonal)
        others = H if into is None else None
        return Counts(diagonal, missed, predicted), cls(x, others, H_own, total, lo, last, share, e2.div_(lo_e))

    def gradient(self, slopes: Slopes) -> Tensor:
        labels, weights, B, A, step, detach, out = slopes
        x, last, total = self.x, self.last, self.total
        r = total.reciprocal() if weights is None else weights.unsqueeze(-2) / total
        own = labels.unsqueeze(-2)
        B_own = B.unsqueeze(-2).gather(-1, own)
        if self.others is None:
            mean = (A.unsqueeze(-2) @ stepped(x, last, step)).addcmul_(B_own, self.H_own).div_(total)
        else:
            mean = (
                (A.unsqueeze(-2) @ self.others).addcmul_((A + B).unsqueeze(-2).gather(-1, own), self.H_own).div_(total)
            )
        e = (A.unsqueeze(-1) - mean).scatter_add_(-2, own, B_own).mul_(x).mul_(r)
        top = where_beyond(e, x, step.corner)
        eS = e.addcmul_(where_beyond(e, x, 1.0), step.bend).addcmul_(top, last)
        Q = eS.sum(-2, keepdim=True)
        out = x.new_empty(x.mT.shape) if out is None else out
        if detach:
            torch.addcmul(eS, x, Q.mul_(self.lo), value=-1, out=out.mT)
            return out
        shift = top.sum(-2, keepdim=True).mul_(self.share)
        two = torch.ge(x, self.x2, out=top).mul_(x)  # their sum is s, unless several are as large as p2
        eS.addcmul_(x, shift * self.lo, value=-1)
        torch.addcmul(eS, two, shift.sub_(Q).div_(two.sum(-2, keepdim=True)), out=out.mT)
        return out


def stepped(x: Tensor, last: Tensor, step: Step) -> Tensor:
    """H / lo of x = p / lo."""
    return torch.addcmul(x, beyond(x, 1.0), step.bend).addcmul_(beyond(x, step.corner), last)


def beyond(x: Tensor, corner: float | Tensor) -> Tensor:
    """[x - corner]+ of positive x."""
    return (x - corner).relu_() if isinstance(corner, Tensor) else torch.nn.functional.softshrink(x, corner)


def where_beyond(values: Tensor, x: Tensor, corner: float | Tensor) -> Tensor:
    """Values where x > corner, else 0."""
    if isinstance(corner, Tensor):
        return torch.gt(x, corner, out=torch.empty_like(x)).mul_(values)
    return torch.ops.aten.threshold_backward(values, x, corner)


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


class BySample(NamedTuple):
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
    ) -> tuple[Counts, "BySample"]:
        s = top.p.sum(-1, keepdim=True)
        lo, hi, gap, last = corners(s, step)
        p1, first = top.p.narrow(-1, 0, 1), top.classes.narrow(-1, 0, 1)
        beyond = (p1 - hi).relu_()
        above, bend = torch.gt(p, lo, out=torch.empty_like(p)), step.bending
        if isinstance(bend, Tensor):
            above, bend = above.mul_(bend), 1.0
        S = torch.addcmul(p, p, above, value=bend)
        H = torch.addcmul(S, above, lo, value=-bend, out=above)
        H.scatter_add_(-1, first, last * beyond)
        S.scatter_add_(-1, first, beyond.sign().mul_(last).mul_(p1))
        H_own, rest = without_own(H, labels.unsqueeze(-1))
        total = H_own + rest
        r = total.reciprocal() if weights is None else weights.unsqueeze(-1) / total
        hits, missed = ((r * x).squeeze(-1) for x in (H_own, rest))
        d = p.shape[-1]
        counts = Counts(per_class(hits, labels, d), per_class(missed, labels, d), (r.mT @ H).squeeze(-2))
        return counts, cls(p, H, S, total, r, s, top.p, top.classes, beyond.div_(gap).div_(p1), H_own)

    def gradient(self, slopes: Slopes) -> Tensor:
        labels, A = slopes.labels, slopes.A
        B_own = slopes.B.gather(-1, labels).unsqueeze(-1)
        mean = (self.H @ A.unsqueeze(-1)).addcmul_(B_own, self.H_own).div_(self.total)
        eS = (A.unsqueeze(-2) - mean).scatter_add_(-1, labels.unsqueeze(-1), B_own).mul_(self.S).mul_(self.r)
        Q = eS.sum(-1, keepdim=True)
        if slopes.detach:
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

    def gradient(self, slopes: Slopes) -> Tensor:
        labels, B, A = slopes.labels, slopes.B, slopes.A
        p, r, own = self.p, self.r, labels.unsqueeze(-1)
        B_own = B.gather(-1, labels).unsqueeze(-1)
        A_entries = A.flatten()[self.of_counts]
        along = p @ A.unsqueeze(-1)
        mean = (along + self.by_row(self.value * A_entries) + B_own * self.H_own) / self.total
        at_entries = self.of_rows(r) * (A_entries - self.of_rows(mean)) * self.slope
        at_own = r * B_own * self.S_own
        Q = shift = r * (along - mean) + self.by_row(at_entries) + at_own
        if not slopes.detach:
            first = self.top_classes.narrow(-1, 0, 1)
            A_first = A.gather(-1, first.squeeze(-1)).unsqueeze(-1)
            shift = r * (A_first + (first == own) * B_own - mean) * self.share
        gradient = torch.cat((r, -r * mean - shift), -1) @ torch.stack((A, torch.ones_like(A)), -2)
        gradient.mul_(p).scatter_add_(-1, own, at_own)
        gradient.view(-1).index_add_(0, self.of_p, at_entries)
        if slopes.detach:
            return gradient
        return gradient.scatter_add_(-1, self.top_classes, (shift - Q) / self.s * self.top_p)


State = TwoClasses | ByClass | BySample | HugeSoftmax


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
    """In turn on a CPU, where NumPy's search is twenty times as fast as topk."""
    return top_two_in_turn(p) if p.device.type == "cpu" else Top(*p.topk(2))


def top_two_in_turn(p: Tensor) -> Top:
    """The largest of p >= 0 is covered up while the second is looked for."""
    first = largest(p)
    p1 = p.gather(-1, first)
    second = largest(p.scatter_(-1, first, -1.0))
    classes = torch.cat((first, second), -1)
    return Top(p.scatter_(-1, first, p1).gather(-1, classes), classes)


def largest(p: Tensor) -> Tensor:
    """argmax [..., 1] of p [..., d] on the CPU, by NumPy."""
    return torch.from_numpy(p.numpy().argmax(-1, keepdims=True))


def top_two_of_blocks(p: Tensor, maxima: Tensor) -> Top:
    """Both lie in the two blocks that have the largest maxima."""
    d = p.shape[-1]
    members = members_of(top_two_in_turn(maxima).classes, maxima.shape[-1], d).flatten(-2)
    candidates = p.gather(-1, members.clamp_max(d - 1)).masked_fill_(members >= d, -1)
    top, places = top_two_in_turn(candidates)
    return Top(top, members.gather(-1, places))
