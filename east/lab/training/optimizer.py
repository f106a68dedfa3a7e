"""Adam over a stack of networks, each with its own learning rate, weight decay and clipping."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from east.lab import models
from east.lab.settings.sections import Hyper

FUSED = ("cpu", "cuda")  # devices where torch's fused kernel is used: one pass over the weights instead of ten


class Adam:
    """Adam, or AdamW if `decoupled`, on the rows of a Stack: torch.optim's formulas with one setting per trial.

    hyper: each trial's lr, weight_decay and clip (largest norm of the gradient; None: no limit).
    """

    BETAS, EPS = (0.9, 0.999), 1e-8
    STATE = ("first", "second", "steps", "lr", "decay", "clip")

    def __init__(self, net: models.Stack, hyper: Sequence[Hyper], decoupled: bool):
        self.net, self.decoupled = net, decoupled
        learned = net.weights[:, : net.learned]
        self.first, self.second = torch.zeros_like(learned), torch.zeros_like(learned)
        self.steps, self.lr, self.decay, self.clip = (
            torch.tensor(values, dtype=torch.float32, device=learned.device)[:, None]
            for values in (
                [0] * len(hyper),
                [h.lr for h in hyper],
                [h.weight_decay for h in hyper],
                [math.inf if h.clip is None else h.clip for h in hyper],
            )
        )
        self.group()

    def group(self) -> None:
        """Group the rows by lr and decay: torch's fused kernel takes one of each per call, but a step count per row."""
        self.clips = bool(self.clip.isfinite().any())
        settings = list(zip(self.lr.flatten().cpu().tolist(), self.decay.flatten().cpu().tolist(), strict=True))
        self.groups = [
            (lr, decay, [row for row, setting in enumerate(settings) if setting == (lr, decay)])
            for lr, decay in dict.fromkeys(settings)
        ]
        self.rows_of: tuple[Tensor | None, Tensor | None] = (None, None)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """One update from the gradient [P, learned], which is overwritten."""
        if self.clips:
            gradient.mul_((self.clip / gradient.norm(dim=1, keepdim=True)).clamp_max(1))
        if gradient.device.type in FUSED:
            self.fused_step(gradient)
        else:
            self.plain_step(self.net.weights[:, : self.net.learned], gradient)

    def fused_step(self, gradient: Tensor) -> None:
        """Call torch.optim's kernel directly: the Python around it takes longer than a small network's update."""
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        if self.rows_of[0] is not gradient or self.rows_of[1] is not self.net.weights:
            self.bind(gradient)
        self.steps += 1
        for settings, (weights, gradients, first, second, steps) in self.calls:
            kernel(weights, gradients, first, second, [], steps, **settings)

    def bind(self, gradient: Tensor) -> None:
        """Collect the kernel's arguments per group of rows: views, valid until weights or gradient are reallocated."""
        weights = self.net.weights[:, : self.net.learned]
        tensors = [tensor.unbind() for tensor in (weights, gradient, self.first, self.second, self.steps.squeeze(1))]
        shared = {"beta1": self.BETAS[0], "beta2": self.BETAS[1], "eps": self.EPS, "amsgrad": False, "maximize": False}
        self.calls = [
            ({"lr": lr, "weight_decay": decay, **shared}, [[tensor[row] for row in rows] for tensor in tensors])
            for lr, decay, rows in self.groups
        ]
        self.rows_of = gradient, self.net.weights

    def plain_step(self, weights: Tensor, gradient: Tensor) -> None:
        if self.decoupled:
            weights.mul_(1 - self.lr * self.decay)
        else:
            gradient.addcmul_(weights, self.decay)
        self.steps += 1
        # expm1 for 1 - beta^t: plain subtraction loses four digits of float32 in the first steps.
        first_bias, second_bias = (-torch.expm1(self.steps * math.log(beta)) for beta in self.BETAS)
        self.first.lerp_(gradient, 1 - self.BETAS[0])
        self.second.mul_(self.BETAS[1]).addcmul_(gradient, gradient, value=1 - self.BETAS[1])
        root = second_bias.sqrt()
        denominator = torch.sqrt(self.second, out=gradient)
        denominator.add_(self.EPS * root).div_(self.lr * root / first_bias)
        weights.addcdiv_(self.first, denominator, value=-1)

    def reset(self, rows: Tensor) -> None:
        """Forget the moments of these rows."""
        self.first[rows], self.second[rows], self.steps[rows] = 0, 0, 0

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        for name in self.STATE:
            setattr(self, name, getattr(self, name)[rows])
        self.group()

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.STATE}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name in self.STATE:
            setattr(self, name, tensors[name])
        self.group()
