"""Digits: 1,797 handwritten digits of 8x8 pixels, shipped with scikit-learn. The default: it needs no download."""

import numpy as np
import torch

from east.choices import ConfigError
from east.lab.data.common import Table
from east.lab.data.sources import Dataset, Root


def digits(root: Root = None, *, imbalance: float = 1, positive: int | None = None) -> Table:
    """64 features, 10 classes; with `positive`, that digit against the rest.

    `imbalance` thins the classes to a long tail: class sizes fall geometrically, and the last class has 1/imbalance
    as many rows as the largest.
    """
    from sklearn.datasets import load_digits

    if imbalance < 1:
        raise ConfigError(f"digits: imbalance is largest class / smallest class, at least 1; got {imbalance}")
    if not (positive is None or (type(positive) is int and 0 <= positive <= 9)):  # 3.0 and true are no digits
        raise ConfigError(f"digits: positive must be a digit 0…9 or null, got {positive!r}")
    features, labels = load_digits(return_X_y=True)
    classes = tuple("0123456789")
    if positive is not None:
        labels, classes = (labels == positive).astype(int), ("rest", classes[positive])
    random, largest, d = np.random.RandomState(0), np.bincount(labels).max(), len(classes)
    sizes = [max(3, round(largest * imbalance ** (-k / (d - 1)))) for k in range(d)]
    kept = [random.permutation(np.flatnonzero(labels == k))[:size] for k, size in enumerate(sizes)]
    rows = np.sort(np.concatenate(kept))
    return Table(
        features=torch.tensor(features[rows], dtype=torch.float32),
        labels=torch.tensor(labels[rows], dtype=torch.int64),
        classes=classes,
        name="digits",
        positive=None if positive is None else 1,
        columns=tuple(f"pixel_{row}_{column}" for row in range(8) for column in range(8)),
        source="scikit-learn",
        path="sklearn.datasets",
    )


DATASETS = {
    "digits": Dataset(
        load=digits,
        kind="table",
        about="1,797 rows, 64 features, 10 classes; comes with scikit-learn",
        licence="CC BY 4.0",
        citation="E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits. UCI, 1998. doi:10.24432/C50P49",
        where="built in",
    )
}
