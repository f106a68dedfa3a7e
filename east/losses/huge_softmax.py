"""The closed form for thousands of classes: only the entries above lo are visited one by one.

Elsewhere H = p and the probabilities sum to 1, so counts and gradient are products with p, plus terms at these entries.
Maxima of blocks find them without looking at every entry. See closed_form.py for the mathematics and the names.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from east.confusion import per_class
from east.losses.closed_form import BySample, Counts, Step, TopTwo, Upstream, corners, top_two_in_turn

SPARSE_CORNER = 0.125  # with a below this, 1 - (sum of the entries above lo) loses precision
SPARSE_SHARE = 32  # if more than one block in 32 holds an entry above lo, as before any training, BySample is faster
BLOCK = 8  # classes per block, approximately; block maxima speed up the search for large entries
LANES = 32  # the number of blocks is a multiple of this, for vectorised code


def count_batch(
    p: Tensor, labels: Tensor, weights: Tensor | None, step: Step
) -> tuple[Counts, "HugeSoftmax | BySample"]:
    """The soft counts of probabilities p [..., n, d] and the state that their gradient needs."""
    maxima = block_maxima(p)
    top = top_two_of_blocks(p, maxima)
    entries = None
    if step.a.min() >= SPARSE_CORNER:
        entries = Entries.above(p, step.a * top.p.sum(-1, keepdim=True), maxima)
    if entries is None:
        return BySample.count_batch(p, top, labels, weights, step)
    return HugeSoftmax.count_batch(p, top, entries, labels, weights, step)


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


def top_two_of_blocks(p: Tensor, maxima: Tensor) -> TopTwo:
    """The two largest entries, which are in the two blocks with the largest maxima."""
    d = p.shape[-1]
    members = block_members(top_two_in_turn(maxima).classes, maxima.shape[-1], d).flatten(-2)
    candidates = p.gather(-1, members.clamp_max(d - 1)).masked_fill_(members >= d, -1)
    top, positions = top_two_in_turn(candidates)
    return TopTwo(top, members.gather(-1, positions))
