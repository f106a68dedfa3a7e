"""Adam over a stack of networks, each with its own learning rate, weight decay and clipping."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from east import models


class Adam:
    """Adam, and AdamW if `decoupled`, on the rows of a Stack: torch.optim's formulas with a number per trial.

    hyper: lr, weight_decay and clip (of the gradient's norm; None for none) of each trial.
    """

    BETAS, EPS = (0.9, 0.999), 1e-8

    def __init__(self, net: models.Stack, hyper: Sequence[Mapping[str, Any]], decoupled: bool):
        self.net, self.decoupled = net, decoupled
        learned = net.weights[:, : net.learned]
        self.first, self.second, self.gradient, self.scratch = (torch.zeros_like(learned) for _ in range(4))
        self.steps, self.lr, self.decay, self.clip = (
            torch.tensor(values, dtype=torch.float32, device=learned.device)[:, None]
            for values in (
                [0] * len(hyper),
                [h["lr"] for h in hyper],
                [h["weight_decay"] for h in hyper],
                [math.inf if h.get("clip") is None else h["clip"] for h in hyper],
            )
        )
        self.decays = any(h["weight_decay"] for h in hyper)
        self.clips = any(h.get("clip") is not None for h in hyper)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One update from the gradients [P, ...] of the stack's leaves."""
        weights, gradient = self.net.weights[:, : self.net.learned], self.gradient
        torch.cat([g.flatten(1) for g in gradients], dim=1, out=gradient)
        if self.clips:
            gradient.mul_((self.clip / gradient.norm(dim=1, keepdim=True)).clamp_max(1))
        if self.decays and self.decoupled:
            weights.mul_(1 - self.lr * self.decay)
        elif self.decays:
            gradient.addcmul_(weights, self.decay)
        self.steps += 1
        # 1 - beta^t by expm1: the plain difference loses four digits of float32 in the first steps.
        first_bias, second_bias = (-torch.expm1(self.steps * math.log(beta)) for beta in self.BETAS)
        self.first.lerp_(gradient, 1 - self.BETAS[0])
        self.second.mul_(self.BETAS[1]).addcmul_(gradient, gradient, value=1 - self.BETAS[1])
        root = second_bias.sqrt()
        torch.sqrt(self.second, out=self.scratch)
        self.scratch.add_(self.EPS * root).div_(self.lr * root / first_bias)
        weights.addcdiv_(self.first, self.scratch, value=-1)

    def reset(self, rows: Tensor) -> None:
        """Forget the moments of these rows."""
        self.first[rows], self.second[rows], self.steps[rows] = 0, 0, 0

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        for name in ("first", "second", "gradient", "scratch", "steps", "lr", "decay", "clip"):
            setattr(self, name, getattr(self, name)[rows])

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("first", "second", "steps", "lr", "decay", "clip")}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name in self.state():
            setattr(self, name, tensors[name])
        self.gradient, self.scratch = torch.zeros_like(self.first), torch.zeros_like(self.first)
