"""The papers' multilayer perceptrons, and how a population of them is computed by one batched product per layer."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU and dropout after each hidden one. Inputs [n, ...] are flattened; logits [n, outputs]."""

    def __init__(self, features: int, hidden: Sequence[int], outputs: int, dropout: float = 0.0):
        super().__init__()
        if not all(isinstance(width, int) and width > 0 for width in hidden):
            raise ValueError(f"model.hidden: expected widths of at least 1, such as [256,128], got {list(hidden)}")
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
    """Dropout of one training step: 1 for each hidden unit that is kept, and the factor that makes up for the rest."""

    kept: list[Tensor]  # of each hidden layer: bytes [P, n, width]
    scale: Tensor  # 1 / (1 - rate), [P, 1, 1]


class StackedMLP:
    """P perceptrons at once: inputs [P, n, sizes[0]] -> logits [P, n, sizes[-1]], and the gradient of the weights.

    A row of weights or gradient [P, N] holds the parameters of one `MLP`, in that module's order. Both passes are
    written by hand and use memory that is allocated once: autograd takes half as long again.
    """

    def __init__(self, sizes: Sequence[int]):
        self.sizes = sizes
        self.buffers: dict[tuple[str, torch.Size], list[Tensor]] = {}

    def bind(self, weights: Tensor, gradient: Tensor) -> None:
        """Read these weights [P, N or more] and write this gradient from now on."""
        self.layers, self.to_layers = layer_views(weights, self.sizes), layer_views(gradient, self.sizes)

    def memory(self, purpose: str, inputs: Tensor) -> list[Tensor]:
        """A buffer [P, n, width] for each hidden layer, reused by later batches of this size."""
        key = purpose, inputs.shape[:2]
        if key not in self.buffers:
            self.buffers[key] = [inputs.new_empty(*inputs.shape[:2], width) for width in self.sizes[1:-1]]
        return self.buffers[key]

    def forward(self, inputs: Tensor, masks: Masks | None = None) -> Tensor:
        """Logits of the inputs. `backward` differentiates the latest call."""
        self.units, self.masks = [inputs, *self.memory("units", inputs)], masks
        for k, (weight, bias) in enumerate(self.layers[:-1]):
            torch.baddbmm(bias, self.units[k], weight.mT, out=self.units[k + 1]).relu_()
            if masks is not None:
                self.units[k + 1].mul_(masks.kept[k]).mul_(masks.scale)
        weight, bias = self.layers[-1]  # logits are stored class by class: BLAS and softmax are slow on short rows
        return torch.baddbmm(bias.mT, weight, self.units[-1].mT).mT

    def backward(self, gradient: Tensor) -> None:
        """Write the weights' gradient of a number, given its gradient for the logits."""
        to_hidden = self.memory("gradients", self.units[0])
        for k in reversed(range(len(self.layers))):
            to_weight, to_bias = self.to_layers[k]
            torch.bmm(gradient.mT, self.units[k], out=to_weight)
            torch.sum(gradient, 1, keepdim=True, out=to_bias)
            if k > 0:
                # Units that ReLU or dropout set to 0 pass no gradient back; the others pass all of it, scaled.
                gradient = torch.bmm(gradient, self.layers[k][0], out=to_hidden[k - 1])
                torch.ops.aten.threshold_backward.grad_input(gradient, self.units[k], 0, grad_input=gradient)
                if self.masks is not None:
                    gradient.mul_(self.masks.scale)


def layer_views(weights: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Weight [P, b, a] and bias [P, 1, b] of every layer, as views of weights [P, N]."""
    views, start = [], 0
    for a, b in pairwise(sizes):
        weight, bias = weights[:, start : start + a * b], weights[:, start + a * b : start + a * b + b]
        views.append((weight.unflatten(1, (b, a)), bias.unsqueeze(1)))
        start += a * b + b
    return views


def wrapped(number: int) -> int:
    """A whole number as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


# The constants of SplitMix64 (Steele, Lea, Flood 2014).
GAMMA, FIRST, SECOND = map(wrapped, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Dropout:
    """Dropout masks for hidden layers of these widths and batches of up to `rows`. rates: [P].

    A mask depends only on its trial's key and the step. There is no generator state, so other trials, the device and a
    resume make no difference. SplitMix64 turns counters into 64-bit words, and each of a word's eight bytes decides
    about one unit, which is much cheaper than a random float per unit. Rates are therefore rounded to multiples of
    1/256 (0.25 and 0.5 are exact), and the scale follows the rounded rate.
    """

    def __init__(self, rates: Tensor, widths: Sequence[int], rows: int):
        dropped = (rates * 256).round()
        self.scale = (1 / (1 - dropped / 256))[:, None, None]
        self.dropped = dropped.to(torch.uint8)[:, None]
        self.counters = torch.arange(-(-rows * sum(widths) // 8), device=rates.device).mul_(GAMMA)
        self.words, self.shifted = (self.counters.new_empty(len(rates), len(self.counters)) for _ in range(2))
        pieces = self.words.view(torch.uint8)[:, : rows * sum(widths)].split([rows * width for width in widths], dim=1)
        self.kept = [piece.unflatten(1, (rows, width)) for piece, width in zip(pieces, widths, strict=True)]

    def masks(self, keys: Tensor, step: int, rows: int) -> Masks:
        """The masks of a step for a batch of `rows`; the next step overwrites them. keys: int64 [P]."""
        words = torch.add(self.counters, keys[:, None] + wrapped((step << 32) * GAMMA), out=self.words)
        for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
            # A logical shift: torch's own shift copies the sign bit.
            torch.bitwise_right_shift(words, shift, out=self.shifted).bitwise_and_((1 << (64 - shift)) - 1)
            words.bitwise_xor_(self.shifted).mul_(factor)
        words.view(torch.uint8).ge_(self.dropped)
        return Masks([kept[:, :rows] for kept in self.kept], self.scale)
