"""The few operations in which NumPy arrays and tensors differ, so that an algorithm is written once for both.

A loss of a small batch is some sixty operations on a few numbers. On a CPU, NumPy is several times as fast there.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any  # a NumPy array or a tensor; both have arithmetic, comparisons, @, indexing and sum


def library_of(x: Array) -> Any:
    """The module that computes with x: torch or NumPy, which agree in where, exp, log and empty_like."""
    return torch if isinstance(x, Tensor) else np


def at_least(x: Array, least: float) -> Array:
    return x.clamp_min(least) if isinstance(x, Tensor) else np.maximum(x, least)


def at_most(x: Array, most: float) -> Array:
    return x.clamp_max(most) if isinstance(x, Tensor) else np.minimum(x, most)


def class_sum(x: Array) -> Array:
    """Sum over the classes: [..., 1]."""
    return x.sum(-1, keepdim=True) if isinstance(x, Tensor) else np.add.reduce(x, -1, keepdims=True)


def indicator(mask: Array, like: Array) -> Array:
    """1 where the mask is true, else 0, in the dtype of `like`."""
    return mask.to(like.dtype) if isinstance(mask, Tensor) else mask.astype(like.dtype)


def constant(x: Array) -> Array:
    """x, with no gradient flowing through it."""
    return x.detach() if isinstance(x, Tensor) else x


def widest_float(x: Tensor) -> torch.dtype:
    """float64, for sums and small differences; MPS has none and keeps its dtype."""
    return x.dtype if x.device.type == "mps" else torch.float64


def fastest(x: Tensor) -> Array:
    """The numbers in float64, as a NumPy array if they are on the CPU."""
    if x.is_cpu and not torch.compiler.is_compiling():
        return x.detach().numpy().astype(np.float64)
    return x.to(widest_float(x))
