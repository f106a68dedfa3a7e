"""From a command to its settings: merge the files of conf/, complete them from protocol and preset, validate.

The result is what Hydra would compose, which takes 0.3 s, and a table asks for hundreds. Our files are plain:
each is read once and merged here.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from east.choices import CONF, ConfigError, choose, groups, names_a_file
from east.lab.files import yaml_content
from east.lab.settings.command import LISTS, Command, text
from east.lab.settings.identity import SEARCHED
from east.lab.settings.messages import FROM_FILE, Checked, refuse_key, validated
from east.lab.settings.sections import DatasetSection, Hyper, Kind, LossSection
from east.lab.settings.settings import Settings

PAPER_DATASETS = (
    *("cifar10", "caltech256", "cocktailparty", "adult", "mammography", "kaggle", "cocktailparty_graph"),
    *("adult_released", "cifar10_transportation", "cifar10_frog"),
)
PRESCRIBED = {"dataset": "dataset", "model": "network"}  # groups whose options a preset gives, and under which key
SINGLE = {"search": "none", "trials": 1}  # what task=train means
VARIANTS = ("executor", "search")  # groups whose `name` is one of ours: executor/cluster.yaml can be a submitit
Files = Mapping[str, Mapping[str, Path]]
Config = dict[str, Any]  # before it is validated


def settings(command: Command) -> Settings:
    """The settings of a command that names one dataset and one loss."""
    if command.get("task") == "train":
        command = of_one_trial(command)
    folder, dataset = command.get("config_dir"), str(command.get("dataset", ""))
    files = groups(folder)
    if names_a_file(dataset) and dataset not in files["dataset"]:
        raise ConfigError(f"dataset={dataset}: did you mean dataset.path={dataset}?")
    if is_classical(str(command.get("loss")), folder):  # a search of several losses is for those that train a network
        command = command.without(*command.among(["search"])).but(search="none")
    chosen = {name: str(value) for name, value in command.values.items() if name in files}
    typed = {name: value for name, value in command.values.items() if name not in (*files, *LISTS)}
    table = choose("table", chosen.pop("table", "grid"), [*files["table"], "all"])
    refuse_settled_keys(typed, files)
    config = composed(files, completed(files, chosen, typed))
    fixed = frozenset(name.partition(".")[2] for name in typed if name.startswith("hyper.") or name == "annealing.r")
    checked = validated(Settings, with_values(config, typed) | {"table": table, "fixed": fixed})
    if checked.searched:
        checked.grid()  # fails if there is none for this kind of data
    return checked.but(hyper=completed_hyper(checked))


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


class Choices(BaseModel):
    """The groups that a protocol or preset chooses."""

    search: str | None = None
    annealing: str = "none"
    model: dict[Kind, str] = {}


def completed(files: Files, chosen: Mapping[str, str], typed: Mapping[str, Any]) -> dict[str, str]:
    """The user's choices, and a choice for every other group; it may depend on the values that the user typed."""
    listed = (entry for entry in yaml_content(CONF / "config.yaml")["defaults"] if isinstance(entry, Mapping))
    choices = {group: name for entry in listed for group, name in entry.items() if name} | {**chosen}
    if choices["preset"] == "auto":
        choices["preset"] = "paper" if choices["dataset"] in PAPER_DATASETS else "quick"
    dataset, loss, protocol, preset = (
        section(files, group, choices[group])[group] for group in ("dataset", "loss", "protocol", "preset")
    )
    kind = validated(DatasetSection, dataset, "dataset").kind
    typed_for_loss = {name.removeprefix("loss."): value for name, value in typed.items() if name.startswith("loss.")}
    anneals = validated(LossSection, loss | typed_for_loss, "loss").anneals
    of_protocol, of_preset = validated(Choices, protocol, "protocol"), validated(Choices, preset, "preset")
    network = of_preset.model.get(kind, of_protocol.model.get(kind))
    if "model" not in choices and network is None:
        raise ConfigError(f"protocol={choices['protocol']} names no network for {kind} data: write model=…")
    search = of_preset.search or of_protocol.search or "none"
    return {
        "model": str(network),
        "search": search,
        "annealing": of_protocol.annealing if anneals else "none",
    } | choices


def composed(files: Files, chosen: Mapping[str, str]) -> Config:
    """conf/config.yaml with these group choices; the preset comes last and wins."""
    base = yaml_content(CONF / "config.yaml")
    config = {name: deepcopy(value) for name, value in base.items() if name not in ("defaults", "hydra", *LISTS)}
    for group in sorted(chosen, key=lambda group: group == "preset"):
        merge(config, section(files, group, chosen[group]))
    return config


def section(files: Files, group: str, name: str) -> Config:
    """What a file of a config group adds to a config: its content under the group's name, or at the top."""
    file = files[group][choose(group, name, files[group])]
    content = yaml_content(file)
    if "@package _global_" not in file.read_text(encoding="utf-8"):
        content = {group: content}
    own_name = content[group].get("name") if isinstance(content.get(group), Mapping) else None
    if own_name != name and group not in VARIANTS:
        hint = f"; a variant of it is called {own_name}-….yaml" if group == "dataset" and own_name else ""
        raise ConfigError(f"{file}: expected name: {name}, as the file is called, got {own_name!r}{hint}")
    if group == "dataset" and (ours := groups()[group].get(name.partition("-")[0])):  # digits-rare is loaded by digits
        content = {group: {"kind": yaml_content(ours)["kind"]} | content[group]}
    return content


def from_file(model: type[Checked], group: str, name: str, config_dir: str | None = None) -> Checked:
    """One file of a config group as a typed section."""
    return validated(model, section(groups(config_dir), group, name)[group], group)


@cache
def is_classical(loss: str, config_dir: str | None = None) -> bool:
    """True if a loss's file says `trains: classical`, so that no network is trained."""
    return loss in groups(config_dir)["loss"] and from_file(LossSection, "loss", loss, config_dir).classical


def merge(config: Config, values: Mapping[str, Any]) -> None:
    """Add values to a config, section by section."""
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(config.get(name), dict):
            merge(config[name], value)
        else:
            config[name] = deepcopy(value)


def with_values(config: Config, typed: Mapping[str, Any]) -> Config:
    """The config with the values that the user typed; ConfigError for names that it lacks and values left open."""
    if any(name.startswith("preset.grid.") for name in typed) and config["preset"].get("grid") is None:
        config["preset"]["grid"] = deepcopy(config["protocol"]["grid"])
    for group, key in PRESCRIBED.items():
        config[group] |= (config["preset"].get(key) or {}).get(config[group]["name"]) or {}
    refuse_unknown_keys(typed, config)
    checked = ("dataset", "model", *(["loss"] if config["loss"].get("trains") == "classical" else []))
    for name, value in typed.items():
        place, (*above, last) = config, name.split(".")
        for part in above:
            if not isinstance(place.get(part), dict):  # such as loss.parameters, which is null
                place[part] = {}
            place = place[part]
        if above and above[0] in checked and not fits(value, place.get(last)):
            raise ConfigError(f"{name}: expected a value such as {place[last]!r}, got {value!r}")
        place[last] = value
    for name, value in leaves(config):
        if value == "???":
            raise ConfigError(f"{name} has no default: write {name}=…")
    return config


def fits(value: Any, default: Any) -> bool:
    """True if an option can have this value: null, or of the default's type. Any number is of the type of another."""
    kind = (int, float) if type(default) in (int, float) else type(default)
    return value is None or default is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool))


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a config with their dotted names; empty sections are leaves."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def completed_hyper(checked: Settings) -> Hyper:
    """The hyperparameters, with the protocol's values where the user left them open."""
    prescribed = checked.protocol.hyperparameters(checked.dataset, checked.loss)
    hyper = checked.hyper.but(**{name: v for name, v in prescribed.items() if getattr(checked.hyper, name) is None})
    for name in () if checked.loss.classical else {*SEARCHED, "weight_decay"}:
        if getattr(hyper, name) is None and not (checked.searched and name in SEARCHED):
            protocol = checked.protocol.name
            raise ConfigError(f"hyper.{name} is not set, and protocol={protocol} has no value: write hyper.{name}=…")
    return hyper


def refuse_settled_keys(typed: Mapping[str, Any], files: Files) -> None:
    """Refuse keys that have no effect once the files are chosen: a file's name, and the groups that it chooses."""
    chosen = {f"{group}.{name}": name for group in ("protocol", "preset") for name in ("search", "annealing", "model")}
    chosen |= {f"{group}.{name}": group for group in files for name in FROM_FILE}
    chosen |= {f"preset.{key}": f"{group}.…" for group, key in PRESCRIBED.items()}
    for name in typed:
        if instead := next((instead for key, instead in chosen.items() if f"{name}.".startswith(f"{key}.")), None):
            raise ConfigError(f"{name} comes from the chosen file: write {instead}=… instead")


def refuse_unknown_keys(typed: Mapping[str, Any], config: Config) -> None:
    """A key must be in a file, or below an empty mapping; the loss itself checks its own when it is built."""
    known = dict(leaves(config))
    custom = "custom" if "target" in config["model"] else None
    for group, ours in (("dataset", config["dataset"]["name"].partition("-")[0]), ("model", custom)):
        if ours in groups()[group]:
            known = {f"{group}.{key}": value for key, value in yaml_content(groups()[group][ours]).items()} | known
    for name in typed:
        parents = [name.rsplit(".", k)[0] for k in range(1, name.count(".") + 1)]
        free = any(known.get(parent) == {} or parent in ("loss", "loss.parameters") for parent in parents)
        if not (free or name in known or any(key.startswith(f"{name}.") for key in known)):
            refuse_key(name, known)
