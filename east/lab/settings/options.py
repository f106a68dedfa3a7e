"""Options of datasets, networks and losses, checked by name and type before anything runs.

What our own yaml files list is known without imports. Anything else is looked up in the signature of the loader, of the
loss or of its metric, which imports torch.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from east.choices import ConfigError, groups, import_by_path, imports_allowed
from east.lab.settings.messages import TYPE_NAMES, expected, unknown_key
from east.lab.settings.reading import read
from east.lab.settings.sections import LossSection

COMMON = {"dataset": ("name", "kind", "limit"), "model": ("name", "outputs")}  # `Settings` checks them
FROM_DATA = ("positive",)  # parameters of a metric that the data fill in, so its own default does not count


def kind_of(dataset: Mapping[str, Any]) -> str:
    """What a dataset's loader gives: table, image or graph."""
    name = str(dataset.get("name")).partition("-")[0]
    ours = groups()["dataset"].get(name)
    return read(ours)["kind"] if ours else import_by_path("east.lab.data.datasets")()[name].kind


def accepted(group: str, section: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options of a dataset or network with their defaults; None for a network that does not exist."""
    name = str(section.get("name"))
    if group == "dataset":
        name = name.partition("-")[0]  # digits-rare is loaded by digits
    elif "target" in section:
        name = "custom"
    if name in groups()[group]:
        return {key: value for key, value in read(groups()[group][name]).items() if key not in COMMON[group]}
    return import_by_path("east.lab.data.options")(name) if group == "dataset" else None


def check(group: str, section: Mapping[str, Any]) -> None:
    """Refuse options that a dataset's loader or a network does not have, or that have another type than its default."""
    known = accepted(group, section)
    if group == "dataset" and (kind := section.get("kind", "table")) != kind_of(section):
        raise ConfigError(f"dataset.kind: expected {kind_of(section)}, got {kind!r}")
    for key, value in section.items():
        if known is None or key in COMMON[group]:
            continue
        if key not in known:
            raise ConfigError(unknown_key(f"{group}.{key}", [f"{group}.{name}" for name in (*COMMON[group], *known)]))
        if group == "dataset" and isinstance(value, float) and isinstance(known[key], int):  # 1.5 where it is 1
            loader = import_by_path("east.lab.data.datasets")()[str(section["name"]).partition("-")[0]].load
            check_type(f"dataset.{key}", value, signature(loader)[key])
        if not (value is None or known[key] is None or has_type_of(known[key], value)):
            default = known[key]
            kind = TYPE_NAMES[float if is_number(default) else type(default)]
            raise ConfigError(f"{group}.{key}: expected {kind} such as {default!r}, got {value!r}")


def has_type_of(default: Any, value: Any) -> bool:
    """Whether a value fits where the default stands: any number for a number, a number or text for text."""
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if is_number(default):
        return is_number(value)
    return isinstance(value, (str, int, float) if isinstance(default, str) else type(default))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def checked_loss(loss: LossSection, typed: set[str]) -> LossSection:
    """The loss without typed options that repeat a default; ConfigError for options that its target does not take."""
    open_questions = {key: value for key, value in loss.options.items() if not settled(loss, key, value)}
    if not open_questions:
        return loss
    try:
        target = import_by_path(loss.target)
        if not isinstance(target, type):
            return loss  # `build_loss` refuses it
        accepted, takes_any, takes_metric = parameters(target)
        unclear = [key for key in open_questions if key not in accepted and key != "parameters"]
        default = accepted["metric"].default if takes_metric else None
        needs_metric = takes_metric and (unclear or loss.options.get("parameters"))
        of_metric = metric_parameters(loss.options.get("metric", default)) if needs_metric else {}
    except ValueError as error:
        if not imports_allowed():
            return loss  # of a record, which may name anyone's code
        raise ConfigError(str(error)) from error
    unused = getattr(target, "unused_in_trials", ())
    usable = [*(key for key in accepted if key not in unused), *of_metric, *(["parameters"] if takes_metric else [])]
    for key, value in open_questions.items():
        parameter = accepted.get(key)
        if key == "parameters" and takes_metric:
            check_parameters(value, of_metric, loss.options.get("metric", default))
        elif parameter is None and not (takes_any or key in of_metric or ANY in of_metric):
            raise ConfigError(unknown_key(f"loss.{key}", [f"loss.{name}" for name in usable if name != ANY]))
        elif parameter is not None and not same(value, parameter.default):
            if key in unused:
                raise ConfigError(f"loss.{key}={value}: it has no effect on the trials of east-run; leave it out")
            check_type(f"loss.{key}", value, parameter)
    defaults = {
        key: p.default for key, p in (of_metric | accepted).items() if key not in {*FROM_DATA, *named_in_conf()}
    }
    repeated = {key for key in typed & defaults.keys() if same(loss.options.get(key), defaults[key])}
    if not repeated:
        return loss
    return LossSection.model_validate(loss.model_dump(by_alias=True, exclude_unset=True, exclude=repeated))


ANY = "**"  # stands for the parameters of a metric that takes any


def settled(loss: LossSection, key: str, value: Any) -> bool:
    """Whether our own file of this loss lists the option, with the same value or another of the same simple type."""
    file = groups()["loss"].get(loss.name)
    ours = read(file) if file else {}
    if key not in ours or ours["_target_"] != loss.target:
        return False
    default = ours[key]
    simple = isinstance(default, str | int | float) and (type(value) is type(default) or isinstance(default, float))
    return same(value, default) or (simple and has_type_of(default, value))


def same(value: Any, default: Any) -> bool:
    """Equal, and both or neither true or false: 1 is not true."""
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)


@cache
def named_in_conf() -> set[str]:
    """Keys that a file of conf/loss lists: records hold them, also where they equal the signature's default."""
    return {key for file in groups()["loss"].values() for key in read(file)}


def parameters(target: type) -> tuple[dict[str, inspect.Parameter], bool, bool]:
    """Parameters of a class, whether it takes any others, and whether others go to its metric.

    A class that passes keywords on also takes those of its base.
    """
    accepted: dict[str, inspect.Parameter] = {}
    takes_metric = False
    for base in target.__mro__:
        if "__init__" not in vars(base):
            continue
        declared = signature(vars(base)["__init__"])
        named = [p for p in [*declared.values()][1:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        accepted = {p.name: p for p in named} | accepted
        passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared.values())
        takes_metric |= passes_on and "metric" in declared
        if not passes_on:
            return accepted, False, takes_metric
    return accepted, True, takes_metric


def signature(function: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function, eval_str=True).parameters
    except Exception:  # annotations that cannot be evaluated
        return inspect.signature(function).parameters


def metric_parameters(metric: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a metric after the confusion; ANY for a metric that takes any."""
    function, _ = import_by_path("east.metrics.parse")(metric)  # f1_positive is f1
    after_confusion = [*signature(function).values()][1:]
    return {ANY if p.kind is p.VAR_KEYWORD else p.name: p for p in after_confusion}


def check_parameters(value: Any, of_metric: Mapping[str, inspect.Parameter], metric: Any) -> None:
    """Refuse a loss.parameters that is not a mapping of the metric's parameters."""
    if not (value is None or isinstance(value, Mapping)):
        raise ConfigError(f"loss.parameters: expected a mapping such as {{beta: 2}}, got {value!r}")
    for key in value or ():
        if ANY not in of_metric and key not in of_metric:
            choices = unknown_key(f"loss.parameters.{key}", [f"loss.parameters.{name}" for name in of_metric])
            raise ConfigError(choices if of_metric else f"loss.parameters.{key}: metric {metric} takes no parameters")


def check_type(name: str, value: Any, parameter: inspect.Parameter) -> None:
    """Refuse a value that does not fit the annotation of its parameter, or else the type of a simple default."""
    kind, default = parameter.annotation, parameter.default
    if kind is parameter.empty or isinstance(kind, str):
        kind = float if is_number(default) else type(default) if isinstance(default, bool | str) else Any
    if value == "balanced" and name == "loss.class_weights":
        return  # `build_loss` computes them
    try:
        options = ConfigDict(strict=True, arbitrary_types_allowed=True)
        TypeAdapter(kind, config=options).validate_json(json.dumps(value))  # as JSON, lists may be tuples
    except PydanticUserError:
        return  # a type that says nothing about plain values
    except ValidationError as error:
        wanted = expected(FieldInfo.from_annotation(kind))
        raise ConfigError(f"{name}: expected {wanted}, got {value!r}") from error
