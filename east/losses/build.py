"""From the `loss` section of a config to the loss itself."""

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from east.losses.inputs import refuse_unknown
from east.losses.metric_loss import MetricLoss


def build(
    config: Mapping[str, Any], classes: Sequence[str], labels: Tensor | None = None, positive: int | None = None
) -> nn.Module:
    """The loss of a config's `loss` section.

    `labels` of the training set serve class_weights=balanced, the index `positive` of a class average=positive.
    What `parameters` holds is passed like the rest: room for a metric's own, which the config cannot know beforehand.
    """
    parameters = {key: value for key, value in config.items() if key not in ("name", "_target_", "parameters")}
    parameters |= config.get("parameters") or {}
    module, _, name = config["_target_"].rpartition(".")
    target = getattr(import_module(module), name)
    if parameters.get("class_weights") == "balanced":
        if labels is None:
            raise ValueError("class_weights=balanced: expected the training labels, got none")
        counts = torch.bincount(labels.flatten(), minlength=len(classes)).clamp_min(1)
        parameters["class_weights"] = (labels.numel() / (len(classes) * counts)).tolist()
    if parameters.get("average") == "positive" and "positive" not in parameters:
        if positive is None and len(classes) > 2:
            raise ValueError(f"average=positive: none of the {len(classes)} classes is the positive one; "
                             "say dataset.positive=… or loss.average=macro")  # fmt: skip
        parameters["positive"] = 1 if positive is None else positive
    if issubclass(target, MetricLoss):
        parameters["classes"] = classes
    else:
        refuse_unknown(f"parameter of {name}", parameters, list(inspect.signature(target).parameters.values()))
    return target(**parameters)
