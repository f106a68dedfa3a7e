"""The papers' multilayer perceptrons, and how a population of them is computed by one batched product per layer."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The constants of SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
GAMMA, FIRST, SECOND = (c - (c >> 63 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


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


class StackedMLP(torch.autograd.Function):
    """P perceptrons at once: inputs [P, n, sizes[0]], weights [P, N] -> logits [P, n, sizes[-1]].

    weights: each row holds the parameters of an `MLP` in its own order. Their gradient is written into one [P, N] as
    well, so that the optimiser needs no copy. Inputs are data and get no gradient.
    masks: bytes [P, n, width] for each hidden layer, 0 where dropout removes a unit; rates [P]: the share removed.

    Dropout scales what it keeps by s = 1 / (1 - rate). ReLU(s z) = s ReLU(z), so the scales of all hidden layers are
    moved behind the last one: layer k computes its values divided by s^k, for which its bias is divided by s^k, and
    only the logits are multiplied. A hidden layer then takes three passes over its units: product, ReLU, bytes.
    """

    @staticmethod
    def forward(
        ctx, inputs: Tensor, weights: Tensor, sizes: Sequence[int], masks: Sequence[Tensor] | None, rates: Tensor | None
    ) -> Tensor:
        scale = torch.ones_like(weights[:, :1]) if rates is None else 1 / (1 - rates[:, None])
        x, activations, last = inputs, [], len(sizes) - 2
        for k, (weight, bias) in enumerate(layer_views(weights, sizes)):
            activations.append(x)
            bias = bias if masks is None else bias / scale**k
            x = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
            if k < last:
                x = x.relu_() if masks is None else x.relu_().mul_(masks[k])
        ctx.save_for_backward(weights, scale, *activations)
        ctx.sizes, ctx.scaled = sizes, masks is not None
        return x * (scale**last).unsqueeze(1) if ctx.scaled else x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor, None, None, None]:
        weights, scale, *activations = ctx.saved_tensors
        to_weights = torch.empty_like(weights)
        last = len(activations) - 1
        if ctx.scaled:
            gradient = gradient * (scale**last).unsqueeze(1)
        layers = list(zip(layer_views(weights, ctx.sizes), layer_views(to_weights, ctx.sizes), strict=True))
        for k, ((weight, _), (to_weight, to_bias)) in reversed(list(enumerate(layers))):
            if ctx.sizes[k] < ctx.sizes[k + 1]:  # BLAS is slow at products with few columns: many columns, then a copy
                to_weight.copy_(torch.bmm(activations[k].mT, gradient).mT)
            else:
                torch.bmm(gradient.mT, activations[k], out=to_weight)
            torch.sum(gradient, 1, out=to_bias)
            if ctx.scaled:
                to_bias.div_(scale**k)
            if k:
                # A unit that ReLU or dropout set to 0 passes nothing back; the others pass everything.
                gradient = torch.bmm(gradient, weight)
                torch.ops.aten.threshold_backward.grad_input(gradient, activations[k], 0, grad_input=gradient)
        return None, to_weights, None, None, None


def layer_views(weights: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Weight [P, b, a] and bias [P, b] of every layer, as views of weights [P, N]."""
    shapes = list(pairwise(sizes))
    pieces = weights.split([count for a, b in shapes for count in (a * b, b)], dim=1)
    return [
        (weight.unflatten(1, (b, a)), bias)
        for (a, b), weight, bias in zip(shapes, pieces[::2], pieces[1::2], strict=True)
    ]


def rounded(rates: Tensor) -> Tensor:
    """Dropout rates as `dropout_masks` applies them: multiples of 1/256."""
    return (rates * 256).round() / 256


def dropout_masks(keys: Tensor, step: int, rates: Tensor, rows: int, widths: Sequence[int]) -> list[Tensor]:
    """Bytes [P, rows, width] of one training step, for each hidden layer: 1 for what dropout keeps.

    A mask is a function of its trial's key (keys [P], int64) and the step alone: there is no generator whose state
    would depend on other trials, on the device or on a resume. SplitMix64 turns counters into 64-bit words, whose eight
    bytes serve eight units, at a fraction of the cost of one float each. Rates [P] are therefore multiples of 1/256:
    exact for 0.25 and 0.5, else rounded, and the scale goes with the rounded rate.
    """
    units = rows * sum(widths)
    counter = torch.arange(-(-units // 8), device=keys.device).add_(step << 32)
    words = counter.mul_(GAMMA) + keys[:, None]
    for shift, factor in ((30, FIRST), (27, SECOND)):
        words.bitwise_xor_(unsigned_shift(words, shift)).mul_(factor)
    words.bitwise_xor_(unsigned_shift(words, 31))
    dropped = (rounded(rates) * 256).to(torch.uint8)
    kept = words.view(torch.uint8)[:, :units].ge_(dropped[:, None])
    return [m.unflatten(1, (rows, -1)) for m in kept.split([rows * width for width in widths], dim=1)]


def unsigned_shift(words: Tensor, shift: int) -> Tensor:
    """words >> shift with zeros coming in from the left; torch's own shift repeats the sign."""
    return (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
