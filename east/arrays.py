"""The few operations in which NumPy arrays and tensors differ, so that an algorithm is written once for both.

A loss of a small batch is some sixty operations on a few numbers. On a CPU, NumPy is several times as fast there.
Nothing here imports torch before it meets a tensor: scores of recorded confusion matrices need only NumPy.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Array = Any  # a NumPy array or a tensor; both have arithmetic, comparisons, @, indexing and sum
OF_NUMPY = (np.ndarray, np.generic, float, int)


def library_of(x: Array) -> Any:
    """The module that computes with x: torch or NumPy, which agree in where, exp, log and empty_like."""
    if isinstance(x, OF_NUMPY):
        return np
    import torch

    return torch


def at_least(x: Array, least: float) -> Array:
    return np.maximum(x, least) if isinstance(x, OF_NUMPY) else x.clamp_min(least)


def at_most(x: Array, most: float) -> Array:
    return np.minimum(x, most) if isinstance(x, OF_NUMPY) else x.clamp_max(most)


def class_sum(x: Array) -> Array:
    """Sum over the classes: [..., 1]."""
    return np.add.reduce(x, -1, keepdims=True) if isinstance(x, OF_NUMPY) else x.sum(-1, keepdim=True)


def indicator(mask: Array, like: Array) -> Array:
    """1 where the mask is true, else 0, in the dtype of `like`."""
    return mask.astype(like.dtype) if isinstance(mask, np.ndarray) else mask.to(like.dtype)


def constant(x: Array) -> Array:
    """x, with no gradient flowing through it."""
    return x if isinstance(x, OF_NUMPY) else x.detach()


def widest_float(x: "Tensor") -> "torch.dtype":
    """float64, for sums and small differences; MPS has none and keeps its dtype."""
    import torch

    return x.dtype if x.device.type == "mps" else torch.float64


def on_host(*tensors: "Tensor") -> Sequence[Array]:
    """The same numbers as NumPy arrays if they are on the CPU, where NumPy is faster."""
    import torch

    if tensors[0].is_cpu and not torch.compiler.is_compiling():
        return [x.numpy() for x in tensors]
    return tensors


def fastest(x: "Tensor") -> Array:
    """The numbers in float64, as a NumPy array if they are on the CPU."""
    (values,) = on_host(x.detach())
    return values.astype(np.float64) if isinstance(values, np.ndarray) else values.to(widest_float(x))
