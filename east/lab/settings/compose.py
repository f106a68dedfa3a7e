"""From a command to its settings: merge the files of conf/, complete them from protocol and preset, validate once.

The result is what Hydra would compose, which takes 0.3 s, and a table asks for hundreds. Our files are plain:
each is read once and merged here.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

from east.choices import CONF, ConfigError, choose, groups, names_a_file
from east.lab.files import yaml_content
from east.lab.settings.command import LISTS, Command
from east.lab.settings.identity import SEARCHED
from east.lab.settings.messages import Checked, refuse_key, validated
from east.lab.settings.settings import DatasetSection, Hyper, LossSection, Preset, Protocol, Settings

PAPER_DATASETS = (
    *("cifar10", "caltech256", "cocktailparty", "adult", "mammography", "kaggle", "cocktailparty_graph"),
    *("adult_released", "cifar10_transportation", "cifar10_frog"),
)
VARIANTS = ("executor", "search")  # groups whose `name` is one of ours: executor/cluster.yaml can be a submitit
FROM_FILE = ("name", "kind", "trains", "has_temperature", "code")  # what a file says of itself
SETTLED = re.compile(  # what nobody types: that, and what has been used up when the typed values are set
    rf"(?P<group>\w+)\.({'|'.join(FROM_FILE)})"
    r"|(protocol|preset)\.(?P<part>search|annealing|model)(\..*)?|preset\.(?P<options>dataset|network)(\..*)?"
)
PRESCRIBED = {"dataset": "dataset", "model": "network"}  # groups whose options a preset gives, and under which key
Files = Mapping[str, Mapping[str, Path]]
Config = Mapping[str, Any]  # before it is validated


def settings(command: Command) -> Settings:
    """The settings of a command that names one dataset and one loss."""
    folder, dataset = command.get("config_dir"), str(command.get("dataset", ""))
    files = groups(folder)
    if names_a_file(dataset) and dataset not in files["dataset"]:
        raise ConfigError(f"dataset={dataset}: did you mean dataset.path={dataset}?")
    table = choose("table", str(command.get("table") or "grid"), [*files["table"], "all"])
    typed = command.without(*files, *LISTS)
    config = with_typed(composed(files, choices(command, files, folder)), typed)
    fixed = frozenset(name.partition(".")[2] for name in typed if name.startswith("hyper.") or name == "annealing.r")
    checked = validated(Settings, {**config, "table": table, "fixed": fixed})
    if checked.searched:
        checked.grid()  # fails if there is none for this kind of data
    return checked.but(hyper=completed_hyper(checked))


def all_settings(command: Command) -> list[Settings]:
    """The settings of every dataset and loss of a command; its search applies to the losses that train a network."""
    found = [settings(single) for single in command.each()]
    search = command.among(["search"]).words
    if search and search != ["search=none"] and all(of_run.loss.classical for of_run in found):
        names = ", ".join(dict.fromkeys(of_run.loss.name for of_run in found))
        raise ConfigError(f"{search[0]}: a search needs a loss that trains a network, got {names}; leave it out")
    return found


def choices(command: Command, files: Files, folder: str | None) -> dict[str, str]:
    """A file for every group: the user's choice, or else that of config.yaml, of the preset, of the protocol."""
    listed = (entry for entry in yaml_content(CONF / "config.yaml")["defaults"] if isinstance(entry, Mapping))
    chosen = {group: name for entry in listed for group, name in entry.items() if name}
    chosen |= {group: str(name) for group in files if (name := command.get(group)) and group != "table"}
    if chosen["preset"] == "auto":
        chosen["preset"] = "paper" if chosen["dataset"] in PAPER_DATASETS else "quick"
    kind = from_file(DatasetSection, "dataset", chosen["dataset"], folder).kind
    loss = from_file(LossSection, "loss", chosen["loss"], folder)
    loss = loss.but(step=command.get("loss.step", loss.options.get("step")))
    protocol = from_file(Protocol, "protocol", chosen["protocol"], folder)
    preset = from_file(Preset, "preset", chosen["preset"], folder)
    network = preset.model.get(kind, protocol.model.get(kind))
    if "model" not in chosen and network is None:
        raise ConfigError(f"protocol={protocol.name} names no network for {kind} data: write model=…")
    return {
        "model": str(network),
        "search": preset.search or protocol.search,
        "annealing": protocol.annealing if loss.anneals else "none",
        **chosen,
        **({"search": "none"} if loss.classical else {}),  # a list of losses may have others, which are searched
    }


def composed(files: Files, chosen: Mapping[str, str]) -> Config:
    """conf/config.yaml with these group choices; the preset comes last and wins."""
    base = {n: v for n, v in yaml_content(CONF / "config.yaml").items() if n not in ("defaults", "hydra", *LISTS)}
    ordered = sorted(chosen, key=lambda group: group == "preset")
    return reduce(merged, (section(files, group, chosen[group]) for group in ordered), base)


def merged(config: Config, values: Config) -> Config:
    """The config with these values, section by section."""
    sections = [name for name, value in values.items() if isinstance(value, Mapping)]
    both = {name: merged(config[name], values[name]) for name in sections if isinstance(config.get(name), Mapping)}
    return {**config, **values, **both}


def section(files: Files, group: str, name: str) -> Config:
    """What a file of a config group adds to a config: its content under the group's name, a preset's at the top."""
    file = files[group][choose(group, name, files[group])]
    content = yaml_content(file) if group == "preset" else {group: yaml_content(file)}
    own_name = content[group].get("name") if isinstance(content.get(group), Mapping) else None
    if own_name != name and group not in VARIANTS:
        raise ConfigError(f"{file}: expected name: {name}, as the file is called, got {own_name!r}")
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


def with_typed(config: Config, typed: Command) -> Config:
    """The config with the options of its preset and the values that the user typed; ConfigError for wrong names."""
    for group, key in PRESCRIBED.items():
        options = (config["preset"].get(key) or {}).get(config[group]["name"])
        config = merged(config, {group: options or {}})
    for name, value in typed.items():
        if (found := SETTLED.fullmatch(name)) and (found["group"] is None or found["group"] in groups()):
            instead = found["group"] or found["part"] or "dataset.…=… or model.…"
            raise ConfigError(f"{name} comes from the chosen file: write {instead}=… instead")
        check_option(name, value, config)
    for name, value in typed.items():
        config = placed(config, name.split("."), value)
    return config


def placed(config: Config | Any, path: Sequence[str], value: Any) -> Any:
    """The config with a value below these names."""
    if not path:
        return value
    inner = config if isinstance(config, Mapping) else {}
    return {**inner, path[0]: placed(inner.get(path[0]), path[1:], value)}


def check_option(name: str, value: Any, config: Config) -> None:
    """An option of data, network or classical model must be in its file, or below a mapping there, and of that type.

    Pydantic checks all other keys, and a loss its own options when it is built.
    """
    group, *path = name.split(".")
    if not path or group not in (*PRESCRIBED, "loss"):
        return
    known, (option, *below) = config[group], path
    if group in PRESCRIBED:
        ours = known["name"].partition("-")[0] if group == "dataset" else "custom" if "target" in known else ""
        known = {**(yaml_content(groups()[group][ours]) if ours in groups()[group] else {}), **known}
        if option not in known or (below and not isinstance(known[option], Mapping)):
            refuse_key(name, [f"{group}.{key}" for key in known if key not in FROM_FILE])
    elif known.get("trains") != "classical":
        return
    default = known.get(option)
    if below or value is None or default is None:
        return
    kind = (int, float) if type(default) in (int, float) else type(default)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise ConfigError(f"{name}: expected a value such as {default!r}, got {value!r}")


def completed_hyper(checked: Settings) -> Hyper:
    """The hyperparameters, with the protocol's values where the user left them open."""
    prescribed = validated(Hyper, checked.protocol.hyperparameters(checked.dataset, checked.loss), "protocol.hyper")
    hyper = checked.hyper.but(**{name: v for name, v in prescribed if getattr(checked.hyper, name) is None})
    for name in () if checked.loss.classical else {*SEARCHED, "weight_decay"}:
        if getattr(hyper, name) is None and not (checked.searched and name in SEARCHED):
            protocol = checked.protocol.name
            raise ConfigError(f"hyper.{name} is not set, and protocol={protocol} has no value: write hyper.{name}=…")
    return hyper
