"""Networks of one architecture stacked in a leading dimension, so that one product trains a population."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from east.lab.models.mlp import MLP, Masks, StackedMLP

ALIGNED = 16  # floats in a cache line
COUNTER = "num_batches_tracked"  # of batch norm
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Stack:
    """P networks of one architecture, one per row of `weights` [P, N].

    A training step, a snapshot, a restored stage or a trial that leaves is one operation on rows. The first `learned`
    columns are parameters; the rest are buffers that training changes, such as batch norm's running statistics.
    MLPs are computed together (`StackedMLP`); any other module is called as it is, in a population of one.

    Rows are padded to whole cache lines, because the last digits of a product depend on the alignment of its factors,
    and a trial should train the same way in any row.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device | str = "cpu"):
        rows = [[*_learned(module).values(), *_tracked(module).values()] for module in modules]
        weights = torch.stack([torch.cat([t.detach().flatten().float() for t in row]) for row in rows])
        self.size = weights.shape[1]
        self.module = modules[0].to(device)
        # Exactly MLP: a user's subclass may have a forward of its own.
        self.mlp = StackedMLP(self.module.sizes) if type(self.module) is MLP else None
        self.normalises = any(isinstance(m, BATCH_NORMS) for m in self.module.modules())
        if len(modules) > 1 and self.mlp is None:
            raise ValueError(f"{type(self.module).__name__}: expected a population of one, got {len(modules)}")
        self.shapes = {name: tensor.shape for name, tensor in _learned(self.module).items()}
        self.learned = sum(shape.numel() for shape in self.shapes.values())
        self.shapes |= {name: tensor.shape for name, tensor in _tracked(self.module).items()}
        starts = accumulate((shape.numel() for shape in self.shapes.values()), initial=0)
        self.counters = [start for name, start in zip(self.shapes, starts, strict=False) if name.endswith(COUNTER)]
        self.weights = torch.empty(0)
        self._gradient: Tensor | None = None
        self.put(F.pad(weights, (0, -self.size % ALIGNED)).to(device))

    def put(self, weights: Tensor) -> None:
        """Use these rows as the networks' weights, without copying them."""
        if self.mlp is not None and self.weights is weights:
            return
        self.weights = weights
        if self.mlp is not None:
            self.mlp.bind(weights)
            return
        pieces = weights[:, : self.size].split([shape.numel() for shape in self.shapes.values()], dim=1)
        # .data, because views share one version counter: batch norm's update of its mean in the forward pass would then
        # invalidate the convolution's weights for the backward pass.
        self.views = {
            name: piece.data.unflatten(1, shape) if shape else piece.data.squeeze(1)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }
        self.leaves = [self.views[name].requires_grad_() for name in _learned(self.module)]

    def __call__(self, inputs: Tensor, training: bool = False, masks: Masks | None = None) -> Tensor:
        """Logits [P, n, ..., d] of inputs [P, n, ...].

        masks: dropout for stacked MLPs. Other modules draw their own from torch's global generator.
        """
        if self.mlp is not None:
            self.leaves = [self.mlp.forward(inputs.flatten(2), masks)]
            return self.leaves[0].requires_grad_(training)
        self.module.train(training)
        weights = {name: view.squeeze(0) for name, view in self.views.items()}
        return functional_call(self.module, weights, (inputs.squeeze(0),)).unsqueeze(0)

    def gradient(self, values: Tensor) -> Tensor:
        """The gradient [P, learned] of the sum of `values`, which were computed from the latest logits.

        It is 0 for weights that the values do not depend on. The next call may overwrite it.
        """
        pieces = torch.autograd.grad(values, self.leaves, torch.ones_like(values), materialize_grads=True)
        if self.mlp is not None:
            return self.mlp.backward(pieces[0])
        if self._gradient is None:  # kept: fresh memory for every step costs more than the copy
            self._gradient = self.weights.new_empty(1, self.learned)
        torch.cat([piece.flatten() for piece in pieces], out=self._gradient[0])
        return self._gradient

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """The state of an ordinary module, on the CPU, whose weights are `row` [N]."""
        pieces = row[: self.size].split([shape.numel() for shape in self.shapes.values()])
        tensors = _learned(self.module) | _tracked(self.module)
        with torch.no_grad():
            for tensor, piece in zip(tensors.values(), pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}


def _learned(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _tracked(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that training changes. Batch norm counts batches in int64; as a float it is exact up to 2^24."""
    return {name: b for name, b in module.named_buffers() if b.is_floating_point() or name.endswith(COUNTER)}
