"""Networks as ordinary modules, and `Stack`, which holds a population of them in one tensor.

net = east.models.build({"name": "mlp", "hidden": [512, 256, 128]}, inputs_shape=(6,), outputs=2)
"""

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from east.choices import choose
from east.models.darknet import DARKNET19, TINY, Darknet
from east.models.gnn import GNN
from east.models.mlp import MLP, dropout_masks

__all__ = ["GNN", "MLP", "MODELS", "TOGETHER", "Darknet", "Stack", "build"]


def build(config: Mapping[str, Any], inputs_shape: Sequence[int], outputs: int, dropout: float = 0.0) -> nn.Module:
    """The network of a config's `model` section, freshly initialised from torch's global generator.

    inputs_shape: of one sample. outputs: the number of classes; `outputs` in the config overrides it, 1 meaning a
    single logit. Dropout has no parameters, so a trained state fits whatever the rate.
    """
    options = {key: value for key, value in config.items() if key not in ("name", "outputs")}
    outputs = config.get("outputs") or outputs
    return MODELS[choose("model", config["name"], MODELS)](tuple(inputs_shape), outputs, dropout, **options)


def _mlp(shape: tuple[int, ...], outputs: int, dropout: float, hidden: Sequence[int]) -> nn.Module:
    return MLP(prod(shape), hidden, outputs, dropout)


def _darknet19(shape: tuple[int, ...], outputs: int, dropout: float, **options: Any) -> nn.Module:
    _expect("darknet19", "images [3, height, width]", shape, len(shape) == 3 and shape[0] == 3)
    return Darknet(DARKNET19, outputs, dropout, **options)


def _tiny_darknet(shape: tuple[int, ...], outputs: int, dropout: float, **options: Any) -> nn.Module:
    _expect("tiny_darknet", "images [3, height, width]", shape, len(shape) == 3 and shape[0] == 3)
    return Darknet(TINY, outputs, dropout, **options)


def _gnn(shape: tuple[int, ...], outputs: int, dropout: float, **options: Any) -> nn.Module:
    _expect("gnn", "graphs [nodes, features]", shape, len(shape) == 2)
    return GNN(shape[-1], outputs, dropout=dropout, **options)


def _custom(
    shape: tuple[int, ...], outputs: int, dropout: float, target: str, parameters: Mapping[str, Any] | None = None
) -> nn.Module:
    """`target` is the dotted path of a class or function, called as Net(inputs_shape=…, outputs=…, **parameters); it
    is given `dropout` as well if it has a parameter of that name."""
    module, _, name = str(target).rpartition(".")
    try:
        net = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model.target {target!r} cannot be imported: expected package.module.Net; {error}") from error
    given = dict(parameters or {})
    if "dropout" in inspect.signature(net).parameters:
        given.setdefault("dropout", dropout)
    return net(inputs_shape=shape, outputs=outputs, **given)


def _expect(model: str, expected: str, shape: tuple[int, ...], met: bool) -> None:
    if not met:
        raise ValueError(f"model {model!r} expects {expected}, got samples of shape {list(shape)}")


MODELS = {
    "custom": _custom,
    "darknet19": _darknet19,
    "gnn": _gnn,
    "mlp": _mlp,
    "mlp_btg": _mlp,
    "tiny_darknet": _tiny_darknet,
}
TOGETHER = ("mlp", "mlp_btg")  # models of which a Stack computes many at once


class Stack:
    """P networks of one architecture. `weights` [P, N] has one in each row: what is learned, then what is tracked.

    A step of training, a snapshot, a restored stage, a trial that leaves: each is then one operation on rows.
    MLPs are computed together (`MLP.stacked`); any other module is called as it is, and its population is of one.
    `learned` are the first columns, `tracked` the rest: floating buffers such as batch norm's running mean.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device | str = "cpu"):
        rows = [[*_learned(module).values(), *_tracked(module).values()] for module in modules]
        weights = torch.stack([torch.cat([t.detach().flatten().float() for t in row]) for row in rows])
        self.module = modules[0].to(device)
        self.together = isinstance(self.module, MLP)
        if len(modules) > 1 and not self.together:
            raise ValueError(f"{type(self.module).__name__}: expected a population of one, got {len(modules)}")
        self.shapes = {name: tensor.shape for name, tensor in _learned(self.module).items()}
        self.learned = sum(shape.numel() for shape in self.shapes.values())
        self.shapes |= {name: tensor.shape for name, tensor in _tracked(self.module).items()}
        self.put(weights.to(device))

    def put(self, weights: Tensor) -> None:
        """Take these rows as the networks' weights, without a copy."""
        self.weights = weights
        pieces = weights.split([shape.numel() for shape in self.shapes.values()], dim=1)
        # .data, because views share one version counter: batch norm's update of its mean in the forward pass would then
        # invalidate the convolution's weights for the backward pass.
        self.views = {
            name: piece.data.unflatten(1, shape) if shape else piece.data.squeeze(1)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }
        self.leaves = [self.views[name].requires_grad_() for name in _learned(self.module)]

    def __call__(
        self, inputs: Tensor, training: bool = False, noise: tuple[Tensor, int, Tensor] | None = None
    ) -> Tensor:
        """Logits [P, n, ..., d] of inputs [P, n, ...].

        noise: keys [P], step and rates [P] of `dropout_masks`, for networks that are computed together; another module
        draws from torch's global generator.
        """
        if self.together:
            masks = dropout_masks(*noise, inputs.shape[1], self.module.hidden) if training and noise else None
            return self.module.stacked(self.views, inputs, masks)
        self.module.train(training)
        weights = {name: view.squeeze(0) for name, view in self.views.items()}
        return functional_call(self.module, weights, (inputs.squeeze(0),)).unsqueeze(0)

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """The state of an ordinary module, on the CPU, whose weights are `row` [N]."""
        pieces = row.split([shape.numel() for shape in self.shapes.values()])
        own = _learned(self.module) | _tracked(self.module)
        with torch.no_grad():
            for tensor, piece in zip(own.values(), pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}


def _learned(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _tracked(module: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in module.named_buffers() if b.is_floating_point()}
