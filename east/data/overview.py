"""Describe a dataset, as a dictionary or as text, and list all datasets."""

import math

import numpy as np

from east.data import sources
from east.data.common import Data, assign
from east.data.sources import Dataset


def describe(data: Data, dataset: Dataset, seed: int = 0, **splitting) -> dict:
    """What to know about a dataset before using it; `splitting` holds further options of `split`."""
    counts = np.bincount(data.labels.flatten().numpy(), minlength=len(data.classes))
    parts = assign(data, seed, **splitting)
    shape = data.inputs.shape[1:]
    return {
        "name": data.name,
        "kind": data.kind,
        "rows": len(data.labels),
        "features": shape[0] if len(shape) == 1 else list(shape),
        "classes": len(data.classes),
        "balance": dict(zip(data.classes, counts.tolist(), strict=True)),
        "positive": None if data.positive is None else data.classes[data.positive],
        "imbalance": round(counts.max() / max(counts.min(), 1), 2),
        "equitability": round(equitability(counts), 4),
        "split": {name: len(rows) for name, rows in zip(("train", "val", "test"), parts, strict=True)},
        "notes": "; ".join(data.notes),
        "limit": data.limit,
        "source": data.source,
        "licence": dataset.licence,
        "citation": dataset.citation,
        "path": data.path,
        "fingerprint": data.fingerprint,
    }


def equitability(counts: np.ndarray) -> float:
    """Shannon's H / ln d of the class counts: 1 for balanced classes, near 0 when one class dominates.

    >>> equitability(np.array([5, 5]))
    1.0
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum() / math.log(len(counts)))


def describe_text(description: dict) -> str:
    """A description as aligned lines; with many classes, only the largest and smallest are shown."""
    shown = {key: value for key, value in description.items() if value not in (None, "")}
    total = sum(shown["balance"].values())
    ranked = sorted(shown["balance"].items(), key=lambda item: -item[1])
    lines = [f"{name} {count:,} ({count / total:.2%})" for name, count in ranked]
    if len(lines) > 12:
        lines = [*lines[:5], f"… {len(lines) - 10} more …", *lines[-5:]]
    shown["balance"] = ", ".join(lines)
    shown["split"] = " / ".join(f"{name} {size:,}" for name, size in shown["split"].items())
    shown["rows"] = f"{shown['rows']:,}"
    if isinstance(shown["features"], list):
        shown["features"] = " x ".join(map(str, shown["features"]))
    return "\n".join(f"{key:<13}{value}" for key, value in shown.items())


def catalogue(datasets: dict[str, Dataset]) -> list[dict]:
    """One row per dataset; `cached` is where its files are, None if not downloaded."""
    rows = []
    for name, dataset in datasets.items():
        row = {"name": name, "kind": dataset.kind, "about": dataset.about, "licence": dataset.licence}
        rows.append({**row, "citation": dataset.citation, "cached": cached(dataset)})
    return rows


def cached(dataset: Dataset) -> str | None:
    """Where a dataset is stored: a folder, a phrase such as "built in", or None."""
    if dataset.where:
        return dataset.where
    for folder in sources.folders():
        if dataset.prepared and any(folder.glob(dataset.prepared)):
            return str(folder)
    places = [next((place for file in one for place in sources.find(file.path)), None) for one in dataset.needs]
    found = [place for place in places if place is not None]
    return str(found[0].parent) if len(found) == len(places) else None


def catalogue_text(rows: list[dict]) -> str:
    """The catalogue as aligned columns."""
    width = max(len(row["name"]) for row in rows)
    return "\n".join(
        f"{row['name']:<{width}}  {row['kind']:<5}  {row['about']}  [{row['cached'] or 'not fetched yet'}]"
        for row in rows
    )
