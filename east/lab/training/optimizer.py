"""Adam over a stack of networks, each with its own learning rate, weight decay and clipping; the mean of weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from east.lab import models
from east.lab.settings.settings import Hyper

FORMULA: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}


class Adam:
    """Adam, or AdamW if `decoupled`, on the rows of a Stack: torch's fused kernel with the settings of each trial.

    rows: `weights` [P, N], the moments `first` and `second` [P, learned], `steps` [P, 1]. hyper: each trial's lr,
    weight_decay and clip (largest norm of the gradient; None: no limit). The kernel takes one lr and decay per call,
    so trials are grouped by these. torch.optim calls it too, in Python that takes longer than a small network's update.
    """

    def __init__(self, net: models.Stack, rows: Mapping[str, Tensor], hyper: Sequence[Hyper], decoupled: bool):
        self.kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
        self.steps = rows["steps"]
        self.clipped = [(net.gradient[p], h.clip) for p, h in enumerate(hyper) if h.clip]
        groups: dict[tuple[float, ...], list[int]] = {}
        settings = torch.tensor([[h.lr or 0.0, h.weight_decay or 0.0] for h in hyper])  # in float32, like the rows
        for p, setting in enumerate(settings.tolist()):
            groups.setdefault(tuple(setting), []).append(p)
        learned = rows["weights"][:, : net.learned]
        tensors = (learned, net.gradient, rows["first"], rows["second"], self.steps.squeeze(1))
        self.calls: list[tuple[list[list[Tensor]], dict[str, Any]]] = [
            ([[tensor[p] for p in group] for tensor in tensors], {"lr": lr, "weight_decay": decay, **FORMULA})
            for (lr, decay), group in groups.items()
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights by the stack's gradient, which clipping overwrites."""
        for gradient, limit in self.clipped:
            gradient.mul_((limit / gradient.norm()).clamp_max(1))
        self.steps += 1
        for (weights, gradients, first, second, steps), settings in self.calls:
            self.kernel(weights, gradients, first, second, [], steps, **settings)


class Average:
    """An exponential moving average of the weights, including batch norm's statistics, over the steps of a stage.

    After t steps the mean m is updated as m <- b m + (1 - b) w with b = min(decay, t / (t + 1)): a plain mean over the
    first 1 / (1 - decay) steps, so that the initial weights are forgotten at once.
    rows: `weights` and `mean` [P, N], `mean_steps` [P, 1]. decays: one per trial; None means b = 0, so that the mean
    is the weights themselves.
    """

    def __init__(self, net: models.Stack, rows: Mapping[str, Tensor], decays: Sequence[float | None]):
        self.weights, self.mean, self.steps = rows["weights"], rows["mean"], rows["mean_steps"]
        self.decay = self.steps.new_tensor([decay or 0.0 for decay in decays])[:, None]
        self.counters = torch.tensor(net.counters, dtype=torch.long, device=self.mean.device)

    @torch.no_grad()
    def update(self) -> None:
        """Account for one step; the number of batches is not averaged."""
        self.mean.lerp_(self.weights, 1 - torch.minimum(self.decay, self.steps / (self.steps + 1)))
        if len(self.counters):
            self.mean[:, self.counters] = self.weights[:, self.counters]
        self.steps += 1
