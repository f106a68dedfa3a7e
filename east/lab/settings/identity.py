"""The identity of a trial: a hash of everything that determines its result.

`key` is the hash of the scientific config; `family` leaves out what a search varies, so all points of a grid have the
same family. Labels, device, paths, executor and stage are not part of either.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

SCHEMA = 1
SECTIONS = ("dataset", "split", "model", "loss", "annealing", "protocol", "hyper")
SEARCHED = ("lr", "dropout", "batch_size")  # keys of hyper; a search also varies annealing.r


def key(config: Mapping) -> str:
    """A hash of the scientific sections of a config.

    A data path counts only if there is no `dataset.fingerprint`, which identifies the data themselves.
    """
    return _digest(_scientific(config))


def family(config: Mapping) -> str:
    """`key` without learning rate, dropout, batch size and `annealing.r`: the same for all points of one search."""
    scientific = _scientific(config)
    for section, names in (("hyper", SEARCHED), ("annealing", ("r",))):
        for name in names:
            scientific.get(section, {}).pop(name, None)
    return _digest(scientific)


def _scientific(config: Mapping) -> dict[str, Any]:
    """The hashed part of a config, with equal values written the same way (5 and 5.0, tuples and lists)."""
    for section in ("dataset", "loss"):
        if "name" not in config.get(section, {}):
            raise ValueError(f"expected a config with {section}.name, got the sections {sorted(config)}")
    whole = lambda x: int(x) if x.is_integer() else x  # noqa: E731
    scientific = {name: plain(config[name], whole) for name in (*SECTIONS, "ensemble") if name in config}
    dataset = scientific["dataset"]
    if dataset.get("fingerprint"):
        dataset.pop("path", None)
    dataset.pop("root", None)
    return scientific


def _digest(scientific: Mapping) -> str:
    text = json.dumps([SCHEMA, scientific], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def plain(value: Any, number: Callable[[float], Any] = lambda x: x) -> Any:
    """The value in JSON types, with None for numbers that are not finite; `number` is applied to the other floats."""
    if value is None or isinstance(value, (str, int)):  # bool is an int
        return value
    if isinstance(value, (dict, Mapping)):  # dict first: the check for the abstract class is slow
        return {str(name): plain(item, number) for name, item in value.items()}
    if isinstance(value, float):
        return number(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # arrays and tensors
        return plain(value.tolist(), number)
    if isinstance(value, Iterable):
        return [plain(item, number) for item in value]
    raise TypeError(f"expected plain JSON types in a record, got {type(value).__name__}: {value!r}")
