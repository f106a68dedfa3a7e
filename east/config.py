"""What the user typed, composed by Hydra from conf/, checked, and completed with what protocol and preset prescribe.

`settings(overrides)` gives one plain dict. What it leaves to nobody: unknown names get a suggestion, a value of another
type than the default is refused, and combinations that make no sense are refused before any work.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from east.choices import choose

HERE = Path(__file__).resolve().parent
CONF = next(folder for folder in (HERE / "conf", HERE.parent / "conf") if (folder / "config.yaml").is_file())
TASKS = ("run", "train", "data", "table", "reproduce", "records", "report", "compare", "predict")
PAPER_DATASETS = ("cifar10", "caltech256", "cocktailparty", "adult", "mammography", "kaggle", "cocktailparty_graph",
                  "adult_released", "cifar10_transportation", "cifar10_frog")  # fmt: skip
NET_OF_KIND = {"table": ("mlp", "mlp_btg", "custom"), "graph": ("gnn", "custom")}
NET_OF_KIND["image"] = ("darknet19", "tiny_darknet", "custom", "mlp")


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", list: "a list"}
ACCEPTED = {bool: (bool,), int: (int,), float: (int, float), str: (str, int, float), list: (list,)}
RANGES = {
    "hyper.lr": (0, 1e9),
    "hyper.batch_size": (0, 2**31),
    "hyper.dropout": (-1e-9, 0.99),
    "hyper.weight_decay": (-1e-9, 1e9),
    "hyper.clip": (0, 1e9),
    "protocol.patience": (0, 1e9),
    "protocol.stage_epochs": (0, 1e9),
    "protocol.max_epochs": (0, 1e9),
    "annealing.T0": (0, 0.4),
    "annealing.T_min": (0, 0.4),
    "annealing.r": (0, 0.999),
    "annealing.patience": (0, 1e9),
    "trials": (0, 1e9),
}
FREE = ("loss.beta", "loss.threshold", "split.seed")  # may be of several types


class ConfigError(ValueError):
    """What the user typed cannot be run; the message says why and what could be."""


@cache
def groups() -> dict[str, list[str]]:
    """The config groups and their choices: the folders and files of conf/."""
    folders = sorted(folder for folder in CONF.iterdir() if folder.is_dir())
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The complete config of one dataset and one loss, from overrides as they are typed: `loss=f1`, `hyper.lr=0.01`."""
    choices, values = parsed(overrides)
    typed = {override.key_or_group: override.value() for override in values}
    choices = completed(choices, typed)
    check_values(typed, composed(tuple(choices.items())))
    config = deepcopy(composed(tuple(choices.items()), tuple(override.input_line for override in values)))
    fill_hyper(config)
    config["dataset"] |= {
        name: value
        for name, value in config["preset"]["dataset"].get(config["dataset"]["name"], {}).items()
        if f"dataset.{name}" not in typed
    }
    check(config)
    return config


def parsed(overrides: Sequence[str]) -> tuple[dict[str, str], list[Override]]:
    """Group choices, and the other overrides."""
    try:
        found = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"cannot read the command line: {str(error).splitlines()[0]}") from error
    choices, values = {}, []
    for override in found:
        line, name = override.input_line, override.key_or_group
        if override.is_delete() or override.is_add() or override.is_force_add():
            raise ConfigError(f"{line}: nothing can be added to or deleted from the config; write name=value")
        if override.is_sweep_override():
            raise ConfigError(f"{line}: several values need -m, or a list: losses=[f1,ce] datasets=[adult,mammography]")
        if name in groups():
            choices[name] = choose(name, str(override.value()), groups()[name])
        else:
            values.append(override)
    return choices, values


@cache
def composed(choices: tuple[tuple[str, str], ...], overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Hydra's composition of conf/config.yaml with these group choices and values."""
    try:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", [*(f"{group}={name}" for group, name in choices), *overrides])
        return OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip().splitlines()[0]) from error


@cache
def read(group: str, name: str) -> dict[str, Any]:
    """conf/<group>/<name>.yaml as it stands."""
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())


def completed(choices: Mapping[str, str], typed: Mapping[str, Any]) -> dict[str, str]:
    """Choices for the groups that the user left open; values that were typed may decide them."""
    full = {"dataset": "digits", "loss": "f1", "protocol": "east", "executor": "auto", "preset": "auto", **choices}
    kind, protocol = read("dataset", full["dataset"])["kind"], read("protocol", full["protocol"])
    loss = read("loss", full["loss"]) | {k.removeprefix("loss."): v for k, v in typed.items() if k.startswith("loss.")}
    if full["preset"] == "auto":
        full["preset"] = "paper" if full["dataset"] in PAPER_DATASETS else "quick"
    preset = read("preset", full["preset"])["preset"]
    full.setdefault("model", preset["model"].get(kind, protocol["model"][kind]))
    full.setdefault("search", (preset["search"] or protocol["search"]) if trains_networks(loss) else "none")
    full.setdefault("annealing", protocol["annealing"] if anneals(loss) else "none")
    return full


def anneals(loss: Mapping[str, Any]) -> bool:
    """Whether the loss has a temperature: the linear step alone."""
    return loss.get("step") == "linear" and not loss["_target_"].endswith("ReleasedBtG")


def trains_networks(loss: Mapping[str, Any]) -> bool:
    return not loss["_target_"].startswith("east.baselines.")


def check_values(typed: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse a key that does not exist, and a value of another type than its default."""
    known = dict(flat(defaults))
    sections = {name.rpartition(".")[0] for name in known}
    for name, value in typed.items():
        if name not in known and name not in sections and not inside_free_value(name, known):
            raise ConfigError(unknown_key(name, known))
        expected = known.get(name)
        fits = type(value) in ACCEPTED.get(type(expected), (type(value),))
        if not fits and value is not None and name not in FREE:
            raise ConfigError(f"{name}: expected {KINDS[type(expected)]} such as {expected!r}, got {value!r}")


def inside_free_value(name: str, known: Mapping[str, Any]) -> bool:
    """Whether the key lies below one whose default is null or empty, such as a mapping that the user fills."""
    parents = [name.rsplit(".", k)[0] for k in range(1, name.count(".") + 1)]
    return any(parent in known and (known[parent] is None or known[parent] == {}) for parent in parents)


def unknown_key(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    section = name.rpartition(".")[0]
    siblings = sorted(key for key in known if key.rpartition(".")[0] == section) or sorted(
        {k.split(".")[0] for k in known}
    )
    return f"unknown key {name!r}{f', did you mean {near[0]!r}?' if near else '.'} Choices: {', '.join(siblings)}"


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a config with their dotted names; empty sections are leaves."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def fill_hyper(config: dict[str, Any]) -> None:
    """Hyperparameters that the user left open are the protocol's, for this kind of data."""
    for name, value in config["protocol"]["hyper"].items():
        if config["hyper"][name] is None:
            kind = config["dataset"]["kind"]
            config["hyper"][name] = value[kind] if isinstance(value, Mapping) else value


def check(config: Mapping[str, Any]) -> None:
    """Refuse combinations that cannot work."""
    dataset, model, loss = config["dataset"], config["model"], config["loss"]
    choose("task", config["task"], TASKS)
    if model["name"] not in NET_OF_KIND[dataset["kind"]]:
        fitting = ", ".join(NET_OF_KIND[dataset["kind"]])
        raise ConfigError(
            f"model={model['name']} does not take {dataset['kind']} data; for {dataset['name']}: {fitting}"
        )
    if config["annealing"]["schedule"] != "none" and not anneals(loss):
        raise ConfigError(
            f"annealing={config['annealing']['name']} needs a loss with a temperature; {loss['name']} has none"
        )
    sections = ("hyper", "protocol", "annealing")
    values = {f"{section}.{name}": value for section in sections for name, value in config[section].items()}
    values["trials"] = config["trials"]
    for name, (lowest, highest) in RANGES.items():
        value = values.get(name)
        if value is not None and not (isinstance(value, int | float) and lowest < value <= highest):
            raise ConfigError(f"{name}: expected a number above {lowest} and at most {highest}, got {value!r}")
