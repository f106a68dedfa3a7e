"""The device that a trial runs on."""

import os

import torch

from east.choices import ConfigError, choose
from east.lab.settings.settings import DEVICES


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is the fastest available."""
    kind = choose("device", name.partition(":")[0], DEVICES)
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if kind == "auto":
        name = kind = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    if not available[kind]:
        choices = ", ".join(k for k in available if available[k])
        raise ConfigError(
            f"device {name!r} is not available here; choices: {choices}{f'. {hidden()}' if hidden() else ''}"
        )
    return torch.device(name)


def hidden() -> str:
    """What users should know who have named GPUs, or hidden them, where PyTorch finds none; else nothing."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or torch.cuda.is_available():
        return ""
    return f"CUDA_VISIBLE_DEVICES={visible} is set, and PyTorch finds no GPU"


def describe_device(device: str = "auto") -> str:
    """The device as records name it: for CUDA with its model, and what is rounded to TF32, if anything is."""
    chosen = pick_device(device)
    if chosen.type != "cuda":
        return chosen.type
    allowed = {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32}
    tf32 = " and ".join(name for name, on in allowed.items() if on) or "off"
    return f"cuda ({torch.cuda.get_device_name(chosen)}, tf32 {tf32})"
