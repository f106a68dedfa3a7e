"""The papers' datasets, an embedded default, and your own files.

    data = east.data.load("mammography")
    splits = east.data.split(data, seed=0)

A dataset is one module of this package, with functions named like the datasets that it serves and a table of them,
DATASETS; and one file of conf/dataset with the same options.
"""

import inspect
from importlib import import_module
from pkgutil import iter_modules

from east.choices import choose
from east.data import overview
from east.data.common import Data, DataError, Graphs, Images, Part, Splits, Table, split
from east.data.encoding import Encoding, encode
from east.data.files import read
from east.data.overview import catalogue_text, describe_text
from east.data.sources import Dataset

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
    "catalogue",
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
    return {name: found for module in modules for name, found in getattr(module, "DATASETS", {}).items()}


def options(name: str) -> dict:
    """The options of a dataset and their defaults, without root and limit."""
    found = datasets()
    parameters = inspect.signature(found[choose("dataset", name, found)].load).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key != "root"}


def load(name: str, root=None, *, limit: int | None = None, **chosen) -> Data:
    """A dataset by name, fetched if need be; `root` is a folder with its files, `limit` takes a stratified part."""
    known = options(name)
    for key in chosen:
        choose(f"option of dataset {name}", key, [*known, "limit"])
    return datasets()[name].load(root, **chosen).limited(limit)


def describe(data: Data, **splitting) -> dict:
    """Rows, features, classes, balance, split sizes, origin and fingerprint of `data`, as plain values."""
    found = datasets()
    return overview.describe(data, found.get(data.name) or found[data.name.split("-")[0]], **splitting)


def catalogue() -> list[dict]:
    """Every dataset with what it is and whether it is here already."""
    return overview.catalogue(datasets())
