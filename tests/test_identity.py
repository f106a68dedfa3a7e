"""Composing the settings of a committed record with the current code gives that record's key."""

import json
from collections import Counter

import pytest

from east.lab.settings import identity
from east.lab.settings.command import Command
from east.lab.settings.compose import settings
from east.lab.settings.settings import Hyper, LossSection, Science, Training
from east.lab.training.objective import with_average
from tests.tracked import exported

LABELS = ("name", "kind", "fingerprint", "_target_")  # these follow from the chosen file or from the data


def kind(config: dict) -> str:
    """Contest records that differ only in dataset and grid point are of one kind; any other record is its own."""
    if config["protocol"]["name"] != "contest":
        return json.dumps(config)
    searched = ("lr", "dropout", "batch_size")
    hyper = {name: value for name, value in config["hyper"].items() if name not in searched}
    return json.dumps(config | {"dataset": config["dataset"]["name"].partition("-")[0], "hyper": hyper})


CONFIGS = {record["key"]: record["config"] for record in exported()}
ONE_OF_A_KIND = {kind(config): key for key, config in CONFIGS.items()}.values()
SECTIONS = ("dataset", "split", "loss", "protocol", "hyper", "annealing", "model")
SEARCHED = ("hyper.lr", "hyper.batch_size", "hyper.dropout", "annealing.r")


def choices_for(config: dict) -> dict[str, str]:
    """The config files and the preset of the command that would produce the record."""
    choices = {group: config[group]["name"] for group in ("dataset", "loss", "protocol")} | {"preset": config["preset"]}
    choices["dataset"] = choices["dataset"].partition("-")[0]  # keel-abalone19 is dataset=keel with set=abalone19
    if config["hyper"]:  # a network
        choices |= {group: config[group]["name"] for group in ("model", "annealing", "ensemble") if group in config}
    return choices


def command_for(config: dict) -> Command:
    """The command that would produce the record: its config files, its preset, and every value typed out."""
    values = {
        f"{section}.{name}": value
        for section in ((*SECTIONS, "ensemble") if config["hyper"] else SECTIONS[:3])
        for name, value in config.get(section, {}).items()
        if name not in LABELS
    }
    return Command(choices_for(config) | values)


def left_to_type(config: dict) -> tuple[str, ...]:
    """The values that the config files and the preset do not give, without those that a search chooses."""
    dataset = config["dataset"]
    composed = settings(Command(choices_for(config))).science(dataset["name"], dataset["fingerprint"]).to_json()
    stored, given = ({(s, n): v for s in SECTIONS for n, v in c[s].items()} for c in (config, composed))
    typed = (".".join(field) for field in {**stored, **given} if stored.get(field) != given.get(field))
    return tuple(sorted(name for name in typed if name not in SEARCHED))


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["each kind", "every one"])
def test_records_are_found_by_their_settings(rest):
    """The typed settings, their JSON and the command that would produce the record give its key."""
    assert len(CONFIGS) > 300
    for key in CONFIGS.keys() - ONE_OF_A_KIND if rest else ONE_OF_A_KIND:
        config = CONFIGS[key]
        composed = settings(command_for(config)).science(config["dataset"]["name"], config["dataset"]["fingerprint"])
        typed = Science.model_validate(config)
        assert composed.key == typed.key == identity.key(config) == key
        assert composed.family == typed.family == identity.family(config)


# The values of protocol, network and annealing that were typed for some of the committed runs, and for how many kinds.
# All other records have the values of today's config files: changing a file would orphan them.
ROUNDS = (5, 15)  # the epochs of halving, which nobody types
TYPED = {
    ("protocol.warmup",): 27,
    ("protocol.val_reduce",): 22,
    ("protocol.max_epochs",): 3,
    ("protocol.max_epochs", "protocol.stage_epochs"): 5,
    ("protocol.max_epochs", "protocol.stage_epochs", "protocol.warmup"): 3,
    ("protocol.max_epochs", "protocol.patience", "protocol.stage_epochs"): 32,
}


def test_config_files_and_presets_give_what_was_not_typed():
    outside = [CONFIGS[key] for key in ONE_OF_A_KIND if CONFIGS[key]["protocol"]["name"] != "contest"]
    typed = Counter(
        tuple(name for name in left_to_type(config) if name.partition(".")[0] not in ("dataset", "loss", "split"))
        for config in outside
    )
    typed["protocol.max_epochs",] -= sum(config["protocol"].get("max_epochs") in ROUNDS for config in outside)
    assert typed.pop(()) > 300
    assert typed == TYPED


def test_a_later_field_counts_only_where_it_differs_from_its_default():
    """This is one rule, declared on the settings model."""
    plain = {"name": "east", "patience": 50}
    assert Training(**plain, warmup=0).to_json() == Training(**plain).to_json() == plain
    assert Training(**plain, warmup=3).to_json() == plain | {"warmup": 3}
    assert Hyper(lr=1, clip=None).to_json() == {"lr": 1.0, "clip": None}, "fields of schema 1 are kept as given"


@pytest.mark.parametrize(
    "options, positive, recorded",
    [
        ({"metric": "f1"}, None, {}),  # macro, as in records from before f1 meant the positive class of two
        ({"metric": "f1"}, 1, {"average": "positive"}),
        ({"metric": "f1", "average": None}, None, {"average": "macro"}),
        ({"metric": "f1", "average": "macro"}, 1, {"average": "macro"}),
        ({"metric": "f1_macro"}, 1, {}),
        ({"metric": "f1", "parameters": {"average": "macro"}}, 1, {}),
        ({"metric": "mcc"}, 1, {}),
    ],
)
def test_an_average_enters_the_key_where_it_is_not_what_older_records_meant(options, positive, recorded):
    loss = with_average(LossSection(name="metric", target="east.losses.MetricLoss", **options), positive)
    assert {name: value for name, value in loss.to_json().items() if name == "average"} == recorded
