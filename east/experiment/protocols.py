"""What a paper prescribes, as plain functions of a complete config: the scientific part, the grid, the seeds."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from east.experiment.settings import SEARCH_SEED, anneals, trains_networks, trials

TRAINING = ("name", "optimizer", "patience", "stage_epochs", "max_epochs", "val_reduce")


def scientific(config: Mapping[str, Any], fingerprint: str, name: str) -> dict[str, Any]:
    """What decides a trial's result besides its seed: hashed into its key. `preset` and `decisions` are labels.

    `name` and `fingerprint` are those of the data that was loaded: a path or an option says less.
    """
    annealing = config["annealing"]
    if annealing["schedule"] == "none":
        annealing = {key: annealing[key] for key in ("name", "schedule", "T0")}
    protocol = {key: config["protocol"][key] for key in TRAINING}
    if warmup := config["protocol"].get("warmup"):  # without, keys are those of records from before the option
        protocol["warmup"] = warmup
    split = dict(config["split"])
    if config["protocol"]["new_split"]:
        split["seed"] = "trial"
    plain = {
        "dataset": {**config["dataset"], "name": name, "fingerprint": fingerprint},
        "split": split,
        "loss": config["loss"],
        "protocol": protocol,
        "hyper": config["hyper"],
        "model": config["model"],
        "annealing": annealing,
        "preset": config["preset"]["name"],
        "decisions": config["protocol"]["decisions"],
    }
    if not trains_networks(config["loss"]):
        plain |= {
            "model": {"name": config["loss"]["name"]},
            "hyper": {},
            "annealing": {"name": "none", "schedule": "none"},
        }
        plain["protocol"] = {"name": config["protocol"]["name"]}
    return plain


def seeds(config: Mapping[str, Any]) -> range:
    """Seeds of the trials; those of the search are beyond them."""
    return range(config["seed"], config["seed"] + trials(config))


def grid(config: Mapping[str, Any]) -> list[dict[str, float]]:
    """The points of the search: values of lr, dropout, batch_size, and r for a loss that anneals. Section 6.1, EAST.

    What the user has given a value is not searched.
    """
    axes = dict(config["preset"]["grid"] or config["protocol"]["grid"])
    axes["batch_size"] = batch_sizes(axes["batch_size"], config)
    if config["annealing"]["schedule"] == "none":
        axes.pop("r")
    for name in config["fixed"]:
        axes.pop(name.partition(".")[2], None)
    return [dict(zip(axes, point, strict=True)) for point in product(*axes.values())]


def batch_sizes(choices: Mapping[str, Any], config: Mapping[str, Any]) -> list[int]:
    """By dataset, there perhaps by loss, else by kind of data."""
    dataset, loss = config["dataset"], config["loss"]
    found = choices.get(dataset["name"], choices[dataset["kind"]])
    return found.get(loss["name"], choices[dataset["kind"]]) if isinstance(found, Mapping) else found


def at(plain: Mapping[str, Any], point: Mapping[str, float], epochs: int | None = None) -> dict[str, Any]:
    """A scientific config at a point of the grid, trained for so many epochs at most."""
    hyper = {name: value for name, value in point.items() if name != "r"}
    moved = {**plain, "hyper": {**plain["hyper"], **hyper}}
    if "r" in point:
        moved["annealing"] = {**plain["annealing"], "r": point["r"]}
    if epochs is not None:
        moved["protocol"] = {**plain["protocol"], "max_epochs": epochs}
    return moved


def search_seeds(config: Mapping[str, Any]) -> list[int]:
    """One seed per point; two for a loss without a cooling rate if all losses are to train equally often."""
    twice = config["search"].get("equal_budget") and not anneals(config["loss"])
    return [SEARCH_SEED, SEARCH_SEED + 1] if twice else [SEARCH_SEED]


def rungs(config: Mapping[str, Any]) -> list[tuple[int | None, int]]:
    """Rounds of the search: the epochs that each point may train (None: all), and how many points take part."""
    search, points = config["search"], len(grid(config))
    if search["name"] == "none":
        return []
    if search["name"] == "grid":
        return [(None, points)]
    factor, rounds = search["factor"], range(search["rounds"])
    counts = [max(1, points // factor**k) for k in range(search["rounds"] + 1)]
    return [*((search["epochs"] * factor**k, counts[k]) for k in rounds), (None, counts[-1])]


def planned(config: Mapping[str, Any]) -> int:
    """Trainings of a run, search included."""
    return sum(count for _, count in rungs(config)) * len(search_seeds(config)) + trials(config)
