"""From a command to its settings: compose the files of conf/, complete them from protocol and preset, validate."""

import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from east.choices import CONF, ConfigError, choose, groups, import_by_path, names_a_file
from east.settings.command import Command
from east.settings.sections import Loss, RefusedError
from east.settings.settings import Settings

PAPER_DATASETS = (
    *("cifar10", "caltech256", "cocktailparty", "adult", "mammography", "kaggle", "cocktailparty_graph"),
    *("adult_released", "cifar10_transportation", "cifar10_frog"),
)
DEFAULTS = {"dataset": "digits", "loss": "f1", "protocol": "east", "executor": "auto", "preset": "auto"}
COMMON = ("name", "kind", "limit", "outputs")  # keys of every dataset or network; `Settings` checks them
COMMAND_ONLY = ("losses", "datasets")  # read by Command.each
Files = Mapping[str, Mapping[str, Path]]
Composed = dict[str, Any]  # a config before it is validated


def settings(command: Command) -> Settings:
    """The settings of a command that names one dataset and one loss."""
    folder = command.get("config_dir")
    files = groups(folder)
    files["table"]["all"] = CONF  # not a file; a table's file is not composed into the config anyway
    dataset = command.get("dataset", "")
    if names_a_file(str(dataset)) and dataset not in files["dataset"]:
        raise ConfigError(f"dataset={dataset}: did you mean dataset.path={dataset}?")
    chosen = {
        name: choose(name, str(value), files[name])
        for name, value in command.values.items()
        if name in files and not isinstance(value, Mapping)
    }
    table = chosen.pop("table", "grid")
    others = {name: value for name, value in command.values.items() if name not in (*chosen, "table")}
    typed = dict(flattened(others, files))

    config = composed(files, completed(files, chosen, typed))
    refuse_unknown_keys(typed, config)
    refuse_wrong_types(typed, config)
    for name, value in typed.items():
        set_value(config, name, value)
    fill_from_preset(config, typed)
    config |= {"table": table, "fixed": frozenset(n.partition(".")[2] for n in typed if n in fixable(config))}
    for name in COMMAND_ONLY:
        config.pop(name, None)
    for name, value in leaves(config):
        if value == "???":
            raise ConfigError(f"{name} has no default: write {name}=…")
    try:
        checked = Settings.model_validate(config)
        return checked.but(hyper=checked.hyper.but(**open_hyperparameters(checked)))
    except ValidationError as error:
        raise ConfigError(explained(error)) from error


def all_settings(command: Command) -> list[Settings]:
    """The settings of every dataset and loss of a command."""
    return [settings(single) for single in command.each()]


def completed(files: Files, chosen: Mapping[str, str], typed: Mapping[str, Any]) -> dict[str, str]:
    """The user's choices, and a choice for every other group; it may depend on the values that the user typed."""
    choices = {**DEFAULTS, **chosen}

    def content(group: str) -> Composed:
        return section(files, group, choices[group])[group]

    kind, protocol = content("dataset")["kind"], content("protocol")
    options = {name.removeprefix("loss."): value for name, value in typed.items() if name.startswith("loss.")}
    loss = Loss.model_validate(content("loss") | options)
    if choices["preset"] == "auto":
        choices["preset"] = "paper" if choices["dataset"] in PAPER_DATASETS else "quick"
    preset = content("preset")
    choices.setdefault("model", preset["model"].get(kind, protocol["model"][kind]))
    choices.setdefault("search", "none" if loss.classical else preset["search"] or protocol["search"])
    choices.setdefault("annealing", protocol["annealing"] if loss.anneals else "none")
    return choices


def composed(files: Files, chosen: Mapping[str, str]) -> Composed:
    """conf/config.yaml with these group choices; the preset comes last and wins.

    The result is what Hydra would compose, but Hydra takes 0.2 s and a table needs hundreds. Our files are plain, so
    each is read once and merged here. A file with a defaults list is composed by Hydra.
    """
    base = read(CONF / "config.yaml")
    config = {name: deepcopy(value) for name, value in base.items() if name not in ("defaults", "hydra")}
    for group in sorted(chosen, key=lambda group: group == "preset"):
        merge(config, section(files, group, chosen[group]))
    if any(isinstance(value, str) and "${" in value for _, value in leaves(config)):
        config = OmegaConf.to_container(OmegaConf.create(config), resolve=True)  # type: ignore[assignment]
    return config


def section(files: Files, group: str, name: str) -> Composed:
    """What a file of a config group adds to a config: its content under the group's name, or at the top."""
    file = files[group][name]
    content = read(file)
    if "defaults" in content:
        return by_hydra(file)
    return content if "@package _global_" in file.read_text(encoding="utf-8") else {group: content}


def read(file: Path) -> Composed:
    return _read(file, file.stat().st_mtime_ns)


@cache
def _read(file: Path, _changed: int) -> Composed:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected names and values, got {type(content).__name__}")
    return content


def by_hydra(file: Path) -> Composed:
    """A file with a defaults list, composed by Hydra with the files of its folder and ours."""
    root = file.parent.parent
    try:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(root.resolve()), version_base="1.3"):
            config = hydra_compose(f"{file.parent.name}/{file.stem}", [f"hydra.searchpath=['file://{CONF}']"])
        return OmegaConf.to_container(config)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{file}: {str(error).strip().splitlines()[0]}") from error


def merge(config: Composed, values: Mapping[str, Any]) -> None:
    """Add values to a config, section by section."""
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(config.get(name), dict):
            merge(config[name], value)
        else:
            config[name] = deepcopy(value)


def set_value(config: Composed, name: str, value: Any) -> None:
    """Set a dotted name, creating missing mappings such as model.parameters."""
    *sections, last = name.split(".")
    for section in sections:
        config = config.setdefault(section, {}) if config.get(section) is None else config[section]
    config[last] = value


def fill_from_preset(config: Composed, typed: Mapping[str, Any]) -> None:
    """Fill in the dataset options that the preset prescribes, unless the user typed them."""
    dataset = config["dataset"]
    for name, value in config["preset"]["dataset"].get(dataset["name"], {}).items():
        if f"dataset.{name}" not in typed:
            dataset[name] = value


def fixable(config: Composed) -> set[str]:
    """Names that a search leaves alone if the user has set them."""
    return {f"hyper.{name}" for name in config["hyper"]} | {"annealing.r"}


def open_hyperparameters(checked: Settings) -> dict[str, float]:
    """The protocol's values for hyperparameters that are not set yet."""
    prescribed = checked.protocol.hyperparameters(checked.dataset, checked.loss)
    values = {name: value for name, value in prescribed.items() if getattr(checked.hyper, name) is None}
    return values | ({"batch_size": int(values["batch_size"])} if "batch_size" in values else {})


def flattened(values: Mapping[str, Any], files: Files) -> Iterator[tuple[str, Any]]:
    """Flatten sections that were typed as a whole, such as hyper={lr: 0.1}, into dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and (name in files or name in ("hyper", "split")):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, value


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a config with their dotted names; empty sections are leaves."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def refuse_unknown_keys(typed: Mapping[str, Any], config: Composed) -> None:
    """A key must be in a yaml file, below a mapping for the user to fill, or a parameter of the loss's target."""
    known = dict(leaves(config))
    for name in typed:
        parents = [name.rsplit(".", k)[0] for k in range(1, name.count(".") + 1)]
        free = any(parent in known and known[parent] in (None, {}) for parent in parents)
        inside = any(key.startswith(f"{name}.") for key in known)
        parameter = name.startswith("loss.") and name.partition(".")[2] in target_parameters(config["loss"])
        if not (name in known or free or inside or parameter):
            if name == "dataset.target" and config["dataset"]["name"] == "images":
                raise ConfigError("dataset.target is for files; the classes of images are their folders")
            raise ConfigError(unknown_key(name, known))


def refuse_wrong_types(typed: Mapping[str, Any], config: Composed) -> None:
    """Options of datasets and networks must have the type of their default in conf/; null accepts anything."""
    for name, value in typed.items():
        section, _, option = name.partition(".")
        default = config.get(section, {}).get(option) if section in ("dataset", "model") else None
        if default is None or value is None or option in COMMON:
            continue
        number = isinstance(default, int | float) and not isinstance(default, bool)
        accepted = (int, float) if number else (str, int, float) if isinstance(default, str) else (type(default),)
        if not isinstance(value, accepted) or (isinstance(value, bool) and not isinstance(default, bool)):
            kind = TYPE_NAMES[float if number else type(default)]
            raise ConfigError(f"{name}: expected {kind} such as {default!r}, got {value!r}")


def target_parameters(loss: Mapping[str, Any]) -> set[str]:
    """The parameters of a loss's target and of its metric. This imports the target, and with it torch."""
    target = import_by_path(loss["_target_"])
    accepted = set(inspect.signature(target).parameters)
    if hasattr(target, "metric_parameter_names"):
        accepted |= set(target.metric_parameter_names(loss.get("metric")))
    return accepted


def unknown_key(name: str, known: Iterable[str]) -> str:
    """The message for a key that does not exist, with a suggestion and the choices."""
    known = list(known)
    deeper = [key for key in known if key.endswith(f".{name}")] or elsewhere(name)  # lr is hyper.lr
    top = sorted({key.split(".")[0] for key in known})  # includes groups: los is loss, not losses
    near = (
        deeper
        or ("." not in name and get_close_matches(name, top, n=1))
        or get_close_matches(name, known, n=1, cutoff=0.5)
    )
    siblings = {key for key in known if key.rpartition(".")[0] == name.rpartition(".")[0]}
    choices = ", ".join(sorted(siblings) if "." in name and siblings else top)
    return f"unknown key {name!r}{f', did you mean {near[0]!r}?' if near else '.'} Choices: {choices}"


def elsewhere(name: str) -> list[str]:
    """Dotted names of a key in files that were not chosen: `path` is dataset.path of dataset=csv."""
    return sorted(
        f"{group}.{name}" for group, choices in groups().items() if any(name in read(file) for file in choices.values())
    )


def explained(error: ValidationError) -> str:
    """The first error in one line: what was expected, what it got, and the choices."""
    first = error.errors()[0]
    location, value = [part for part in first["loc"] if isinstance(part, str)], first["input"]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if isinstance(cause, RefusedError):
        location, value = [*location, cause.field], cause.value
    field, depth = field_at(location)
    name = ".".join(location[:depth])
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
        if model is None or part not in model.model_fields:
            break
        field, depth = model.model_fields[part], depth + 1
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
    dict: "a mapping",
}


def expected(field: FieldInfo) -> str:
    """A field's type and bounds in words."""
    kinds, bounds = [], list(field.metadata)
    for kind in alternatives(field.annotation):
        bounds += list(getattr(kind, "__metadata__", ()))
        kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
        kinds.append(TYPE_NAMES.get(get_origin(kind) or kind, "a value"))
    limits = [limit for bound in bounds for limit in getattr(bound, "metadata", [bound])]
    text = " or ".join(dict.fromkeys(kinds))
    low, above, high, below = (
        next((getattr(bound, name) for bound in limits if hasattr(bound, name)), None)
        for name in ("ge", "gt", "le", "lt")
    )
    if low is not None and high is not None:
        return f"{text} from {low:g} to {high:g}"
    words = (("of at least", low), ("above", above), ("of at most", high), ("below", below))
    return " ".join([text, " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)]).strip()
