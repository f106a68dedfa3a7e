"""The papers' datasets, an embedded default, and your own files.

    data = east.data.load("mammography")
    splits = east.data.split(data, seed=0)

A dataset is a function of the same name in a module of this package, an entry of that module's DATASETS, and a file of
conf/dataset with the same options.
"""

import inspect
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from east.choices import choose
from east.lab.data import overview
from east.lab.data.common import Data, DataError, Graphs, Images, Part, Splits, Table, split
from east.lab.data.encoding import Encoding, encode
from east.lab.data.files import read
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
    "datasets",
    "describe",
    "describe_text",
    "encode",
    "load",
    "options",
    "read",
    "split",
]


def datasets() -> dict[str, Dataset]:
    """Every dataset by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return {name: dataset for module in modules for name, dataset in getattr(module, "DATASETS", {}).items()}


def options(name: str) -> dict[str, Any]:
    """The options of a dataset and their defaults, without root and limit."""
    available = datasets()
    parameters = inspect.signature(available[choose("dataset", name, available)].load).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key != "root"}


def load(name: str, root: Root = None, *, limit: int | None = None, **chosen: Any) -> Data:
    """A dataset by name, downloaded if necessary. root: a folder with its files; limit: rows of a stratified sample."""
    accepted = [*options(name), "limit"]
    for key in chosen:
        choose(f"option of dataset {name}", key, accepted)
    return datasets()[name].load(root, **chosen).limited(limit)


def describe(data: Data, **splitting: Any) -> dict[str, Any]:
    """Rows, features, classes, balance, split sizes, origin and fingerprint of `data`, as plain values."""
    available = datasets()
    return overview.describe(data, available.get(data.name) or available[data.name.split("-")[0]], **splitting)
