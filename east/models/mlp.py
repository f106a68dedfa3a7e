"""The papers' multilayer perceptrons, and how a population of them is computed by one batched product per layer."""

from collections.abc import Mapping, Sequence
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
        sizes = [features, *hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.hidden = list(hidden)
        self.dropout = dropout

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.flatten(1)
        for layer in self.layers[:-1]:
            x = F.dropout(layer(x).relu(), self.dropout, self.training)
        return self.layers[-1](x)

    def stacked(self, weights: Mapping[str, Tensor], inputs: Tensor, masks: Sequence[Tensor] | None) -> Tensor:
        """Logits [P, n, outputs] of P networks: weights by name with a leading P, inputs [P, n, ...].

        masks: what dropout multiplies each hidden layer with, from `dropout_masks`; None for none.
        """
        x = inputs.flatten(2)
        for k in range(len(self.layers)):
            x = StackedLinear.apply(x, weights[f"layers.{k}.weight"], weights[f"layers.{k}.bias"])
            if k < len(self.hidden):
                x = x.relu_()
                x = x if masks is None else x * masks[k]
        return x


class StackedLinear(torch.autograd.Function):
    """P linear layers at once: inputs [P, n, a], weight [P, b, a], bias [P, b] -> [P, n, b].

    Autograd's own formula for the same product returns the weight's gradient transposed in memory; putting it straight
    for the optimiser takes a tenth of a training step.
    """

    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight.mT)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        to_inputs = torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None
        return to_inputs, torch.bmm(gradient.mT, inputs), gradient.sum(1)


def dropout_masks(keys: Tensor, step: int, rates: Tensor, rows: int, widths: Sequence[int]) -> list[Tensor]:
    """Dropout masks [P, rows, width] of one training step, for each hidden layer: 0, or 1 / (1 - rate).

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
    dropped = (rates * 256).round()[:, None]
    kept = words.view(torch.uint8)[:, :units].ge_(dropped.to(torch.uint8)).float().mul_(256 / (256 - dropped))
    return [m.unflatten(1, (rows, -1)) for m in kept.split([rows * width for width in widths], dim=1)]


def unsigned_shift(words: Tensor, shift: int) -> Tensor:
    """words >> shift with zeros coming in from the left; torch's own shift repeats the sign."""
    return (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
