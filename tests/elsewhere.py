"""A fake second device for machines without a GPU: code that mixes devices fails on it as it would on CUDA.

    with elsewhere():
        loss(logits.to(ELSEWHERE), labels.to(ELSEWHERE)).backward()

Its tensors wrap ordinary ones and compute with them, but report another device and cannot be combined with tensors of
the CPU. In torch the device is called "lazy", a type that always exists and that nobody uses. `waits` counts what would
make the CPU wait for a GPU.
"""

import os
from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
import torch._dynamo  # it notes torch's functions when it is imported, so not while they are replaced here
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

REAL = os.environ.get("EAST_TEST_DEVICE")  # such as cuda:0, to test a real device instead; scripts/gpu_check sets it
ELSEWHERE = torch.device(REAL or "lazy:0")
CLOSE = 0.02 if REAL else 1e-4  # probabilities after some epochs: Adam amplifies rounding errors
# Operations whose result, or its shape, the CPU must know before it goes on.
WAITING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "unique_dim",
           "_unique2")  # fmt: skip
LACKING = {"take", "put_"}  # which MPS has only since PyTorch 2.15

waits: Counter[str] = Counter()  # what the CPU has waited for; tests clear it


@contextmanager
def elsewhere():
    if REAL:
        yield ELSEWHERE
        return
    enabled, autocast = torch.is_autocast_enabled, torch.autocast  # these know only real devices

    def is_autocast_enabled(*kind):
        return kind != (ELSEWHERE.type,) and enabled(*kind)

    def no_autocast(kind, *rest, **options):
        return nullcontext() if kind == ELSEWHERE.type else autocast(kind, *rest, **options)

    with (
        mock.patch("torch.is_autocast_enabled", is_autocast_enabled),
        mock.patch("torch.autocast", no_autocast),
        _Operations(),
        _FromData(),
    ):
        yield ELSEWHERE


@contextmanager
def without_waiting():
    """AssertionError, or RuntimeError by CUDA, if the CPU waits for the device in this block."""
    waits.clear()
    if ELSEWHERE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if ELSEWHERE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert waits.total() == 0, +waits


class Distant(torch.Tensor):
    """A tensor on the fake device; `here` holds its numbers on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here):
        layout = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, here.shape, **layout, device=ELSEWHERE)

    def __init__(self, here):
        self.here = here

    def __repr__(self):
        return f"Distant({self.here})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


def is_elsewhere(device) -> bool:
    return device is not None and torch.device(device).type == ELSEWHERE.type


def computed(function, args, kwargs):
    """Apply the operation to the numbers; results are on the device of its tensors, or on the requested one."""
    name, requested = function._schema.name.removeprefix("aten::"), kwargs.get("device")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    distant, moves = [isinstance(t, Distant) for t in tensors], name in ("_to_copy", "copy_")
    if any(distant) and not moves:
        here = [tuple(t.shape) for t in tensors if not isinstance(t, Distant) and t.dim()]  # scalars may be anywhere
        if here:
            raise RuntimeError(f"{name}: expected all tensors on one device, got {here} here, others elsewhere")
        if name in LACKING:
            raise NotImplementedError(f"{name}: not on every device")
    count(name, args, distant, is_elsewhere(requested) if requested else distant[:1] == [True])
    away = is_elsewhere(requested) if requested else any(distant[:1] if moves else distant)
    kwargs = kwargs | {"device": torch.device("cpu")} if requested else kwargs
    cpu_args, cpu_kwargs = tree_map_only(Distant, lambda t: t.here, (args, kwargs))
    result = function(*cpu_args, **cpu_kwargs)
    if not away:
        return result
    return return_and_correct_aliasing(function, args, kwargs, tree_map_only(torch.Tensor, Distant, result))


def count(name, args, distant, target):
    """Count an operation in `waits` if it reads the fake device's numbers, or uploads numbers to it.

    distant: whether each of its tensors is elsewhere. target: whether a copy goes there.
    """
    if name in ("_to_copy", "copy_"):
        waits["download"] += distant[-1] and not target
        waits["upload"] += target and not distant[-1]
    elif name in ("index", "index_put_", "index_put"):
        # A mask as an index is searched for its ones first, unless a single number is filled in.
        masked = any(isinstance(t, Distant) and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        waits["mask as index"] += masked and not (len(args) > 2 and args[2].numel() == 1)
    elif name in WAITING:
        waits[name] += any(distant)


class _Operations(TorchDispatchMode):
    """Catches operations that create tensors without inputs."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


class _FromData(TorchFunctionMode):
    """Tensors made from Python numbers, which dispatch modes do not see: created on the CPU, then moved."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and is_elsewhere(kwargs.get("device")):
            return function(*args, **kwargs | {"device": None}).to(ELSEWHERE)
        if function is torch.Tensor.new_tensor and isinstance(args[0], Distant):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(ELSEWHERE)
        return function(*args, **kwargs)
