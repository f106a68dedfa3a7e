"""The identity of a trial: a hash of everything that determines its result.

`key` is the hash of the scientific config; `family` leaves out what a search varies, so all points of a grid have the
same family. Labels, device, paths, executor and stage are not part of either.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pydantic_core import to_json

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

SCHEMA = 1
SECTIONS = ("dataset", "split", "model", "loss", "annealing", "protocol", "hyper")
SEARCHED = ("lr", "dropout", "batch_size")  # keys of hyper; a search also varies annealing.r


def key(config: Mapping) -> str:
    """A hash of the scientific sections of a config.

    A data path counts only if there is no `dataset.fingerprint`, which identifies the data themselves.
    """
    return _digest(config, of_family=False)


def family(config: Mapping) -> str:
    """`key` without learning rate, dropout, batch size and `annealing.r`: the same for all points of one search."""
    return _digest(config, of_family=True)


def _digest(config: Mapping, of_family: bool) -> str:
    for section in ("dataset", "loss"):
        if "name" not in config.get(section, {}):
            raise ValueError(f"expected a config with {section}.name, got the sections {sorted(config)}")
    hashed = sorted({*SECTIONS, "ensemble"} & config.keys())
    return digest({name: hashed_text(name, config[name], of_family) for name in hashed})


def hashed_text(section: str, values: Mapping, of_family: bool) -> str:
    """What is hashed of a section, with equal values written the same way (5 and 5.0, tuples and lists)."""
    scientific: dict = json_types(values, lambda x: int(x) if x.is_integer() else x)  # type: ignore[assignment]
    unhashed: tuple[str, ...] = ()
    if section == "dataset":
        unhashed = ("root", "path") if scientific.get("fingerprint") else ("root",)
    if of_family:
        unhashed = {"hyper": SEARCHED, "annealing": ("r",)}.get(section, unhashed)
    return _dumps({name: value for name, value in scientific.items() if name not in unhashed})


def digest(texts: Mapping[str, str]) -> str:
    """The hash of a config, given what is hashed of its sections."""
    sections = ",".join(f'"{name}":{texts[name]}' for name in sorted(texts))
    return hashlib.sha256(f"[{SCHEMA},{{{sections}}}]".encode()).hexdigest()[:12]


def _dumps(value: Json) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def json_types(value: Any, number: Callable[[float], Any] = lambda x: x) -> Any:
    """The value in JSON types, with None for numbers that are not finite; `number` is applied to the other floats."""
    text = to_json(value, inf_nan_mode="null", fallback=lambda array: array.tolist())  # of NumPy or torch
    return json.loads(text, parse_float=lambda digits: number(float(digits)))
