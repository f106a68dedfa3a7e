"""Soft counts, and 1 - metric of them, as autograd nodes: the fastest form for each batch, in chunks if it is large."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from east.arrays import fastest
from east.losses import huge_softmax, on_cpu
from east.losses.closed_form import (
    ByClass,
    BySample,
    Counts,
    Step,
    TwoClasses,
    Upstream,
    counts_by_class,
    step_for,
    top_two,
)
from east.losses.huge_softmax import HugeSoftmax
from east.losses.inputs import blanked, masked
from east.losses.on_cpu import MANY_CLASSES
from east.losses.slopes import loss_and_slopes
from east.metrics import Metric

CHUNK = 1 << 18  # entries; larger batches are counted in chunks, so that temporaries are few and stay in cache

State = TwoClasses | ByClass | BySample | HugeSoftmax


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
    rest = temperature, detach_threshold, metric, parameters
    if on_cpu.covers(logits) and (ignore_index is None or logits.ndim == 2):
        return loss_on_cpu(logits, labels, weights, ignore_index, *rest)
    if ignore_index is None:
        return _SoftMetricLoss.apply(logits, labels, weights, None, *rest)
    counted = masked(labels, weights, ignore_index, logits.dtype)
    if counted[1] is None:
        return _SoftMetricLoss.apply(logits, labels, weights, counted, *rest)
    if logits.is_cpu:
        loss = _SoftMetricLoss.apply(logits, labels, weights, counted, *rest)
        if not math.isnan(loss.item()):  # then there is no need to copy large logits
            return loss
    return _SoftMetricLoss.apply(blanked(logits, counted[1]), labels, weights, counted, *rest)


def loss_on_cpu(logits: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int | None, *rest: Any) -> Tensor:
    """soft_metric_loss for logits that on_cpu covers; `rest` are its temperature and what follows."""
    classes, counted = logits.shape[-1], (labels, weights)
    if not on_cpu.are_classes(labels, classes) or ignore_index in range(classes):
        if ignore_index is not None:
            counted = masked(labels, weights, ignore_index, logits.dtype)
        if not on_cpu.are_classes(counted[0], classes):
            raise IndexError("a label is not the index of a class")  # Loss.forward and per_trial report its value
    if ignore_index is not None:
        logits = blanked(logits, counted[1])
    return _LossOnCPU.apply(logits, labels, weights, *counted, *rest)


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


def slopes_at(metric: Metric, parameters: Mapping[str, Any], *counts: Tensor) -> tuple[Tensor, ...]:
    """1 - metric [...] and its slopes D and P [..., d] at counts [..., d], with their dtype and device."""
    like = counts[0]
    loss, *slopes = (
        torch.as_tensor(x, device=like.device).to(like.dtype)
        for x in loss_and_slopes(metric, parameters, *map(fastest, counts))
    )
    return loss, *(x.expand(like.shape) for x in slopes)


class _LossOnCPU(Function):
    """Forward computes the gradient, backward only scales it. `counted_labels` and `counted_weights` may be masked."""

    @staticmethod
    def forward(ctx, logits, labels, weights, counted_labels, counted_weights, *rest):
        batch = logits, counted_labels, counted_weights, *rest
        loss, gradient = on_cpu.loss_and_gradient(*batch, needs_gradient=ctx.needs_input_grad[0])
        ctx.logits = logits
        ctx.save_for_backward(labels, weights, gradient)  # labels, weights: to notice if they are overwritten
        return loss

    @staticmethod
    def backward(ctx, upstream):
        gradient = ctx.saved_tensors[2]
        return scaled(gradient, ctx, upstream), None, None, None, None, None, None, None, None


class _SoftMetricLoss(Function):
    """Where possible, forward computes the gradient, while its inputs are in memory, and backward only scales it.

    BySample and HugeSoftmax leave it to backward: a pass over their gradient costs more than keeping the state that it
    is computed from. `counted`: labels and weights as `masked` returns them, if all samples are one batch.
    """

    @staticmethod
    def forward(ctx, logits, labels, weights, counted, temperature, detach_threshold, metric, parameters):
        used_labels, used_weights = (labels, weights) if counted is None else counted
        ctx.logits, gradient, deferred = logits, None, ()
        needs_gradient = ctx.needs_input_grad[0]
        step = step_for(temperature, logits)
        sums_images = counted is not None and logits.ndim > 2
        in_one_chunk = counted is None or logits.numel() <= CHUNK or not counts_by_class(logits)
        if not sums_images and in_one_chunk:
            counts, state = count_batch(logits, used_labels, used_weights, step)
            loss, D, P = slopes_at(metric, parameters, *counts)
            if isinstance(state, BySample | HugeSoftmax):
                ctx.kind, ctx.step, ctx.detach_threshold = type(state), step, detach_threshold
                deferred = used_labels, used_weights, D, P, *state
            elif needs_gradient:
                gradient = state.gradient(Upstream(used_labels, used_weights, D, P, step, detach_threshold))
        else:
            gradient = torch.empty_like(logits) if needs_gradient else None
            chunks, states = list(split_into_chunks(logits, used_labels, used_weights, gradient)), []
            counts = zip(*count_chunks(chunks, step, states), strict=True)
            loss, D, P = slopes_at(metric, parameters, *(torch.stack(x).sum(0) for x in counts))
            for (_, *batch, out), state in zip(chunks, states, strict=False):  # no states without a gradient
                result = state.gradient(Upstream(*batch, D, P, step, detach_threshold, out))
                out.copy_(result) if result is not out else None
        # Saving labels and weights lets autograd notice if they are overwritten.
        ctx.save_for_backward(labels, weights, gradient, *deferred)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        _, _, gradient, *deferred = ctx.saved_tensors
        if gradient is not None:
            return scaled(gradient, ctx, upstream), None, None, None, None, None, None, None

        def from_state() -> Tensor:
            labels, weights, D, P, *state = deferred
            D, P = D * upstream.unsqueeze(-1), P * upstream.unsqueeze(-1)
            return ctx.kind(*state).gradient(Upstream(labels, weights, D, P, ctx.step, ctx.detach_threshold))

        return without_graph(from_state, ctx, upstream), None, None, None, None, None, None, None


def scaled(gradient: Tensor, ctx: Any, upstream: Tensor) -> Tensor:
    """The gradient [..., n, d] from forward times the one [...] that backward received; ctx as in `without_graph`."""
    if is_one(upstream) and not torch.is_grad_enabled():
        # Not a view or a copy: autograd sees whether the graph still holds it, and copies it only then.
        ctx.logits = None
        return gradient
    factor = upstream[..., None, None] if upstream.ndim else upstream
    return without_graph(lambda: gradient * factor, ctx, upstream)


def is_one(upstream: Tensor) -> bool:
    """Whether a gradient is 1, as in `loss.backward()`; only on a CPU, where looking costs nothing."""
    return upstream.is_cpu and upstream.ndim == 0 and upstream.item() == 1


def count_batch(
    logits: Tensor, labels: Tensor, weights: Tensor | None, step: Step, gradient: Tensor | None = None
) -> tuple[Counts, State]:
    """The soft counts of a batch and the state that their gradient needs, in the fastest form for the batch's shape.

    gradient [n, d]: where the gradient will be written. ByClass stores x there in the meantime, and keeps less state.
    """
    classes = logits.shape[-1]
    if classes == 2:
        return TwoClasses.count_batch(logits, labels, weights, step)
    if counts_by_class(logits):
        return ByClass.count_batch(logits.mT, labels, weights, step, None if gradient is None else gradient.mT)
    p = logits.softmax(-1)
    if classes < MANY_CLASSES or not p.is_cpu:
        return BySample.count_batch(p, top_two(p), labels, weights, step)
    return huge_softmax.count_batch(p, labels, weights, step)


def count_chunks(chunks: list[tuple[Any, ...]], step: Step, states: list[State]) -> Iterator[Counts]:
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
