"""The papers' datasets, an embedded default, and your own files.

    data = east.data.load("mammography")
    splits = east.data.split(data, seed=0)

A dataset is a function of the same name in a module of this package, an entry of that module's DATASETS, and a file of
conf/dataset with the same options. `cifar10_frog` is in cifar10.py; only the module of the chosen dataset is imported.
"""

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from east.choices import choose, groups
from east.lab.data import overview
from east.lab.data.common import Data, DataError, Graphs, Images, Part, Splits, Table, split
from east.lab.data.encoding import Encoding, encode
from east.lab.data.overview import catalogue_text, describe_text
from east.lab.data.sources import Dataset, Root

__all__ = [
    "Data",
    "DataError",
    "Dataset",
    "Encoding",
    "Graphs",
    "Images",
    "Part",
    "Splits",
    "Table",
    "catalogue_text",
    "dataset",
    "datasets",
    "describe",
    "describe_text",
    "encode",
    "load",
    "options",
    "split",
]


def dataset(name: str) -> Dataset:
    """What is known about a dataset."""
    module = f"{__name__}.{name.partition('_')[0]}"
    if not (name.isidentifier() and find_spec(module)):
        choose("dataset", name, groups()["dataset"])
    return import_module(module).DATASETS[name]


def datasets(config_dir: str | None = None) -> dict[str, Dataset]:
    """Every dataset by name, also those of the user's configs."""
    return {name: dataset(name) for name in groups(config_dir)["dataset"] if "-" not in name}


def options(name: str) -> dict[str, Any]:
    """The options of a dataset and their defaults, without root and limit."""
    parameters = inspect.signature(dataset(name).load).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key != "root"}


def load(name: str, root: Root = None, *, limit: int | None = None, **chosen: Any) -> Data:
    """A dataset by name, downloaded if necessary. root: a folder with its files; limit: rows of a stratified sample."""
    accepted = [*options(name), "limit"]
    for key in chosen:
        choose(f"option of dataset {name}", key, accepted)
    return dataset(name).load(root, **chosen).limited(limit)


def describe(data: Data, **splitting: Any) -> dict[str, Any]:
    """Rows, features, classes, balance, split sizes, origin and fingerprint of `data`, as plain values."""
    return overview.facts(data, dataset(data.name.partition("-")[0]), **splitting)
