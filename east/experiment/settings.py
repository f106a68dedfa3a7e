"""What the user typed, composed by Hydra from conf/, checked, and completed with what protocol and preset prescribe.

`settings(overrides)` gives one plain dict, `combinations(overrides)` one for every dataset and loss. An unknown name
gets a suggestion; a value of another type than its default, and a combination that makes no sense, is refused.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from math import inf
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from east.choices import CONF, ConfigError, choose, groups, install_hint

PAPER_DATASETS = ("cifar10", "caltech256", "cocktailparty", "adult", "mammography", "kaggle", "cocktailparty_graph",
                  "adult_released", "cifar10_transportation", "cifar10_frog")  # fmt: skip
NET_OF_KIND = {
    "table": ("mlp", "mlp_btg", "custom"),
    "image": ("darknet19", "tiny_darknet", "mlp", "custom"),
    "graph": ("gnn", "custom"),
}
EXTRAS = {"ray": "ray", "submitit": "slurm", "tensorboard": "tensorboard"}  # library -> extra of east

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", list: "a list"}
ACCEPTED = {bool: (bool,), int: (int,), float: (int, float), str: (str, int, float), list: (list,)}
PATHS = ("dataset.path", "results_dir", "data_dir", "input", "output", "checkpoint")
TEXTS = (*PATHS, "dataset.target", "dataset.delimiter", "dataset.positive")  # any text, quoted for Hydra if need be
FREE = ("loss.beta", "loss.threshold", "split.seed")  # may be of several types
SEARCH_SEED = 1000  # and 1001; trials have lower ones
LISTS = {"dataset": "datasets", "loss": "losses"}
EXAMPLES = {"dataset": "adult,mammography", "loss": "f1,ce"}
NUMBERS = {  # type, lowest, highest; null where the default is
    "trials": (int, 1, 1000),
    "seed": (int, 0, SEARCH_SEED - 1),
    "dataset.limit": (int, 3, inf),
    "hyper.lr": (float, 1e-12, 1e3),
    "hyper.batch_size": (int, 1, inf),
    "hyper.dropout": (float, 0, 0.99),
    "hyper.weight_decay": (float, 0, 1e3),
    "hyper.clip": (float, 1e-12, inf),
    "protocol.patience": (int, 1, inf),
    "protocol.stage_epochs": (int, 1, inf),
    "protocol.max_epochs": (int, 1, inf),
    "protocol.warmup": (int, 0, inf),
    "annealing.T0": (float, 1e-6, 0.4),
    "annealing.T_min": (float, 1e-6, 0.4),
    "annealing.r": (float, 1e-3, 0.999),
    "annealing.patience": (int, 1, inf),
    "executor.slots": (int, 1, 1024),
    "executor.retries": (int, 0, 100),
    "executor.parallel": (int, 1, inf),
    "search.factor": (int, 2, 100),
    "search.epochs": (int, 1, inf),
    "search.rounds": (int, 1, 10),
}
CHOICES = {
    "selection": ("val_loss", "val_metric"),
    "variant": ("clean", "released"),
    "protocol.optimizer": ("adam", "adamw"),
    "protocol.val_reduce": ("split", "batch_mean"),
    "annealing.outer": ("soft", "hard"),
}
DEVICES = ("auto", "cpu", "cuda", "mps")


def combinations(overrides: Sequence[str]) -> list[dict[str, Any]]:
    """The settings of every dataset and loss that was asked for: one, or those of losses=[f1,ce] datasets=[adult]."""
    rest, options = list(overrides), []
    for group, many in LISTS.items():
        lines = [line for line in parsed(rest) if line.key_or_group == many]
        typed = lines[-1].value() if lines else None
        rest = [line for line in rest if not line.startswith(f"{many}=")]
        if typed is None:
            options.append([()])
            continue
        if not (isinstance(typed, list) and typed):
            got = lines[-1].input_line.partition("=")[2]
            raise ConfigError(f"{many}: expected a list such as {many}=[{EXAMPLES[group]}], got {got!r}")
        for line in rest:
            if line.startswith((f"{group}=", f"{group}.")) and not line.startswith("dataset.limit="):
                raise ConfigError(f"{line}: with {many}=[…] nothing else can be said of the {group}")
        options.append([(f"{group}={name}",) for name in dict.fromkeys(typed)])
    return [settings([*rest, *dataset, *loss]) for dataset in options[0] for loss in options[1]]


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of every job of a sweep by Hydra's basic sweeper: `loss=f1,ce` stands for two."""
    return [list(job) for job in BasicSweeper.split_arguments(parsed(overrides), None)[0]]


def settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The complete config of one dataset and one loss, from overrides as they are typed: `loss=f1`, `hyper.lr=0.01`."""
    lines = parsed(overrides)
    for line in lines:
        refuse_syntax(line)
    own = own_folder(overrides)
    files = groups(own)
    files["table"]["all"] = CONF  # no file, and a table's is not composed into the rest
    chosen = {o.key_or_group: choose(o.key_or_group, str(o.value()), files[o.key_or_group])
              for o in lines if o.key_or_group in files}  # fmt: skip
    table = chosen.pop("table", "grid")
    values = [line for line in lines if line.key_or_group not in files]
    typed = {line.key_or_group: line.value() for line in values}
    chosen = completed(chosen, typed, files)

    defaults = composed(own, tuple(chosen.items()))
    fill_hyper(defaults)
    typed = dict(flat_typed(typed, defaults))
    check_typed(typed, defaults)
    known = dict(flat(defaults))  # "++": Hydra lets nobody fill an empty mapping otherwise
    config = composed(own, tuple(chosen.items()), tuple(
        line.input_line if line.key_or_group in known and known[line.key_or_group] != {} else f"++{line.input_line}"
        for line in values
    ))  # fmt: skip
    fill_hyper(config)
    by_preset = config["preset"]["dataset"].get(config["dataset"]["name"], {})
    config["dataset"] |= {name: value for name, value in by_preset.items() if f"dataset.{name}" not in typed}
    config["fixed"] = sorted(name for name in typed if name.startswith("hyper.") or name == "annealing.r")
    config["table"] = table
    check(config)
    return config


def own_folder(overrides: Sequence[str]) -> str | None:
    """The user's folder of configs, if there is one."""
    return next((line.value() for line in parsed(overrides) if line.key_or_group == "config_dir"), None)


def parsed(overrides: Sequence[str]) -> list[Override]:
    """The overrides as Hydra reads them; a path or name that it cannot read, such as ~/a.csv or été, is quoted."""
    parser, lines = OverridesParser.create(), []
    for typed in overrides:
        name, _, value = typed.partition("=")
        blank = name in TEXTS and value.isspace()  # a delimiter, which Hydra would strip
        try:
            lines.append(parser.parse_override(f"{name}={quoted(value)}" if blank else typed))
        except HydraException as error:
            if name not in TEXTS or value.startswith(("'", '"', "[", "{")) or "${" in value:
                raise ConfigError(unreadable(name, value)) from error
            values = value.split(",") if all(value.split(",")) else [value]  # a sweep, but the delimiter "," is none
            values = [os.path.expanduser(one) if name in PATHS else one for one in values]
            lines.append(parser.parse_override(f"{name}={','.join(map(quoted, values))}"))
    return lines


def quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def unreadable(name: str, value: str) -> str:
    """What to write in place of an override that Hydra cannot read."""
    if not re.fullmatch(r"[\w./@+~-]+", name, re.ASCII):
        return f"cannot read {name}={value}: expected name=value, such as loss=f1"
    parts = [quoted(one.strip("' \"")) for one in value.strip("[]").split(",")]
    better = f"[{','.join(parts)}]" if value.startswith("[") else quoted(value.strip("' \""))
    return f'cannot read {name}={value}: such signs need quotes, inside those of the shell: "{name}={better}"'


def refuse_syntax(override: Override) -> None:
    """Hydra's syntax for adding, deleting and sweeping has no meaning here."""
    if override.is_delete() or override.is_add() or override.is_force_add():
        raise ConfigError(
            f"{override.input_line}: nothing can be added to or deleted from the config; write name=value"
        )
    if override.is_sweep_override() and override.key_or_group in TEXTS:
        name = override.key_or_group
        raise ConfigError(f"{name}: several values need -m; a comma inside of one needs quotes: \"{name}='a, b'\"")
    if override.is_sweep_override():
        raise ConfigError(
            f"{override.input_line}: several values need -m, or a list: losses=[f1,ce] datasets=[adult,mammography]"
        )


def completed(chosen: Mapping[str, str], typed: Mapping[str, Any], files: Mapping) -> dict[str, str]:
    """Choices for the groups that the user left open; values that were typed may decide them."""
    full = {"dataset": "digits", "loss": "f1", "protocol": "east", "executor": "auto", "preset": "auto", **chosen}
    read = lambda group: yaml.safe_load(files[group][full[group]].read_text())  # noqa: E731
    kind, protocol = read("dataset")["kind"], read("protocol")
    loss = read("loss") | {name.removeprefix("loss."): v for name, v in typed.items() if name.startswith("loss.")}
    if full["preset"] == "auto":
        full["preset"] = "paper" if full["dataset"] in PAPER_DATASETS else "quick"
    preset = read("preset")["preset"]
    full.setdefault("model", preset["model"].get(kind, protocol["model"][kind]))
    full.setdefault("search", (preset["search"] or protocol["search"]) if trains_networks(loss) else "none")
    full.setdefault("annealing", protocol["annealing"] if anneals(loss) else "none")
    return full


def composed(own: str | None, chosen: tuple[tuple[str, str], ...], values: tuple[str, ...] = ()) -> dict[str, Any]:
    """Hydra's composition of conf/config.yaml, and the user's own folder, with these group choices and values."""
    return deepcopy(_composed(own, chosen, values))


@cache
def _composed(own: str | None, chosen: tuple[tuple[str, str], ...], values: tuple[str, ...]) -> dict[str, Any]:
    further = [f"hydra.searchpath=['file://{own}']"] if own else []
    try:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", [*(f"{group}={name}" for group, name in chosen), *values, *further])
        return OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip().splitlines()[0]) from error


def fill_hyper(config: dict[str, Any]) -> None:
    """Hyperparameters that the user left open are the protocol's, for this loss or kind of data."""
    loss, kind = config["loss"]["name"], config["dataset"]["kind"]
    for name, value in config["protocol"]["hyper"].items():
        if config["hyper"][name] is None:
            config["hyper"][name] = value.get(loss, value[kind]) if isinstance(value, Mapping) else value


def anneals(loss: Mapping[str, Any]) -> bool:
    """Whether the loss has a temperature: the linear step alone."""
    return loss.get("step") == "linear" and not loss["_target_"].endswith("ReleasedBtG")


def trains_networks(loss: Mapping[str, Any]) -> bool:
    return not loss["_target_"].startswith("east.baselines.")


def trials(config: Mapping[str, Any]) -> int:
    """How many seeds are averaged: the user's number, else the preset's, else the paper's."""
    return config["trials"] or config["preset"]["trials"] or config["protocol"]["trials"]


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a config with their dotted names; empty sections are leaves."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def flat_typed(typed: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A section that was typed as a whole, such as hyper={lr: 0.1}, name by name."""
    sections = {name.rpartition(".")[0] for name, _ in flat(defaults)}
    for name, value in typed.items():
        yield from flat(value, f"{name}.") if name in sections and isinstance(value, Mapping) else [(name, value)]


def check_typed(typed: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse a key that does not exist, and a value of another type than its default."""
    known = dict(flat(defaults))
    for name, value in typed.items():
        if name not in known and not inside_free_value(name, known):
            raise ConfigError(unknown_key(name, known))
        expected = known.get(name)
        fits = type(value) in ACCEPTED.get(type(expected), (type(value),))
        if not fits and value is not None and name not in FREE:
            such = "" if type(expected) is bool else f" such as {expected!r}"
            raise ConfigError(f"{name}: expected {KINDS[type(expected)]}{such}, got {value!r}")


def inside_free_value(name: str, known: Mapping[str, Any]) -> bool:
    """Whether the key lies below one whose default is null or empty, such as a mapping that the user fills."""
    parents = [name.rsplit(".", k)[0] for k in range(1, name.count(".") + 1)]
    return any(parent in known and (known[parent] is None or known[parent] == {}) for parent in parents)


def unknown_key(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    siblings = {key for key in known if key.rpartition(".")[0] == name.rpartition(".")[0]}
    choices = ", ".join(sorted(siblings or {key.split(".")[0] for key in known}))
    return f"unknown key {name!r}{f', did you mean {near[0]!r}?' if near else '.'} Choices: {choices}"


def check_split(seed: Any, fractions: Any, stratify: Any) -> None:
    """Refuse what no data can be split by."""
    if seed != "trial" and not (type(seed) is int and 0 <= seed < 2**32):
        raise ConfigError(f"split.seed: expected a whole number of at least 0, or trial, got {seed!r}")
    numbers = isinstance(fractions, list) and all(type(one) in ACCEPTED[float] and one > 0 for one in fractions)
    if not numbers or len(fractions) != 3 or abs(sum(fractions) - 1) > 1e-6:
        raise ConfigError(
            "split.fractions: expected three positive numbers that add up to 1, for train, validation and test, "
            f"such as [0.64,0.16,0.2], got {fractions!r}"
        )
    if type(stratify) is not bool:
        raise ConfigError(f"split.stratify: expected true or false, got {stratify!r}")


def check(config: Mapping[str, Any]) -> None:
    """Refuse numbers out of range, unknown names, libraries that are not here, and what does not go together."""
    values = dict(flat(config))
    if missing := [name for name, value in values.items() if value == "???"]:
        raise ConfigError(f"{missing[0]} has no default: write {missing[0]}=…")
    for name, (kind, lowest, highest) in NUMBERS.items():
        value = values.get(name)
        if value is not None and not (type(value) in ACCEPTED[kind] and lowest <= value <= highest):
            bounds = f"of at least {lowest}" if highest == inf else f"from {lowest} to {highest}"
            raise ConfigError(f"{name}: expected {KINDS[kind]} {bounds}, got {value!r}")
    for name, choices in CHOICES.items():
        if name in values:
            choose(name, values[name], choices)
    if not config["results_dir"]:
        raise ConfigError("results_dir: expected a folder, such as results, got nothing")
    check_split(**config["split"])
    choose("device", str(config["device"]).partition(":")[0], DEVICES)
    for library in (config["executor"]["name"], "tensorboard" if config["tensorboard"] else None):
        if library in EXTRAS and find_spec(library) is None:
            raise ConfigError(f"{library} is not installed: {install_hint(EXTRAS[library])}")

    if config["seed"] + trials(config) > SEARCH_SEED:
        raise ConfigError(
            f"seed={config['seed']} trials={trials(config)}: expected at most {SEARCH_SEED} together, "
            f"since seeds from {SEARCH_SEED} on are the search's"
        )
    dataset, model, loss = config["dataset"], config["model"], config["loss"]
    if config["save_model"] and not (trains_networks(loss) or loss["_target_"].endswith(".RandomForest")):
        raise ConfigError(f"save_model=true: expected a network or a random forest, got loss={loss['name']}")
    if model["name"] not in NET_OF_KIND[dataset["kind"]]:
        fitting = ", ".join(NET_OF_KIND[dataset["kind"]])
        raise ConfigError(
            f"model={model['name']} does not take {dataset['kind']} data; for {dataset['name']}: {fitting}"
        )
    if config["annealing"]["schedule"] != "none" and not anneals(loss):
        raise ConfigError(
            f"annealing={config['annealing']['name']} needs a loss with a temperature; {loss['name']} has none"
        )
