"""An exponential moving average of the weights over training steps, for each trial of a population that sets one."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from east.lab import models


class Average:
    """Updates the mean of the weights, including batch norm's statistics, over the steps of the current stage.

    After t steps the mean m is updated as m <- b m + (1 - b) w with b = min(decay, t / (t + 1)): a plain mean over the
    first 1 / (1 - decay) steps, so that the initial weights are forgotten at once.
    rows: `weights` and `mean` [P, N], `mean_steps` [P, 1]. decays: one per trial; None means b = 0, so that the mean
    is the weights themselves.
    """

    def __init__(self, net: models.Stack, rows: Mapping[str, Tensor], decays: Sequence[float | None]):
        self.weights, self.mean, self.steps = rows["weights"], rows["mean"], rows["mean_steps"]
        self.decay = self.steps.new_tensor([decay or 0.0 for decay in decays])[:, None]
        self.counters = net.counters

    @torch.no_grad()
    def update(self) -> None:
        """Account for one step."""
        b = torch.minimum(self.decay, self.steps / (self.steps + 1))
        self.mean.lerp_(self.weights, 1 - b)
        if self.counters:  # the number of batches is not averaged
            self.mean[:, self.counters] = self.weights[:, self.counters]
        self.steps += 1
