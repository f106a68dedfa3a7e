"""The file of a checkpoint: tensors by safetensors, the courses of the population's trials, and a digest of it all."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

import safetensors.torch
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from torch import Tensor

from east.lab.files import write_atomically
from east.lab.training.annealing import Course

VERSION = "3"  # of the layout; a checkpoint of another version is not resumed
COURSES = TypeAdapter(list[Course])

Identity: TypeAlias = tuple[str, int, str]  # key, seed and stage of a trial


def write_checkpoint(
    file: Path, tensors: Mapping[str, Tensor], courses: Sequence[Course], trials: Sequence[Identity]
) -> None:
    """Write tensors of the CPU and the courses of these trials, in place of an earlier checkpoint."""
    state = json.dumps([asdict(course) for course in courses])
    about = {"format": VERSION, "state": state, "digest": _digest(state, tensors), "trials": json.dumps(trials)}
    content = safetensors.torch.save(dict(tensors), metadata=about)
    write_atomically(file, content)


def read_checkpoint(file: Path, device: torch.device) -> tuple[dict[str, Tensor], list[Course]]:
    """The tensors and courses of a checkpoint."""
    with safe_open(file, framework="pt", device=str(device)) as stored:
        about = stored.metadata() or {}
        if about.get("format") != VERSION:
            raise ValueError("it was written by another version")
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
    if about.get("digest") != _digest(about.get("state", ""), tensors):
        raise ValueError("its content has changed since it was written")
    return tensors, COURSES.validate_python(json.loads(about["state"]))


def trials_in(file: Path) -> set[Identity]:
    """The trials of a checkpoint; none if it does not say, or cannot be read."""
    try:
        with safe_open(file, framework="pt") as stored:
            return {(key, seed, stage) for key, seed, stage in json.loads(stored.metadata()["trials"])}
    except Exception:  # a damaged file can raise nearly anything
        return set()


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash of everything in a checkpoint: a bit that flips on disk must not become a result."""
    state = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].cpu()
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        state.update(tensor.flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()
