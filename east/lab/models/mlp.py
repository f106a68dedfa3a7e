"""The papers' multilayer perceptrons, and how a population of them is computed by one batched product per layer."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wrapped(number: int) -> int:
    """A whole number as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


# The constants of SplitMix64 (Steele, Lea, Flood 2014).
GAMMA, FIRST, SECOND = map(wrapped, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class MLP(nn.Module):
    """Linear layers with ReLU and dropout after each hidden one. Inputs [n, ...] are flattened; logits [n, outputs]."""

    def __init__(self, features: int, hidden: Sequence[int], outputs: int, dropout: float = 0.0):
        super().__init__()
        self.sizes = [features, *hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(self.sizes))
        self.hidden = list(hidden)
        self.dropout = dropout

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.flatten(1)
        for layer in self.layers[:-1]:
            x = F.dropout(layer(x).relu(), self.dropout, self.training)
        return self.layers[-1](x)


class Masks(NamedTuple):
    """Dropout of one training step. kept: bytes [P, n, width] of each hidden layer, 0 for a unit that is removed.

    scales: s^k [P, 1, 1] for layer k, with s = 1 / (1 - rate) for each trial.
    """

    kept: Sequence[Tensor]
    scales: Sequence[Tensor]


class StackedMLP:
    """P perceptrons at once: inputs [P, n, sizes[0]] -> logits [P, n, sizes[-1]], and the gradient of the weights.

    Each row of the weights [P, N] holds the parameters of one `MLP`, in that module's order; so does the gradient.
    Both passes are written by hand and use memory that is allocated once: for small networks, autograd and the
    allocator cost as much as the matrix products. Inputs are data and get no gradient.

    Dropout multiplies the units it keeps by s. Because ReLU(s z) = s ReLU(z), all of these factors can be applied once,
    to the logits: layer k computes its units divided by s^k, which only requires dividing its bias by s^k. A hidden
    layer then makes three passes over its units: product, ReLU, mask.
    """

    def __init__(self, sizes: Sequence[int]):
        self.sizes, self.last = sizes, len(sizes) - 2
        self.gradient = torch.empty(0)
        self.buffers: dict[tuple[str, torch.Size], list[Tensor]] = {}
        self.masks: Masks | None = None

    def bind(self, weights: Tensor) -> None:
        """Compute with these weights [P, N or more], in place, from now on."""
        size = sum(a * b + b for a, b in pairwise(self.sizes))
        self.layers = layer_views(weights[:, :size], self.sizes)
        if len(self.gradient) != len(weights):
            self.gradient = torch.empty_like(weights)[:, :size]
            self.to_layers = layer_views(self.gradient, self.sizes)
            self.buffers.clear()

    def forward(self, inputs: Tensor, masks: Masks | None = None) -> Tensor:
        """Logits of the inputs. `backward` differentiates the latest call."""
        x, self.masks = inputs, masks
        self.units = [inputs, *self.memory("units", inputs)]
        for k, (weight, bias) in enumerate(self.layers[:-1]):
            x = self.units[k + 1]
            scaled = bias if masks is None or k == 0 else bias / masks.scales[k]
            torch.baddbmm(scaled, self.units[k], weight.mT, out=x).relu_()
            if masks is not None:
                x.mul_(masks.kept[k])
        weight, bias = self.layers[-1]  # logits are stored class by class: BLAS and softmax are slow on short rows
        if masks is None:
            return torch.baddbmm(bias.mT, weight, x.mT).mT
        return torch.bmm(weight, x.mT).mul_(masks.scales[self.last]).add_(bias.mT).mT

    def backward(self, to_logits: Tensor) -> Tensor:
        """The gradient [P, N] of a number, given its gradient for the logits. The next call overwrites the result."""
        gradient, masks, to_hidden = to_logits, self.masks, self.memory("gradients", self.units[0])
        torch.sum(gradient, 1, keepdim=True, out=self.to_layers[-1][1])
        if masks is not None:
            gradient = gradient * masks.scales[self.last]
        for k in range(self.last, -1, -1):
            (weight, _), (to_weight, to_bias), units = self.layers[k], self.to_layers[k], self.units[k]
            if self.sizes[k] < self.sizes[k + 1]:  # BLAS is slow when the result has few columns
                to_weight.copy_(torch.bmm(units.mT, gradient).mT)
            else:
                torch.bmm(gradient.mT, units, out=to_weight)
            if k < self.last:
                torch.sum(gradient, 1, keepdim=True, out=to_bias)
                if masks is not None and k > 0:
                    to_bias.div_(masks.scales[k])
            if k > 0:
                # Units that ReLU or dropout set to 0 pass no gradient back; the others pass all of it.
                gradient = torch.bmm(gradient, weight, out=to_hidden[k - 1])
                torch.ops.aten.threshold_backward.grad_input(gradient, units, 0, grad_input=gradient)
        return self.gradient

    def memory(self, purpose: str, inputs: Tensor) -> list[Tensor]:
        """A buffer [P, n, width] for each hidden layer, reused by later batches of this size."""
        key = purpose, inputs.shape[:2]
        if key not in self.buffers:
            self.buffers[key] = [inputs.new_empty(*inputs.shape[:2], width) for width in self.sizes[1:-1]]
        return self.buffers[key]


def layer_views(weights: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Weight [P, b, a] and bias [P, 1, b] of every layer, as views of weights [P, N]."""
    shapes = list(pairwise(sizes))
    pieces = weights.split([count for a, b in shapes for count in (a * b, b)], dim=1)
    return [
        (weight.unflatten(1, (b, a)), bias.unsqueeze(1))
        for (a, b), weight, bias in zip(shapes, pieces[::2], pieces[1::2], strict=True)
    ]


class Dropout:
    """The dropout masks of an epoch for hidden layers of these widths. keys: int64 [P], rates [P].

    Set `keys` to start the next epoch.

    A mask depends only on its trial's key and the step. There is no generator state, so other trials, the device and a
    resume make no difference. SplitMix64 turns counters into 64-bit words, and each of a word's eight bytes decides
    about one unit, which is much cheaper than a random float per unit. Rates are therefore rounded to multiples of
    1/256 (0.25 and 0.5 are exact), and the scale follows the rounded rate.
    """

    def __init__(self, keys: Tensor, rates: Tensor, widths: Sequence[int], rows: int):
        """rows: the size of the largest batch."""
        dropped = (rates * 256).round()
        self.scales = [(1 / (1 - dropped / 256))[:, None, None] ** k for k in range(len(widths) + 1)]
        self.dropped, self.keys = dropped.to(torch.uint8)[:, None], keys
        self.counters = torch.arange(-(-rows * sum(widths) // 8), device=keys.device).mul_(GAMMA)
        self.words, self.shifted = (keys.new_empty(len(keys), len(self.counters)) for _ in range(2))
        pieces = self.words.view(torch.uint8)[:, : rows * sum(widths)].split([rows * width for width in widths], dim=1)
        self.kept = [piece.unflatten(1, (rows, width)) for piece, width in zip(pieces, widths, strict=True)]

    def masks(self, step: int, rows: int) -> Masks:
        """The masks of a step for a batch of `rows`; the next step overwrites them."""
        offset = self.keys[:, None] + wrapped((step << 32) * GAMMA)
        words = torch.add(self.counters, offset, out=self.words)
        for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
            # A logical shift: torch's own shift copies the sign bit.
            torch.bitwise_right_shift(words, shift, out=self.shifted).bitwise_and_((1 << (64 - shift)) - 1)
            words.bitwise_xor_(self.shifted)
            if factor != 1:
                words.mul_(factor)
        words.view(torch.uint8).ge_(self.dropped)
        return Masks([kept[:, :rows] for kept in self.kept], self.scales)
