"""Describe a dataset, as a dictionary or as text, and list all datasets."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from east.lab.data.common import Data, assign
from east.lab.data.sources import Dataset


def facts(data: Data, dataset: Dataset, seed: int = 0, **splitting: Any) -> dict[str, Any]:
    """What to know about a dataset before using it; `splitting` holds other options of `split`."""
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
