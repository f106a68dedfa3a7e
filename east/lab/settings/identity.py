"""The identity of a trial: a hash of everything that determines its result.

`key` is the hash of the scientific config; `family` leaves out what a search varies, so all points of a grid have the
same family. Labels, device, paths, executor and stage are not part of either.

A record stores as JSON the values of a section that were set. A field declared with `later` was added after the first
records were written: it is stored, and enters the key, only if it differs from its default. A field with `exclude` is
never stored and never enters the key.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic_core import to_json

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

SCHEMA = 1
SECTIONS = ("dataset", "split", "model", "loss", "annealing", "protocol", "hyper")
SEARCHED = ("lr", "dropout", "batch_size")  # keys of hyper; a search also varies annealing.r
LATER: JsonDict = {"identity": "later"}


def later(default: Any, **constraints: Any) -> Any:
    """A field added after schema 1: part of a record and of its key only where it differs from its default."""
    return Field(default, json_schema_extra=LATER, **constraints)


class Section(BaseModel):
    """One part of a config."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True, protected_namespaces=())
    group: ClassVar[str] = ""  # its name in a config, if `hashed_text` treats it in a way of its own

    def to_json(self) -> dict[str, Json]:
        """The values that were set, as a record stores and hashes them."""
        fields = type(self).model_fields.items()
        unchanged = {n for n, f in fields if f.json_schema_extra == LATER and getattr(self, n) == f.default}
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=unchanged, warnings=False)

    def but(self, **changed: Any) -> Self:
        """The same section with other values."""
        copied = self.model_copy(update=changed)
        for derived in ("hashed", "key", "family"):
            copied.__dict__.pop(derived, None)
        return copied

    @cached_property
    def hashed(self) -> tuple[str, str]:
        """What is hashed of it for a trial's key and for its family."""
        stored = self.to_json()
        return hashed_text(self.group, stored, False), hashed_text(self.group, stored, True)


class Open(Section):
    """A section that holds the options of its target besides the common keys."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> Mapping[str, Any]:
        return self.model_extra or {}


def key(config: Mapping, of_family: bool = False) -> str:
    """A hash of the scientific sections of a config.

    A data path counts only if there is no `dataset.fingerprint`, which identifies the data themselves.
    """
    if not all("name" in config.get(section, {}) for section in ("dataset", "loss")):
        raise ValueError(f"expected a config with dataset.name and loss.name, got the sections {sorted(config)}")
    hashed = {*SECTIONS, "ensemble"} & config.keys()
    return digest({name: hashed_text(name, config[name], of_family) for name in hashed})


def family(config: Mapping) -> str:
    """`key` without learning rate, dropout, batch size and `annealing.r`: the same for all points of one search."""
    return key(config, of_family=True)


def hashed_text(section: str, values: Mapping, of_family: bool) -> str:
    """What is hashed of a section, with equal values written the same way (5 and 5.0, tuples and lists)."""
    unhashed: tuple[str, ...] = ()
    if section == "dataset":
        unhashed = ("root", "path") if values.get("fingerprint") else ("root",)
    if section == "model" and values.get("code"):
        unhashed = ("weights",)  # a file, which `code` identifies
    if of_family:
        unhashed = {"hyper": SEARCHED, "annealing": ("r",)}.get(section, unhashed)
    scientific = {name: value for name, value in values.items() if name not in unhashed}
    plain = json_types(scientific, lambda x: int(x) if x.is_integer() else x)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def digest(texts: Mapping[str, str]) -> str:
    """The hash of a config, given what is hashed of its sections."""
    sections = ",".join(f'"{name}":{texts[name]}' for name in sorted(texts))
    return hashlib.sha256(f"[{SCHEMA},{{{sections}}}]".encode()).hexdigest()[:12]


def json_types(value: Any, number: Callable[[float], Any] = lambda x: x) -> Any:
    """The value in JSON types, with None for numbers that are not finite; `number` is applied to the other floats."""
    plain = lambda other: dict(other) if isinstance(other, Mapping) else other.tolist()  # noqa: E731 (NumPy, torch)
    text = to_json(value, inf_nan_mode="null", fallback=plain)
    return json.loads(text, parse_float=lambda digits: number(float(digits)))
