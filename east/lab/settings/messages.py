"""What is wrong with a setting, in one line: what was expected, what came, the choices, and what was probably meant."""

import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from east.choices import ConfigError, choose, groups
from east.lab.settings.reading import read
from east.lab.settings.sections import RefusedError
from east.lab.settings.settings import Settings

FROM_FILE = ("name", "kind", "trains", "has_temperature", "code")  # what a file says of itself; nobody types it
Checked = TypeVar("Checked", bound=BaseModel)


def validated(model: type[Checked], content: Any, section: str | None = None) -> Checked:
    """The content as a model; ConfigError if it is not one. section: where it stands in a config, the top if None."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(explained(error, [section] if section else [])) from error


def unknown_key(name: str, known: Iterable[str]) -> str:
    """The message for a key that does not exist, with a suggestion and the choices."""
    known = list(known)
    top = sorted({key.split(".")[0] for key in known})  # includes groups: los is loss, not losses
    siblings = {key for key in known if "." in name and key.rpartition(".")[0] == name.rpartition(".")[0]}
    known = [key for key in known if key.rpartition(".")[2] not in FROM_FILE]
    deeper = [key for key in known if key.endswith(f".{name}")] or elsewhere(name)  # lr is hyper.lr
    near = (
        deeper
        or ("." not in name and get_close_matches(name, top, n=1))
        or get_close_matches(name, known, n=1, cutoff=0.5)
    )
    choices = ", ".join(sorted(siblings & {*known}) if siblings else top) or "none"
    return f"unknown key {name!r}{f', did you mean {near[0]!r}?' if near else '.'} Choices: {choices}"


def elsewhere(name: str) -> list[str]:
    """Dotted names of a key in files that were not chosen: `path` is dataset.path of dataset=csv."""
    return sorted(
        f"{group}.{name}" for group, choices in groups().items() if any(name in read(file) for file in choices.values())
    )


def explained(error: ValidationError, section: Sequence[str] = ()) -> str:
    """The first error in one line: what was expected, what it got, and the choices. section: where the model stands."""
    first = error.errors()[0]
    location, value = [*section, *(part for part in first["loc"] if isinstance(part, str))], first["input"]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if isinstance(cause, RefusedError):
        location, value = [*location, cause.field], cause.value
    field, depth = field_at(location)
    name = ".".join(location[:depth])
    if first["type"] == "missing":
        return f"{'.'.join(location)} is missing: add it to the {location[0]} file"
    if first["type"] == "extra_forbidden":
        return unknown_key(".".join(location), known_fields(location[:-1]))
    if field is None:
        return f"{name}: {first['msg']}"
    if choices := literals(field.annotation):
        try:
            choose(name, value, choices)
        except ConfigError as wrong:
            return str(wrong)
    return f"{name}: expected {field.description or expected(field)}, got {value!r}"


def field_at(location: Iterable[str]) -> tuple[FieldInfo | None, int]:
    """The field at a location, and how many parts of the location name it; the rest is inside the field's value."""
    model: type[BaseModel] | None = Settings
    field, depth = None, 0
    for part in location:
        fields = {info.alias or name: info for name, info in model.model_fields.items()} if model else {}
        if part not in fields:
            break
        field, depth = fields[part], depth + 1
        model = next(sections_of(field.annotation), None)
    return field, depth


def known_fields(location: list[str]) -> list[str]:
    """Dotted names of the fields of the section at a location."""
    field, _ = field_at(location)
    section = next(sections_of(field.annotation)) if field else Settings
    return [".".join([*location, name]) for name in section.model_fields]


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections among the types that a field may have."""
    return (t for t in alternatives(annotation) if inspect.isclass(t) and issubclass(t, BaseModel))


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, without None; any other type is its own only alternative."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(t for t in get_args(annotation) if t is not type(None))
    return (annotation,)


def literals(annotation: Any) -> list[str]:
    """The words that a field allows, if it allows nothing else."""
    options = alternatives(annotation)
    return [word for t in options for word in get_args(t)] if all(get_origin(t) is Literal for t in options) else []


TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list",
    list: "a list",
    Sequence: "a list",
    dict: "a mapping",
    Mapping: "a mapping",
}
NUMBERS = (TYPE_NAMES[int], TYPE_NAMES[float])


def expected(field: FieldInfo) -> str:
    """A field's type and bounds in words."""
    kinds = (in_words(kind, field.metadata) for kind in alternatives(field.annotation))
    return " or ".join(dict.fromkeys(words for words in kinds if words)) or "another value"


def in_words(kind: Any, bounds: Iterable[Any] = ()) -> str:
    """A type and its bounds in words; nothing for a type that cannot be written in a config."""
    bounds = [*bounds, *getattr(kind, "__metadata__", ())]
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    is_section = inspect.isclass(kind) and issubclass(kind, BaseModel)
    text = TYPE_NAMES.get(dict if is_section else get_origin(kind) or kind, "")
    if get_origin(kind) is tuple:
        return f"{text} with at least one entry, each {in_words(get_args(kind)[0])}"
    if text not in NUMBERS:
        return text
    limits = [limit for bound in bounds for limit in getattr(bound, "metadata", [bound])]
    low, above, high, below = (
        next((getattr(bound, name) for bound in limits if hasattr(bound, name)), None)
        for name in ("ge", "gt", "le", "lt")
    )
    if low is not None and high is not None:
        return f"{text} from {low:g} to {high:g}"
    words = (("of at least", low), ("above", above), ("of at most", high), ("below", below))
    return " ".join([text, " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)]).strip()
