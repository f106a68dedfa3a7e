"""Build a loss from the `loss` section of a config."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from east import metrics
from east.choices import import_by_path
from east.lab.settings.settings import LossSection
from east.losses.inputs import Loss, refuse_unknown
from east.losses.metric_cross_entropy import MetricCrossEntropy
from east.losses.metric_loss import MetricLoss


def build_loss(
    loss: LossSection, classes: Sequence[str], labels: Tensor | None = None, positive: int | None = None
) -> Loss:
    """The loss that a config's `loss` section describes.

    labels: the training labels, for class_weights=balanced. positive: index of the positive class, for
    average=positive.
    """
    target = import_by_path(loss.target)
    if not (isinstance(target, type) and issubclass(target, Loss)):
        raise ValueError(f"loss._target_={loss.target}: expected a class of east.losses.Loss, got {target!r}")
    parameters = with_average(loss, positive).arguments
    if unused := parameters.keys() & {*target.unused_in_trials}:
        raise ValueError(f"loss.{min(unused)}: it has no effect on the trials of east-run; leave it out")
    if parameters.get("class_weights") == "balanced":
        if labels is None:
            raise ValueError("class_weights=balanced: expected the training labels, got none")
        counts = torch.bincount(labels.flatten(), minlength=len(classes)).clamp_min(1)
        parameters["class_weights"] = (labels.numel() / (len(classes) * counts)).tolist()
    if parameters.get("average") == "positive":
        if positive is None and len(classes) > 2 and "positive" not in parameters:
            raise ValueError(f"average=positive: none of the {len(classes)} classes is the positive one; "
                             "set dataset.positive=… or loss.average=macro")  # fmt: skip
        parameters.setdefault("positive", 1 if positive is None else positive)
    if issubclass(target, MetricLoss | MetricCrossEntropy):
        return target(**parameters, classes=classes)
    refuse_unknown(f"parameter of {target.__name__}", parameters, [*inspect.signature(target).parameters.values()])
    return target(**parameters)


def with_average(loss: LossSection, positive: int | None) -> LossSection:
    """The loss with the average that its config leaves to the data: positive if they have such a class, else macro.

    A config without the key `average` meant macro in older records: it gets the key only where positive is meant.
    """
    meant, target = "macro" if positive is None else "positive", import_by_path(loss.target)
    if "average" in loss.options:
        return loss if loss.options["average"] is not None else loss.but(average=meant)
    of_metric = isinstance(target, type) and issubclass(target, MetricLoss | MetricCrossEntropy)
    if meant == "macro" or not of_metric or "metric" not in loss.options:
        return loss
    function, given = metrics.parse(loss.options["metric"], loss.arguments)
    return loss if "average" in given or not metrics.takes_average(function) else loss.but(average=meant)
