"""An exponential moving average of the weights over training steps, for each trial of a population that sets one."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from east.lab import models


class Average:
    """The mean [P, N] of the weights, including batch norm's statistics, over the steps of the current stage.

    After t steps the mean m is updated as m <- b m + (1 - b) w with b = min(decay, t / (t + 1)): a plain mean over the
    first 1 / (1 - decay) steps, so that the initial weights are forgotten at once.
    decays: one per trial; None means b = 0, so that the mean is the weights themselves.
    """

    STATE = ("mean", "mean_steps", "mean_decay")

    def __init__(self, net: models.Stack, decays: Sequence[float | None]):
        self.net = net
        self.on = any(decay is not None for decay in decays)
        device = net.weights.device
        self.mean_decay = torch.tensor([decay or 0.0 for decay in decays], device=device)[:, None]
        self.mean_steps = torch.zeros_like(self.mean_decay)
        self.mean = net.weights.clone() if self.on else net.weights

    @torch.no_grad()
    def update(self) -> None:
        """Account for one step."""
        if self.on:
            b = torch.minimum(self.mean_decay, self.mean_steps / (self.mean_steps + 1))
            self.mean.lerp_(self.net.weights, 1 - b)
            if self.net.counters:  # the number of batches is not averaged
                self.mean[:, self.net.counters] = self.net.weights[:, self.net.counters]
            self.mean_steps += 1

    def restart(self, rows: Tensor) -> None:
        """Start over from the network's weights in these rows."""
        if self.on:
            self.mean[rows] = self.net.weights[rows]
            self.mean_steps[rows] = 0

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        if self.on:
            for name in self.STATE:
                setattr(self, name, getattr(self, name)[rows])

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.STATE} if self.on else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name in self.STATE if self.on else ():
            setattr(self, name, tensors[name])
