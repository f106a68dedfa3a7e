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
  few entries exceed lo, and the gradient is p times a matrix of rank two, plus terms at those few (`HugeSoftmax`).

With D and P the derivatives of the loss with respect to the diagonal and the predicted counts, and g_j = P_j, plus D_j
at the true class, e = (g - mean of g weighted by H) / sum H, times the sample's weight. The gradient with respect to
the logits is e S - p shift, plus p dL/ds at the two largest entries. In the code `total` is sum H, `r` is the weight
divided by it, and Q is sum_j e_j S_j. If the threshold is detached, dL/ds is 0 and Q takes the place of shift.

With two classes s = 1 and H sums to 1, so everything is a function of the difference of the logits (`TwoClasses`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from east.confusion import per_class
from east.losses import by_hand, on_cpu
from east.losses.inputs import masked
from east.losses.on_cpu import FEW_CLASSES, MANY_CLASSES
from east.losses.steps import half_width
from east.metrics import Metric

# With MANY_CLASSES, HugeSoftmax looks up the entries above lo on a CPU,
SPARSE_CORNER = 0.125  # unless a is below this, where 1 - (sum of the entries above lo) loses precision,
SPARSE_SHARE = 32  # or more than one block in 32 holds such an entry, as before any training
BLOCK = 8  # classes per block, approximately; block maxima speed up the search for large entries
LANES = 32  # the number of blocks is a multiple of this, for vectorised code
CHUNK = 1 << 18  # entries; larger batches are counted in chunks, so that temporaries are few and stay in cache


class Counts(NamedTuple):
    """Soft counts [..., d] of a batch, summed without differences; see Confusion."""

    diagonal: Tensor
    missed: Tensor
    false_positives: Tensor

    @property
    def predicted(self) -> Tensor:
        return self.diagonal + self.false_positives


def soft_counts(
    logits: Tensor, labels: Tensor, weights: Tensor | None, temperature: float | Tensor, detach_threshold: bool = False
) -> Counts:
    """Soft counts [..., d] of logits [..., n, d] and labels [..., n]; eq. 4-5, arXiv 2405.20954.

    `weights` [..., n] are sample weights; `temperature` is a number or a tensor over the leading dimensions.
    """
    step = step_for(temperature, logits)
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
    """1 - metric of the soft counts as a single autograd node, for metrics with hand-derived slopes.

    With `ignore_index`, all samples of logits [n, d], or [k, n, d] with k > 1, are one batch, except those with that
    label; if no others are left, the loss is 0. Without it, there is one loss per leading index.
    """
    if logits.requires_grad and not torch.is_grad_enabled():
        logits = logits.detach()  # otherwise forward would compute the gradient anyway
    return _SoftMetricLoss.apply(
        logits, labels, weights, temperature, detach_threshold, metric, parameters, ignore_index
    )


class _SoftCounts(Function):
    @staticmethod
    def forward(ctx, logits, labels, weights, step, detach_threshold):
        counts, state = count_batch(logits, labels, weights, step)
        ctx.save_for_backward(labels, weights, *state)
        ctx.kind, ctx.step, ctx.detach_threshold, ctx.logits = type(state), step, detach_threshold, logits
        return tuple(counts)

    @staticmethod
    def backward(ctx, by_diagonal, by_missed, by_false_positives):
        labels, weights, *state = ctx.saved_tensors

        def gradient() -> Tensor:
            D, P = slopes_by_margins(by_diagonal, by_missed, by_false_positives)
            return ctx.kind(*state).gradient(Upstream(labels, weights, D, P, ctx.step, ctx.detach_threshold))

        return without_graph(gradient, ctx, by_diagonal), None, None, None, None


def slopes_by_margins(by_diagonal: Tensor, by_missed: Tensor, by_false_positives: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes D and P by diagonal and predicted counts: if only the diagonal grows, both kinds of errors fall."""
    return by_diagonal - by_missed - by_false_positives, by_false_positives


class _SoftMetricLoss(Function):
    """Where possible, forward computes the gradient, while its inputs are in memory, and backward only scales it.

    BySample and HugeSoftmax leave it to backward: a pass over their gradient costs more than keeping the state that it
    is computed from.
    """

    @staticmethod
    def forward(ctx, logits, labels, weights, temperature, detach_threshold, metric, parameters, ignore_index):
        used_labels, used_weights, ctx.logits = labels, weights, logits
        if ignore_index is not None:
            used_labels, used_weights = masked(labels, weights, ignore_index, logits.dtype)
        gradient, deferred = None, ()
        needs_gradient = ctx.needs_input_grad[0]
        sums_images = ignore_index is not None and logits.ndim > 2
        if not sums_images and on_cpu.covers(logits):
            batch = logits, used_labels, used_weights, temperature
            loss, gradient = on_cpu.loss_and_gradient(*batch, metric, parameters, detach_threshold, needs_gradient)
            ctx.save_for_backward(labels, weights, gradient)
            return loss
        step = step_for(temperature, logits)
        in_one_chunk = ignore_index is None or logits.numel() <= CHUNK or not counts_by_class(logits)
        if not sums_images and in_one_chunk:
            counts, state = count_batch(logits, used_labels, used_weights, step)
            loss, D, P = by_hand.loss_and_slopes(metric, parameters, *counts)
            if isinstance(state, BySample | HugeSoftmax):
                ctx.kind, ctx.step, ctx.detach_threshold = type(state), step, detach_threshold
                deferred = used_labels, used_weights, D, P, *state
            elif needs_gradient:
                gradient = state.gradient(Upstream(used_labels, used_weights, D, P, step, detach_threshold))
        else:
            gradient = torch.empty_like(logits) if needs_gradient else None
            chunks, states = list(split_into_chunks(logits, used_labels, used_weights, gradient)), []
            counts = zip(*count_chunks(chunks, step, states), strict=True)
            loss, D, P = by_hand.loss_and_slopes(metric, parameters, *(torch.stack(x).sum(0) for x in counts))
            for (_, *batch, out), state in zip(chunks, states, strict=False):  # no states without a gradient
                result = state.gradient(Upstream(*batch, D, P, step, detach_threshold, out))
                out.copy_(result) if result is not out else None
        # Saving labels and weights lets autograd notice if they are overwritten.
        ctx.save_for_backward(labels, weights, gradient, *deferred)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        _, _, gradient, *deferred = ctx.saved_tensors
        if gradient is not None and not torch.is_grad_enabled() and is_one(upstream):
            # Not a view or a copy: autograd sees whether the graph still holds it, and copies it only then.
            ctx.logits = None
            return gradient, None, None, None, None, None, None, None

        def scaled() -> Tensor:
            if gradient is not None:
                return gradient * (upstream[..., None, None] if upstream.ndim else upstream)
            labels, weights, D, P, *state = deferred
            D, P = D * upstream.unsqueeze(-1), P * upstream.unsqueeze(-1)
            return ctx.kind(*state).gradient(Upstream(labels, weights, D, P, ctx.step, ctx.detach_threshold))

        return without_graph(scaled, ctx, upstream), None, None, None, None, None, None, None


def is_one(upstream: Tensor) -> bool:
    """Whether a gradient is 1, as in `loss.backward()`; only on a CPU, where looking costs nothing."""
    return upstream.device.type == "cpu" and upstream.ndim == 0 and upstream.item() == 1


def count_chunks(chunks: list[tuple[Any, ...]], step: "Step", states: list["State"]) -> Iterator[Counts]:
    """The counts of chunks (logits, labels, weights, gradient); `states` gets the state of chunks with a gradient."""
    for logits, labels, weights, gradient in chunks:
        counts, state = count_batch(logits, labels, weights, step, gradient)
        if gradient is not None:
            states.append(state)
        yield counts


def split_into_chunks(logits: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Chunks [k, d] of logits [n, d] or [..., n, d], each with its part of the other tensors; None stays None.

    ByClass gets chunks of about CHUNK entries; the other forms take the n samples of a leading index at once.
    """
    if logits.ndim > 2:
        for group in zip(logits, *(repeat(None) if x is None else x for x in others)):  # noqa: B905 (repeat has no end)
            yield from split_into_chunks(*group)
        return
    n, d = logits.shape
    count = -(-n * d // CHUNK) if counts_by_class(logits) else 1
    rows = -(-n // count)
    for start in range(0, n, rows):
        yield tuple(None if x is None else x[start : start + rows] for x in (logits, *others))


def counts_by_class(logits: Tensor) -> bool:
    """Whether ByClass counts logits [..., n, d]: few classes, or pixels, whose samples are adjacent in memory."""
    n, d = logits.shape[-2:]
    return d > 2 and (d < FEW_CLASSES or (logits.stride(-2) == 1 and n > 1))


def without_graph(gradient: Callable[[], Tensor], ctx: Any, upstream: Tensor) -> Tensor:
    """Compute a gradient without a graph and in full precision; a second derivative raises an error.

    ctx: whose `logits` the gradient belongs to. A plain backward releases them, as autograd does with what it saves.
    upstream: the gradient that backward received.
    """
    if torch.is_autocast_enabled(upstream.device.type):  # backward may run inside an autocast block that forward left
        with torch.autocast(upstream.device.type, enabled=False):
            return without_graph(gradient, ctx, upstream)
    if not torch.is_grad_enabled():
        ctx.logits = None
        return gradient()
    with torch.no_grad():
        result = gradient()
    return _FirstDerivativeOnly.apply(result.requires_grad_(), ctx.logits)


class _FirstDerivativeOnly(Function):
    """The gradient, connected to the logits, but not differentiable: a second derivative would otherwise be 0."""

    @staticmethod
    def forward(ctx, gradient, logits):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, upstream):
        raise RuntimeError(
            "MetricLoss's closed form has no second derivative; instead, compute the metric of "
            "Confusion.from_memberships(loss.memberships(logits), labels), which autograd differentiates throughout"
        )


def count_batch(
    logits: Tensor, labels: Tensor, weights: Tensor | None, step: "Step", gradient: Tensor | None = None
) -> tuple[Counts, "State"]:
    """The soft counts of a batch and the state that their gradient needs, in the fastest form for the batch's shape.

    gradient [n, d]: where the gradient will be written. ByClass stores x there in the meantime, and keeps less state.
    """
    classes = logits.shape[-1]
    if classes == 2:
        return TwoClasses.count_batch(logits, labels, weights, step)
    if counts_by_class(logits):
        return ByClass.count_batch(logits.mT, labels, weights, step, None if gradient is None else gradient.mT)
    p = logits.softmax(-1)
    if classes < MANY_CLASSES or p.device.type != "cpu":
        return BySample.count_batch(p, top_two(p), labels, weights, step)
    maxima = block_maxima(p)
    top = top_two_of_blocks(p, maxima)
    entries = None
    if step.a.min() >= SPARSE_CORNER:
        entries = Entries.above(p, step.a * top.p.sum(-1, keepdim=True), maxima)
    if entries is None:
        return BySample.count_batch(p, top, labels, weights, step)
    return HugeSoftmax.count_batch(p, top, entries, labels, weights, step)


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
        a = (1 - half_width(T)) / 2
        middle = (1 - 2 * T) / (1 - 2 * a) * a / T
        first, hi_per_lo = T / a, (1 - a) / a
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


class HugeSoftmax(NamedTuple):
    """The state for many classes: H = p except at the m entries above lo, where H - p and S - p [m] are kept.

    `rows`, `p_positions` and `count_positions` [m] locate these entries, as in `Entries`.
    """

    p: Tensor
    H_extra: Tensor
    S_extra: Tensor
    rows: Tensor
    p_positions: Tensor
    count_positions: Tensor
    H_true: Tensor
    S_true: Tensor
    total: Tensor
    r: Tensor
    s: Tensor
    top_p: Tensor
    top_classes: Tensor
    shift_factor: Tensor

    @classmethod
    def count_batch(
        cls, p: Tensor, top: TopTwo, entries: "Entries", labels: Tensor, weights: Tensor | None, step: Step
    ) -> tuple[Counts, "HugeSoftmax"]:
        s = top.p.sum(-1, keepdim=True)
        lo, hi, gap_hi, bend_hi = corners(s, step)
        p1 = top.p.narrow(-1, 0, 1)
        row_corners = lo, hi, bend_hi, step.bend_lo.expand_as(lo)
        H_extra, S_extra = corner_terms(entries.p, *(entries.take_rows(x) for x in row_corners))
        true_class, d = labels.unsqueeze(-1), p.shape[-1]
        p_true = p.gather(-1, true_class)
        H_extra_true, S_extra_true = corner_terms(p_true, *row_corners)
        H_true, S_true = p_true + H_extra_true, p_true + S_extra_true
        H_extra_others = H_extra * (entries.classes != entries.take_rows(labels))
        rest = p.scatter_(-1, true_class, 0).sum(-1, keepdim=True).add_(entries.sum_by_row(H_extra_others))
        total = H_true + rest
        r = total.reciprocal() if weights is None else weights.unsqueeze(-1) / total
        shift_factor = (p1 - hi).relu_() * lo / gap_hi**2
        false_positives = (r.mT @ p).squeeze(-2)
        false_positives.view(-1).index_add_(0, entries.count_positions, entries.take_rows(r) * H_extra_others)
        p.scatter_(-1, true_class, p_true)
        diagonal, missed = (per_class((r * x).squeeze(-1), labels, d) for x in (H_true, rest))
        positions = entries.rows, entries.p_positions, entries.count_positions
        per_row = H_true, S_true, total, r, s, top.p, top.classes, shift_factor
        return Counts(diagonal, missed, false_positives), cls(p, H_extra, S_extra, *positions, *per_row)

    def take_rows(self, x: Tensor) -> Tensor:
        return x.flatten()[self.rows]

    def sum_by_row(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.total).view(-1).index_add_(0, self.rows, values).view(self.total.shape)

    def gradient(self, upstream: Upstream) -> Tensor:
        labels, D, P = upstream.labels, upstream.D, upstream.P
        p, r, true_class = self.p, self.r, labels.unsqueeze(-1)
        D_true = D.gather(-1, labels).unsqueeze(-1)
        P_entries = P.flatten()[self.count_positions]
        p_dot_P = p @ P.unsqueeze(-1)
        mean = (p_dot_P + self.sum_by_row(self.H_extra * P_entries) + D_true * self.H_true) / self.total
        at_entries = self.take_rows(r) * (P_entries - self.take_rows(mean)) * self.S_extra
        at_true = r * D_true * self.S_true
        Q = shift = r * (p_dot_P - mean) + self.sum_by_row(at_entries) + at_true
        if not upstream.detach_threshold:
            first = self.top_classes.narrow(-1, 0, 1)
            P_first = P.gather(-1, first.squeeze(-1)).unsqueeze(-1)
            shift = r * (P_first + (first == true_class) * D_true - mean) * self.shift_factor
        gradient = torch.cat((r, -r * mean - shift), -1) @ torch.stack((P, torch.ones_like(P)), -2)
        gradient.mul_(p).scatter_add_(-1, true_class, at_true)
        gradient.view(-1).index_add_(0, self.p_positions, at_entries)
        if upstream.detach_threshold:
            return gradient
        return gradient.scatter_add_(-1, self.top_classes, (shift - Q) / self.s * self.top_p)


State = TwoClasses | ByClass | BySample | HugeSoftmax


def corner_terms(p: Tensor, lo: Tensor, hi: Tensor, bend_hi: Tensor, bend_lo: Tensor) -> tuple[Tensor, Tensor]:
    """What the corners add to p: H - p and S - p."""
    excess_lo, excess_hi = (p - lo).relu_(), (p - hi).relu_()
    H_extra = bend_lo * excess_lo + bend_hi * excess_hi
    return H_extra, (bend_lo * excess_lo.sign_() + bend_hi * excess_hi.sign_()) * p


class Entries:
    """The m entries of p [..., n, d] above lo, and where they are: all [m].

    `rows` are their samples, `p_positions` their positions in the flattened p, and `count_positions` the positions of
    their `classes` in the flattened counts [..., d].
    """

    def __init__(self, p: Tensor, rows: Tensor, classes: Tensor):
        n, d = p.shape[-2:]
        self.shape = (*p.shape[:-1], 1)
        self.rows, self.classes = rows, classes
        self.p_positions = rows * d + classes
        self.count_positions = rows // n * d + classes
        self.p = p.view(-1)[self.p_positions]

    def take_rows(self, x: Tensor) -> Tensor:
        """x [..., n, 1] at the samples of the entries: [m]."""
        return x.flatten()[self.rows]

    def sum_by_row(self, values: Tensor) -> Tensor:
        """Sum of values [m] over the entries of each sample: [..., n, 1]."""
        return values.new_zeros(self.shape).view(-1).index_add_(0, self.rows, values).view(self.shape)

    @classmethod
    def above(cls, p: Tensor, lo: Tensor, maxima: Tensor) -> "Entries | None":
        """The entries above lo [..., n, 1], looked up in blocks with a maximum above it; None if there are too many."""
        d, blocks = p.shape[-1], maxima.shape[-1]
        candidates = (maxima > lo).view(-1).nonzero().squeeze(-1)
        if len(candidates) * SPARSE_SHARE > maxima.numel():
            return None
        rows = candidates // blocks
        members = block_members(candidates - rows * blocks, blocks, d)
        positions = (members + (rows * d).unsqueeze(-1)).clamp_max_(p.numel() - 1)
        is_above = (p.view(-1).take(positions) > lo.view(-1)[rows].unsqueeze(-1)) & (members < d)
        positions = positions[is_above]
        rows = positions // d
        return cls(p, rows, positions - rows * d)


def block_maxima(p: Tensor) -> Tensor:
    """Maxima [..., k] of k interleaved blocks of p [..., d]: block j holds the classes j, j+k, j+2k, …"""
    blocks = max(LANES, p.shape[-1] // BLOCK // LANES * LANES)
    whole = p.shape[-1] // blocks * blocks
    maxima = p[..., :whole].unflatten(-1, (-1, blocks)).amax(-2)
    remainder = p.shape[-1] - whole
    maxima[..., :remainder] = torch.maximum(maxima[..., :remainder], p[..., whole:])
    return maxima


def block_members(block: Tensor, blocks: int, classes: int) -> Tensor:
    """The classes [..., size] in each block [...]; indices beyond the last class are padding."""
    size = -(-classes // blocks)
    return block.unsqueeze(-1) + torch.arange(0, size * blocks, blocks, device=block.device)


def top_two(p: Tensor) -> TopTwo:
    """The two largest entries of each sample; on a CPU one after the other with NumPy, twenty times as fast as topk."""
    return top_two_in_turn(p) if p.device.type == "cpu" else TopTwo(*p.topk(2))


def top_two_in_turn(p: Tensor) -> TopTwo:
    """Find the largest entry of p >= 0, overwrite it to find the second largest, and put it back."""
    first = argmax(p)
    p1 = p.gather(-1, first)
    second = argmax(p.scatter_(-1, first, -1.0))
    classes = torch.cat((first, second), -1)
    return TopTwo(p.scatter_(-1, first, p1).gather(-1, classes), classes)


def argmax(p: Tensor) -> Tensor:
    """argmax [..., 1] of p [..., d] on the CPU, by NumPy."""
    return torch.from_numpy(p.numpy().argmax(-1, keepdims=True))


def top_two_of_blocks(p: Tensor, maxima: Tensor) -> TopTwo:
    """The two largest entries, which are in the two blocks with the largest maxima."""
    d = p.shape[-1]
    members = block_members(top_two_in_turn(maxima).classes, maxima.shape[-1], d).flatten(-2)
    candidates = p.gather(-1, members.clamp_max(d - 1)).masked_fill_(members >= d, -1)
    top, positions = top_two_in_turn(candidates)
    return TopTwo(top, members.gather(-1, positions))
