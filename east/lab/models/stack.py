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


class Stack:
    """P networks of one architecture, one per row of `weights` [P, N].

    A training step, a snapshot, a restored stage or a trial that leaves is one operation on rows. The first `learned`
    columns are parameters; the rest are buffers that training changes, such as batch norm's running statistics.
    MLPs are computed together (`StackedMLP`); any other module is called as it is, in a population of one.

    Rows are padded to whole cache lines, because the last digits of a product depend on the alignment of its factors,
    and a trial should train the same way in any row. Kernels of convolutions are stored channels last, like images.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device | str = "cpu"):
        self.module = modules[0]
        if len(modules) > 1 and type(self.module) is not MLP:
            raise ValueError(f"{type(self.module).__name__}: expected a population of one, got {len(modules)}")
        # Exactly MLP: a user's subclass may have a forward of its own.
        self.mlp = StackedMLP(self.module.sizes) if type(self.module) is MLP else None
        rows = torch.stack([torch.cat([stored(t.detach()).float() for t in trained_tensors(m).values()])
                            for m in modules])  # fmt: skip
        tensors = trained_tensors(self.module.to(device))
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.parameters = sum(isinstance(tensor, nn.Parameter) for tensor in tensors.values())
        self.learned = sum(self.sizes[: self.parameters])
        starts = accumulate(self.sizes, initial=0)
        self.counters = [start for name, start in zip(self.shapes, starts, strict=False) if name.endswith(COUNTER)]
        self.gradient = torch.empty(0)
        self.put(F.pad(rows, (0, -sum(self.sizes) % ALIGNED)).to(device))

    def put(self, weights: Tensor) -> None:
        """Use these rows as the networks' weights, without copying them."""
        self.weights = weights
        if len(self.gradient) != len(weights):
            self.gradient = torch.empty_like(weights)[:, : self.learned]
            if self.mlp is not None:
                self.mlp.buffers.clear()
        if self.mlp is not None:
            self.mlp.bind(weights, self.gradient)
        elif len(weights):
            # .data, because views share one version counter: batch norm's update of its mean in the forward pass would
            # then invalidate the convolution's weights for the backward pass.
            self.views = {name: view.data for name, view in self.tensors(weights[0]).items()}
            self.leaves = [view.requires_grad_() for view in list(self.views.values())[: self.parameters]]

    def tensors(self, row: Tensor) -> dict[str, Tensor]:
        """The network's tensors in a row of weights [N], by name."""
        pieces = row[: sum(self.sizes)].split(self.sizes)
        return {name: restored(piece, shape) for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)}

    def __call__(self, inputs: Tensor, training: bool = False, masks: Masks | None = None) -> Tensor:
        """Logits [P, n, ..., d] of inputs [P, n, ...].

        masks: dropout for stacked MLPs. Other modules draw their own from torch's global generator.
        """
        if self.mlp is not None:
            self.leaves = [self.mlp.forward(inputs.flatten(2), masks)]
            return self.leaves[0].requires_grad_(training)
        self.module.train(training)
        return functional_call(self.module, self.views, (inputs.squeeze(0),)).unsqueeze(0)

    def backward(self, values: Tensor) -> None:
        """Set `gradient` to that of the sum of `values` [P], which were computed from the latest logits.

        It is 0 for weights that the values do not depend on.
        """
        pieces = torch.autograd.grad(values, self.leaves, torch.ones_like(values), materialize_grads=True)
        if self.mlp is not None:
            self.mlp.backward(pieces[0])
        else:
            torch.cat([stored(piece) for piece in pieces], out=self.gradient[0])

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """The state of an ordinary module, on the CPU, whose weights are `row` [N]."""
        with torch.no_grad():
            for tensor, trained in zip(trained_tensors(self.module).values(), self.tensors(row).values(), strict=True):
                tensor.copy_(trained)
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}


def stored(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in the order of a row."""
    return (tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor).flatten()


def restored(piece: Tensor, shape: torch.Size) -> Tensor:
    """The tensor of this shape whose numbers are `piece`, as a view."""
    if len(shape) != 4:
        return piece.view(shape)
    k, c, h, w = shape
    return piece.view(k, h, w, c).permute(0, 3, 1, 2)


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes: parameters, then buffers.

    Batch norm counts batches in int64; as a float it is exact up to 2^24.
    """
    learned: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return learned | {n: b for n, b in module.named_buffers() if b.is_floating_point() or n.endswith(COUNTER)}
