"""Networks as ordinary modules, and `Stack`, which holds a population of them in one tensor.

net = east.lab.models.build(ModelSection(name="mlp", hidden=[512, 256, 128]), inputs_shape=(6,), outputs=2)
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from east.choices import choose, import_by_path
from east.lab.data.common import Splits
from east.lab.models.mlp import MLP
from east.lab.models.stack import Stack
from east.lab.settings.settings import ModelSection

__all__ = ["MLP", "MODELS", "TOGETHER", "Stack", "build", "for_network", "untrained"]

MODELS = ("backbone", "custom", "darknet19", "gnn", "mlp", "mlp_btg", "tiny_darknet")
TOGETHER = ("mlp", "mlp_btg")  # models that a Stack computes many at a time


def build(model: ModelSection, inputs_shape: Sequence[int], outputs: int, dropout: float = 0.0) -> nn.Module:
    """The network of a config's `model` section, freshly initialised from torch's global generator.

    inputs_shape: of one sample. outputs: the number of classes; `model.outputs` overrides it, and 1 means a single
    logit. Dropout has no parameters, so a trained state fits a network of any dropout rate. A config with a `target`
    names its class; the others are in MODELS.
    """
    shape, outputs, options = tuple(inputs_shape), model.outputs or outputs, model.options
    if "target" in options:
        return custom(shape, outputs, dropout, **options)
    name = choose("model", model.name, MODELS)
    if name in TOGETHER:
        return MLP(prod(shape), outputs=outputs, dropout=dropout, **options)
    if name == "backbone":
        from east.lab.models.backbone import Backbone

        return Backbone(shape, outputs, dropout, **options)
    if name == "gnn":
        from east.lab.models.gnn import GNN

        return GNN(shape, outputs, dropout, **options)
    from east.lab.models.darknet import DARKNET19, TINY, Darknet

    return Darknet(TINY if name == "tiny_darknet" else DARKNET19, shape, outputs, dropout, **options)


def untrained(model: ModelSection) -> ModelSection:
    """The same network without pretrained weights, which a saved model or a timing does not need."""
    return model.but(weights=None) if model.name == "backbone" else model


def for_network(splits: Splits, model: ModelSection) -> Splits:
    """The splits with the images scaled as the network's pretrained weights expect, if it has such."""
    if model.name != "backbone":
        return splits
    from east.lab.models.backbone import preprocessing

    _, mean, std = preprocessing(model.options["arch"])
    return replace(splits, mean=mean, std=std)


def weights_file(model: ModelSection) -> Path | None:
    """The file that a network's pretrained weights are read from, if any."""
    weights = model.options.get("weights") if model.name == "backbone" else None
    return None if weights in (None, "none", "DEFAULT") else Path(str(weights)).expanduser().absolute()


def notes(model: ModelSection, shape: Sequence[int]) -> list[str]:
    """What users should know about a network for inputs [n, ...] of this shape."""
    if model.name != "backbone":
        return []
    from east.lab.models.backbone import preprocessing

    size = model.options["size"] or preprocessing(model.options["arch"])[0]
    smaller = f"images of {shape[-1]} pixels are scaled up to the {size} of model.arch={model.options['arch']}"
    return [f"{smaller}; dataset.size={size} would show it more"] if shape[-1] < size else []


def custom(
    shape: tuple[int, ...], outputs: int, dropout: float, target: str, parameters: Mapping[str, Any] | None = None
) -> nn.Module:
    """A user's network: `target` is the dotted path of a class or function, called as
    Net(inputs_shape=…, outputs=…, **parameters), and with `dropout` if it has a parameter of that name."""
    net = import_by_path(target)
    is_class = isinstance(net, type) and issubclass(net, nn.Module)
    accepted = inspect.signature(net).parameters if is_class or inspect.isfunction(net) else {}
    if not (is_class or {"inputs_shape", "outputs"} <= accepted.keys()):
        raise ValueError(
            f"model.target={target}: expected a subclass of torch.nn.Module, or a function of inputs_shape and "
            f"outputs, got {net!r}"
        )
    arguments = {"dropout": dropout} if "dropout" in accepted else {}
    return net(inputs_shape=shape, outputs=outputs, **arguments | dict(parameters or {}))
