"""The few operations in which NumPy arrays and tensors differ, so that an algorithm is written once for both.

A loss of a small batch is some sixty operations on a few numbers. On a CPU, NumPy is several times as fast there.
Nothing here imports torch before it meets a tensor: scores of recorded confusion matrices need only NumPy.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Array = Any  # a NumPy array or a tensor; both have arithmetic, comparisons, @, indexing, reshape and sum
OF_NUMPY = (np.ndarray, np.generic, float, int)


def library_of(x: Array) -> Any:
    """The module that computes with x: torch or NumPy, which agree in where, exp, log, stack, arange and zeros_like."""
    if isinstance(x, OF_NUMPY):
        return np
    import torch

    return torch


def at_least(x: Array, least: Array) -> Array:
    return np.maximum(x, least) if isinstance(x, OF_NUMPY) else x.clamp_min(least)


def at_most(x: Array, most: Array) -> Array:
    return np.minimum(x, most) if isinstance(x, OF_NUMPY) else x.clamp_max(most)


def class_sum(x: Array) -> Array:
    """Sum over the classes: [..., 1]."""
    return x.sum(-1, keepdims=True)


def sums_at(positions: Array, values: Array, size: int) -> Array:
    """The sums [size] of the values at each position, in float64 (MPS: float32); both have any shape."""
    if isinstance(values, np.ndarray):
        return np.bincount(positions.reshape(-1), values.reshape(-1), size)
    zeros = values.new_zeros(size, dtype=widest_float(values))
    return zeros.scatter_add(0, positions.reshape(-1), values.reshape(-1).to(zeros.dtype))


def one_hot(labels: Array, classes: int, like: Array) -> Array:
    """1 at the class of each label [..., n], else 0: [..., classes, n], in the dtype of `like`."""
    if isinstance(labels, np.ndarray):
        return (labels[..., None, :] == np.arange(classes)[:, None]).astype(like.dtype)
    zeros = like.new_zeros((*labels.shape[:-1], classes, labels.shape[-1]))
    return zeros.scatter_(-2, labels.unsqueeze(-2), 1)  # fails on the device if a label is out of range


def cast(x: Array, like: Array) -> Array:
    """x, such as a mask, in the dtype of `like`."""
    return x.astype(like.dtype) if isinstance(x, np.ndarray | np.generic) else x.to(like.dtype)


def in_float64(x: Array) -> Array:
    """x in float64; on MPS, which has none, as it is."""
    return x.astype(np.float64) if isinstance(x, np.ndarray) else x.to(widest_float(x))


def as_array(x: "Tensor") -> Array:
    """A tensor without a gradient as a NumPy array if it is on the CPU; they share their memory."""
    import torch

    return x.numpy() if x.is_cpu and not torch.compiler.is_compiling() else x


def as_tensor(x: Array) -> "Tensor":
    """The inverse of `as_array`."""
    import torch

    return torch.from_numpy(np.asarray(x)) if isinstance(x, OF_NUMPY) else x


def widest_float(x: "Tensor") -> "torch.dtype":
    """float64, for sums and small differences; MPS has none and keeps its dtype.

    scatter_add adds one sample after the other: 65,536 roundings can shift a float32 sum by 1e-3.
    """
    import torch

    return x.dtype if x.device.type == "mps" else torch.float64
