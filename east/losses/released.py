"""Losses as the papers' released code computes them; each docstring names the quirk that it reproduces."""

from collections.abc import Sequence

import torch
from torch import Tensor

from east.choices import choose
from east.losses import steps
from east.losses.classic import WMW
from east.losses.inputs import Loss, check_binary, mean_over_samples
from east.losses.metric_loss import BTG_THRESHOLDS, area, checked_threshold


class ReleasedBtG(Loss):
    """Bridging the Gap as its released code computes it.

    On one side of p = tau the threshold is mirrored to 1 - tau, so that a sample's memberships do not sum to 1; they
    are the paper's only at tau = 1/2. The AUROC area lacks its end points.
    """

    EPS = 1e-7

    def __init__(self, metric: str = "f1", beta: float = 1.0, threshold: Sequence[float] = BTG_THRESHOLDS,
                 step: str = "linear", slope: float = 10.0):  # fmt: skip
        super().__init__()
        self.metric = choose("metric", metric, ("f1", "fbeta", "accuracy", "auroc"))
        self.step = choose("step", step, ("linear", "sigmoid"))
        self.beta, self.slope = beta, slope
        self.threshold = checked_threshold(threshold, step)

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        check_binary(self, logits)
        tp, fn, fp, tn = self.counts(logits.softmax(-1)[..., 1], labels, weights)
        if self.metric == "accuracy":
            return 1 - ((tp + tn) / (tp + tn + fp + fn)).mean(0)
        recall = tp / (tp + fn + self.EPS)
        if self.metric == "auroc":
            false_positive_rate, order = (fp / (fp + tn + self.EPS)).sort(0, descending=True)
            return 1 - area(false_positive_rate, recall.gather(0, order))
        precision, square = tp / (tp + fp + self.EPS), self.beta**2
        return 1 - ((1 + square) * precision * recall / (square * precision + recall + self.EPS)).mean(0)

    def counts(self, p: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """TP, FN, FP and TN [k, ...] at k thresholds."""
        t = steps.thresholds_like(self.threshold, p)
        y = labels.to(p.dtype)

        def summed(inputs: Tensor, threshold: Tensor) -> Tensor:
            values = self.step_values(inputs.expand(threshold.shape), threshold)
            return (values if weights is None else values * weights).sum(-1)

        mirrored = 1 - t
        return (
            summed(p * y, torch.where(p > t, t, mirrored)),
            summed((1 - p) * y, torch.where(p < t, mirrored, t)),
            summed(p * (1 - y), torch.where(p < t, t, mirrored)),
            summed((1 - p) * (1 - y), torch.where(p < t, mirrored, t)),
        )

    def step_values(self, inputs: Tensor, threshold: Tensor) -> Tensor:
        if self.step == "sigmoid":
            return steps.sigmoid(inputs, threshold, self.slope)
        return steps.linear(inputs, threshold, 0.2)


class ReleasedDice(Loss):
    """Dice on raw outputs, with the class index broadcast over all of them.

    This is what happens if integer labels are passed to a loss that expects one-hot labels: the optimum is "every
    output equals the class index". The suspected origin of EAST's Dice rows; their code was never seen.
    """

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        y = labels.to(logits.dtype).unsqueeze(-1)
        dice = (logits * y).sum(-1) / ((logits**2).sum(-1) + logits.shape[-1] * y.squeeze(-1) ** 2 + 1e-7)
        return 1 - mean_over_samples(dice, weights)


class ReleasedWMW(WMW):
    """WMW as the released code computes it: on raw logits, and with positives compared to positives.

    Its optimum is "all positives equal", which explains the WMW row of Bridging the Gap's Table 1.
    """

    def value(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        check_binary(self, logits)
        return self.over_pairs(logits[..., 1] - logits[..., 0], labels == 1, labels == 1, weights)
