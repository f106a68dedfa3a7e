"""Explain a wrong setting in one line: what was expected, what it got, the choices, and what was probably meant."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from east.choices import ConfigError, choose, groups
from east.lab.files import yaml_content

FROM_FILE = ("name", "kind", "trains", "has_temperature", "code")  # what a file says of itself; nobody types it
WORDS = {  # of pydantic, and ours
    "Value error, ": "",
    "Input should be ": "",
    "Tuple should have at least 1 item after validation, not 0": "a list with at least one entry",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid tuple": "a list",
    "a valid dictionary": "a mapping",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
    "0.000000000001": "1e-12",
}
Checked = TypeVar("Checked", bound=BaseModel)


def validated(model: type[Checked], content: Mapping[str, Any], section: str = "") -> Checked:
    """The content as a model; ConfigError if it is not one. section: where the content stands in a config."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(explained(error, model, content, section)) from error


def explained(error: ValidationError, model: type[BaseModel], content: Any, section: str) -> str:
    """What is wrong with the content of a model, in one line."""
    wrong: dict[str, list[Any]] = {}  # pydantic has an error for each type that a value may have
    for details in error.errors(include_url=False):
        parts, value = [section] if section else [], content
        for part in details["loc"]:  # also has places in lists and the names of types
            if isinstance(value, Mapping) and part in value:
                parts, value = [*parts, str(part)], value[part]
        wrong.setdefault(".".join(parts), []).append(details)
    name = max(wrong, key=lambda name: name.count("."))
    first = wrong[name][0]
    match first["type"]:
        case "missing":
            return f"{name}.{first['loc'][-1]} is missing: add it to the {name} file"
        case "extra_forbidden":
            for part in first["loc"][:-1]:
                model = model.model_fields[part].annotation  # type: ignore[assignment]
            refuse_key(name, [name.rpartition(".")[0] + f".{field}" for field in model.model_fields])
        case "literal_error":
            choose(name, str(first["input"]), re.findall("'(.*?)'", first["ctx"]["expected"]))
        case "value_error" if isinstance(cause := first["ctx"]["error"], ConfigError):
            return str(cause)
    reasons = {details["msg"]: None for details in wrong[name] if details["type"] != "too_short" or details is first}
    text = " or ".join(reasons)
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    return f"{name}: expected {text}, got {first['input']!r}"


def refuse_key(name: str, known: Iterable[str]) -> NoReturn:
    """Raise a ConfigError for a key that does not exist, with the choices and what was probably meant."""
    known, section = list(known), name.rpartition(".")[0]
    while section and not any(key.startswith(f"{section}.") for key in known):
        section = section.rpartition(".")[0]  # hyper for hyper.lr.foo
    prefix = f"{section}." if section else ""
    siblings = {prefix + key.removeprefix(prefix).partition(".")[0] for key in known if key.startswith(prefix)}
    choices = {key for key in siblings if key.removeprefix(prefix) not in FROM_FILE} or {"none"}
    elsewhere = [key for key in known if key.endswith(f".{name}")] or [  # lr is hyper.lr; path is that of dataset=csv
        f"{group}.{name}" for group, files in groups().items() for file in files.values() if name in yaml_content(file)
    ]
    choose("key", name, choices, next(iter(elsewhere), None))
    raise AssertionError(f"{name} is a key")
