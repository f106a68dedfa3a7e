"""From a command to its settings: compose the files of conf/, complete them from protocol and preset, validate."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from east.choices import CONF, ConfigError, choose, groups, names_a_file
from east.lab.settings import options
from east.lab.settings.command import Command, text
from east.lab.settings.identity import SEARCHED
from east.lab.settings.messages import FROM_FILE, Checked, unknown_key, validated
from east.lab.settings.reading import Composed, read
from east.lab.settings.sections import DatasetSection, Hyper, Kind, LossSection
from east.lab.settings.settings import Settings

PAPER_DATASETS = (
    *("cifar10", "caltech256", "cocktailparty", "adult", "mammography", "kaggle", "cocktailparty_graph"),
    *("adult_released", "cifar10_transportation", "cifar10_frog"),
)
PRESCRIBED = {"dataset": "dataset", "model": "network"}  # groups whose options a preset gives, and under which key
DEFAULTS = {"dataset": "digits", "loss": "f1", "protocol": "east", "executor": "auto", "preset": "auto"}
COMMAND_ONLY = ("losses", "datasets")  # read by Command.each
SINGLE = {"search": "none", "trials": 1}  # what task=train means
VARIANTS = ("executor", "search")  # groups whose `name` is one of ours: executor/cluster.yaml can be a submitit
FIXABLE = {*(f"hyper.{name}" for name in Hyper.model_fields), "annealing.r"}  # a search leaves them alone if typed
Files = Mapping[str, Mapping[str, Path]]


def settings(command: Command) -> Settings:
    """The settings of a command that names one dataset and one loss."""
    if command.get("task") == "train":
        command = of_one_trial(command)
    folder = command.get("config_dir")
    files = groups(folder)
    files["table"]["all"] = CONF  # not a file; a table's file is not composed into the config anyway
    dataset = command.get("dataset", "")
    if names_a_file(str(dataset)) and dataset not in files["dataset"]:
        raise ConfigError(f"dataset={dataset}: did you mean dataset.path={dataset}?")
    if is_classical(str(command.get("loss")), folder):  # a search of several losses is for those that train a network
        command = command.without(*command.among(["search"])).but(search="none")
    chosen = {name: choose(name, str(value), files[name]) for name, value in command.values.items() if name in files}
    typed = {name: value for name, value in command.values.items() if name not in chosen}
    table = chosen.pop("table", "grid")
    refuse_settled_keys(typed, files)
    config = composed(files, completed(files, chosen, typed))
    if any(name.startswith("preset.grid.") for name in typed) and config["preset"].get("grid") is None:
        config["preset"]["grid"] = deepcopy(config["protocol"]["grid"])
    refuse_unknown_keys(typed, config)
    for name, value in typed.items():
        set_value(config, name, value)
    fill_from_preset(config, typed)
    config |= {"table": table, "fixed": frozenset(name.partition(".")[2] for name in typed if name in FIXABLE)}
    for name in COMMAND_ONLY:
        config.pop(name, None)
    for name, value in leaves(config):
        if value == "???":
            raise ConfigError(f"{name} has no default: write {name}=…")
    for group in ("dataset", "model"):
        options.check(group, config[group])
    checked = validated(Settings, config)
    if checked.searched:
        checked.grid()  # fails if there is none for this kind of data
    loss = options.checked_loss(checked.loss, {name.partition(".")[2] for name in typed if name.startswith("loss.")})
    return checked.but(loss=loss, hyper=completed_hyper(checked))


def all_settings(command: Command) -> list[Settings]:
    """The settings of every dataset and loss of a command; its search applies to the losses that train a network."""
    found = [settings(single) for single in command.each()]
    search = Command(command.among(["search"])).words
    if search and search != ["search=none"] and all(of_run.loss.classical for of_run in found):
        names = ", ".join(dict.fromkeys(of_run.loss.name for of_run in found))
        raise ConfigError(f"{search[0]}: a search needs a loss that trains a network, got {names}; leave it out")
    return found


def of_one_trial(command: Command) -> Command:
    """A command of task=train, which trains one trial without a search; ConfigError if it asks for more."""
    for name, value in command.among([*SINGLE]).items():
        if value != SINGLE.get(name):
            word = f"{name}={text(value, name)}"
            raise ConfigError(f"{word}: task=train trains one trial without a search; leave it out, or use task=run")
    return Command(SINGLE).but(command.values)


def completed(files: Files, chosen: Mapping[str, str], typed: Mapping[str, Any]) -> dict[str, str]:
    """The user's choices, and a choice for every other group; it may depend on the values that the user typed."""
    choices = {**DEFAULTS, **chosen}

    def content(group: str) -> Composed:
        return section(files, group, choices[group])[group]

    kind = validated(DatasetSection, content("dataset"), "dataset").kind
    protocol = validated(Choices, content("protocol"), "protocol")
    typed_for_loss = {name.removeprefix("loss."): value for name, value in typed.items() if name.startswith("loss.")}
    loss = validated(LossSection, content("loss") | typed_for_loss, "loss")
    if choices["preset"] == "auto":
        choices["preset"] = "paper" if choices["dataset"] in PAPER_DATASETS else "quick"
    preset = validated(Choices, content("preset"), "preset")
    network = preset.model.get(kind, protocol.model.get(kind))
    if "model" not in choices and network is None:
        raise ConfigError(f"protocol={choices['protocol']} names no network for {kind} data: write model=…")
    choices.setdefault("model", str(network))
    choices.setdefault("search", preset.search or protocol.search or "none")
    choices.setdefault("annealing", protocol.annealing if loss.anneals else "none")
    return choices


class Choices(BaseModel):
    """The groups that a protocol or preset chooses."""

    search: str | None = None
    annealing: str = "none"
    model: dict[Kind, str] = {}


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
    file = files[group][choose(group, name, files[group])]
    content = read(file)
    if "defaults" in content:
        content = by_hydra(file)
    elif "@package _global_" not in file.read_text(encoding="utf-8"):
        content = {group: content}
    own_name = content[group].get("name") if isinstance(content.get(group), Mapping) else None
    if own_name != name and group not in VARIANTS:
        hint = f"; a variant of it is called {own_name}-….yaml" if group == "dataset" and own_name else ""
        raise ConfigError(f"{file}: expected name: {name}, as the file is called, got {own_name!r}{hint}")
    return content


def from_file(model: type[Checked], group: str, name: str, config_dir: str | None = None) -> Checked:
    """One file of a config group as a typed section; unlike a whole command, it never needs torch."""
    return validated(model, composed(groups(config_dir), {group: name})[group], group)


@cache
def is_classical(loss: str, config_dir: str | None = None) -> bool:
    """Whether a loss's file says `trains: classical`, so that no network is trained; False if there is no such file."""
    return loss in groups(config_dir)["loss"] and from_file(LossSection, "loss", loss, config_dir).classical


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
        if not isinstance(config.get(section), dict):
            config[section] = {}
        config = config[section]
    config[last] = value


def fill_from_preset(config: Composed, typed: Mapping[str, Any]) -> None:
    """Fill in the options of dataset and network that the preset prescribes, unless the user typed them."""
    for group, key in PRESCRIBED.items():
        section = config[group]
        for name, value in ((config["preset"].get(key) or {}).get(section["name"]) or {}).items():
            if f"{group}.{name}" not in typed:
                section[name] = value


def completed_hyper(checked: Settings) -> Hyper:
    """The hyperparameters, with the protocol's values where the user left them open."""
    prescribed = checked.protocol.hyperparameters(checked.dataset, checked.loss)
    hyper = checked.hyper.but(**{name: v for name, v in prescribed.items() if getattr(checked.hyper, name) is None})
    for name in () if checked.loss.classical else {*SEARCHED, "weight_decay"}:
        if getattr(hyper, name) is None and not (checked.searched and name in SEARCHED):
            protocol = checked.protocol.name
            raise ConfigError(f"hyper.{name} is not set, and protocol={protocol} has no value: write hyper.{name}=…")
    return hyper


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a config with their dotted names; empty sections are leaves."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def refuse_settled_keys(typed: Mapping[str, Any], files: Files) -> None:
    """Refuse keys that have no effect once the files are chosen: a file's name, and the groups that it chooses."""
    for name, value in typed.items():
        group, _, key = name.partition(".")
        first, _, rest = key.partition(".")
        if group in files and key in FROM_FILE:
            raise ConfigError(f"{name} comes from the chosen file: write {group}=… instead")
        if group in ("protocol", "preset") and first in ("search", "annealing", "model"):
            raise ConfigError(f"{name}={text(value, name)}: write {first}=… instead")
        if group == "preset" and first in PRESCRIBED.values():
            prescribed = next(group for group, key in PRESCRIBED.items() if key == first)
            option = rest.partition(".")[2] or "size"
            raise ConfigError(f"{name}={text(value, name)}: write {prescribed}.{option}=… instead")


def refuse_unknown_keys(typed: Mapping[str, Any], config: Composed) -> None:
    """A key must be in a yaml file or below a mapping for the user to fill; those of the loss are checked later."""
    known = dict(leaves(config))
    for group in ("dataset", "model"):
        keys = (*options.COMMON[group], *(options.accepted(group, config[group]) or ()))
        known = {f"{group}.{key}": None for key in keys} | known
    for name in typed:
        parents = [name.rsplit(".", k)[0] for k in range(1, name.count(".") + 1)]
        free = any(known.get(parent) == {} or (parent == "loss.parameters" and parent in known) for parent in parents)
        inside = any(key.startswith(f"{name}.") for key in known)
        of_loss = name.startswith("loss.") and name.count(".") == 1
        if not (name in known or free or inside or of_loss):
            if name == "dataset.target" and config["dataset"]["name"] == "images":
                raise ConfigError("dataset.target is for files; the classes of images are their folders")
            if value := next((parent for parent in parents if parent in known), None):
                raise ConfigError(f"{name}: {value} has no keys: write {value}=…")
            raise ConfigError(unknown_key(name, known))
