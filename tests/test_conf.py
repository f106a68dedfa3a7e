"""Every file of conf/ composes, holds its own name, and its target accepts its arguments."""

import inspect
from importlib import import_module

import pytest
import torch
import yaml

from east import METRICS
from east.choices import CONF, groups
from east.lab.settings.command import Command
from east.lab.settings.compose import settings
from east.lab.settings.settings import Settings
from east.lab.training.objective import build_loss

FILES = [(group, name) for group, files in groups().items() for name in files]
NEEDS = {  # what a file needs beside it to be composed
    ("preset", "half"): ["dataset=cifar10"],
    ("preset", "patience"): ["dataset=cifar10"],
    ("dataset", "csv"): ["dataset.path=a.csv", "dataset.target=b"],
    ("model", "backbone"): ["dataset=cifar10"],
    ("model", "darknet19"): ["dataset=cifar10"],
    ("model", "tiny_darknet"): ["dataset=cifar10"],
    ("model", "gnn"): ["dataset=cocktailparty_graph"],
    ("model", "custom"): ["model.target=torch.nn.Linear"],
}


def read(group, name):
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())


def test_all_groups_are_found():
    folders = {folder.name: len(list(folder.glob("*.yaml"))) for folder in CONF.iterdir() if folder.is_dir()}
    assert {group: len(files) for group, files in groups().items()} == folders
    assert {*folders} - {"table"} < Settings.model_fields.keys()


@pytest.mark.parametrize(("group", "name"), FILES)
def test_a_file_composes_and_has_its_own_name_inside(group, name):
    if (group, name) in (("executor", "ray"), ("executor", "submitit")):
        pytest.importorskip(name)
    config = settings(Command.parse([f"{group}={name}", *NEEDS.get((group, name), [])]))
    chosen = config.table if group == "table" else getattr(config, group).name
    assert chosen == ("quick" if (group, name) == ("preset", "auto") else name)


@pytest.mark.parametrize("name", groups()["loss"])
def test_the_target_of_a_loss_binds_its_arguments(name):
    given = read("loss", name)
    module, _, target = given.pop("_target_").rpartition(".")
    arguments = {
        key: value for key, value in given.items() if key not in ("name", "parameters", "trains", "has_temperature")
    }
    inspect.signature(getattr(import_module(module), target)).bind(**arguments)


def test_protocols_have_the_same_keys():
    keys = [set(read("protocol", name)) for name in groups()["protocol"]]
    assert all(one == keys[0] for one in keys)


@pytest.mark.parametrize("metric", [name for name in METRICS if name != "cost"])
def test_anyloss_trains_every_metric_as_its_file_says(metric):
    comment = (CONF / "loss" / "anyloss.yaml").read_text().splitlines()[1]
    others = comment.removeprefix("# ").replace("gmean", metric).split()
    averaged = "average" in inspect.signature(METRICS[metric]).parameters
    words = ["loss=anyloss", f"loss.metric={metric}"] if averaged else others
    loss = build_loss(settings(Command.parse(words)).loss, ("no", "yes"))
    given = read("loss", "anyloss")
    assert (loss.step, loss.slope, loss.threshold) == (given["step"], given["slope"], given["threshold"])
    assert loss(torch.zeros(4, 2), torch.arange(4) % 2).isfinite()
