"""Losses over a batch: MetricLoss, MetricCrossEntropy and the baselines. conf/loss refers to them as `_target_`."""

from east.losses.classic import WMW, APPerf, CrossEntropy, Dice, Focal, SigmoidF1
from east.losses.inputs import Loss
from east.losses.metric_cross_entropy import MetricCrossEntropy
from east.losses.metric_loss import AUROCLoss, MetricLoss
from east.losses.released import ReleasedBtG, ReleasedDice, ReleasedWMW

__all__ = [
    "WMW", "APPerf", "AUROCLoss", "CrossEntropy", "Dice", "Focal", "Loss", "MetricCrossEntropy", "MetricLoss",
    "ReleasedBtG", "ReleasedDice", "ReleasedWMW", "SigmoidF1",
]  # fmt: skip
