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
    but a step count per tensor. torch.optim calls it too; the Python around it takes longer than a small network's
    update.
    """

    def __init__(self, net: models.Stack, rows: Mapping[str, Tensor], hyper: Sequence[Hyper], decoupled: bool):
        self.net, self.steps, self.clips = net, rows["steps"], [h.clip for h in hyper]
        self.kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        pieces = [net.pieces(rows[name]) for name in ("weights", "first", "second")]
        steps = rows["steps"].squeeze(1).unbind()
        self.trials = [0] * len(pieces[0]) if len(hyper) == 1 else range(len(hyper))  # of every piece
        # In float32, like the rows.
        settings = torch.tensor([[h.lr or 0.0, h.weight_decay or 0.0] for h in hyper]).tolist()
        groups: dict[tuple[float, float], list[int]] = {}
        for k, p in enumerate(self.trials):
            groups.setdefault(tuple(settings[p]), []).append(k)
        self.calls = []
        for (lr, decay), group in groups.items():
            chosen = [[tensors[k] for k in group] for tensors in (*pieces, [steps[p] for p in self.trials])]
            self.calls.append((group, chosen, {"lr": lr, "weight_decay": decay, **FORMULA}))

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights by the stack's gradients, which clipping overwrites."""
        for p, limit in enumerate(self.clips):
            if limit:
                own = [gradient for trial, gradient in zip(self.trials, self.net.gradients, strict=True) if trial == p]
                torch._foreach_mul_(own, (limit / torch.nn.utils.get_total_norm(own)).clamp_max(1))
        self.steps += 1
        for group, (weights, first, second, steps), settings in self.calls:
            self.kernel(weights, [self.net.gradients[k] for k in group], first, second, [], steps, **settings)


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
