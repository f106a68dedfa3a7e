"""Adam over a stack of networks, each with its own learning rate, weight decay and clipping."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from east.lab import models
from east.lab.settings.sections import Hyper

FUSED = ("cpu", "cuda")  # devices where torch's fused kernel is used: one pass over the weights instead of ten
BETAS, EPS = (0.9, 0.999), 1e-8


class Adam:
    """Adam, or AdamW if `decoupled`, on the rows of a Stack: torch.optim's formulas with one setting per trial.

    rows: the moments `first` and `second` [P, learned], `steps` [P, 1]. hyper: each trial's lr, weight_decay and clip
    (largest norm of the gradient; None: no limit).
    """

    def __init__(self, net: models.Stack, rows: Mapping[str, Tensor], hyper: Sequence[Hyper], decoupled: bool):
        self.weights, self.gradient, self.decoupled = net.weights[:, : net.learned], net.gradient, decoupled
        self.first, self.second, self.steps = (rows[name] for name in ("first", "second", "steps"))
        self.clips = any(h.clip for h in hyper)
        limits = [[h.lr or 0.0, h.weight_decay or 0.0, h.clip or math.inf] for h in hyper]
        self.lr, self.decay, self.clip = self.steps.new_tensor(limits).unsqueeze(-1).unbind(1)
        self.calls = self.fused_calls(hyper) if self.gradient.device.type in FUSED else None

    def fused_calls(self, hyper: Sequence[Hyper]) -> list[tuple[list[list[Tensor]], dict]]:
        """Arguments of torch's fused kernel: it takes one lr and decay per call, but a step count per row."""
        shared = {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "amsgrad": False, "maximize": False}
        tensors = [t.unbind() for t in (self.weights, self.gradient, self.first, self.second, self.steps.squeeze(1))]
        rows: dict[tuple[float, float], list[int]] = {}
        for row, setting in enumerate(zip(self.lr.flatten().tolist(), self.decay.flatten().tolist(), strict=True)):
            rows.setdefault(setting, []).append(row)
        return [
            ([[tensor[row] for row in group] for tensor in tensors], {"lr": lr, "weight_decay": decay, **shared})
            for (lr, decay), group in rows.items()
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights by the stack's gradient, which is overwritten."""
        if self.clips:
            self.gradient.mul_((self.clip / self.gradient.norm(dim=1, keepdim=True)).clamp_max(1))
        self.steps += 1
        if self.calls is None:
            self.plain_step(self.gradient)
            return
        # torch.optim calls the same kernel; the Python around it takes longer than a small network's update.
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        for (weights, gradients, first, second, steps), settings in self.calls:
            kernel(weights, gradients, first, second, [], steps, **settings)

    def plain_step(self, gradient: Tensor) -> None:
        if self.decoupled:
            self.weights.mul_(1 - self.lr * self.decay)
        else:
            gradient.addcmul_(self.weights, self.decay)
        # expm1 for 1 - beta^t: plain subtraction loses four digits of float32 in the first steps.
        first_bias, second_bias = (-torch.expm1(self.steps * math.log(beta)) for beta in BETAS)
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root = second_bias.sqrt()
        denominator = torch.sqrt(self.second, out=gradient)
        denominator.add_(EPS * root).div_(self.lr * root / first_bias)
        self.weights.addcdiv_(self.first, denominator, value=-1)
