"""Explain a wrong setting in one line: what was expected, what it got, the choices, and what was probably meant."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from east.choices import ConfigError, choose, groups
from east.lab.files import yaml_content

Checked = TypeVar("Checked", bound=BaseModel)


def validated(model: type[Checked], content: Mapping[str, Any], section: str = "") -> Checked:
    """The content as a model; ConfigError if it is not one. section: where the content stands in a config."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(reason(error, model, content, section)) from error


def reason(error: ValidationError, model: type[BaseModel], content: Any, section: str) -> str:
    """The first error of the most deeply nested key; a key that may be of several types has one for each."""
    wrong: dict[tuple[str, ...], list[Any]] = {}
    for details in error.errors(include_url=False):
        key, value = [section] if section else [], content
        for part in details["loc"]:  # it also has places in lists and names of types
            if isinstance(value, Mapping) and part in value:
                key, value = [*key, str(part)], value[part]
        wrong.setdefault(tuple(key), []).append(details)
    path = max(wrong, key=len)
    name, first = ".".join(path), wrong[path][0]
    match first["type"]:
        case "missing":
            return f"{name}.{first['loc'][-1]} is missing: add it to the {name} file"
        case "extra_forbidden":
            refuse_key(name, [f"{section}.{key}" if section else key for key in keys_of(model)])
        case "literal_error":
            choose(name, str(first["input"]), re.findall("'(.*?)'", first["ctx"]["expected"]))
        case "value_error" if isinstance(cause := first["ctx"]["error"], ConfigError):
            return str(cause)
    reasons = dict.fromkeys(
        re.sub("^(Input should be|Value error,|Tuple should have) ", "", each["msg"]) for each in wrong[path]
    )
    return f"{name}: expected {' or '.join(reasons)}, got {first['input']!r}"


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    """Dotted names of a model's fields and of those of its sections."""
    for name, field in model.model_fields.items():
        yield name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from (f"{name}.{below}" for below in keys_of(part))


def refuse_key(name: str, known: Iterable[str]) -> NoReturn:
    """Raise a ConfigError for a key that does not exist, with the choices and what was probably meant."""
    section = name.rpartition(".")[0]
    beside = [key for key in known if key.rpartition(".")[0] == section] or [section]
    renamed = {"tensorboard": "logger=tensorboard"}.get(name)
    deeper = sorted((key for key in known if key.endswith(f".{name}")), key=len)  # lr is hyper.lr
    of_file = (f"{g}.{name}" for g, files in groups().items() for file in files.values() if name in yaml_content(file))
    choose("key", name, beside, renamed or next(iter(deeper), None) or next(of_file, None))  # path: that of dataset=csv
    raise AssertionError(f"{name} is a key")
