"""Composing the settings of a committed record with the current code gives that record's key."""

import json
from pathlib import Path

import pytest

from east.settings.command import Command
from east.settings.compose import settings
from east.settings.sections import Hyper, Science, Training

RECORDS = Path(__file__).parents[1] / "results" / "records"
LABELS = ("name", "kind", "fingerprint", "_target_")  # these follow from the chosen file or from the data


def committed() -> dict[str, dict]:
    """Key -> config of the committed records."""
    lines = (line for file in sorted(RECORDS.glob("*.jsonl")) for line in file.read_text(encoding="utf-8").splitlines())
    return {record["key"]: record["config"] for record in map(json.loads, lines)}


def kind(config: dict) -> str:
    """Contest records that differ only in dataset and grid point are of one kind; any other record is its own."""
    if config["protocol"]["name"] != "contest":
        return json.dumps(config)
    searched = ("lr", "dropout", "batch_size")
    hyper = {name: value for name, value in config["hyper"].items() if name not in searched}
    return json.dumps(config | {"dataset": config["dataset"]["name"].partition("-")[0], "hyper": hyper})


CONFIGS = committed()
ONE_OF_A_KIND = {kind(config): key for key, config in CONFIGS.items()}.values()


def command_for(config: dict) -> Command:
    """The command that would produce the record: its config files, its preset, and every value they leave open."""
    choices = {group: config[group]["name"] for group in ("dataset", "loss", "protocol")} | {"preset": config["preset"]}
    choices["dataset"] = choices["dataset"].partition("-")[0]  # keel-abalone19 is dataset=keel with set=abalone19
    if config["hyper"]:  # a network
        choices |= {group: config[group]["name"] for group in ("model", "annealing")}
    sections = ("dataset", "split", "loss", "protocol", "hyper", "annealing", "model")
    values = {
        f"{section}.{name}": value
        for section in (sections if config["hyper"] else sections[:3])
        for name, value in config[section].items()
        if name not in LABELS
    }
    return Command(choices | values)


def test_there_are_records():
    assert len(CONFIGS) > 300


@pytest.mark.parametrize("key", ONE_OF_A_KIND)
def test_a_record_is_found_by_its_settings(key):
    check(key)


@pytest.mark.nightly
def test_every_record_is_found_by_its_settings():
    for key in CONFIGS.keys() - ONE_OF_A_KIND:
        check(key)


def check(key: str) -> None:
    config = CONFIGS[key]
    composed = settings(command_for(config)).science(config["dataset"]["name"], config["dataset"]["fingerprint"])
    assert composed.key == key
    assert Science.model_validate(config).key == key
    assert Science.model_validate(config).family == composed.family


def test_a_later_field_counts_only_where_it_differs_from_its_default():
    """This is one rule, declared on the settings model."""
    plain = {"name": "east", "patience": 50}
    assert Training(**plain, warmup=0).to_json() == Training(**plain).to_json() == plain
    assert Training(**plain, warmup=3).to_json() == plain | {"warmup": 3}
    assert Hyper(lr=1, clip=None).to_json() == {"lr": 1.0, "clip": None}, "fields of schema 1 are kept as given"
