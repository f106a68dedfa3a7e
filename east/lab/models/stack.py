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
    and a trial should train the same way in any row.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device | str = "cpu"):
        self.module = modules[0]
        if len(modules) > 1 and type(self.module) is not MLP:
            raise ValueError(f"{type(self.module).__name__}: expected a population of one, got {len(modules)}")
        rows = torch.stack(
            [torch.cat([t.detach().flatten().float() for t in trained_tensors(m).values()]) for m in modules]
        )
        # Exactly MLP: a user's subclass may have a forward of its own.
        self.mlp = StackedMLP(self.module.sizes) if type(self.module) is MLP else None
        tensors = trained_tensors(self.module.to(device))
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.parameters = sum(isinstance(tensor, nn.Parameter) for tensor in tensors.values())
        self.learned = sum(self.sizes[: self.parameters])
        starts = accumulate(self.sizes, initial=0)
        self.counters = [start for name, start in zip(self.shapes, starts, strict=False) if name.endswith(COUNTER)]
        self.gradient = torch.empty(0)
        padded = F.pad(rows, (0, -sum(self.sizes) % ALIGNED)).to(device)
        # A GPU wants the kernels of convolutions in the memory layout of its images, a CPU rearranges them anyway.
        images = any(len(shape) == 4 for shape in self.shapes.values())
        self.channels_last = images and padded.device.type not in ("cpu", "mps")
        places = torch.arange(padded.shape[1], device=padded.device)
        self.order = torch.cat([*(t.flatten() for t in self.tensors(places)), places[sum(self.sizes) :]])
        self.put(self.arranged(padded))

    def put(self, weights: Tensor) -> None:
        """Use these rows as the networks' weights, without copying them."""
        self.weights = weights
        if len(self.gradient) != len(weights):
            self.gradient = torch.empty_like(weights)[:, : self.learned]
            self.gradients = [*self.gradient.unbind()]
            if self.mlp is not None:
                self.mlp.buffers.clear()
        if self.mlp is not None:
            self.mlp.bind(weights, self.gradient)
        elif len(weights):
            # .data, because views share one version counter: batch norm's update of its mean in the forward pass would
            # then invalidate the convolution's weights for the backward pass.
            self.views = dict(zip(self.shapes, (view.data for view in self.tensors(weights[0])), strict=True))
            self.leaves = [view.requires_grad_() for view in list(self.views.values())[: self.parameters]]

    def tensors(self, row: Tensor) -> list[Tensor]:
        """The network's tensors in a row of weights [N], or only its parameters in a row of moments [learned]."""
        sizes = self.sizes if len(row) > self.learned else self.sizes[: self.parameters]
        views = []
        for piece, shape in zip(row[: sum(sizes)].split(sizes), self.shapes.values(), strict=False):
            if self.channels_last and len(shape) == 4:
                k, c, h, w = shape
                views.append(piece.view(k, h, w, c).permute(0, 3, 1, 2))
            else:
                views.append(piece.view(shape))
        return views

    def pieces(self, rows: Tensor) -> list[Tensor]:
        """What an optimiser updates, as views of rows: whole rows, or with channels_last each parameter of one module.

        Gradients then have the memory layout of their parameters.
        """
        return self.tensors(rows[0])[: self.parameters] if self.channels_last else [*rows[:, : self.learned].unbind()]

    def ordered(self, rows: Tensor) -> Tensor:
        """Rows [P, N] or [P, learned] with every tensor in torch's default layout, as checkpoints hold them."""
        return rows[:, self.order[: rows.shape[1]]]

    def arranged(self, rows: Tensor) -> Tensor:
        """The inverse of `ordered`."""
        return rows[:, self.order.argsort()[: rows.shape[1]]]

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
        """Set `gradients`, which match the `pieces` of the weights, to those of the sum of `values` [P].

        The values were computed from the latest logits. Gradients are 0 for weights that they do not depend on.
        """
        pieces = torch.autograd.grad(values, self.leaves, torch.ones_like(values), materialize_grads=True)
        if self.mlp is not None:
            self.mlp.backward(pieces[0])
        elif self.channels_last:  # the optimiser's kernel goes through memory: it needs equal strides
            self.gradients = [
                piece if piece.stride() == leaf.stride() else torch.empty_like(leaf).copy_(piece)
                for piece, leaf in zip(pieces, self.leaves, strict=True)
            ]
        else:
            torch.cat([piece.flatten() for piece in pieces], out=self.gradient[0])

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """The state of an ordinary module, on the CPU, whose weights are `row` [N]."""
        with torch.no_grad():
            for tensor, stored in zip(trained_tensors(self.module).values(), self.tensors(row), strict=True):
                tensor.copy_(stored)
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes: parameters, then buffers.

    Batch norm counts batches in int64; as a float it is exact up to 2^24.
    """
    learned: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return learned | {n: b for n, b in module.named_buffers() if b.is_floating_point() or n.endswith(COUNTER)}
