"""The papers' datasets, an embedded default, and your own files.

    data = east.data.load("mammography")
    splits = east.data.split(data, seed=0)

A dataset is a function of the same name in a module of this package, an entry of that module's DATASETS, and a file of
conf/dataset with the same options. `cifar10_frog` is in cifar10.py; only the module of the chosen dataset is imported.
"""

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from east.choices import choose, groups
from east.lab.data.common import Data, DataError, Graphs, Images, Part, Splits, Table, assign, split
from east.lab.data.encoding import Encoding, encode
from east.lab.data.sources import Dataset, Root

__all__ = ["Data", "DataError", "Dataset", "Encoding", "Graphs", "Images", "Part", "Splits", "Table"]
__all__ += ["catalogue_text", "dataset", "datasets", "describe", "describe_text", "encode", "load", "options", "split"]


def dataset(name: str) -> Dataset:
    """Facts about a dataset."""
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


def describe(data: Data, seed: int = 0, **splitting: Any) -> dict[str, Any]:
    """Rows, features, classes, balance, split sizes, origin and fingerprint of `data`, as plain values."""
    about = dataset(data.name.partition("-")[0])
    counts = np.bincount(data.labels.flatten().numpy(), minlength=len(data.classes))
    parts = assign(data, seed, **splitting)
    shape, shares = data.inputs.shape[1:], counts[counts > 0] / counts.sum()
    return {
        "name": data.name,
        "kind": data.kind,
        "rows": len(data.labels),
        "features": shape[0] if len(shape) == 1 else list(shape),
        "classes": len(data.classes),
        "balance": dict(zip(data.classes, counts.tolist(), strict=True)),
        "positive": None if data.positive is None else data.classes[data.positive],
        "imbalance": round(counts.max() / max(counts.min(), 1), 2),
        "equitability": round(float(-(shares * np.log(shares)).sum() / np.log(len(counts))), 4),  # 1 if balanced
        "split": {name: len(rows) for name, rows in zip(("train", "val", "test"), parts, strict=True)},
        "notes": "; ".join(data.notes),
        "limit": data.limit,
        "source": data.source,
        "licence": about.licence,
        "citation": about.citation,
        "path": data.path,
        "fingerprint": data.fingerprint,
    }


def describe_text(description: dict[str, Any]) -> str:
    """A description as aligned lines; with many classes, only the largest and smallest are shown."""
    texts = {key: value for key, value in description.items() if value not in (None, "")}
    total = sum(texts["balance"].values())
    ranked = sorted(texts["balance"].items(), key=lambda item: -item[1])
    classes = [f"{name} {count:,} ({count / total:.2%})" for name, count in ranked]
    if len(classes) > 12:
        classes = [*classes[:5], f"… {len(classes) - 10} more …", *classes[-5:]]
    texts["balance"] = ", ".join(classes)
    texts["split"] = " / ".join(f"{name} {size:,}" for name, size in texts["split"].items())
    texts["rows"] = f"{texts['rows']:,}"
    if isinstance(texts["features"], list):
        texts["features"] = " x ".join(map(str, texts["features"]))
    return "\n".join(f"{key:<13}{text}" for key, text in texts.items())


def catalogue_text(datasets: Mapping[str, Dataset]) -> str:
    """Every dataset in a line: what it is, and where its files are."""
    width = max(map(len, datasets))
    return "\n".join(
        f"{name:<{width}}  {dataset.kind:<5}  {dataset.about}  [{dataset.cached() or 'not fetched yet'}]"
        for name, dataset in datasets.items()
    )
